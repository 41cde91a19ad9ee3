"""`leanqkv inspect`: what a model or a checkpoint is, and what could be removed from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..progress import progress_bar
from .options import NAME_HELP, console

if TYPE_CHECKING:
    from ..eliminate.audit import Finding, Spectrum


def inspect(
    source: Annotated[str, typer.Argument(help=f"{NAME_HELP}; or a checkpoint directory, ours or of transformers")],
    spectra: Annotated[bool, typer.Option(help="Condition numbers of a checkpoint's projections, too.")] = True,
) -> None:
    """Show parameters, KV bytes, the plan of every layer, and what could be eliminated exactly, or why not.

    leanqkv inspect gpt2-124m+skipv1

    leanqkv inspect hf/pythia-160m
    """
    from ..checkpoints.memory import give_back_freed_memory
    from ..checkpoints.open import open_checkpoint
    from ..inspect.plan import layer_table, summary
    from ..presets import preset

    config: Any
    if Path(source).exists():
        give_back_freed_memory()
        opened = open_checkpoint(Path(source))
        config, tensors = opened.config, opened.tensors if spectra else None
    else:
        config, tensors = preset(source), None
    console.print(layer_table(config, source))
    for line in summary(config):
        console.print(line)
    _print_audit(config, tensors, source)


def _print_audit(config: Any, tensors: Any, title: str) -> None:
    """Prints what can be eliminated and, with tensors, how the projections are conditioned."""
    from ..checkpoints.tensors import finite
    from ..eliminate.audit import findings, spectra, weight_table

    found_ways = findings(config)
    console.print(_findings_table(found_ways, title))
    reasons: dict[str, list[str]] = {}
    for finding in found_ways:
        if finding.why_not:
            reasons.setdefault(finding.why_not, []).append(finding.remove)
    for reason, ways in reasons.items():
        console.print(f"not {'; '.join(ways)}: {reason}", highlight=False)
    if tensors is not None:
        with progress_bar("reading", in_bytes=True) as bar:
            found = list(spectra(config, finite(tensors), lambda name: bar.describe(f"singular values of {name}")))
        console.print(_spectra_table(found))
    table = weight_table(config)
    console.print(
        f"without any Q and P, were that exact: {table['weight savings']:.0%} fewer of {table['total weights']:,.0f} "
        f"weights, {table['possible speedup at batch 1']:.2f}× at batch 1 (as P4 counts)",
        highlight=False,
    )


def _findings_table(findings: "list[Finding]", title: str) -> Table:
    table = Table(title=f"Exact eliminations, {title}", title_justify="left")
    for column in ("--remove", "exact", "--layer", "saves", "batch 1", "source"):
        table.add_column(column, justify="right" if column in ("saves", "batch 1") else "left")
    for found in findings:
        layers = (
            "" if not found.applies else "all" if found.layer is None else "one of " + ",".join(map(str, found.layer))
        )
        if found.remove in ("block-diagonal", "single-head"):
            layers = ""
        saves = f"{found.saves:,} ({found.saves / (found.parameters + found.saves):.1%})" if found.applies else ""
        speed = f"{found.speedup:.2f}×" if found.applies else ""
        table.add_row(found.remove, "yes" if found.applies else "no", layers, saves, speed, found.source)
    return table


def _spectra_table(spectra: "list[Spectrum]") -> Table:
    table = Table(title="Attention's projections", title_justify="left")
    for column in ("tensor", "shape", "rank", "condition", "smallest singular value"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for found in spectra:
        shape = "×".join(map(str, found.shape))
        table.add_row(found.tensor, shape, str(found.rank), f"{found.condition:.3g}", f"{found.smallest:.3g}")
    return table
