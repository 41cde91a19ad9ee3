"""The suites, which are comparisons by name with the numbers that papers print for them.

Each is one file, suites/NAME.yaml. It holds `title`, `source`, `claims` and `stability` as `Suite` has them, and

    scales:                        # tiny, small, paper
      tiny:
        seeds: 3                   # how many
        evaluation_sequences: 256  # this and other fields of `Comparison`
        groups:
        - base: tiny               # how the models of the group begin
          name: short              # stands for the base in labels
          suffix: ", scaled"       # the end of the labels
          recipe: {steps: 800}     # for all entries
          entries:                 # the first is the baseline; `suffix` and `recipe` may be an entry's own
          - {row: baseline}
          - {row: skipv1, add: +skipv1}
          - {row: 10%, add: +skipv1, suffix: ", uptrained", uptrain: 0.1}  # from the baseline, as `Entry` says
    published:                     # fields of `Published`; numbers in quotes, so that no digit is lost
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LeanError
from ..files import read_yaml
from ..model.registry import suggest
from ..presets import preset
from .suite import SCALES, TINY, Comparison, Entry, Group, Published, Suite


def load_suite(file: Path) -> Suite:
    """Return the suite of a file under suites/, named as the file."""
    content = read_yaml(file)
    scales = {
        scale: Comparison(
            title=content["title"],
            suite=file.stem,
            scale=scale,
            **fields
            | {
                "groups": tuple(_group(**group) for group in fields["groups"]),
                "seeds": tuple(range(fields["seeds"])),
                "notes": tuple(fields.get("notes", ())),
                "tasks": tuple(fields.get("tasks", ())),
            },
        )
        for scale, fields in content["scales"].items()
    }
    published = tuple(Published(**table | {"groups": tuple(table["groups"])}) for table in content.get("published", ()))
    claims = tuple(content.get("claims", ()))
    return Suite(**content | {"scales": scales, "published": published, "claims": claims})


def _group(
    base: str, entries: Sequence[Mapping[str, Any]], name: str = "", suffix: str = "", recipe: Mapping[str, Any] = {}
) -> Group:
    shared = recipe

    def entry(
        row: str = "", add: str = "", suffix: str = suffix, recipe: Mapping[str, Any] = {}, uptrain: float | None = None
    ) -> Entry:
        return Entry(base + add, (name or base) + add + suffix, {**shared, **recipe}, row, uptrain)

    return tuple(entry(**fields) for fields in entries)


SUITES: dict[str, Suite] = {
    file.stem: load_suite(file) for file in sorted(Path(__file__).with_name("suites").glob("*.yaml"))
}


# What the fields that entries set by number were chosen for.
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")


def rebased(comparison: Comparison, base: str) -> Comparison:
    """Return a suite's comparison with its models built on another base, such as an encoder of the same shape.

    Raises:
        LeanError: a suite of several bases, or a base of another shape.
    """
    [first, *others] = dict.fromkeys(entry.model.partition("+")[0] for entry in comparison.entries.values())
    if others:
        raise LeanError(
            f"`base` takes the place of a suite's base, and {comparison.suite} has {1 + len(others)}; leave it out"
        )
    own, given = ({name: getattr(preset(one), name) for name in SHAPE} for one in (first, base))
    for name in SHAPE:
        if own[name] != given[name]:
            raise LeanError(
                f"`base={base}` has {name} {given[name]}, the models of {comparison.suite} are made for {own[name]}; "
                f"give a base of the shape of {first}, such as {first}+task=masked_lm"
            )

    def moved(entry: Entry) -> Entry:
        model, label = (re.sub(rf"^{re.escape(first)}(?![^+, ])", base, name) for name in (entry.model, entry.label))
        return replace(entry, model=model, label=label)

    groups = tuple(tuple(map(moved, group)) for group in comparison.groups)
    notes = (*comparison.notes, f"The models are built on {base}, the suite's on {first}.")
    return replace(comparison, title=f"{comparison.title} ({base})", groups=groups, notes=notes, base=base)


def choose(names: Sequence[str], suite: str | None, scale: str | None, base: str | None = None) -> Comparison:
    """Return the comparison that a person asked for.

    Args:
        names: models, the baseline first; or a suite's name alone.
        suite: a suite's name, in place of `names`.
        scale: of a suite; None: tiny.
        base: of a suite, see `rebased`.

    Raises:
        LeanError: neither or both, an unknown suite, or a scale or base that it does not exist for.
    """
    if suite is not None and names:
        raise LeanError(f"`suite={suite}` names what is compared; leave out {' '.join(names)}")
    if suite is not None and suite not in SUITES:
        raise LeanError(f"there is no suite {suite!r}: {suggest(suite, SUITES)}; `leanqkv compare --list` shows them")
    if suite is None and not names:
        raise LeanError("nothing to compare: give a suite, see `leanqkv compare --list`, or models")
    if suite is None and len(names) == 1:
        suite = names[0]
        if suite not in SUITES:
            raise LeanError(f"{suite!r} is not a suite ({', '.join(SUITES)}), and one model alone is no comparison")
    if suite is None:
        if scale is not None:
            raise LeanError("`scale` is for suites; models are named with their size")
        if base is not None:
            raise LeanError("`base` is for suites; models are named with their base")
        title = " against ".join([", ".join(names[1:]), names[0]])
        return Comparison(title=title, groups=(tuple(map(Entry, names)),))
    scales, scale = SUITES[suite].scales, scale or TINY
    if scale not in SCALES:
        raise LeanError(f"scale {scale!r} is not known: {suggest(scale, SCALES)}")
    if scale not in scales:
        raise LeanError(f"{suite} exists only at {' and '.join(scales)}, found `scale={scale}`")
    return scales[scale] if base is None else rebased(scales[scale], base)
