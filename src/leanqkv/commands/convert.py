"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..progress import continued_when_repeated, progress_bar
from .options import SOURCE, Dtype, Out, as_dtype, console

if TYPE_CHECKING:
    import numpy as np


def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    to: Annotated[str, typer.Option(help="skipv1 or nonlinear-query.")],
    out: Out,
    method: Annotated[
        str, typer.Option(help="For skipv1: calibrated, or mean-v, mean-vo, top-v, top-vo, svd from weights alone.")
    ] = "calibrated",
    calibration: Annotated[
        str | None,
        typer.Option(help="Text for the calibrated method, as --data of train takes it.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 200_000,
    sequence_length: Annotated[
        int | None, typer.Option(help="Of the calibration sequences. Default: 512, or all positions.")
    ] = None,
    ratio: Annotated[float, typer.Option(help="Share of the value heads that becomes the first layer's.")] = 0.5,
    choose: Annotated[bool, typer.Option(help="Calibrated: which heads keep a value, by what is lost without.")] = True,
    refit_lent: Annotated[bool, typer.Option(help="Calibrated: fit the values that the first layer lends.")] = True,
    refit_values: Annotated[bool, typer.Option(help="Calibrated: fit W_V of the kept heads, not W_O alone.")] = True,
    seed: Annotated[int, typer.Option(help="Of the new matrices of a nonlinear query.")] = 0,
    dtype: Dtype = "fp32",
) -> None:
    """Convert a checkpoint to first-layer values (three quarters of the KV cache), or give it a nonlinear query.

    leanqkv convert runs/baseline --to skipv1 --calibration book.txt --out runs/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out runs/mean

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear
    """
    from ..checkpoints.write import check_free
    from ..convert.calibrated import Settings
    from ..convert.conversion import check_request, convert_directory

    settings = Settings(ratio=ratio, choose=choose, refit_lent=refit_lent, refit_values=refit_values)
    check_free(out, source)
    check_request(to, method, settings, calibration is not None)
    sample = None if calibration is None else _read_tokens(source, ratio, calibration, tokens, sequence_length)
    with continued_when_repeated(), progress_bar("reading") as bar:

        def show_written(done: int, total: int) -> None:
            if bar.description == "writing":
                bar.start("writing, MB")
            bar(done // 10**6, total // 10**6)

        report = convert_directory(
            source,
            out,
            to=to,
            method=method,
            tokens=sample,
            settings=settings,
            seed=seed,
            dtype=as_dtype(dtype),
            calibrating=bar,
            message=bar.describe,
            progress=show_written,
        )
    _print_report(report)
    console.print(f"{out}: conversion.json", highlight=False)


def _read_tokens(source: Path, ratio: float, text: str, tokens: int, sequence_length: int | None) -> "np.ndarray":
    """Calibration tokens [sequences, length] of the tokenizer in `source`, a model that can be converted."""
    from ..checkpoints.open import open_checkpoint
    from ..convert.calibrated import calibrated_target
    from ..convert.conversion import calibration_tokens, check_sequence_length
    from ..data import prepare_data

    config = open_checkpoint(source).config
    calibrated_target(config, ratio)  # refuses before the text is read
    assert config.max_position_embeddings is not None
    length = sequence_length or min(512, config.max_position_embeddings)
    check_sequence_length(config, length)
    with progress_bar("reading the calibration text") as bar:
        data = prepare_data(text, vocab_size=config.vocab_size, tokenizer=str(source), progress=bar.describe)
    return calibration_tokens(data, config, tokens, length)


def _print_report(report: dict[str, Any]) -> None:
    for key, unit in (("parameters", "parameters"), ("kv_bytes_per_token_bf16", "bytes of KV cache per token (bf16)")):
        before, after = report[key]
        console.print(f"{before:,} -> {after:,} {unit} ({after / before - 1:+.1%})", highlight=False)
    if "pools" in report:
        console.print(f"value heads pooled: {report['pools']}", highlight=False)
    for layer in report.get("layers", ()):
        error = f"{layer['missed']:.2%} of attention's output missed"
        if not layer["layer"]:
            console.print(f"layer 0: the values it lends are fitted to all layers; {error}", highlight=False)
            continue
        pairs = ", ".join(f"{head}: {first}" for head, first in layer["paired"].items())
        tied = f", their order fixed by {layer['tied_by']}" if "tied_by" in layer else ""
        console.print(
            f"layer {layer['layer']}: heads {layer['kept']} keep their values, the others take the first layer's "
            f"({pairs}){tied}; {error}",
            highlight=False,
        )
