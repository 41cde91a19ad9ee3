"""`leanqkv eliminate` and `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import LeanError
from ..files import check_free
from .options import SOURCE, as_dtype

# The largest difference of logits at which two checkpoints are one function, relative to the largest logit, in float64.
TOLERANCE = 1e-3


def eliminate(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    remove: str,
    out: Path,
    layer: str = "all",
    format: str = "strict",
    family: str | None = None,
    dtype: str = "fp32",
    max_condition: float = 1e8,
    plain: bool = False,
    text: Path | None = None,
) -> None:
    """Remove weights from a checkpoint without changing its function. A certificate states the error.

    leanqkv inspect lists the possible eliminations.

    leanqkv eliminate runs/a --remove query --layer 3 --out runs/b

    leanqkv eliminate runs/skipless --remove query,output --out runs/c

    leanqkv eliminate hf/llama --remove block-diagonal --format stock --out hf/llama-vo

    Options:
        remove: query, key, value, output, several of them between commas; block-diagonal; single-head.
        layer: Layers of query, key, value and output to remove: 3 or 0,2, counted from 0; or all.
        format: strict: ours, with fewer tensors. stock: a class of transformers.
        family: Class for --format stock: llama, gpt2, … Default: the simplest that fits.
        max_condition: Refuse to solve with a matrix of a larger condition number.
        plain: Use the textbook form instead of the one with the smallest rounding error.
        text: Text to compare on. Default: random tokens from a fixed seed.
    """
    if format not in ("strict", "stock"):
        raise LeanError(f"`format` is strict or stock, found {format!r}")
    if family is not None and format != "stock":
        raise LeanError("`family` chooses a class of transformers; it needs `format=stock`")
    check_free(out, source)
    from ..eliminate import parse_request
    from .eliminating import eliminate_and_certify

    request = parse_request(remove, layer, max_condition=max_condition, balance=not plain)
    eliminate_and_certify(source, out, request, text, dtype=as_dtype(dtype), stock=format == "stock", family=family)


def verify(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    other: Annotated[Path, typer.Argument(help="Another checkpoint with the same vocabulary.", metavar="DIR")],
    text: Path | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare two checkpoints on their logits, in float64, float32 and bfloat16; exit code 1 if they differ.

    leanqkv verify runs/a runs/b --text book.txt

    Options:
        text: Text to compare on. Default: random tokens from a fixed seed.
        tolerance: Largest difference of logits in float64, relative to the largest logit.
    """
    from .eliminating import verify_and_report

    if not verify_and_report(source, other, text, tolerance):
        raise typer.Exit(1)
