"""One training run with its display: what `train` and `uptrain` have in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import TEXT_EVALUATION, console, evaluation_size, outcome, precision_for, prepare

if TYPE_CHECKING:
    from ..model.config import LeanConfig
    from ..presets import Recipe


def run_one(
    name: str,
    config: "LeanConfig",
    recipe: "Recipe",
    out: Path,
    *,
    data: str | None,
    tokenizer: str | None,
    text_field: str,
    max_documents: int | None,
    precision: str,
    device: str | None,
    context_length: int | None,
    micro_batch_size: int | None,
    evaluation_sequences: int | None,
    initial: Path | None = None,
    teacher: Path | None = None,
    keep_checkpoints: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Reads the data, chooses the precision, trains, and returns the record; `settings` are further fields of the
    RunSpec. Arguments are those of the command line.

    Raises:
        LeanError: whatever does not fit together, before anything is read or written where that is possible.
    """
    from ..progress import training_display
    from ..train import RunSpec, train
    from ..train.directory import check_out
    from ..train.environment import check_device, default_device
    from ..train.work import check_fit, check_trainable

    check_trainable(name, config)
    check_out(out)
    context = context_length or config.max_position_embeddings
    assert context is not None
    prepared = prepare(data, [config], tokenizer, text_field, max_documents)
    check_fit(name, config, prepared, context)
    arithmetic = precision_for(
        precision, out, config, recipe, micro_batch_size, context, check_device(device or default_device())
    )
    spec = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=recipe,
        context_length=context,
        precision=str(arithmetic),
        precision_timings=arithmetic.timings,
        data_sha256=prepared.sha256,
        micro_batch_size=micro_batch_size,
        evaluation_sequences=evaluation_sequences or evaluation_size(prepared, TEXT_EVALUATION),
        **settings,
    )
    with training_display(console) as display:
        display.start(recipe.steps)

        def progress(step: int, total: int, loss: float | None, rate: float | None) -> None:
            display.update(name, step, total, loss, rate)

        record = train(
            spec,
            prepared,
            out,
            device=device,
            initial=initial,
            teacher=teacher,
            keep_checkpoints=keep_checkpoints,
            progress=progress,
        )
        display.finish(name, recipe.steps, outcome(record))
    contents = [name for name in ("model.safetensors", "tokenizer.json", "record.json") if (out / name).exists()]
    console.print(f"{out}: {', '.join(contents)}", highlight=False)
    return record
