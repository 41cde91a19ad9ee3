"""`leanqkv import` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import LeanError
from ..files import check_free
from ..progress import console, progress_bar
from .options import SOURCE, as_dtype


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="SOURCE")], out: Path, dtype: str | None = None
) -> None:
    """Convert a checkpoint of transformers, or a GGUF file, to leanqkv's format. Every tensor is accounted for.

    leanqkv import hf/pythia-160m --out runs/pythia

    leanqkv import model.Q8_0.gguf --out runs/model

    Options:
        dtype: fp64, fp32 or bf16. Default: as stored.
    """
    _rewrite(source, out, dtype, stock=False)


def export_checkpoint(
    source: Annotated[Path, typer.Argument(help=SOURCE, metavar="DIR")],
    out: Path,
    format: str = "stock",
    family: str | None = None,
    dtype: str | None = None,
) -> None:
    """Convert a checkpoint of leanqkv to a class of transformers. Identities become plain matrices.

    leanqkv export runs/a --format stock --out hf/a

    Options:
        format: stock, a class of transformers.
        family: Class to export to: llama, gpt2, … Default: the simplest that fits.
        dtype: fp64, fp32 or bf16. Default: as stored.
    """
    if format != "stock":
        raise LeanError(f"`format` is stock, found {format!r}")
    _rewrite(source, out, dtype, stock=True, family=family)


def _rewrite(source: Path, out: Path, dtype: str | None, *, stock: bool, family: str | None = None) -> None:
    check_free(out, source)
    from ..checkpoints.write import rewrite

    with progress_bar("writing", in_bytes=True) as bar:
        name, parameters = rewrite(source, out, as_dtype(dtype), stock=stock, family=family, progress=bar)
    console.print(f"{out}: {name}, {parameters:,} parameters")
