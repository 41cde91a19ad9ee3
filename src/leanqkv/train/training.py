"""A training run, from its specification to its record."""

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ..checkpoints.load import load_weights
from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..compat import quiet_transformers, use_one_device
from ..environment import check_device, default_device, git_commit, hardware, versions
from ..errors import LeanError
from ..files import RECORD_FORMAT
from ..model.config import LeanConfig
from .directory import claim, disk_full_is_an_error, finish, last_checkpoint, only_here
from .precision import Precision, parse_precision
from .spec import RunSpec
from .tasks import Data, build, check_fit, make_task
from .trainer import LeanTrainer, Progress, Sequences, Watch, make_optimizer, make_schedule, summarize


@dataclass(frozen=True)
class Start:
    """Where a run finds its batch plan, and the checkpoints that it starts from and learns from."""

    batches: Path
    initial: Path | None = None
    teacher: Path | None = None


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
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Trains, or goes on where `out` left off, and returns the run's record, which is also written to `out`.

    `out` ends up a directory that `from_pretrained` loads, with the tokenizer where there is text, and record.json.
    Under `torchrun` or `accelerate launch` the batch is split over the processes.

    Args:
        batches: where the batch plan is, or will be, saved; by default in `out`.
        initial, teacher: checkpoint directories, where the specification names the hash of their weights.
        keep_checkpoints: whether the model stays in `checkpoint-STEP` as every evaluation found it; without, the run
            drops its checkpoints when it is done.

    Raises:
        LeanError: `out` holds something else, the batch does not divide, or a checkpoint is not the one specified.
    """
    device = check_device(device or default_device())
    precision = _precision(spec)
    config = LeanConfig(**spec.config)
    check_fit(spec.name, config, data, spec.context_length)
    arguments = _arguments(spec, out, device, keep_checkpoints)
    if data.sha256 != spec.data_sha256:
        raise LeanError(f"{spec.name} was to be trained on other data than this ({data.description})")
    for directory, wanted in ((initial, spec.initial_sha256), (teacher, spec.teacher_sha256)):
        if (directory and weights_hash(directory)) != wanted:
            raise LeanError(f"{spec.name} was to be trained from, or by, other weights than those in {directory}")
    finished = claim(out, spec)
    if finished is not None:
        return finished
    with only_here(out):
        start = Start(batches or out / "batches", initial, teacher)
        return _train(spec, data, out, config, precision, arguments, start, keep_checkpoints, progress)


def _train(
    spec: RunSpec,
    data: Data,
    out: Path,
    config: LeanConfig,
    precision: Precision,
    arguments: TrainingArguments,
    start: Start,
    keep_checkpoints: bool,
    progress: Progress,
) -> dict[str, Any]:
    recipe = spec.recipe
    task = make_task(spec, data, start.batches)
    torch.manual_seed(spec.seed)
    model = build(config)
    if start.initial is not None:
        load_weights(model, open_checkpoint(start.initial).tensors)
    teacher = None
    if start.teacher is not None:
        opened = open_checkpoint(start.teacher)
        teacher = build(opened.config).eval().requires_grad_(False)
        load_weights(teacher, opened.tensors)
        teacher.to(arguments.device)
    task.prepare(model)
    if spec.gradient_checkpointing:
        # transformers is about to drop the older name, and its older versions have no other.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    precision.apply(model)
    optimizer = make_optimizer(model, recipe)

    def validate(evaluated: torch.nn.Module) -> dict[str, float]:
        device = arguments.device.type
        return task.evaluate(evaluated, arguments.per_device_train_batch_size, lambda: precision.autocast(device))

    trainer = LeanTrainer(
        precision=precision,
        task=task,
        validate=validate,
        teacher=teacher,
        distillation=spec.distillation,
        model=model,
        args=arguments,
        train_dataset=Sequences(task.plan),
        eval_dataset=Sequences(task.plan),
        data_collator=task.collate,
        optimizers=(optimizer, make_schedule(optimizer, recipe)),
        callbacks=[Watch(spec, progress)],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.perf_counter()
    with quiet_transformers(), disk_full_is_an_error(out):
        trainer.train(resume_from_checkpoint=last_checkpoint(out))
    history = trainer.state.log_history
    record = {
        "record": RECORD_FORMAT,
        **spec.as_json(),
        "parameters": asdict(config.plan.count_parameters()),
        "kv_bytes_per_token": {
            name: config.plan.kv_bytes_per_token(getattr(torch, name)) for name in ("bfloat16", "float32")
        },
        "data": data.record(),
        "batch_plan": task.plan.record(),
        "precision": precision.record(),
        "hardware": {**hardware(arguments.device.type), "processes": arguments.world_size},
        "versions": versions(),
        "git_commit": git_commit(),
        "last_session_seconds": round(time.perf_counter() - started, 2),
        **summarize(spec, history),
    }
    if trainer.is_world_process_zero():
        with quiet_transformers(), disk_full_is_an_error(out):
            finish(out, model, task, record, keep_checkpoints)
    return record


def _precision(spec: RunSpec) -> Precision:
    precision = parse_precision(spec.precision)
    if precision is None:
        raise LeanError("a run needs a precision that has been chosen; choose_precision does")
    return replace(precision, timings=spec.precision_timings)


def _arguments(spec: RunSpec, out: Path, device: str, keep_checkpoints: bool) -> TrainingArguments:
    recipe = spec.recipe
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    micro = spec.micro_batch_size or recipe.batch_size // processes
    if micro < 1 or recipe.batch_size % (micro * processes):
        raise LeanError(
            f"a batch of {recipe.batch_size} sequences does not divide into micro-batches of {max(micro, 1)} on "
            f"{processes} process{'es' if processes > 1 else ''}; change --batch-size or --micro-batch-size"
        )
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=device == "cpu",
        seed=spec.seed,
        max_steps=recipe.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=recipe.batch_size // (micro * processes),
        max_grad_norm=recipe.max_grad_norm or 0.0,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        dataloader_pin_memory=device == "cuda",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        logging_strategy="steps",
        logging_steps=spec.log_interval,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_on_start=spec.initial_sha256 is not None,
        eval_steps=spec.evaluate_every,
        save_strategy="steps",
        save_steps=spec.evaluate_every,
        save_total_limit=None if keep_checkpoints else 2,
        report_to="none",
        disable_tqdm=True,
    )
    use_one_device(arguments)
    return arguments
