"""A training run, from its specification to its record."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from ..checkpoints.open import load_weights, open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..compat import quiet_transformers, use_one_device
from ..environment import check_device, denormals_as_zero, keep_freed_memory, made_on
from ..errors import LeanError, TimeIsUpError
from ..files import RECORD_FORMAT, disk_full_is_an_error
from ..job import locked
from ..model.config import LeanConfig
from ..model.shapes import count_parameters
from .directory import claim, clean, finish, last_checkpoint, note_hardware
from .micro_batch import split_batch
from .norm_removal import NormRemoval, check_removal, make_removable, remove_norms, summarize_removal
from .precision import Precision, parse_precision
from .processes import connect, first_decides, process_count
from .sharding import sharding_arguments, whole_model
from .spec import RunSpec
from .tasks import Data, check_fit, check_teacher, task_of
from .trainer import LeanTrainer, Progress, Watch, summarize, train_only_changed

AFTER_FULL = "make room and run the same command again, it goes on from the last checkpoint"


def train(
    spec: RunSpec,
    data: Data,
    out: Path,
    *,
    device: str | None = None,
    batches: Path | None = None,
    initial: Path | None = None,
    teacher: Path | None = None,
    keep_checkpoints: bool = False,
    max_hours: float | None = None,
    report_to: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Train, or resume the run in `out`, and return the run's record, which is also written to `out`.

    `out` becomes a directory that `from_pretrained` loads, with record.json and, for text, the tokenizer. Under
    `torchrun` or `accelerate launch` the batch is split over the processes.

    Args:
        batches: directory of the saved batch plan; by default in `out`.
        initial, teacher: checkpoint directories; the specification has the hashes of their weights.
        keep_checkpoints: keep the model of every evaluation in `checkpoint-STEP`; without, a finished run deletes them.
        max_hours: of this process, before which the run stops with a checkpoint.
        report_to: trackers by the names that transformers gives them, such as "tensorboard".

    Raises:
        TimeIsUpError: the run has stopped before `max_hours`.
        LeanError: `out` holds something else, the batch does not divide, a checkpoint is not the one specified, or the
            teacher cannot teach this model.
    """
    device = check_device(device)
    keep_freed_memory(device)
    precision = _check_options(spec, report_to, keep_checkpoints)
    connect(device, spec.shard)
    arguments = _arguments(spec, out, device, report_to)
    config, teacher_config = _check(spec, data, initial, teacher)
    if (finished := first_decides(lambda: claim(out, spec))) is not None:
        first_decides(lambda: clean(out, finished))
        return finished
    with ExitStack() as stack:
        # Against a second command on the same run; the processes of torchrun are one.
        first_decides(lambda: stack.enter_context(locked(out, "training")))
        first_decides(lambda: note_hardware(out, device))
        task = task_of(config)(spec, data, batches or out / "batches")
        torch.manual_seed(spec.seed)
        model = _model(config, initial)
        teaching = None if teacher_config is None else _model(teacher_config, teacher)
        if spec.norm_schedule is not None:
            make_removable(model)
        if spec.only_changed and teaching is not None:
            train_only_changed(model, teaching)
        task.configure(model)
        watch = Watch(spec, progress, max_hours, keep_checkpoints)
        trainer = LeanTrainer(spec, task, precision, model, arguments, watch, teaching)
        if spec.norm_schedule is not None:
            trainer.add_callback(NormRemoval(spec.norm_schedule))
        with quiet_transformers(), disk_full_is_an_error(out, AFTER_FULL), denormals_as_zero(device):
            _run(trainer, out, initial)
            record = _record(trainer, config, data)
            whole = model if spec.shard is None else whole_model(model)
            if trainer.is_world_process_zero():
                if spec.norm_schedule is not None and record["diverged"] is None:
                    whole = _norm_free(trainer, config, record)
                finish(out, whole, task, record, keep_checkpoints, initial)
    return record


def _check_options(spec: RunSpec, report_to: Sequence[str], keep_checkpoints: bool) -> Precision:
    """Return the precision of a run that can be made, before its processes are connected."""
    check_trackers(report_to)
    if (precision := parse_precision(spec.precision, spec.precision_timings)) is None:
        raise LeanError("a run needs a precision that has been chosen; choose_precision does")
    if spec.norm_schedule is not None:
        check_removal(spec.shard, keep_checkpoints)
    return precision


