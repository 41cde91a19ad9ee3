"""Which runs diverged, and when: by a loss that is not finite, or by one that rose and stayed up."""

import math
from collections import Counter

from ..compare.records import ComparisonRecord, Result, Run
from .published import here
from .text import ABSENT, Table

# Nats. Evaluations of a run that learns lie within hundredths of the lowest before them.
RISE = 0.5
STABILITY_HEADERS = ("model", "learning rate", "minimum", "weight\ndecay", "outcome", "lowest\nloss", "final\nloss")
STABILITY_NOTE = (
    f"A run counts as diverged where its loss is not finite, and where its validation loss ends {RISE} or more above "
    "its own lowest, or above the logarithm of the vocabulary, which is the loss of one that knows nothing; the step "
    "is that of the first evaluation so far up. A spike is such a rise that the run came back from. A run that "
    "learned little counts as finished: see its loss."
)


def outcome(run: Run) -> str:
    """Return `diverged at step 340`, `spike at step 200` or `finished`."""
    if run.diverged:
        return f"diverged at step {run.diverged[0]:,}"
    vocab_size = run.data.get("vocab_size")
    start = math.log(vocab_size) if vocab_size else math.inf
    lowest, losses = start, run.curves["loss"]
    for step, loss in sorted(losses.items()):
        if loss >= lowest + RISE:
            stayed = run.loss is not None and run.loss >= min(start, *losses.values()) + RISE
            return f"{'diverged' if stayed else 'spike'} at step {step:,}"
        lowest = min(lowest, loss)
    return "finished"


def stability_table(comparison: ComparisonRecord) -> Table:
    """Return a table of every architecture's rates, the outcome of every seed, its lowest and its final loss."""
    rows = [_row(comparison, result) for result in comparison.results]
    return Table(STABILITY_HEADERS, rows, f"Which runs diverged. Here: {here(comparison)}.", STABILITY_NOTE)


def _row(comparison: ComparisonRecord, result: Result) -> list[str]:
    runs = [run for seed, run in sorted(result.finals.items()) if result.state(seed) != "missing"]
    if not runs:
        return [f"`{result.name}`", *[ABSENT] * 3, "missing", ABSENT, ABSENT]
    recipe = runs[0].recipe
    outcomes = [f"{text} ({n} seeds)" if n > 1 else text for text, n in Counter(outcome(run) for run in runs).items()]
    missing = len(comparison.seeds) - len(runs)
    lowest = [min(losses.values()) for run in runs if (losses := run.curves["loss"])]
    return [
        f"`{result.name}`",
        *(f"{recipe[name]:g}" for name in ("learning_rate", "min_learning_rate", "weight_decay")),
        "\n".join([*outcomes, *([f"{missing} missing"] if missing else [])]),
        f"{min(lowest):.3f}" if lowest else ABSENT,
        f"{result.mean_loss:.3f}" if result.losses else ABSENT,
    ]
