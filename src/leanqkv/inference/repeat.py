"""The layers of a decoding step as one call, which makes the calls of kernels of the step before it again.

Steps of the same sequences call the same kernels. They differ in what they are given, in where new keys and values go,
and in how many positions are read. So the calls of one step are noted while it runs, with the memory that it used, and
the next steps make them again after these numbers are set. Whatever else computes something is seen, an operator of
PyTorch or a kernel that is not noted, and then every step runs as it is written.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from ..model.position import Rotations

_of_thread = threading.local()
# Operators that give memory and compute nothing.
EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}
# Rows of input up to which kernels multiply faster than PyTorch, so that steps of no more rows may be repeated.
ROWS = 32
# Steps in a row that are noted in vain until a cache's steps are no longer noted, since at times one does more than
# others; and caches in a row until none's are.
TRIES = 3


POINTER, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of a structure, all of one kind."""
    return [(name, kind) for name in names.split()]


class Arguments(ctypes.Structure):
    """What a kernel is called with: its address is the only argument, and it returns whether it did its work."""

    # The pointers to what a step is given.
    given: tuple[str, ...] = ()
    # How many more steps differ in nothing but these, and the numbers that are `growing`.
    lasting = 2**30

    def pointers(self) -> list[ctypes.c_void_p]:
        """Return the pointers to what a step is given."""
        return [ctypes.c_void_p.from_buffer(self, getattr(type(self), name).offset) for name in self.given]

    def growing(self) -> list[ctypes.c_int64]:
        """Return the numbers that grow by one from a step to the next."""
        return []

    def number(self, name: str) -> ctypes.c_int64:
        """Return a number, to be changed."""
        return ctypes.c_int64.from_buffer(self, getattr(type(self), name).offset)

    def fit(self, rows: int, length: int) -> None:
        """Let the first so many rows of the batch be computed, of which the longest reads so many positions."""
        self.batch = rows


class _Noted(ctypes.Structure):
    """The same, in the same order, as `Noted` in step.cpp."""

    _fields_ = fields(POINTER, "function arguments")


def call(function: Callable[[Any], bool], arguments: Arguments) -> bool:
    """Call a kernel, and note it where a step is noted."""
    if (step := _noted()) is not None:
        step.calls.append((function, arguments))
    return function(ctypes.byref(arguments))


def not_noted() -> None:
    """Say that something is computed which is not noted."""
    if (step := _noted()) is not None:
        step.complete = False


@contextmanager
def known() -> Iterator[None]:
    """What is computed here a repeated step does in another way: a cache's `advance`."""
    step, _of_thread.step = _noted(), None
    try:
        yield
    finally:
        _of_thread.step = step


def made_of(mask: Tensor) -> Tensor | None:
    """Return what was made of a mask before the layers of this step, for all of them; None: nothing was."""
    return getattr(_of_thread, "masks", {}).get(id(mask))


def _noted() -> "Calls | None":
    return getattr(_of_thread, "step", None)


class _Watch(TorchDispatchMode):
    """Keep what operators give, and see those that compute."""

    def __init__(self, step: "Calls"):
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.step.held.append(found)
        if function not in EMPTY and not _is_view(function, args, found):
            not_noted()
        return found


