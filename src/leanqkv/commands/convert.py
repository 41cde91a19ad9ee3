"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from ..convert.targets import CALIBRATED, FREEDOMS, METHODS, SMALLER, TARGETS, listed
from ..environment import check_device
from ..errors import LeanError
from ..files import check_free
from .options import SOURCE, Dtype, Out, as_dtype


@dataclass(frozen=True)
class TargetOptions:
    """What the checkpoint becomes.

    Options:
        cache: Latents: share of the source's cache to take at most, as 75%. Default: 84%.
        ratio: Merged values, skipv1, gqa: share of the value heads that go: merged with another, the first layer's
            instead, pooled with their neighbours (and so the keys). Default: 0.5.
        layers: Latents and merged values: layers whose values may be reduced, as 2,5,8-11. Default: all.
        choose: skipv1: which heads keep a value, by what is lost without.
        refit_lent: skipv1: fit the values that the first layer lends.
        refit_values: skipv1: fit W_V of the kept heads, not W_O alone.
        device: Latents and merged values: cpu, cuda or mps, to calibrate on. Default: cpu.
        seed: Of the new matrices of a nonlinear query.
    """

    to: Annotated[
        str,
        typer.Option(
            help=f"{listed(SMALLER, 'or')} for a smaller cache; "
            f"{listed([name for name in TARGETS if name not in SMALLER], 'or')}."
        ),
    ] = "latents"
    cache: str | None = None
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
        values = {
            "method": None if self.method == CALIBRATED else self.method,
            "cache": None if self.cache is None else read_share(self.cache),
            "ratio": self.ratio,
            "layers": None if self.layers is None else _read_layers(self.layers),
            **{name: None if getattr(self, name) else False for name in FREEDOMS},
            "device": None if self.device is None else check_device(self.device),
            "seed": self.seed or None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ConversionTexts:
    """The texts of a conversion.

    Options:
        calibration: Text to calibrate on, as --data of train takes it.
        tokens: Calibration tokens. Default: 40 per unit of width, from 24576 to 131072.
        sequence_length: Of the sequences to calibrate and evaluate on. Default: 512, or all positions.
        evaluate: Text on which source and result are compared, as --data of train takes it; no mixture.
        evaluate_tokens: Tokens to compare them on. Default: 16384, or all there are.

    Raises:
        LeanError: tokens without their text.
    """

    calibration: str | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    evaluate: str | None = None
    evaluate_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.calibration is None and self.tokens is not None:
            raise LeanError("`tokens` goes with `calibration=FILE`; leave it out")
        if self.evaluate is None and self.evaluate_tokens is not None:
            raise LeanError("`evaluate_tokens` goes with `evaluate=FILE`; leave it out")


def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Out,
    target: TargetOptions,
    texts: ConversionTexts,
    dtype: Dtype = "fp32",
    verbose: bool = False,
) -> None:
    """Give a checkpoint a smaller KV cache, or a nonlinear query.

    leanqkv convert model.gguf --cache 84% --calibration prose --out hf/smaller --evaluate book.txt

    leanqkv convert hf/llama --cache 75% --calibration prose,code.txt:0.3 --out hf/smaller

    leanqkv convert hf/llama --to merged-values --calibration prose --out hf/merged

    leanqkv convert hf/llama --to skipv1 --calibration prose --out hf/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out hf/mean

    leanqkv convert hf/llama --to gqa --ratio 0.75 --out hf/grouped

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear

    Options:
        verbose: Print a line for every layer; a log has it anyway.
    """
    check_free(out, source)
    given = target.given()
    from .converting import convert_checkpoint

    convert_checkpoint(source, out, target.to, given, texts, as_dtype(dtype), verbose)


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
