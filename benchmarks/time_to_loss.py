"""How many tokens each run of a comparison takes to a validation loss, and how far seeds are apart on the way.

    python benchmarks/time_to_loss.py results/skipv1-six-seeds --out results/skipv1-six-seeds/time-to-loss.json
    python benchmarks/time_to_loss.py --tables results/skipv1-six-seeds/time-to-loss.json

Reads a finished comparison and trains nothing. The tokens to a loss are interpolated between the evaluations; a run
that crosses it more than once counts from the last time. Shares are paired by seed, as logarithms.
"""

import argparse
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import numpy as np

from leanqkv.compare.records import Run, load_comparison
from leanqkv.compare.statistics import over_seeds
from leanqkv.errors import LeanError
from leanqkv.report.text import mean_with_deviation

LOSSES = (3.6, 3.4, 3.2, 3.0, 2.8, 2.6, 2.4)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if options.comparison is None:
        raise LeanError("name the directory of a comparison")
    comparison = load_comparison(options.comparison)
    rows = []
    for result in comparison.results:
        for seed, run in sorted(result.finals.items()):
            per_step = run.tokens / max(run.scores)
            curve = [[round(step * per_step), loss] for step, loss in sorted(run.scores.items())]
            rows.append({"model": result.name, "seed": seed, "curve": curve, "tokens": _tokens_to(run, per_step)})
    return {"comparison": options.comparison.name, "baseline": comparison.baselines[0], "rows": rows}


def _tokens_to(run: Run, per_step: float) -> dict[str, float]:
    """Return the tokens after which the loss stays below each of LOSSES, of those that it comes to."""
    steps, losses = zip(*sorted(run.scores.items()), strict=True)
    found = {}
    for wanted in LOSSES:
        above = [at for at, loss in enumerate(losses) if loss > wanted]
        if above and (after := above[-1] + 1) < len(losses):
            step = np.interp(-wanted, [-losses[after - 1], -losses[after]], [steps[after - 1], steps[after]])
            found[str(wanted)] = float(step) * per_step
    return found


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown: the tokens to each loss, and the spread of the seeds at each evaluation."""
    models = list(dict.fromkeys(row["model"] for row in record["rows"]))
    others = [name for name in models if name != record["baseline"]]
    taken = {(row["model"], row["seed"]): row["tokens"] for row in record["rows"]}
    rows = []
    for wanted in map(str, LOSSES):
        base = {seed: of[wanted] for (name, seed), of in taken.items() if name == record["baseline"] and wanted in of}
        if not base:
            continue
        mean, least, most = (of(base.values()) / 1e6 for of in (fmean, min, max))
        cells = [wanted, f"{mean:.1f}M ({least:.1f}–{most:.1f})"]
        for name in others:
            pairs = {s: log(taken[name, s][wanted] / base[s]) for s in base if wanted in taken.get((name, s), {})}
            cells.append(_share(pairs) if pairs else "–")
        rows.append(cells)
    headers = ["validation loss", f"`{record['baseline']}`: tokens (range)", *(f"`{name}`: tokens" for name in others)]
    spread = []
    for at, (tokens, _) in enumerate(record["rows"][0]["curve"]):
        of_models = [[row["curve"][at][1] for row in record["rows"] if row["model"] == name] for name in models]
        spread.append([f"{tokens / 1e6:.1f}M", *map(mean_with_deviation, of_models)])
    curves = harness.table(["tokens", *(f"`{name}`: validation loss (s.d.)" for name in models)], spread)
    return f"{harness.table(headers, rows)}\n\n{curves}"


def _share(logarithms: dict[int, float]) -> str:
    """Return by how much a model's tokens differ from the baseline's, with the 95% interval, and on how many seeds."""
    difference = over_seeds(logarithms)
    mean, *ends = (f"{exp(value) - 1:+.1%}" for value in (difference.mean, *(difference.interval or ())))
    interval = f" ({ends[0]} to {ends[1]})" if ends else ""
    fewer = sum(value < 0 for value in logarithms.values())
    return f"{mean}{interval}, fewer on {fewer} of {len(logarithms)} seeds".replace("-", "−")


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("comparison", type=Path, nargs="?", help="directory of a comparison")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
