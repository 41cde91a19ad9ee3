"""`leanqkv convert`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .checkpoints import SOURCE, Dtype, Out, as_dtype
from .options import console


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
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens.")] = 200_000,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Of the calibration sequences. Default: 512, or all positions.")
    ] = None,
    ratio: Annotated[float, typer.Option(help="Share of the value heads that becomes the first layer's.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the new matrices of a nonlinear query.")] = 0,
    dtype: Dtype = "fp32",
) -> None:
    """Convert a checkpoint to first-layer values (three quarters of the KV cache), or give it a nonlinear query.

    leanqkv convert runs/baseline --to skipv1 --calibration book.txt --out runs/skipv1

    leanqkv convert hf/llama --to skipv1 --method mean-v --out runs/mean

    leanqkv convert runs/baseline --to nonlinear-query --out runs/nonlinear
    """
    from ..checkpoints.open import open_checkpoint
    from ..convert.calibrated import Settings
    from ..convert.methods import CALIBRATED
    from ..convert.run import calibration_tokens, convert_directory
    from ..data import prepare_data
    from ..errors import LeanError

    sample = None
    if calibration is not None:
        if to != "skipv1" or method != CALIBRATED:
            raise LeanError("--calibration is for --to skipv1 --method calibrated; leave it out")
        config = open_checkpoint(source).config
        with console.status("reading the calibration text"):
            data = prepare_data(calibration, vocab_size=config.vocab_size, tokenizer=str(source))
        length = sequence_length or min(512, config.max_position_embeddings)
        sample = calibration_tokens(data, config, tokens, length)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("passes over the calibration text", total=None)

        def calibrating(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        report: dict[str, Any] = convert_directory(
            source,
            out,
            to=to,
            method=method,
            tokens=sample,
            settings=Settings(ratio=ratio),
            seed=seed,
            dtype=as_dtype(dtype),
            calibrating=calibrating,
        )
    for what, unit in (("parameters", ""), ("kv_bytes_per_token_bf16", " bytes of KV cache per token (bf16)")):
        before, after = report[what]
        console.print(f"{before:,} -> {after:,}{unit or ' parameters'} ({after / before - 1:+.1%})", highlight=False)
    if "pools" in report:
        console.print(f"value heads pooled: {report['pools']}", highlight=False)
    for layer in report.get("layers", ()):
        paired = ", ".join(f"{head}: {first}" for head, first in layer["paired"].items())
        console.print(
            f"layer {layer['layer']}: heads {layer['kept']} keep their values, the others take the first layer's "
            f"({paired}); {layer['missed']:.2%} of attention's output missed",
            highlight=False,
        )
    console.print(f"{out}: conversion.json", highlight=False)
