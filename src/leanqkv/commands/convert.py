"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from ..convert.targets import CALIBRATED, METHODS, SMALLER, TARGETS
from ..environment import check_device
from ..errors import LeanError, listed
from ..files import check_free
from .options import SOURCE, as_dtype, changed
from .texts import ConversionTexts


@dataclass(frozen=True)
class TargetOptions:
    """What the checkpoint becomes.

    Options:
        cache: Latents: share of the source's cache to take at most, as 75%. Default: 84%.
        at_context: Latents: count that share at a context of so many tokens, of which layers with a sliding window keep
            the window's alone. Default: a context that every window holds.
        ratio: Merged values, skipv1, gqa: share of the value heads that go: merged with another, the first layer's
            instead, pooled with their neighbours (and so the keys). Default: 0.5.
        layers: Latents and merged values: layers whose values may be reduced, as 2,5,8-11. Default: all.
        choose: skipv1: choose the heads that keep their value by the error without it.
        refit_lent: skipv1: fit the values that the first layer lends.
        refit_values: skipv1: fit W_V of the kept heads, not W_O alone.
        device: Latents and merged values: cpu, cuda or mps, to calibrate on. Default: cpu.
        seed: Seed of a nonlinear query's new matrices.
    """

    to: Annotated[
        str,
        typer.Option(
            help=f"{listed(SMALLER, 'or')} for a smaller cache; "
            f"{listed([name for name in TARGETS if name not in SMALLER], 'or')}."
        ),
    ] = "latents"
    cache: str | None = None
    at_context: int | None = None
    method: Annotated[
        str, typer.Option(help=f"For skipv1: {CALIBRATED}, or {', '.join(METHODS)} from weights alone.")
    ] = CALIBRATED
    ratio: float | None = None
    layers: str | None = None
    choose: bool = True
    refit_lent: bool = True
    refit_values: bool = True
    device: str | None = None
    seed: int = 0

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as the library takes them.

        Raises:
            LeanError: a share, a list of layers or a device that is none.
        """
        read: dict[str, Callable[[str], Any]] = {"cache": read_share, "layers": _read_layers, "device": check_device}
        given = {name: value for name, value in changed(self).items() if name != "to"}
        return {name: read[name](value) if name in read else value for name, value in given.items()}


def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Path,
    target: TargetOptions,
    texts: ConversionTexts,
    dtype: str = "fp32",
    dry_run: bool = False,
    verbose: bool = False,
) -> None:
    """Give a checkpoint a smaller KV cache, or a nonlinear query.

    leanqkv convert model.gguf --cache 84% --calibration prose --out hf/smaller --evaluate book.txt

    leanqkv convert hf/llama --cache 75% --calibration prose,code.txt:0.3 --out hf/smaller

    leanqkv convert gemma.gguf --cache 75% --at-context 4096 --calibration prose --out hf/smaller

    leanqkv convert hf/llama --to merged-values --calibration prose --out hf/merged

    leanqkv convert hf/llama --to skipv1 --calibration prose --out hf/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out hf/mean

    leanqkv convert hf/llama --to gqa --ratio 0.75 --out hf/grouped

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear

    Options:
        dry_run: Latents and merged values: estimate forward passes, time, memory and disk, and write nothing.
        verbose: Print a line for every layer on a terminal. A log always has them.
    """
    check_free(out, source)
    given = target.given()
    from .converting import convert_checkpoint

    convert_checkpoint(source, out, target.to, given, texts, as_dtype(dtype), verbose, dry_run)


def read_share(text: str, option: str = "--cache") -> float:
    """Return the share of "75%" or "0.75".

    Raises:
        LeanError: it is neither, or not between 0 and 1.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise LeanError(f"{option} is a share of the source's cache, such as 75%, found {shorten(text, 80)!r}")
    return share


def _read_layers(text: str) -> tuple[int, ...]:
    """Return the layers of "2,5,8-11".

    Raises:
        LeanError: it is no such list.
    """
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        run = range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
        if not run:
            raise LeanError(f"--layers is a list like 2,5,8-11, found {shorten(text, 80)!r}")
        layers |= set(run)
    return tuple(sorted(layers))
