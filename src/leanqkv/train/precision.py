"""Precision: bf16 autocast or fp32, compiled or not, and the attention; chosen by timing the real model."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel

from ..environment import keep_freed_memory, return_freed_memory
from ..errors import LeanError
from ..model.config import LeanConfig
from .tasks import task_of

if TYPE_CHECKING:
    from .micro_batch import Step

ATTENTION = ("sdpa", "eager")
TIMED_STEPS = 4
# A run that takes fewer seconds than this without compiling is over before compiling has been timed.
COMPILING_PAYS = 30.0


@dataclass(frozen=True)
class Precision:
    """How the arithmetic of a run is done. Weights and optimizer state are float32 in every case.

    Attributes:
        dtype: "fp32", or "bf16" for autocast.
        compiled: torch.compile of the whole model.
        attention: "sdpa" or "eager"; eager is the faster one on some CPUs once compiled, for short contexts.
        timings: name -> milliseconds per step of each precision that `choose_precision` tried.
    """

    dtype: str = "fp32"
    compiled: bool = False
    attention: str = "sdpa"
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    # The configuration of the model that was compiled last. Dynamo keeps a few graphs of a function, of all models of a
    # process together, and runs what would be one more as it is written.
    compiled_last: ClassVar[dict[str, Any] | None] = None

    def __str__(self) -> str:
        return "+".join([self.dtype, *(["compile"] if self.compiled else []), self.attention])

    def autocast(self, device: str) -> AbstractContextManager:
        """Return the context of a forward pass."""
        return torch.autocast(device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()

    def apply(self, model: PreTrainedModel) -> None:
        """Set the attention implementation and compile, in place: tensor names stay as they are."""
        model.set_attn_implementation(self.attention)
        if self.compiled:
            if Precision.compiled_last != (config := model.config.to_dict()):
                torch.compiler.reset()
                Precision.compiled_last = config
            model.compile(dynamic=False)

    def record(self) -> dict[str, Any]:
        """Return a record's entry on the precision."""
        return {"choice": str(self), "milliseconds_per_step": self.timings}


def parse_precision(text: str, timings: dict[str, float] | None = None) -> Precision | None:
    """Return the precision that `fp32`, `bf16+compile`, `bf16+compile+eager` and so on name; None for `auto`."""
    if text == "auto":
        return None
    dtype, *rest = text.split("+")
    if dtype not in ("fp32", "bf16") or set(rest) - {"compile", *ATTENTION} or {*ATTENTION} <= {*rest}:
        raise LeanError(f"precision {text!r} is not known; give auto, or fp32 or bf16 with +compile, +sdpa or +eager")
    attention = next((name for name in ATTENTION if name in rest), "sdpa")
    return Precision(dtype, "compile" in rest, attention, timings or {})


def choose_precision(
    step: "Step", micro_batch_size: int | None, steps: int, progress: Callable[[str], None] = lambda doing: None
) -> Precision:
    """Return the precision with the smallest estimated time for a run: set-up (compiling) plus `steps` steps.

    Times a few training steps of the real model in each precision, plain and compiled, in this process alone.

    Args:
        micro_batch_size: sequences or images that a process takes at a time; None: its part of the batch.
        progress: called with the precision that is timed next.

    Raises:
        LeanError: a model that cannot be trained on this device.
    """
    timed: dict[Precision, tuple[float, float]] = {}
    batch_size = step.at_a_time(micro_batch_size)
    failures: list[Exception] = []

    def measure(precision: Precision) -> None:
        progress(f"timing {precision}")
        try:
            timed[precision] = time_steps(step.config, precision, batch_size, step.context_length, step.device)
        except Exception as error:  # no compiler, no bf16, no memory for it, or NaN: no choice
            failures.append(error)

    def seconds(precision: Precision) -> float:
        return timed[precision][0] + steps * timed[precision][1]

    for dtype in ("fp32", "bf16"):
        measure(Precision(dtype))
    kinds = (False,) if timed and min(map(seconds, timed)) < COMPILING_PAYS else (False, True)
    if True in kinds:
        for dtype in ("fp32", "bf16"):
            measure(Precision(dtype, compiled=True))
    return_freed_memory()
    if not timed:
        raise LeanError(f"no precision could be timed: {' '.join(str(failures[0]).split())[:200]}")
    if step.device == "cpu":
        best = min(timed, key=lambda p: timed[p][1])
        for compiled in kinds:
            measure(Precision(best.dtype, compiled, attention="eager"))
    best = min(timed, key=seconds)
    timings = {str(precision): round(1e3 * each, 2) for precision, (_, each) in timed.items()}
    return Precision(best.dtype, best.compiled, best.attention, timings)


def time_steps(
    config: LeanConfig, precision: Precision, batch_size: int, context_length: int, device: str
) -> tuple[float, float]:
    """Return the seconds of the first training step, compiling included, and of the fastest step after it.

    The fastest step is the one that other processes disturbed least. The random state is left as it was.

    Raises:
        ArithmeticError: the last loss is not finite. A compiler has made NaN gradients of a model that was sound.
    """
    keep_freed_memory(device)
    with torch.random.fork_rng(devices=[]):
        Precision.compiled_last = None
        task = task_of(config)
        model: Any = task.model_class(config)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = task.random_batch(config, batch_size, context_length, device)
        precision.apply(model)
        seconds = []
        for _ in range(TIMED_STEPS + 1):
            start = time.perf_counter()
            with precision.autocast(device):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for an accelerator
            seconds.append(time.perf_counter() - start)
        if not loss.isfinite():
            raise ArithmeticError(f"the loss is not finite in {precision}")
        return seconds[0], min(seconds[1:])