def _check(
    spec: RunSpec, data: Data, initial: Path | None, teacher: Path | None
) -> tuple[LeanConfig, LeanConfig | None]:
    """Return the configurations of the model and of its teacher, if data and checkpoints are those of the run."""
    config = LeanConfig(**spec.config)
    check_fit(spec.name, config, data, spec.context_length, spec.recipe, spec.evaluation_sequences)
    teacher_config = read_teacher(teacher, spec.name, config, spec.context_length)
    if teacher_config is not None and spec.teacher_config not in (None, teacher_config.as_overrides()):
        raise LeanError(f"{spec.name} was to be trained by another model than that in {teacher}")
    if data.sha256 != spec.data_sha256:
        raise LeanError(f"{spec.name} was to be trained on other data than this ({data.description})")
    for directory, wanted in ((initial, spec.initial_sha256), (teacher, spec.teacher_sha256)):
        if (directory and weights_hash(directory)) != wanted:
            raise LeanError(f"{spec.name} was to be trained from, or by, other weights than those in {directory}")
    return config, teacher_config


def _run(trainer: LeanTrainer, out: Path, initial: Path | None) -> None:
    """Train from the last checkpoint to the end."""
    checkpoint = first_decides(lambda: last_checkpoint(out))
    trainer.args.eval_on_start = initial is not None and checkpoint is None
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.watch.time_is_up:
        raise TimeIsUpError(
            f"stopped at step {trainer.state.global_step:,} of {trainer.spec.recipe.steps:,}: what is left of "
            f"{trainer.watch.max_hours:g} hours may not last for more; run the same command again to go on"
        )


def read_teacher(teacher: Path | None, name: str, config: LeanConfig, context_length: int) -> LeanConfig | None:
    """Return the configuration of a teacher that can teach the model; None for none. Raises as `check_teacher`."""
    if teacher is None:
        return None
    teacher_config = open_checkpoint(teacher).config
    check_teacher(name, config, teacher.name, teacher_config, context_length)
    return teacher_config


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known to transformers and installed.

    Raises:
        LeanError: one is not.
    """
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            found = ", ".join(available) or "none"
            raise LeanError(f"`report_to={name}`: no tracker of that name is installed; found: {found}")


def _model(config: LeanConfig, weights: Path | None) -> PreTrainedModel:
    """Return a model with random weights, or with those of a checkpoint."""
    model = task_of(config).model_class(config)
    if weights is not None:
        load_weights(model, open_checkpoint(weights).tensors)
    return model


def _record(trainer: LeanTrainer, config: LeanConfig, data: Data) -> dict[str, Any]:
    return {
        "record": RECORD_FORMAT,
        **trainer.spec.as_json(),
        **_sizes(config),
        "data": data.record(),
        "batch_plan": trainer.task.plan.record(),
        "precision": trainer.precision.record(),
        **made_on(trainer.args.device.type, processes=trainer.args.world_size),
        **summarize(trainer.spec, trainer.state.log_history, trainer.first_bad_step()),
    }


def _sizes(config: LeanConfig) -> dict[str, Any]:
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float32")}
    return {
        "parameters": asdict(count_parameters(config)),
        "kv_bytes_per_token": {name: config.plan.kv_bytes_per_token(dtype) for name, dtype in dtypes.items()},
    }


def _norm_free(trainer: LeanTrainer, config: LeanConfig, record: dict[str, Any]) -> PreTrainedModel:
    """Return the model without norms, and complete the record with it."""
    state = {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}
    model, checked = remove_norms(config, state)
    trainer.task.configure(model)
    record |= _sizes(model.config)
    record["norms"] = summarize_removal(trainer.spec, state, record["evaluations"], checked)
    return model


def _arguments(spec: RunSpec, out: Path, device: str, report_to: Sequence[str]) -> TrainingArguments:
    recipe = spec.recipe
    micro, accumulation = split_batch(recipe.batch_size, spec.micro_batch_size, process_count())
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=device == "cpu",
        seed=spec.seed,
        max_steps=recipe.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=recipe.max_grad_norm or 0.0,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=device == "cuda",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        logging_steps=spec.log_interval,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=spec.evaluate_every,
        save_steps=spec.evaluate_every,
        report_to=list(report_to) or "none",
        run_name=out.name,
        disable_tqdm=True,
        **({} if spec.shard is None else sharding_arguments()),
    )
    use_one_device(arguments)
    return arguments