def _is_view(function: Any, args: Any, found: Any) -> bool:
    if function._schema.is_mutable or not isinstance(found, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return found.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


class Calls:
    """The calls of kernels that are made while something is computed, to be made again.

    Attributes:
        calls: functions and arguments, in their order.
        held: whose memory they read and write.
        complete: whether they are all that is computed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Arguments]] = []
        self.held: list[Any] = []
        self.complete = True

    def note(self, compute: Callable[[], Any], inputs: Sequence[Tensor] = ()) -> Any:
        """Compute something and note it. inputs: what lies elsewhere when it is repeated."""
        _of_thread.step = self
        try:
            with _Watch(self):
                found = compute()
        finally:
            _of_thread.step = None
        self.complete = self.complete and bool(self.calls)
        self._given: list[tuple[ctypes.c_void_p, int, int]] = []
        for pointer in (pointer for _, arguments in self.calls for pointer in arguments.pointers()):
            for number, one in enumerate(inputs):
                offset = (pointer.value or 0) - one.data_ptr()
                if 0 <= offset < one.nbytes:
                    self._given.append((pointer, number, offset))
        noted = [_Noted(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(own)) for function, own in self.calls]
        self._noted = (_Noted * len(noted))(*noted)
        return found

    def repeat(self, repeat: Callable[[Any, int], int], inputs: Sequence[Tensor] = ()) -> None:
        """Make them again, of other inputs: `repeat` is of step.cpp."""
        addresses = [one.data_ptr() for one in inputs]
        for pointer, number, offset in self._given:
            pointer.value = addresses[number] + offset
        if repeat(self._noted, len(self._noted)) != len(self._noted):
            raise ValueError("a cache holds fewer positions than attention is to read")


class Step(Calls):
    """The calls of a step of a cache."""

    def __init__(self, cache: Cache):
        super().__init__()
        self._layers: list[Any] = cache.layers
        self._marks = self._marks_now()

    def note(self, compute: Callable[[], Any], inputs: Sequence[Tensor] = ()) -> Any:
        """Run a step and note it; a repeated one returns the first of its results. inputs: all that differs."""
        self.complete = all(one.is_contiguous() for one in inputs)
        self.output, rest = super().note(compute, inputs)
        self._layers = [layer for layer, old in zip(self._layers, self._marks, strict=True) if layer.mark is not old]
        self._marks = self._marks_now()
        self._shapes, self._threads, self._run = [_shape(one, 0) for one in inputs], torch.get_num_threads(), 0
        self._left = min((arguments.lasting for _, arguments in self.calls), default=0)
        self._growing = [number for _, arguments in self.calls for number in arguments.growing()]
        return self.output, rest

    def _marks_now(self) -> list[Any]:
        return [layer.mark for layer in self._layers]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether this may be run with these inputs: the caches are as the last step left them."""
        return (
            self.complete
            and self._left > 0
            and self._threads == torch.get_num_threads()
            and self._shapes == [_shape(one, self._run + 1) for one in inputs]
            and all(
                layer.mark is mark and layer.steps > 0 for layer, mark in zip(self._layers, self._marks, strict=True)
            )
        )

    def run(self, repeat: Callable[[Any, int], int], inputs: Sequence[Tensor]) -> Tensor:
        """Run it once more. What it returns is overwritten by the next time."""
        for count in self._growing:
            count.value += 1
        for layer in self._layers:
            layer.advance()
        self._left, self._run = self._left - 1, self._run + 1
        self._marks = self._marks_now()
        self.repeat(repeat, inputs)
        return self.output


def _shape(given: Tensor, steps: int) -> tuple[Any, ...]:
    """What steps have alike, so many after the noted one: masks grow, and tables of all positions of a cache, which are
    those of every row."""
    *shape, last = given.shape
    if given.dim() == 4:
        last -= steps
    elif shape[0] == 1 < shape[1]:
        shape[1] -= steps
    return given.dtype, given.is_contiguous(), *shape, last


class RepeatedLayers:
    """Takes the place of a model's `_run_layers`, of which it repeats steps of single tokens."""

    def __init__(self, model: Any, repeat: Callable[[Any, int], int], additive: Callable[[Tensor], Tensor]):
        """repeat: of step.cpp. additive: makes of a mask what the kernel for attention takes."""
        self.model, self.plain, self.repeat, self.additive = model, model._run_layers, repeat, additive
        self.steps: WeakKeyDictionary[Cache, Step] = WeakKeyDictionary()
        self.failed: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()
        self.vain = 0  # caches in a row

    def __call__(
        self,
        hidden_states: Tensor,
        masks: dict[int | None, Any],
        position_embeddings: Rotations | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As `_run_layers` of model/transformer.py."""
        given = hidden_states, masks, position_embeddings, (cache := past_key_values)
        if cache is None or not self._is_alike(hidden_states, cache):
            if cache is not None:
                self.steps.pop(cache, None)
            return self.plain(*given, **kwargs)
        made = {id(mask): self.additive(mask) for mask in masks.values() if isinstance(mask, Tensor)}
        tables = [table for tables in (position_embeddings or {}).values() for table in tables]
        inputs = [hidden_states, *tables, *made.values()]
        step = self.steps.get(cache)
        if step is not None and step.fits(inputs):
            return step.run(self.repeat, inputs), None
        self.steps.pop(cache, None)  # with the memory that it holds
        step, _of_thread.masks = Step(cache), made
        try:
            output, rest = step.note(partial(self.plain, *given, **kwargs), inputs)
        finally:
            _of_thread.masks = {}
        if step.complete and rest is None:
            self.steps[cache], self.failed[cache], self.vain = step, 0, 0
        else:
            self.failed[cache] = self.failed.get(cache, 0) + 1
            self.vain += self.failed[cache] == TRIES
        return output, rest

    def _is_alike(self, hidden_states: Tensor, cache: Cache) -> bool:
        """Whether steps of this kind may be alike."""
        blocks: Any = self.model.layers
        return (
            hidden_states.shape[1] == 1
            and len(hidden_states) <= ROWS
            and torch.is_inference_mode_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and self.failed.get(cache, 0) < TRIES > self.vain
            and all(hasattr(layer, "advance") for layer in cache.layers)
            and not any(module._forward_hooks for block in blocks for module in (block, block.self_attn))
        )
