"""`leanqkv convert` and `uptrain`: a finished checkpoint with a smaller KV cache, or a nonlinear query."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .checkpoints import SOURCE, Dtype, Out, as_dtype
from .one_run import run_one
from .options import (
    BatchSize,
    ContextLength,
    Data,
    Device,
    EvaluateEvery,
    EvaluationSequences,
    KeepCheckpoints,
    MaxDocuments,
    MicroBatchSize,
    PrecisionOption,
    TextField,
    console,
)


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
    choose: Annotated[bool, typer.Option(help="Calibrated: which heads keep a value, by what is lost without.")] = True,
    refit_lent: Annotated[bool, typer.Option(help="Calibrated: fit the values that the first layer lends.")] = True,
    refit_values: Annotated[bool, typer.Option(help="Calibrated: fit W_V of the kept heads, not W_O alone.")] = True,
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
    from ..progress import counting

    sample = None
    settings = Settings(ratio=ratio, choose=choose, refit_lent=refit_lent, refit_values=refit_values)
    if settings != Settings(ratio=ratio) and (to != "skipv1" or method != CALIBRATED):
        raise LeanError(
            "--no-choose, --no-refit-lent and --no-refit-values are for --method calibrated; leave them out"
        )
    if calibration is not None:
        if to != "skipv1" or method != CALIBRATED:
            raise LeanError("--calibration is for --to skipv1 --method calibrated; leave it out")
        config = open_checkpoint(source).config
        with console.status("reading the calibration text"):
            data = prepare_data(calibration, vocab_size=config.vocab_size, tokenizer=str(source))
        length = sequence_length or min(512, config.max_position_embeddings)
        sample = calibration_tokens(data, config, tokens, length)
    with counting(console, "passes over the calibration text") as calibrating:
        report: dict[str, Any] = convert_directory(
            source,
            out,
            to=to,
            method=method,
            tokens=sample,
            settings=settings,
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
        missed = f"{layer['missed']:.2%} of attention's output missed"
        if not layer["layer"]:
            console.print(f"layer 0: the values it lends are fitted to all layers; {missed}", highlight=False)
            continue
        paired = ", ".join(f"{head}: {first}" for head, first in layer["paired"].items())
        console.print(
            f"layer {layer['layer']}: heads {layer['kept']} keep their values, the others take the first layer's "
            f"({paired}); {missed}",
            highlight=False,
        )
    console.print(f"{out}: conversion.json", highlight=False)


def uptrain(
    source: Annotated[Path, typer.Argument(help=SOURCE)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; goes on where an earlier start of it left off.")],
    data: Data = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint whose predictions are matched as well.", show_default=False)
    ] = None,
    distillation: Annotated[
        float, typer.Option(min=0, max=1, help="With --teacher: share of KL(teacher || model) in the loss.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the batches.")] = 0,
    batch_size: BatchSize = 16,
    micro_batch_size: MicroBatchSize = None,
    context_length: ContextLength = None,
    learning_rate: Annotated[float, typer.Option(help="Peak, as in P3's uptraining.")] = 1.5e-4,
    min_learning_rate: Annotated[float | None, typer.Option(help="Default: a tenth.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(min=0, help="On matrices only.")] = 0.1,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="Default: a tenth.", show_default=False)] = None,
    precision: PrecisionOption = "auto",
    device: Device = None,
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    evaluate_every: EvaluateEvery = 50,
    evaluation_sequences: EvaluationSequences = None,
    keep_checkpoints: KeepCheckpoints = False,
) -> None:
    """Go on training a checkpoint, such as a converted one; dropout is off, as in the paper's uptraining.

    Its loss before the first step is in the record, and so is every validation after it. Killed and started again, the
    same command goes on, bit-identically.

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --out runs/uptrained

    leanqkv uptrain runs/skipv1 --data book.txt --steps 300 --teacher runs/baseline --out runs/distilled
    """
    from ..checkpoints.open import open_checkpoint
    from ..checkpoints.tensors import weights_hash
    from ..errors import LeanError
    from ..model.config import LeanConfig
    from ..presets import Recipe

    overrides = open_checkpoint(source).config.as_overrides()
    config = LeanConfig(**{key: value for key, value in overrides.items() if not key.endswith("_dropout")})
    if teacher is not None and (found := open_checkpoint(teacher).config.vocab_size) != config.vocab_size:
        raise LeanError(f"the teacher has {found:,} tokens, the model {config.vocab_size:,}: they cannot be compared")
    recipe = Recipe(
        steps,
        batch_size or 16,
        learning_rate,
        learning_rate / 10 if min_learning_rate is None else min_learning_rate,
        weight_decay,
        steps // 10 if warmup_steps is None else warmup_steps,
    )
    record = run_one(
        source.name,
        config,
        recipe,
        out,
        data=data,
        tokenizer=str(source),
        text_field=text_field,
        max_documents=max_documents,
        precision=precision,
        device=device,
        context_length=context_length,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences,
        evaluate_every=evaluate_every,
        keep_checkpoints=keep_checkpoints,
        seed=seed,
        role="uptrain",
        initial=source,
        teacher=teacher,
        initial_sha256=weights_hash(source),
        teacher_sha256=None if teacher is None else weights_hash(teacher),
        distillation=0.0 if teacher is None else distillation,
    )
    console.print(f"validation loss before the first step: {record['evaluations'][0]['loss']:.4f}", highlight=False)
