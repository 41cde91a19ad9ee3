"""How differences to the baseline change with the size of the model: a straight line in its logarithm.

    python benchmarks/by_size.py results/half-tiny results/tiny --out results/by-size.json
    python benchmarks/by_size.py --tables results/by-size.json

Reads finished comparisons of several sizes, trained on the same text for equally many tokens per parameter, and trains
nothing. What all sizes have is compared. Every seed has a line of its own through its differences, so that the interval
is that of independent runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import PairedDifference, over_seeds
from leanqkv.errors import LeanError
from leanqkv.report.text import compact, with_interval

# Tokens per parameter of two sizes may differ by this share: steps are whole, and widths multiples of the heads.
TOLERANCE = 0.05


def read_size(folder: Path) -> dict[str, Any]:
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
    sizes = sorted(map(read_size, options.comparisons), key=lambda size: size["parameters"])
    lengths = [size["tokens"] / size["parameters"] for size in sizes]
    if max(lengths) > min(lengths) * (1 + TOLERANCE):
        raise LeanError(f"tokens per parameter differ: {', '.join(f'{length:.1f}' for length in lengths)}")
    if len({size["data"] for size in sizes}) > 1:
        raise LeanError("the comparisons were trained on different data")
    if len({size["parameters"] for size in sizes}) < len(sizes):
        raise LeanError("two of the comparisons have baselines of one size")
    variants = [name for name in sizes[0]["differences"] if all(name in size["differences"] for size in sizes)]
    if not variants:
        raise LeanError("the comparisons have no model in common but the baseline")
    for size in sizes:
        size["differences"] = {name: size["differences"][name] for name in variants}
    return {"sizes": sizes}


def differences(record: dict[str, Any], name: str) -> list[PairedDifference]:
    """Return a variant's difference to the baseline at each size."""
    return [over_seeds(_seeds(size["differences"][name])) for size in record["sizes"]]


def per_doubling(record: dict[str, Any], name: str) -> PairedDifference:
    """Return what twice the parameters add to a variant's difference, over the seeds that all sizes have."""
    by_size = [_seeds(size["differences"][name]) for size in record["sizes"]]
    seeds = sorted(set.intersection(*map(set, by_size)))
    gaps = [[at[seed] for seed in seeds] for at in by_size]
    slopes = np.polyfit(np.log2([size["parameters"] for size in record["sizes"]]), gaps, 1)[0]
    return over_seeds(dict(zip(seeds, slopes.tolist(), strict=True)))


def _seeds(values: dict[Any, float]) -> dict[int, float]:
    """The keys of JSON are text."""
    return {int(seed): value for seed, value in values.items()}


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    sizes: Sequence[dict[str, Any]] = record["sizes"]
    headers = [
        "difference to the baseline",
        *(f"{compact(size['parameters'])} parameters, {compact(size['tokens'])} tokens" for size in sizes),
        "per doubling of the parameters",
    ]
    rows = [
        [f"`{name}`", *map(with_interval, [*differences(record, name), per_doubling(record, name)])]
        for name in sizes[0]["differences"]
    ]
    return harness.table(headers, rows)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("comparisons", type=Path, nargs="*", help="directories of comparisons, one for each size")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
