"""Rows with one token each, whose layers make the calls of kernels of an earlier step again.

What a step gives these calls is copied to memory that is kept. So steps differ in the numbers of rows and of positions,
and in where a layer's parts and its output lie, and a layer takes no longer than its kernels: see
leanqkv/inference/repeat.py. Layers of which other operators compute something run as they are written.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from leanqkv.inference import attention
from leanqkv.inference.repeat import Calls
from leanqkv.inference.step import compiled_kernels, write

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
        self._rows = self._now = self._longest = 0  # rows of the calls, and of this step
        self._notes = False  # whether a layer of this step was noted
        self._calls: dict[int, Calls] = {}

    def begin(self, rows: int, longest: int, *kinds: int) -> bool:
        """Prepare a step; return whether it may be noted or repeated.

        longest: positions of the longest row. kinds: what else steps that are repeated have alike.
        """
        complete = len(self._calls) == self.layers
        self.left = TRIES if complete else self.left - self._notes
        if not complete or kinds != self._kinds or not (1 < rows <= self._rows or rows == self._rows):
            self._calls, self._kinds = {}, kinds
        self._now, self._longest, self._notes = rows, longest, False
        return self.left > 0

    def keep(self, name: str, made: Tensor) -> Tensor:
        """Return a copy, contiguous, that lies where the one of that name lay in the step before if there is room."""
        return self._room(name, made).copy_(made)

    def _room(self, name: str, like: Tensor) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < like.numel() or memory.dtype != like.dtype:
            self._calls = {}
            memory = self._memory[name] = like.new_empty(2 * like.numel())
        return memory[: like.numel()].view(like.shape)

    def attend(
        self,
        layer: int,
        name: str,
        compute: Callable[[Sequence[Tensor | None]], Tensor],
        parts: Sequence[Tensor | None],
        output: Tensor,
    ) -> None:
        """Write what `compute` makes of copies of a layer's parts to the output, or let the noted calls do it.

        name: of the copies. parts: of at least all rows, [rows, width] each; output: [rows, heads, head_dim].
        """
        given = [part for part in parts if part is not None]
        if calls := self._calls.get(layer):
            for _, arguments in calls.calls:
                arguments.fit(self._now, self._longest)
            for (_, copy), part in zip(calls.calls, given, strict=False):  # the first calls: see _compute
                copy.from_batch = part.stride(0) * part.itemsize
            assert self._repeat is not None
            calls.repeat(self._repeat, [*given, output])
            return
        calls, self._rows, self._notes = Calls(), self._now, True
        calls.note(partial(self._compute, name, compute, parts, output), [*given, output])
        if calls.complete:
            self._calls[layer] = calls

    def _compute(self, name: str, compute: Any, parts: Sequence[Tensor | None], output: Tensor) -> None:
        copies: list[Tensor | None] = []
        for number, part in enumerate(parts):
            rows = None if part is None else part[: self._now]
            copies.append(None if rows is None else self._room(f"part {number}{name}", rows)[:, None])
            if rows is not None:
                write(rows[:, None, None], copies[-1][:, None], 0)  # type: ignore[index]
        found = compute(copies).flatten(1)
        write(found[:, None, None], output[: self._now].flatten(1)[:, None, None], 0)
