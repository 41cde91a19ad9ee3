"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

import re
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from ..convert.targets import CALIBRATED, METHODS, SMALLER, TARGETS, listed
from ..environment import check_device
from ..errors import LeanError
from ..files import check_free
from ..progress import continued_when_repeated, progress_bar
from .options import SOURCE, Dtype, Out, as_dtype, console


def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    out: Out,
    to: Annotated[
        str,
        typer.Option(
            help=f"{listed(SMALLER, 'or')} for a smaller cache; "
            f"{listed([name for name in TARGETS if name not in SMALLER], 'or')}."
        ),
    ] = "latents",
    cache: Annotated[
        str | None,
        typer.Option(help="Latents: share of the source's cache to take at most, as 75%. Default: 84%."),
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"For skipv1: {CALIBRATED}, or {', '.join(METHODS)} from weights alone.")
    ] = CALIBRATED,
    calibration: Annotated[
        str | None,
        typer.Option(help="Text to calibrate on, as --data of train takes it.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Calibration tokens. Default: 40 per unit of width, from 24576 to 131072.", show_default=False
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Of the sequences to calibrate and evaluate on. Default: 512, or all positions.")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="Text on which source and result are compared, as --data of train takes it; no mixture."),
    ] = None,
    evaluate_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens to compare them on. Default: 16384, or all there are.", show_default=False),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Merged values, skipv1, gqa: share of the value heads that go: merged with another, the first "
            "layer's instead, pooled with their neighbours (and so the keys). Default: 0.5.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Latents and merged values: layers whose values may be reduced, as 2,5,8-11. Default: all.",
            show_default=False,
        ),
    ] = None,
    choose: Annotated[bool, typer.Option(help="skipv1: which heads keep a value, by what is lost without.")] = True,
    refit_lent: Annotated[bool, typer.Option(help="skipv1: fit the values that the first layer lends.")] = True,
    refit_values: Annotated[bool, typer.Option(help="skipv1: fit W_V of the kept heads, not W_O alone.")] = True,
    device: Annotated[
        str | None,
        typer.Option(help="Latents and merged values: cpu, cuda or mps, to calibrate on. Default: cpu."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the new matrices of a nonlinear query.")] = 0,
    dtype: Dtype = "fp32",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line for every layer; a log has it anyway.")
    ] = False,
) -> None:
    """Give a checkpoint a smaller KV cache, or a nonlinear query.

    leanqkv convert model.gguf --cache 84% --calibration prose --out hf/smaller --evaluate book.txt

    leanqkv convert hf/llama --cache 75% --calibration prose,code.txt:0.3 --out hf/smaller

    leanqkv convert hf/llama --to merged-values --calibration prose --out hf/merged

    leanqkv convert hf/llama --to skipv1 --calibration prose --out hf/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out hf/mean

    leanqkv convert hf/llama --to gqa --ratio 0.75 --out hf/grouped

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear
    """
    check_free(out, source)
    given = {
        "method": None if method == CALIBRATED else method,
        "cache": None if cache is None else read_share(cache),
        "ratio": ratio,
        "layers": None if layers is None else _read_layers(layers),
        "choose": None if choose else False,
        "refit_lent": None if refit_lent else False,
        "refit_values": None if refit_values else False,
        "device": None if device is None else check_device(device),
        "seed": seed or None,
    }
    from ..checkpoints.open import open_causal_lm, open_checkpoint
    from ..convert.conversion import Conversion, check_sequence_length
    from ..report.conversion import KIND, layer_lines
    from ..report.page import NO_PAGE
    from .converting import about_conversion, read_evaluation, read_tokens

    stored_dtype = as_dtype(dtype)
    if calibration is None and tokens is not None:
        raise LeanError("--tokens goes with --calibration FILE; leave it out")
    opened = open_checkpoint(source) if evaluate is None else open_causal_lm(source)
    conversion = Conversion(opened, to, **{name: value for name, value in given.items() if value is not None})
    conversion.check_text(calibration is not None)
    length = sequence_length or min(512, opened.config.max_position_embeddings or 512)
    check_sequence_length(opened.config, length)
    comparison = read_evaluation(opened, evaluate, evaluate_tokens, length, calibration)
    about, sample = about_conversion(source, out, device or "cpu"), None
    if calibration is not None:
        tokens = tokens or min(max(40 * opened.config.hidden_size, 24_576), 131_072)
        sample, data = read_tokens(opened, calibration, tokens, length)
        about["calibration"] = {**data.record(), "sequence_length": length}
        if comparison is not None:
            about["calibration"]["source_bits_per_byte"] = comparison.compare_domains(sample, data)
    with continued_when_repeated(), progress_bar("reading") as bar:

        def show_written(done: int, total: int) -> None:
            if bar.description == "writing":
                bar.start("writing, MB")
            bar(done // 10**6, total // 10**6)

        report = conversion.write(
            out,
            sample,
            dtype=stored_dtype,
            calibrating=bar,
            message=bar.describe,
            progress=show_written,
            about=about,
            evaluate=lambda directory: (
                {} if comparison is None else {"evaluation": comparison.evaluate(directory, bar)}
            ),
            finish=KIND.write,
        )
    console.print(KIND.terminal(report))
    if verbose or not console.is_terminal:
        for line in layer_lines(report):
            console.print(line, highlight=False)
    page = KIND.html if (out / KIND.html).exists() else NO_PAGE
    console.print(f"{out}: {page}, {KIND.file}, README.md (a model card)", highlight=False)


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
