"""Entries of a comparison that continue their baseline, converted to first-layer values, for a share of its steps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..convert.conversion import REPORT, Conversion
from ..convert.heads import check_convertible
from ..errors import LeanError
from ..files import read_json, remove
from ..model.config import LeanConfig
from ..train.directory import RECORD
from .jobs import PlannedRun
from .suite import Comparison

# P3 section 5.1: every two value heads of the layers beyond the first are averaged.
METHOD = {"to": "skipv1", "method": "mean-v"}


def check_uptrained(comparison: Comparison) -> None:
    """Check, before anything is trained, that the baselines of uptrained entries can be converted.

    Raises:
        LeanError: one cannot; says why.
    """
    for group in comparison.groups:
        if any(entry.uptrain is not None for entry in group):
            try:
                check_convertible(comparison.configs[group[0].label])
            except LeanError as error:
                raise LeanError(f"{group[0].label} cannot be converted and uptrained: {error}") from None


def converted_starts(
    comparison: Comparison,
    finals: Mapping[tuple[str, int], PlannedRun],
    directory: Path,
    on_message: Callable[[str], None],
) -> list[PlannedRun]:
    """Return the runs of the uptrained entries, each with the converted baseline of its seed, which is written first.

    A seed whose baseline has not been trained, or has diverged, is left out and said.

    Args:
        finals: every final run by label and seed.
        directory: of the converted checkpoints.

    Raises:
        LeanError: the conversion of a group's baseline is not the model of its entry.
    """
    jobs = []
    for group in comparison.groups:
        uptrained = [entry.label for entry in group if entry.uptrain is not None]
        for seed in comparison.seeds if uptrained else ():
            source = finals[group[0].label, seed].out
            if (source / RECORD).exists() and (source / "config.json").exists():
                start = _converted(source, directory / source.name)
                jobs += [_from(finals[label, seed], start, label) for label in uptrained]
            else:
                on_message(f"{source.name} has no model yet, from which others of its seed start")
    return jobs


def _converted(source: Path, out: Path) -> Path:
    """Convert a checkpoint, unless that has been done."""
    digest = weights_hash(source)
    if out.exists() and read_json(out / REPORT).get("source_sha256") != digest:
        remove(out)
    if not out.exists():
        Conversion(open_checkpoint(source), **METHOD).write(out, about={"source_sha256": digest})
    return out


def _from(job: PlannedRun, initial: Path, label: str) -> PlannedRun:
    """Return a run that starts from a checkpoint, without dropout (P3 appendix B.1)."""
    converted, planned = open_checkpoint(initial).config, LeanConfig(**job.spec.config)
    if converted.plan != planned.plan:
        raise LeanError(f"{label} cannot be uptrained: its baseline is converted to skipv1, which is another model")
    fields = {name: value for name, value in converted.as_overrides().items() if not name.endswith("_dropout")}
    return replace(job, spec=replace(job.spec, config=fields, initial_sha256=weights_hash(initial)), initial=initial)
