"""Comparisons with a name: what is compared, on which size, for how long."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Suite:
    """A named comparison. The first architecture is the baseline; `recipe` overrides each architecture's own."""

    title: str
    architectures: tuple[str, ...]
    seeds: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    evaluation_sequences: int = 128
    evaluate_every: int = 50


SUITES: dict[str, Suite] = {
    "quickstart": Suite(
        "Quickstart: identity and nonlinear queries, first-layer values, and both together",
        (
            "tiny",
            "tiny+identity-query",
            "tiny+nonlinear-query",
            "tiny+skipv1",
            "tiny+skipv1+identity-query",
            "tiny+skipv1+nonlinear-query",
        ),
        seeds=2,
        evaluation_sequences=256,
        evaluate_every=100,
    ),
}
