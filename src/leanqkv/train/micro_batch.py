"""The micro-batch: as much of a batch as fits in memory, from a count of what a training step would hold."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

# Documented in PyTorch's notes on fake tensors, whatever the name of the module says.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ..errors import LeanError
from ..memory import PeakMemory
from ..model.config import LeanConfig
from .norm_removal import make_removable
from .precision import Precision
from .processes import process_count
from .tasks import task_of
from .trainer import checkpoint_activations, divergence

# Of free memory; the rest is for what kernels take while they run, for holes between tensors (a fifth was measured on
# a CPU), and for other programs.
USABLE_SHARE = 0.75
# Weights, their gradients, and AdamW's two moments, all of them float32.
TENSORS_PER_PARAMETER, FLOAT32 = 4, 4


@dataclass(frozen=True)
class Step:
    """A training step whose memory is to be counted.

    Attributes:
        batch_size: sequences or images of the whole batch.
        precision: None while it is still to be chosen; then the one that needs most is counted.
        teacher: configuration of the model whose predictions are matched.
        shard: "fsdp" where each process holds a part of the model.
        removes_norms: one after another (norm_removal.py).
        processes: of the run.
    """

    config: LeanConfig
    batch_size: int
    context_length: int
    device: str
    precision: Precision | None = None
    gradient_checkpointing: bool = False
    teacher: LeanConfig | None = None
    shard: str | None = None
    removes_norms: bool = False
    processes: int = field(default_factory=process_count)

    def at_a_time(self, micro_batch_size: int | None) -> int:
        """Return how many sequences or images a process takes at a time, as `split_batch` does."""
        return split_batch(self.batch_size, micro_batch_size, self.processes)[0]

    def bytes(self, micro_batch_size: int) -> int:
        """Return the most bytes that training in micro-batches of this size holds at one time in a process."""
        return self.state_bytes() + self.activation_bytes(micro_batch_size)

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state in a process, and of a teacher's weights."""
        model, *teacher = self._models()
        weights = sum(p.numel() for other in teacher for p in other.parameters())
        return FLOAT32 * (_numbers_held(model, self.shard, self.processes) + weights)

    def activation_bytes(self, micro_batch_size: int) -> int:
        """Return the most bytes that a step holds beside that.

        What kernels take for themselves is not seen; torch.compile needs less.
        """
        precision = self.precision or Precision(attention="eager" if self.device == "cpu" else "sdpa")
        memory = PeakMemory()
        self._run_on_shapes(micro_batch_size, precision, memory)
        return memory.peak

    def flops(self) -> int:
        """Return the operations of forward and backward pass over one sequence or image, as PyTorch counts them.

        Those of matrix products; attention with all pairs of positions, those too that a mask hides.
        """
        counter = FlopCounterMode(display=False)
        self._run_on_shapes(1, Precision(attention="eager"), counter)
        return counter.get_total_flops()

    def _models(self) -> list[PreTrainedModel]:
        """Return the model and its teacher, if it has one, as tensors that have shapes and no content."""
        configs = [config for config in (self.config, self.teacher) if config is not None]
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return [task_of(config).model_class(config) for config in configs]

    def _run_on_shapes(self, micro_batch_size: int, precision: Precision, observer: AbstractContextManager) -> None:
        """Run forward and backward inside `observer`, on tensors that have shapes and no content.

        It takes a fraction of a second and no memory.
        """
        model, *teacher = models = self._models()
        with FakeTensorMode(allow_non_fake_inputs=True), _EvenRouting(self.config.num_local_experts):
            if self.removes_norms:
                make_removable(model)
            for each in models:
                each.to_empty(device="cpu")
                each.set_attn_implementation(precision.attention)
            if self.gradient_checkpointing:
                checkpoint_activations(model)
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            batch = task_of(self.config).random_batch(self.config, micro_batch_size, self.context_length, "cpu")
            with observer:
                with precision.autocast("cpu"):
                    outputs = model(**batch)
                    loss = outputs.loss
                    if teacher:
                        with torch.no_grad():
                            expected = teacher[0](input_ids=batch["input_ids"], use_cache=False).logits
                        loss = loss + divergence(expected, outputs.logits)
                loss.backward()


