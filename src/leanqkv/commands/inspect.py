"""`leanqkv inspect`: what a model or a checkpoint is, and what could be removed from it."""

from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from ..errors import LeanError
from ..progress import progress_bar
from .options import NAME_HELP, console


def inspect(
    source: Annotated[
        str,
        typer.Argument(help=f"{NAME_HELP}; or a checkpoint: a directory of ours or of transformers, or a .gguf file"),
    ],
    layers: bool = False,
    spectra: bool = True,
) -> None:
    """Show what a model is, its parameters and KV bytes, and what could be eliminated exactly, or why not.

    leanqkv inspect gpt2-124m+skipv1

    leanqkv inspect hf/pythia-160m --layers

    Options:
        layers: Also print the plan of every layer, every elimination, and every tensor.
        spectra: Compute the condition numbers of a checkpoint's projections.
    """
    from ..checkpoints.gguf_format import is_gguf
    from ..checkpoints.memory import give_back_freed_memory
    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tensors import finite
    from ..eliminate import audit
    from ..inspect import condition_line, findings_table, layer_table, query_output_line, spectra_table, summary
    from ..presets import preset

    exists = Path(source).exists() or is_gguf(source)
    if "/" in source and not exists:
        raise LeanError(f"there is no directory {source}")
    opened = open_checkpoint(Path(source)) if exists else None
    config = preset(source) if opened is None else opened.config
    findings, projections = audit.findings(config), []
    if opened is not None and spectra:
        give_back_freed_memory()
        with progress_bar("singular values") as bar:
            projections = list(audit.spectra(config, finite(opened.tensors), bar))
    lines = [*summary(config, source, opened, findings)]
    if projections:
        lines.append(condition_line(projections))
    for line in lines:
        console.print(fill(line, console.width, subsequent_indent="  "), highlight=False, soft_wrap=True)
    if layers or opened is None:
        console.print(layer_table(config, f"Layers, {source}"))
    if layers:
        console.print(findings_table(findings, f"Exact eliminations, {source}"))
        console.print(query_output_line(config), highlight=False)
    if layers and projections:
        console.print(spectra_table(projections, f"Attention's projections, {source}"))
