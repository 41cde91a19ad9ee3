"""Rows with one token each, whose layers make the calls of kernels of an earlier step again.

What a step gives these calls is copied to memory that is kept. So steps differ in the numbers of rows and of positions
alone, and a layer takes no longer than its kernels: see leanqkv/inference/repeat.py. Layers of which other operators
compute something run as they are written.
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from leanqkv.inference import attention
from leanqkv.inference.repeat import Calls
from leanqkv.inference.step import compiled_kernels

# Steps in a row that are noted in vain until none are.
TRIES = 3


class RepeatedRows:
    """The memory that the calls read and write, as much as the most rows so far took, and the calls of every layer."""

    def __init__(self, layers: int, kernel: ModuleType):
        """kernel: the module with leanqkv's kernel, which on a GPU repeats nothing."""
        kernels = compiled_kernels() if kernel is attention else {}
        self.layers, self.left = layers, TRIES if kernels else 0
        self._repeat = next(iter(kernels.values())).repeat if kernels else None
        self._memory: dict[str, Tensor] = {}
        self._kinds: tuple = ()
        self._rows = self._longest = 0
        self._notes = False  # whether a layer of this step was noted
        self._calls: dict[int, tuple[Calls, Tensor]] = {}

    def begin(self, rows: int, longest: int, *kinds: int) -> bool:
        """Prepare a step; return whether it may be noted or repeated.

        longest: positions of the longest row. kinds: what else steps that are repeated have alike.
        """
        complete = len(self._calls) == self.layers
        self.left = TRIES if complete else self.left - self._notes
        if not complete or kinds != self._kinds or not (1 < rows <= self._rows or rows == self._rows):
            self._calls, self._kinds = {}, kinds
        self._longest, self._notes = longest, False
        return self.left > 0

    def keep(self, name: str, made: Tensor) -> Tensor:
        """Return a copy, contiguous, that lies where the one of that name lay in the step before if there is room."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < made.numel() or memory.dtype != made.dtype:
            self._calls = {}
            memory = self._memory[name] = made.new_empty(2 * made.numel())
        return memory[: made.numel()].view(made.shape).copy_(made)

    def attend(self, layer: int, rows: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` does, [rows, ...], and do what it does, of tensors that are kept."""
        if noted := self._calls.get(layer):
            calls, found = noted
            for _, arguments in calls.calls:
                arguments.fit(rows, self._longest)
            assert self._repeat is not None
            calls.repeat(self._repeat)
            return found[:rows]
        calls, self._rows, self._notes = Calls(), rows, True
        found = calls.note(compute)
        if calls.complete:
            self._calls[layer] = calls, found
        return found
