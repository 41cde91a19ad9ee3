"""`leanqkv import` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from ..progress import progress_bar
from .options import SOURCE, Out, as_dtype, console


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="HF_DIR")],
    out: Out,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
) -> None:
    """Turn a checkpoint of transformers into one of leanqkv; every tensor is accounted for.

    leanqkv import hf/pythia-160m --out runs/pythia
    """
    from ..checkpoints.memory import give_back_freed_memory
    from ..eliminate.elimination import convert_format

    give_back_freed_memory()
    with progress_bar("reading", in_bytes=True) as bar:
        bar.describe("writing")
        config, name = convert_format(source, out, stock=False, dtype=as_dtype(dtype), progress=bar)
    console.print(f"{out}: {name}, {config.plan.count_parameters().total:,} parameters", highlight=False)


def export_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="DIR")],
    out: Out,
    stock: Annotated[str, typer.Option("--format", help="stock, a class of transformers.")] = "stock",
    family: Annotated[str | None, typer.Option(help="Which one: llama, gpt2, … Default: the plainest.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32 or bf16. Default: as stored.", show_default=False)
    ] = None,
) -> None:
    """Turn a checkpoint of leanqkv into one of a class that transformers knows, identities written out.

    leanqkv export runs/a --format stock --out hf/a
    """
    from ..checkpoints.memory import give_back_freed_memory
    from ..eliminate.elimination import convert_format
    from ..errors import LeanError

    if stock != "stock":
        raise LeanError(f"--format is stock, found {stock!r}")
    give_back_freed_memory()
    with progress_bar("reading", in_bytes=True) as bar:
        bar.describe("writing")
        _, name = convert_format(source, out, stock=True, family=family, dtype=as_dtype(dtype), progress=bar)
    console.print(f"{out}: {name}", highlight=False)
