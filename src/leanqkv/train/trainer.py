"""`transformers.Trainer` over the batch plan, read in order: optimizer, schedule, loss, log."""

import math
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ..compat import shard_on_cpus
from ..data.batches import IGNORED
from ..data.objectives import MaskedTokens, targets
from ..errors import LeanError
from .directory import complete
from .optimizer import make_optimizer, make_schedule
from .precision import Precision
from .processes import first_decides
from .sharding import whole_model
from .spec import RunSpec
from .tasks import TrainingTask

# step, steps, training loss (None until the first is known), tokens per second
Progress = Callable[[int, int, float | None, float | None], None]


# Of a step that has not come.
NEVER = 2**62


class LeanTrainer(Trainer):
    """Trainer over the batch plan, with the run's autocast and validation, and the time of every logging interval.

    Attributes:
        model: the one that is trained; never None.
        watch: what it reports to, and whether the time was up.
    """

    model: Any

    def __init__(
        self,
        spec: RunSpec,
        task: TrainingTask,
        precision: Precision,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        watch: "Watch",
        teacher: Any = None,
    ):
        if spec.gradient_checkpointing:
            checkpoint_activations(model)
        precision.apply(model)
        entries: Any = range(len(task.plan.train_starts))  # `collate` turns them into inputs, a batch at a time
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=entries,
            eval_dataset=entries,
            data_collator=task.collate,
            callbacks=[watch],
        )
        self.remove_callback(PrinterCallback)
        self.spec, self.task, self.precision, self.watch = spec, task, precision, watch
        self.teacher = None if teacher is None else teacher.eval().requires_grad_(False).to(arguments.device)
        self.interval_start: float | None = None
        self._first_bad_step = torch.tensor(NEVER, device=arguments.device)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            # A block returns keys and values as views of a projection, and nobody writes into them.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            self.is_fsdp_enabled = shard_on_cpus(self.accelerator, self.args.fsdp_plugin_args)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.spec.recipe)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(self.create_optimizer(), self.spec.recipe)
        return self.lr_scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.fsdp and self.watch.keep_checkpoints:
            whole = whole_model(self.model)
            if self.is_world_process_zero():
                whole.save_pretrained(str(output_dir or self.args.output_dir))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        # Without waiting for the device: whether the loss is finite is asked when it is logged.
        step = torch.where(loss.detach().isfinite(), NEVER, self.state.global_step + 1)
        self._first_bad_step = torch.minimum(self._first_bad_step, step.to(self._first_bad_step.device))
        return loss

    def first_bad_step(self) -> int | None:
        """Return the first step with a loss that is not finite, in any process; all processes call this."""
        found = self.accelerator.gather(self._first_bad_step[None])
        return None if int(found.min()) == NEVER else int(found.min())

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        return self.precision.autocast(self.args.device.type)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self.task.finish(super()._prepare_inputs(inputs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the model's loss; with a teacher, mixed with the divergence from it where a token is predicted."""
        if self.teacher is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with torch.no_grad():
            expected = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits
        share, temperature = self.spec.distillation, self.spec.distillation_temperature
        own: Any = 0.0
        if share == 1:  # the model's own loss would be computed and weigh nothing
            outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        else:
            own, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        logits, weight = outputs.logits, 1.0
        if num_items_in_batch is not None:  # not every token is predicted; it weighs as in the model's own loss
            predicted = targets(inputs) != IGNORED
            expected, logits = expected[predicted], logits[predicted]
            weight = predicted.sum() * self.accelerator.num_processes / num_items_in_batch
        loss = (1 - share) * own + share * weight * divergence(expected, logits, temperature)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        paused = time.perf_counter()
        model = self.accelerator.unwrap_model(self.model)
        batch_size = self.args.per_device_train_batch_size
        figures = self.task.evaluate(model, batch_size, self.autocast_smart_context_manager)
        metrics = {f"eval_{name}": value for name, value in figures.items()}
        self.log(metrics)
        if self.args.report_to and not self.args.fsdp:
            self.log({f"logit_spread/layer_{layer}": spread for layer, spread in enumerate(self.task.spreads(model))})
        if self.interval_start is not None:
            self.interval_start += time.perf_counter() - paused
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now = time.perf_counter()
            if self.interval_start is not None:
                logs["seconds"] = now - self.interval_start
                logs["tokens_per_second"] = self.spec.tokens(self.spec.log_interval) / logs["seconds"]
            self.interval_start = now
        super().log(logs, start_time)


class Watch(TrainerCallback):
    """Report progress, stop runs that diverge or whose time is up, and complete checkpoints.

    Attributes:
        time_is_up: whether the run was stopped before `max_hours` of this process had passed.
    """

    def __init__(
        self, spec: RunSpec, progress: Progress, max_hours: float | None = None, keep_checkpoints: bool = False
    ):
        self.spec, self.progress, self.max_hours, self.keep_checkpoints = spec, progress, max_hours, keep_checkpoints
        self.loss: float | None = None
        self.rate: float | None = None
        self.time_is_up = False
        self.last_hours = 0.0
        self.longest_interval = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.last_hours = _hours_of_this_process()

    def on_step_end(self, args, state, control, **kwargs):
        self.progress(state.global_step, state.max_steps, self.loss, self.rate)
        # Where the log has an entry: the trainer forgets the losses since the last one when it goes on.
        logged = state.global_step % self.spec.log_interval == 0 and state.global_step < state.max_steps
        if logged and self.max_hours is not None and first_decides(self._next_interval_is_too_long):
            self.time_is_up = control.should_training_stop = control.should_save = True

    def _next_interval_is_too_long(self) -> bool:
        """Whether another interval, and as much again for the checkpoint, would pass the limit."""
        hours = _hours_of_this_process()
        self.longest_interval = max(self.longest_interval, hours - self.last_hours)
        self.last_hours = hours
        return hours + 2 * self.longest_interval >= (self.max_hours or math.inf)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        self.loss = logs.get("loss", self.loss)
        self.rate = logs.get("tokens_per_second", self.rate)
        if not math.isfinite(logs.get("loss", logs.get("eval_loss", 0.0))):
            control.should_training_stop, control.should_save = True, False
            self.time_is_up = False  # more time would not help

    def on_save(self, args, state, control, **kwargs):
        args.distributed_state.wait_for_everyone()  # each process has written its random state
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            for weights in checkpoint.glob("*.safetensors"):  # written for their owner alone
                shutil.copymode(checkpoint / "config.json", weights)
            complete(checkpoint, self.keep_checkpoints)


def _hours_of_this_process() -> float:
    return (time.time() - psutil.Process().create_time()) / 3600


def divergence(expected: torch.Tensor, predicted: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the mean KL(expected || predicted) per position, in nats, of logits [..., tokens].

    Both are divided by the temperature, and the divergence is multiplied by its square, so that the size of the
    gradients stays (Hinton et al. 2015, arXiv:1503.02531, section 2).
    """
    target, prediction = (
        (logits.flatten(0, -2).float() / temperature).log_softmax(-1) for logits in (expected, predicted)
    )
    lost = torch.nn.functional.kl_div(prediction, target, reduction="batchmean", log_target=True)
    return temperature**2 * lost


def train_only_changed(model: torch.nn.Module, teacher: torch.nn.Module) -> None:
    """Freeze the parameters that the teacher has too, with the same numbers.

    Raises:
        LeanError: nothing is left to train.
    """
    theirs = dict(teacher.named_parameters())
    for name, weight in model.named_parameters():
        other = theirs.get(name)
        weight.requires_grad_(other is None or other.shape != weight.shape or not torch.equal(other, weight))
    if not any(weight.requires_grad for weight in model.parameters()):
        raise LeanError("the model has its teacher's weights; leave out `only_changed`")


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the model compute activations again in the backward pass instead of keeping them."""
    # transformers is about to drop the older name, and its older versions have no other.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def summarize(spec: RunSpec, history: list[dict[str, Any]], first_bad_step: int | None = None) -> dict[str, Any]:
    """Return a record's curves and figures, from the trainer's log and the first step whose loss is not finite."""
    training = [{"step": entry["step"], "loss": entry["loss"]} for entry in history if "loss" in entry]
    # By step: the trainer evaluates the last one twice.
    evaluated = {entry["step"]: entry for entry in history if "eval_loss" in entry}
    evaluations = [
        {"step": step, **{key.removeprefix("eval_"): entry[key] for key in entry if key.startswith("eval_")}}
        for step, entry in evaluated.items()
    ]
    seconds = [entry["seconds"] for entry in history if "seconds" in entry]
    bad = next((entry for entry in (*training, *evaluations) if not math.isfinite(entry["loss"])), None)
    reason = "the loss is not finite"
    if first_bad_step is not None:
        reason += f", first in step {first_bad_step:,}, batch {first_bad_step - 1:,} of the plan"
    final = None
    if evaluations and bad is None:
        loss = evaluations[-1]["loss"]
        outcome = {name: value for name, value in evaluations[-1].items() if name not in ("step", "loss")}
        # Where a token is predicted from what follows it too, or a class, there is no perplexity.
        if not outcome.keys() & {"accuracy", MaskedTokens.counted}:
            outcome["perplexity"] = math.exp(min(loss, 700))
        final = {"validation_loss": loss, **outcome}
    return {
        "tokens": spec.tokens(max((entry["step"] for entry in (*training, *evaluations)), default=0)),
        "training": [entry for entry in training if math.isfinite(entry["loss"])],
        "evaluations": [entry for entry in evaluations if math.isfinite(entry["loss"])],
        "final": final,
        "tokens_per_second": round(spec.tokens(spec.log_interval) / median(seconds), 1) if seconds else None,
        "seconds": round(sum(seconds), 2),
        "diverged": {"step": bad["step"], "reason": reason} if bad else None,
        "rise": _largest_rise([entry for entry in training if math.isfinite(entry["loss"])]),
    }


def _largest_rise(training: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return by how many nats the training loss has been above the lowest one before it, at most, and at which step."""
    found, lowest = None, math.inf
    for entry in training:
        lowest = min(lowest, entry["loss"])
        if entry["loss"] - lowest > (found["nats"] if found else 0):
            found = {"step": entry["step"], "nats": entry["loss"] - lowest}
    return found
