"""What a mechanism gives in each of two recipes, and what the other recipe gives the baseline.

    python benchmarks/two_recipes.py results/first results/second --out results/two-recipes.json
    python benchmarks/two_recipes.py --tables results/two-recipes.json

Reads two finished comparisons of the same models on the same text whose recipes differ, such as in how far the learning
rate falls, and trains nothing. A model in the second recipe against the baseline in the first is what a comparison
measures that gives its variant another recipe: the mechanism and the recipe together.
"""

import argparse
from pathlib import Path
from typing import Any

import harness

from leanqkv.compare.records import ComparisonRecord, Result, load_comparison
from leanqkv.compare.statistics import PairedDifference, paired_difference
from leanqkv.environment import place_of
from leanqkv.errors import LeanError
from leanqkv.report.text import with_interval

# What the runs of both recipes must agree in.
SAME = {
    "text": lambda run: run.data["sha256"],
    "held-out sequences": lambda run: run.batch_plan["evaluation_sequences"],
    "tokens": lambda run: run.tokens,
    "machine": lambda run: place_of(run.hardware),
    "precision": lambda run: run.precision["choice"],
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if len(options.comparisons) != 2:
        raise LeanError("name the directories of two comparisons")
    comparisons = [load_comparison(folder) for folder in options.comparisons]
    by_name = [_results(comparison) for comparison in comparisons]
    names = [name for name in by_name[0] if name in by_name[1]]
    baselines = {comparison.baselines[0] for comparison in comparisons}
    if len(baselines) > 1 or len(names) < 2:
        raise LeanError("the comparisons have no baseline and other model in common")
    rows = []
    for name in names:
        first, second = (results[name] for results in by_name)
        for seed in sorted(first.losses.keys() & second.losses.keys()):
            _check(first, second, seed)
            rows.append({"model": name, "seed": seed, "losses": [first.losses[seed], second.losses[seed]]})
    if not rows:
        raise LeanError("the comparisons have no finished seed in common")
    recipes = [dict(results[names[0]].finals[rows[0]["seed"]].recipe) for results in by_name]
    different = sorted(field for field in recipes[0] if recipes[0][field] != recipes[1].get(field))
    if not different:
        raise LeanError("the two comparisons have one recipe")
    recipes = [{field: recipe[field] for field in different} for recipe in recipes]
    return {"baseline": baselines.pop(), "recipes": recipes, "rows": rows}


def _results(comparison: ComparisonRecord) -> dict[str, Result]:
    return {result.name: result for result in comparison.results}


def _check(first: Result, second: Result, seed: int) -> None:
    """Refuse runs that differ in more than the recipe."""
    for what, of in SAME.items():
        if of(first.finals[seed]) != of(second.finals[seed]):
            raise LeanError(f"{first.name}, seed {seed}: the two runs differ in {what}")


def losses(record: dict[str, Any], model: str, recipe: int) -> dict[int, float]:
    """Return the losses of a model in the first (0) or second (1) recipe, by seed."""
    return {row["seed"]: row["losses"][recipe] for row in record["rows"] if row["model"] == model}


def difference(record: dict[str, Any], model: str, recipe: int, of_baseline: int) -> PairedDifference | None:
    """Return what a model in one recipe has more than the baseline in the other or the same."""
    return paired_difference(losses(record, model, recipe), losses(record, record["baseline"], of_baseline))


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    first, second = (
        ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in recipe.items())
        for recipe in record["recipes"]
    )
    headers = ["difference to the baseline", f"both: {first}", f"both: {second}", f"{second}, the baseline: {first}"]
    rows = [
        [f"`{name}`", *(with_interval(difference(record, name, *pair)) for pair in ((0, 0), (1, 1), (1, 0)))]
        for name in dict.fromkeys(row["model"] for row in record["rows"])
    ]
    rows[0][1:3] = "–", "–"  # the baseline to itself
    return harness.table(headers, rows)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("comparisons", type=Path, nargs="*", help="directories of two comparisons")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
