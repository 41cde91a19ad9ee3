"""The check of the in-context regression: what it states, and what has to hold of its record.

Wu et al. 2025, section 4 and appendix A. https://github.com/Zhoutong-Wu/SkipV1Former
"""

from ..check import Check, Finding
from ..report import Record, number
from .figure import draw
from .measure import Settings, measured, parts
from .tables import markdown_tables


def findings(record: Record) -> list[Finding]:
    """Return the findings of the exact parts; those of training, which depend on sizes, are in the tables."""
    entries = measured(record)
    optimised = [
        abs(entry[key]["loss"] - entry[key]["theory"])
        for entry in entries["by_rows"]
        for key in ("attention", "first_value")
    ]
    noise = [abs(entry["sampled_gap"] - entry["gap"]) / entry["sampled_half_width"] for entry in entries["grid"]]
    gaps = [entry["gap"] for entry in entries["grid"]]
    reversed_gaps = [entry["gap_at_most"] for entry in entries["reversed"] if entry["in_hypothesis"]]
    return [
        Finding(
            "with A and B chosen best and W_0 = 0 an optimiser finds the closed form",
            f"largest difference {max(optimised):.1e}",
            max(optimised) < 1e-3,
        ),
        Finding(
            "the gap c is positive, and sampling agrees with it",
            f"least c {number(min(gaps))}; sampled within {number(max(noise), 1)} half-widths of 95 %",
            min(gaps) > 0 and max(noise) < 2,
        ),
        Finding(
            "for given A and B the statement does not hold: a negative gap inside its hypothesis",
            f"gap at most {number(min(reversed_gaps))}",
            min(reversed_gaps) < 0,
        ),
    ]


CHECK = Check(
    name="in-context",
    statement="two layers of linear attention learn regression in context better with the first layer's value",
    source="Wu et al. 2025, Theorem 2",
    settings=Settings,
    parts=parts,
    findings=findings,
    tables=markdown_tables,
    draw=draw,
    digits=10,
)
