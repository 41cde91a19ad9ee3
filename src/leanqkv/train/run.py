"""A training run: `transformers.Trainer` over the batch plan, read in order."""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_with_min_lr_schedule_with_warmup,
)
from transformers.trainer_callback import PrinterCallback

from ..checkpoints.load import load_weights
from ..checkpoints.open import open_checkpoint
from ..checkpoints.tensors import weights_hash
from ..data import BatchPlan
from ..errors import LeanError
from ..files import RECORD_FORMAT, read_json, write_json
from ..model.config import LeanConfig
from ..presets import Recipe
from ..quiet import quiet_transformers
from .environment import check_device, default_device, git_commit, hardware, versions
from .precision import Precision, parse_precision
from .work import Data, Work, build, check_fit, make_work

RECORD = "record.json"
SPEC = "run.json"
# Written into a checkpoint last; a checkpoint without it was cut off and is never picked up.
COMPLETE = "complete"
# What an evaluation finds, and where the trainer's log has it.
EVALUATED = {"loss": "eval_loss", "accuracy": "eval_accuracy"}

# step, steps, training loss (None until the first is known), tokens per second
Progress = Callable[[int, int, float | None, float | None], None]


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the numbers of a run; two runs of equal specs on one machine give equal losses.

    Of images, `context_length` is how many tokens the model makes of one, and `evaluation_sequences` how many of the
    test split are evaluated.
    """

    name: str
    config: dict[str, Any]
    recipe: Recipe
    seed: int
    context_length: int
    precision: str
    data_sha256: str
    precision_timings: dict[str, float] = field(default_factory=dict)
    micro_batch_size: int | None = None
    evaluation_sequences: int = 128
    evaluate_every: int = 50
    log_every: int = 10
    gradient_checkpointing: bool = False
    role: str = "final"
    initial_sha256: str | None = None  # of the weights it starts from; None: drawn from the seed
    teacher_sha256: str | None = None  # of a model whose predictions it is to match as well
    distillation: float = 0.0  # weight of the divergence from the teacher, 1 less this that of the loss

    @property
    def log_interval(self) -> int:
        """Steps between entries of the log: `log_every`, or less, so that a checkpoint never falls between two. The
        trainer forgets the losses since the last entry when it goes on from a checkpoint."""
        return math.gcd(self.log_every, self.evaluate_every)

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


class _Sequences(Dataset):
    """The plan's training starts, one after another; `collate` turns them into inputs a batch at a time."""

    def __init__(self, plan: BatchPlan):
        self.starts = plan.train_starts.reshape(-1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> int:
        return int(self.starts[index])


class _Trainer(Trainer):
    """Trainer with our autocast, our validation, and the time of every logging interval in the log."""

    def __init__(
        self,
        *,
        precision: Precision,
        work: Work,
        validate: Callable[[torch.nn.Module], dict[str, float]],
        teacher: torch.nn.Module | None = None,
        distillation: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.teacher, self.distillation = teacher, distillation
        self.precision = precision
        self.work = work
        self.validate = validate
        self.interval_start: float | None = None

    def compute_loss_context_manager(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.precision.autocast(self.args.device.type))
        return stack

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self.work.finish(super()._prepare_inputs(inputs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss; with a teacher, mixed with the mean KL(teacher || model) of the next token, in nats."""
        if self.teacher is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            expected = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits
        expected, found = (logits.flatten(0, 1).float().log_softmax(-1) for logits in (expected, outputs.logits))
        # Sequences are of one length, so the mean over a micro-batch weighs as the model's own loss does.
        divergence = torch.nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True)
        loss = (1 - self.distillation) * loss + self.distillation * divergence
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        paused = time.perf_counter()
        found = self.validate(self.accelerator.unwrap_model(self.model))
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(metrics)
        if self.interval_start is not None:
            self.interval_start += time.perf_counter() - paused
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now = time.perf_counter()
            if self.interval_start is not None:
                logs["seconds"] = now - self.interval_start
            self.interval_start = now
        super().log(logs, start_time)


class _Watch(TrainerCallback):
    """Progress, an end to runs that diverge, and the mark of complete checkpoints."""

    def __init__(self, spec: RunSpec, progress: Progress):
        self.spec, self.progress = spec, progress
        self.loss: float | None = None
        self.rate: float | None = None

    def on_step_end(self, args, state, control, **kwargs):
        self.progress(state.global_step, state.max_steps, self.loss, self.rate)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        self.loss = logs.get("loss", self.loss)
        if "seconds" in logs:
            self.rate = _tokens(self.spec, self.spec.log_interval) / logs["seconds"]
        if not math.isfinite(logs.get("loss", logs.get("eval_loss", 0.0))):
            control.should_training_stop = True
            control.should_save = False

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


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
    finished = _claim(out, spec)
    if finished is not None:
        return finished
    with _only_here(out):
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
    work = make_work(spec, data, start.batches)
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
    work.prepare(model)
    if spec.gradient_checkpointing:
        # transformers is about to drop the older name, and its older versions have no other.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    precision.apply(model)
    optimizer = make_optimizer(model, recipe)

    def validate(evaluated: torch.nn.Module) -> dict[str, float]:
        device = arguments.device.type
        return work.evaluate(evaluated, arguments.per_device_train_batch_size, lambda: precision.autocast(device))

    trainer = _Trainer(
        precision=precision,
        work=work,
        validate=validate,
        teacher=teacher,
        distillation=spec.distillation,
        model=model,
        args=arguments,
        train_dataset=_Sequences(work.plan),
        eval_dataset=_Sequences(work.plan),
        data_collator=work.collate,
        optimizers=(optimizer, make_schedule(optimizer, recipe)),
        callbacks=[_Watch(spec, progress)],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.perf_counter()
    with quiet_transformers(), _disk_full_is_an_error(out):
        trainer.train(resume_from_checkpoint=_last_checkpoint(out))
    history = trainer.state.log_history
    record = {
        "record": RECORD_FORMAT,
        **spec.as_json(),
        "parameters": asdict(config.plan.count_parameters()),
        "kv_bytes_per_token": {
            name: config.plan.kv_bytes_per_token(getattr(torch, name)) for name in ("bfloat16", "float32")
        },
        "data": data.record(),
        "batch_plan": work.plan.record(),
        "precision": precision.record(),
        "hardware": {**hardware(arguments.device.type), "processes": arguments.world_size},
        "versions": versions(),
        "git_commit": git_commit(),
        "last_session_seconds": round(time.perf_counter() - started, 2),
        **summarize(spec, history),
    }
    if trainer.is_world_process_zero():
        with quiet_transformers(), _disk_full_is_an_error(out):
            _finish(out, model, work, record)
            for checkpoint in out.glob("checkpoint-*"):
                if keep_checkpoints and record["diverged"] is None:
                    _thin(checkpoint)
                else:
                    shutil.rmtree(checkpoint)
    return record


def make_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices (embeddings among them) and not on vectors, as nanoGPT and the papers."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine to the minimum over `schedule_steps`, of which a run may see only a part; a longer
    run stays at the minimum."""
    length = recipe.schedule_steps or recipe.steps
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer,
        num_warmup_steps=recipe.warmup_steps,
        num_training_steps=length,
        min_lr=recipe.min_learning_rate,
    )
    # Beyond its length the library's cosine would rise again.
    schedule.lr_lambdas = [partial(_held, factor, length) for factor in schedule.lr_lambdas]
    return schedule


def _held(factor: Callable[[int], float], length: int, step: int) -> float:
    return factor(min(step, length))


def summarize(spec: RunSpec, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves and figures of a run, from the trainer's log."""
    # By step: the trainer evaluates the last one twice.
    trained = {entry["step"]: {"loss": entry["loss"]} for entry in history if "loss" in entry}
    evaluated = {
        entry["step"]: {name: entry[key] for name, key in EVALUATED.items() if key in entry}
        for entry in history
        if "eval_loss" in entry
    }
    training, evaluations = ([{"step": step, **at} for step, at in found.items()] for found in (trained, evaluated))
    seconds = [entry["seconds"] for entry in history if "seconds" in entry]
    bad = next((entry for entry in (*training, *evaluations) if not math.isfinite(entry["loss"])), None)
    last = evaluations[-1] if evaluations and bad is None else None
    return {
        "tokens": _tokens(spec, max((entry["step"] for entry in (*training, *evaluations)), default=0)),
        "training": [entry for entry in training if math.isfinite(entry["loss"])],
        "evaluations": [entry for entry in evaluations if math.isfinite(entry["loss"])],
        "final": None if last is None else _final(last),
        "tokens_per_second": round(_tokens(spec, spec.log_interval) / median(seconds), 1) if seconds else None,
        "seconds": round(sum(seconds), 2),
        "diverged": {"step": bad["step"], "reason": "the loss is not finite"} if bad else None,
    }


def _final(last: dict[str, Any]) -> dict[str, float]:
    loss = {"validation_loss": last["loss"]}
    if "accuracy" in last:
        return {**loss, "accuracy": last["accuracy"]}
    return {**loss, "perplexity": math.exp(min(last["loss"], 700))}


def _tokens(spec: RunSpec, steps: int) -> int:
    return steps * spec.recipe.batch_size * spec.context_length


def _precision(spec: RunSpec) -> Precision:
    precision = parse_precision(spec.precision)
    if precision is None:
        raise LeanError("a run needs a precision that has been chosen; choose_precision does")
    return replace(precision, timings=spec.precision_timings)


@contextmanager
def _only_here(out: Path) -> Iterator[None]:
    """Holds `out` against a second process on the same run; several processes of one run are one."""
    if int(os.environ.get("RANK", "0")):
        yield
        return
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise LeanError(f"another process is training in {out}; wait for it, or stop it first") from None


@contextmanager
def _disk_full_is_an_error(out: Path) -> Iterator[None]:
    """Every library reports a full disk in its own way; this makes it one line."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if full or shutil.disk_usage(out).free < 2**20:  # torch.save only says that a position was not the expected one
            raise LeanError(
                f"the disk is full: {out} could not be written; make room and run the same command again, it goes on "
                "from the last checkpoint"
            ) from error
        raise


def check_out(out: Path) -> None:
    """Raises:
    LeanError: `out` holds something that is not a run.
    """
    if (
        out.exists()
        and not (out / SPEC).exists()
        and (not out.is_dir() or any(not file.name.startswith(".") for file in out.iterdir()))
    ):
        raise LeanError(f"{out} is not empty and not a run of ours; choose another --out")


def _claim(out: Path, spec: RunSpec) -> dict[str, Any] | None:
    """Makes `out` this run's own; returns the record if the run is already done."""
    spec_file = out / SPEC
    if spec_file.exists():
        found = read_json(spec_file)
        wanted = spec.as_json()
        different = [key for key in wanted if key != "precision_timings" and found.get(key) != wanted[key]]
        if different:
            shown = "; ".join(
                f"{key}: {_short(found.get(key))} there, {_short(wanted[key])} asked" for key in different
            )
            raise LeanError(f"{out} holds another run ({shown}); choose another --out or delete it")
        if (out / RECORD).exists():
            return read_json(out / RECORD)
        return None
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(spec_file, spec.as_json())
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _last_checkpoint(out: Path) -> str | None:
    """The newest complete checkpoint; what was cut off while being written is removed."""
    complete = []
    for checkpoint in out.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).exists():
            complete.append(checkpoint)
        else:
            shutil.rmtree(checkpoint, ignore_errors=True)  # another process may be at it too
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


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
    arguments._n_gpu = min(arguments._n_gpu, 1)  # several devices are torchrun's business, never DataParallel's
    return arguments


def _finish(out: Path, model: PreTrainedModel, work: Work, record: dict[str, Any]) -> None:
    """Puts the final model and, last of all, the record in place."""
    if record["diverged"] is None:
        partial = out / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        model.config.use_cache = True  # the trainer turns it off
        model.save_pretrained(partial)
        work.save(partial)
        for file in sorted(partial.iterdir()):
            file.replace(out / file.name)
        partial.rmdir()
    write_json(out / RECORD, record)


def _thin(checkpoint: Path) -> None:
    """Leaves of a checkpoint what a model is read from, without what training would go on from."""
    for file in checkpoint.iterdir():
        if file.suffix not in (".json", ".safetensors", ".py") and file.name != COMPLETE:
            file.unlink()
