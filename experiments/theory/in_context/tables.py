"""The tables of the in-context regression, from its record alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..report import Record, interval, number, table, yes
from .measure import measured

Entries = Sequence[Mapping[str, Any]]
MODELS = ("attention", "first_value")
CASE = ("d", "n", "σ")


def markdown_tables(record: Record) -> str:
    """Return every table of the check, a blank line between two."""
    tables = {
        "by_rows": _by_rows,
        "grid": _grid,
        "approach": _approach,
        "priors": _priors,
        "reversed": _reversed,
        "last_step": _last_step,
        "any_copy": _any_copy,
        "training": _training,
    }
    entries = measured(record)
    return "\n".join(make(entries[name]) for name, make in tables.items())


def _case(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(entry["d"]), str(entry["n"]), f"{entry['sigma']:g}"


def _by_rows(entries: Entries) -> str:
    rows = []
    for entry in entries:
        losses = (number(entry[model][what]) for model in MODELS for what in ("theory", "loss"))
        gap = entry["attention"]["theory"] - entry["first_value"]["theory"]
        rows.append((*_case(entry), str(entry["rows"]), *losses, number(gap)))
    headers = ("a", "attention, infimum", "optimised", "first value, minimum", "optimised", "gap")
    return table((*CASE, *headers), rows)


def _grid(entries: Entries) -> str:
    rows = []
    for entry in entries:
        sampled = interval(entry["sampled_gap"], entry["sampled_half_width"])
        constant = interval(entry["proof_constant"], entry["proof_half_width"], digits=4)
        rows.append((*_case(entry), number(entry["gap"]), sampled, constant))
    headers = ("gap c, exact", "sampled, 95 %", "constant of the proof at a = d − 1, 95 %")
    return table((*CASE, *headers), rows)


def _approach(entries: Entries) -> str:
    rows = [(f"{entry['scale']:g}", f"{entry['excess']:.1e}") for entry in entries]
    return table(("scale t of A and B", "attention's loss above its infimum"), rows)


def _priors(entries: Entries) -> str:
    rows = []
    for entry in entries:
        losses = (f"{number(entry[model]['loss'])} ({entry[model]['rows']})" for model in MODELS)
        bounds = (number(entry[key]) for key in ("gap", "proof_bound_at_full_rows", "attention_at_full_rows"))
        rows.append((*_case(entry), f"{entry['prior']:g}", yes(entry["in_hypothesis"]), *losses, *bounds))
    headers = ("w", "w > 2√d σ", "attention (a)", "first value (a)", "gap")
    bound_headers = ("attention at a = d, at least (proof)", "at most (here)")
    return table((*CASE, *headers, *bound_headers), rows)


def _reversed(entries: Entries) -> str:
    rows = []
    for entry in entries:
        bounds = (number(entry[key]) for key in ("first_value_exact", "attention_at_most", "gap_at_most"))
        gap = number(entry["gap"]) if "gap" in entry else "–"
        rows.append((*_case(entry), f"{entry['prior']:g}", yes(entry["in_hypothesis"]), *bounds, gap))
    headers = ("w", "w > 2√d σ", "first value, exact", "attention, at most", "gap, at most", "gap, optimised")
    return table((*CASE, *headers), rows)


def _last_step(entries: Entries) -> str:
    rows = []
    for entry in entries:
        mean = interval(entry["mean"], entry["half_width"])
        rows.append((str(entry["d"]), f"{entry['sigma']:g}", number(entry["prior"], 2), mean))
    return table(("d = n", "σ", "w = 1.05 · 2√d σ", "mean of σ_d(W X Xᵀ) − ‖ε Xᵀ‖, 95 %"), rows)


def _any_copy(entries: Entries) -> str:
    rows = []
    for entry in entries:
        losses = (entry["assumption_infimum"], *(entry[model]["loss"] for model in MODELS), entry["gap"])
        rows.append((*_case(entry), *map(number, losses)))
    headers = ("attention, Assumption 1", "attention, any copy", "first value", "gap, any copy")
    return table((*CASE, *headers), rows)


def _training(entries: Entries) -> str:
    rows = []
    for entry in entries:
        reads = "positions" if entry["reads_positions"] else "tokens"
        losses = (
            f"{number(entry[model][best])} ({number(float(np.median(entry[model])))})"
            for model, best in zip(MODELS, entry["best_seeds"], strict=True)
        )
        gaps = (interval(entry[gap], entry[f"{gap}_half_width"]) for gap in ("gap", "gap_of_best"))
        rows.append((reads, *_case(entry), f"{entry['prior']:g}", number(entry["zero_loss"]), *losses, *gaps))
    headers = ("w", "zero", "attention, best (median)", "first value, best (median)")
    return table(("first layer reads", *CASE, *headers, "gap over seeds, 95 %", "gap of the best, 95 %"), rows)
