"""How differences to the baseline change with the size of the model or with the length of training.

    python benchmarks/by_scale.py results/half-tiny results/tiny --out results/by-size.json
    python benchmarks/by_scale.py runs/quarter runs/half runs/whole --along tokens --out results/by-tokens.json
    python benchmarks/by_scale.py --tables results/by-size.json

Reads finished comparisons on the same text and trains nothing: of several sizes, with equally many tokens per
parameter, or of one size, whose learning rates come down at the end of each length. The models that all of them have
are compared. Every seed has a line of its own through its differences over the logarithm of the scale, so that the
interval is that of independent runs. What three scales or more predict at ten times the last holds if the line does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import PairedDifference, over_seeds
from leanqkv.compare.trend import FURTHER, line
from leanqkv.errors import LeanError
from leanqkv.report.text import compact, with_interval

# Tokens per parameter of two sizes may differ by this share: steps are whole, and widths multiples of the heads.
TOLERANCE = 0.05


def read_scale(folder: Path) -> dict[str, Any]:
    """Return one comparison: its baseline's size, and the differences of the others by seed."""
    comparison = load_comparison(folder)
    if len(comparison.baselines) > 1:
        raise LeanError(f"{folder} has several baselines; this benchmark takes one group of models")
    for result in comparison.results:
        for seed in comparison.seeds:
            if seed not in result.scores:
                raise LeanError(f"{folder}: {result.name}, seed {seed}, is {result.state(seed)}")
    baseline, *others = comparison.results
    run = baseline.finals[comparison.seeds[0]]
    variants = {result.name.removeprefix(baseline.name).lstrip("+"): result.difference for result in others}
    return {
        "baseline": baseline.name,
        "parameters": run.parameters["total"],
        "tokens": run.tokens,
        "data": run.data["sha256"],
        "differences": {name: dict(difference.by_seed) for name, difference in variants.items() if difference},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if len(options.comparisons) < 2:
        raise LeanError("name the directories of at least two comparisons")
    along = options.along
    scales = sorted(map(read_scale, options.comparisons), key=lambda scale: scale[along])
    if len({scale["data"] for scale in scales}) > 1:
        raise LeanError("the comparisons were trained on different data")
    if len({scale[along] for scale in scales}) < len(scales):
        raise LeanError(f"two of the comparisons have equally many {along}")
    _check_the_rest(scales, along)
    variants = [name for name in scales[0]["differences"] if all(name in scale["differences"] for scale in scales)]
    if not variants:
        raise LeanError("the comparisons have no model in common but the baseline")
    for scale in scales:
        scale["differences"] = {name: scale["differences"][name] for name in variants}
    return {"along": along, "scales": scales}


def _check_the_rest(scales: Sequence[dict[str, Any]], along: str) -> None:
    """Refuse scales that differ in more than what is asked for."""
    if along == "tokens":
        if len(baselines := {(scale["baseline"], scale["parameters"]) for scale in scales}) > 1:
            found = ", ".join(f"{name} of {compact(parameters)} parameters" for name, parameters in sorted(baselines))
            raise LeanError(f"--along tokens compares lengths of training of one baseline, found {found}")
        return
    lengths = [scale["tokens"] / scale["parameters"] for scale in scales]
    if max(lengths) > min(lengths) * (1 + TOLERANCE):
        raise LeanError(f"tokens per parameter differ: {', '.join(f'{length:.1f}' for length in lengths)}")


def differences(record: dict[str, Any], name: str) -> list[PairedDifference]:
    """Return a variant's difference to the baseline at each scale."""
    return [over_seeds(_seeds(scale["differences"][name])) for scale in record["scales"]]


def lines(record: dict[str, Any], name: str) -> tuple[PairedDifference, PairedDifference]:
    """Return what twice the scale adds, and the prediction beyond the last, over the seeds of all comparisons."""
    by_scale = [_seeds(scale["differences"][name]) for scale in record["scales"]]
    seeds = sorted(set.intersection(*map(set, by_scale)))
    gaps = [[at[seed] for seed in seeds] for at in by_scale]
    return line([scale[record["along"]] for scale in record["scales"]], gaps, seeds)


def _seeds(values: dict[Any, float]) -> dict[int, float]:
    """The keys of JSON are text."""
    return {int(seed): value for seed, value in values.items()}


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    scales: Sequence[dict[str, Any]] = record["scales"]
    along = record["along"]
    headers = [
        "difference to the baseline",
        *(f"{compact(scale['parameters'])} parameters, {compact(scale['tokens'])} tokens" for scale in scales),
        f"per doubling of the {along}",
        f"{compact(FURTHER * scales[-1][along])} {along}, predicted",
    ]
    if len(scales) == 2:
        headers.pop()  # two points say nothing about what lies beyond them
    rows = [
        [f"`{name}`", *map(with_interval, [*differences(record, name), *lines(record, name)])][: len(headers)]
        for name in scales[0]["differences"]
    ]
    return harness.table(headers, rows)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("comparisons", type=Path, nargs="*", help="directories of comparisons, one for each scale")
    parser.add_argument("--along", choices=("parameters", "tokens"), default="parameters", help="what grows")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
