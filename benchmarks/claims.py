"""The papers' claims beside what trained comparisons here say of them, with Holm's correction over all.

    python benchmarks/claims.py results --out results/claims.json
    python benchmarks/claims.py --tables results/claims.json

Reads finished comparisons and trains nothing. Each claim is that a model's loss is below its baseline's, and is tested
by Student's t over the paired differences of all seeds of one comparison, the longest that there is. It is confirmed,
or contradicted, if its p-value is below 5% after Holm's correction (1979, https://www.jstor.org/stable/4615733).
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import harness
from scipy import stats

from leanqkv.compare.records import load_comparison
from leanqkv.compare.statistics import over_seeds
from leanqkv.errors import LeanError
from leanqkv.report.text import with_interval

LEVEL = 0.05


class Claim(NamedTuple):
    """A statement, the comparison that tests it, a model of it, and the page that shows it."""

    statement: str
    comparison: str
    model: str
    page: str


LARGER = "tiny+identity-query+intermediate_size=576"
CLAIMS = [
    Claim("SkipV1 lowers the loss (P3)", "skipv1-six-seeds", "tiny+skipv1", "trained-to-the-end"),
    Claim("SkipV1 lowers the loss (P3)", "small-h100", "small+skipv1", "on-a-gpu"),
    Claim("SkipV1 lowers the loss (P3), on English prose", "tiny-prose", "tiny+skipv1", "trained-to-the-end"),
    Claim("SkipV1 lowers the loss (P3), trained with Muon", "muon", "tiny+skipv1", "trained-to-the-end"),
    Claim("A nonlinear query lowers the loss (P2)", "one-decay", "tiny+nonlinear-query", "trained-to-the-end"),
    Claim("… with P2's weight decay", "tiny-deep-decay", "tiny+nonlinear-query", "trained-to-the-end"),
    Claim("An identity query with a larger MLP lowers the loss (P1)", "one-decay", LARGER, "trained-to-the-end"),
    Claim("ResFormer lowers the loss (P3)", "one-decay", "tiny+resformer", "trained-to-the-end"),
    Claim(
        "SkipV1 with a nonlinear query lowers the loss",
        "tiny-deep-decay",
        "tiny+skipv1+nonlinear-query",
        "trained-to-the-end",
    ),
    Claim("Hyper-connections lower the loss, early in training", "extensions", "tiny+hyper-connections", "extensions"),
    Claim(
        "A gate on attention's output lowers the loss, early in training",
        "extensions",
        "tiny+output-gate",
        "extensions",
    ),
    Claim(
        "A nonlinear value lowers the loss (P1), early in training", "extensions", "tiny+nonlinear-value", "extensions"
    ),
    Claim(
        "SkipV1 lowers the loss (P3), at an eighth of the length",
        "eight-seeds",
        "tiny+skipv1",
        "trained-to-the-end",
    ),
    Claim(
        "A nonlinear query lowers the loss (P2), at an eighth of the length",
        "eight-seeds",
        "tiny+nonlinear-query",
        "trained-to-the-end",
    ),
    Claim("SkipV1 lowers the loss (P3), early in training", "kv-sharing", "small+skipv1", "sharing-values"),
    Claim("DenseFormer lowers the loss (P3), early in training", "kv-sharing", "small+denseformer", "sharing-values"),
]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    if options.results is None:
        raise LeanError("name the directory of the comparisons, such as results")
    rows = []
    for claim in CLAIMS:
        comparison = load_comparison(options.results / claim.comparison)
        result = next((one for one in comparison.results if one.name == claim.model), None)
        if result is None or result.difference is None:
            raise LeanError(f"{options.results / claim.comparison} has no finished pair of {claim.model}")
        run = result.any_run
        differences = {str(seed): value for seed, value in result.difference.by_seed.items()}
        sizes = {"parameters": run.parameters["total"], "tokens": run.tokens}
        rows.append({**claim._asdict(), **sizes, "differences": differences})
    return {"rows": rows}


def p_value(differences: dict[str, float]) -> float:
    """Return Student's two-sided p-value of a mean of zero."""
    return float(stats.ttest_1samp(list(differences.values()), 0).pvalue)


def holm(values: list[float]) -> list[float]:
    """Return p-values that are corrected for their number, in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, largest = [0.0] * len(values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[at]))
        corrected[at] = largest
    return corrected


def verdict(mean: float, corrected: float) -> str:
    """Say what a difference with this corrected p-value means for the claim that it is negative."""
    if corrected >= LEVEL:
        return "open"
    return "**confirmed**" if mean < 0 else "**contradicted**"


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    values = [p_value(row["differences"]) for row in record["rows"]]
    rows = []
    for row, value, corrected in zip(record["rows"], values, holm(values), strict=True):
        difference = over_seeds(row["differences"])
        words = row["page"].replace("-", " ").replace("gpu", "GPU")
        size = f"{row['parameters'] / 1e6:.2f}M, {row['tokens'] / 1e6:.3g}M"
        rows.append(
            [
                row["statement"],
                verdict(difference.mean, corrected),
                with_interval(difference),
                str(len(row["differences"])),
                size,
                f"{value:.2g}",
                f"{corrected:.2g}",
                f"[{words}](results-{row['page']}.md)",
            ]
        )
    headers = [
        "claim",
        "here",
        "difference to the baseline, 95%",
        "seeds",
        "parameters, tokens",
        "p",
        "p, Holm",
        "page",
    ]
    return harness.table(headers, rows)


def command_line() -> argparse.ArgumentParser:
    """Return the options of this benchmark."""
    parser = harness.command_line(__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="directory of the comparisons")
    return parser


if __name__ == "__main__":
    harness.run(command_line(), measure, tables)
