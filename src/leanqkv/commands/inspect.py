"""`leanqkv inspect`: what a model or a checkpoint is, and what could be removed from it."""

from typing import Annotated

import typer

from .options import NAME_HELP


def inspect(
    source: Annotated[
        str,
        typer.Argument(help=f"{NAME_HELP}; or a checkpoint: a directory of ours or of transformers, or a .gguf file"),
    ],
    layers: bool = False,
    spectra: bool = True,
) -> None:
    """Show a model's architecture, parameters, KV bytes and possible exact eliminations.

    leanqkv inspect gpt2-124m+skipv1

    leanqkv inspect hf/pythia-160m --layers

    Options:
        layers: Also print the plan of every layer, every elimination, and every tensor.
        spectra: Compute the condition numbers of a checkpoint's projections.
    """
    from ..inspect import show

    show(source, layers, spectra)