def _numbers_held(model: PreTrainedModel, shard: str | None, processes: int) -> int:
    """Of weights, gradients and optimizer state in one process."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if shard is None:
        return numbers * (TENSORS_PER_PARAMETER + (processes > 1))  # DDP copies the gradients
    layers: Any = model.base_model.layers
    blocks = [sum(p.numel() for p in block.parameters()) for block in layers]
    rest = numbers - sum(blocks)
    # Two units at a time are whole: the one that computes and the next; the embeddings and the head stay whole.
    return TENSORS_PER_PARAMETER * -(-numbers // processes) + 2 * (rest + 2 * max(blocks))


class _EvenRouting(TorchDispatchMode):
    """Let every expert get the same number of tokens: tensors without content cannot say how many."""

    def __init__(self, experts: int | None):
        super().__init__()
        self.experts = experts or 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.nonzero.default:
            (chosen,) = args
            return torch.empty(-(-chosen.numel() // self.experts), chosen.ndim, dtype=torch.int64)
        if function is torch.ops.aten.bincount.default:  # by the balancing loss of transformers 5.17
            return torch.empty(self.experts, dtype=torch.int64)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class MicroBatch:
    """A choice.

    Attributes:
        size: sequences or images that a process takes at a time; None: whole batches, which differ between models.
        batch_size: None where it differs between models.
        needed, free: bytes.
    """

    size: int | None
    batch_size: int | None
    needed: int
    free: int

    def __str__(self) -> str:
        """Say what was chosen, in a line."""
        processes = process_count()
        text = f"micro-batch {self.size or 'as large as the batch'}"
        if self.size and self.batch_size:
            text += f" of {self.batch_size}" + (f" on {processes} processes" if processes > 1 else "")
            if (passes := self.batch_size // (self.size * processes)) > 1:
                text += f" ({passes} accumulation steps)"
        text += f": {_in_words(self.needed)} of {_in_words(self.free)} free"
        if self.needed > self.free * USABLE_SHARE:
            text += (
                ", so it may run out of memory. A shorter context needs less, and so does "
                "gradient checkpointing in `leanqkv train`"
            )
        return text


def _in_words(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def choose_micro_batch(steps: Sequence[Step], free: int) -> MicroBatch:
    """Return the largest micro-batch with which each of `steps` fits in `free` bytes; 1 if none does.

    It is the whole batch, or a divisor of each process's part of every batch.

    Raises:
        LeanError: a batch that cannot be divided among the processes.
    """
    [processes], limit = {step.processes for step in steps}, int(free * USABLE_SHARE)
    batches = {step.batch_size for step in steps}
    parts = {split_batch(batch, None, processes)[0] for batch in batches}
    alike = len(batches) == 1
    batch_size = max(batches) if alike else None

    @cache
    def needed(size: int) -> int:
        return max(step.bytes(size) for step in steps)

    if (whole := max(step.bytes(step.batch_size // processes) for step in steps)) <= limit:
        return MicroBatch(max(parts) if alike else None, batch_size, whole, free)
    common = math.gcd(*parts)
    divisors = [size for size in range(1, common + 1) if common % size == 0]
    size = divisors[max(0, bisect_right(divisors, limit, key=needed) - 1)]
    return MicroBatch(size, batch_size, needed(size), free)


def split_batch(batch_size: int, micro_batch_size: int | None, processes: int) -> tuple[int, int]:
    """Return how many sequences each process takes at a time, and how many times for one step.

    Raises:
        LeanError: the batch does not divide so.
    """
    share = max(1, batch_size // processes)
    # A run begun on fewer processes may have larger micro-batches than there is for each of these.
    micro = share if micro_batch_size is None or share < micro_batch_size <= batch_size else micro_batch_size
    if batch_size % (micro * processes):
        raise LeanError(
            f"a batch of {batch_size} sequences does not divide into micro-batches of {micro} on "
            f"{processes} process{'es' if processes > 1 else ''}; change `batch_size` or `micro_batch_size`"
        )
    return micro, batch_size // (micro * processes)
