"""Comparisons with a name: what is compared, on which size, for how long, and what the papers print for it."""

from collections.abc import Sequence

from ..errors import LeanError
from ..model.registry import suggest
from . import suites_queries, suites_skipv1, suites_vision
from .suite import SCALES, TINY, Entry, Setup, Suite

QUICKSTART = Suite(
    "Quickstart: identity and nonlinear queries, first-layer values, and both together",
    {
        TINY: Setup(
            (
                tuple(
                    Entry(f"tiny{mechanisms}")
                    for mechanisms in (
                        "",
                        "+identity-query",
                        "+nonlinear-query",
                        "+skipv1",
                        "+skipv1+identity-query",
                        "+skipv1+nonlinear-query",
                    )
                ),
            ),
            seeds=2,
        )
    },
)

SUITES: dict[str, Suite] = {
    "quickstart": QUICKSTART,
    **suites_queries.SUITES,
    **suites_skipv1.SUITES,
    **suites_vision.SUITES,
}


def choose(names: Sequence[str], suite: str | None, scale: str | None) -> tuple[str | None, str | None, str, Setup]:
    """What a person asked for: a suite, by `suite` or as the only name, or models, the baseline first.

    Returns:
        Name and scale of the suite (None for models), a title, and what is to be trained.

    Raises:
        LeanError: neither or both, an unknown suite, or a scale that it does not exist at.
    """
    if suite is not None and names:
        raise LeanError(f"--suite {suite} names what is compared; leave out {' '.join(names)}")
    if suite is not None and suite not in SUITES:
        raise LeanError(f"there is no suite {suite!r}: {suggest(suite, SUITES)}; `leanqkv compare --list` shows them")
    if suite is None and len(names) == 1:
        if names[0] not in SUITES:
            raise LeanError(f"{names[0]!r} is not a suite ({', '.join(SUITES)}), and one model alone is no comparison")
        suite = names[0]
    if suite is None:
        if not names:
            raise LeanError("nothing to compare: give a suite, see `leanqkv compare --list`, or models")
        if scale is not None:
            raise LeanError("--scale is for suites; models are named with their size")
        title = " against ".join([", ".join(names[1:]), names[0]])
        models = Setup((tuple(map(Entry, names)),), evaluation_sequences=128, evaluate_every=50)
        return None, None, title, models
    chosen, scale = SUITES[suite], scale or TINY
    if scale not in SCALES:
        raise LeanError(f"scale {scale!r} is not known: {suggest(scale, SCALES)}")
    if scale not in chosen.scales:
        raise LeanError(f"{suite} exists only at {' and '.join(chosen.scales)}, found --scale {scale}")
    return suite, scale, chosen.title, chosen.scales[scale]
