"""Carry out one request for an elimination on a configuration and its tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..checkpoints.disabled_norms import norms_disabled, without_norms
from ..checkpoints.stream import PROJECTIONS, Stream
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.registry import suggest
from ..model.shapes import count_parameters
from . import block_diagonal, single_head
from .forms import balance_for_rounding, keep_mean_zero
from .projections import Removal, assign_bases, is_solved_with, point_of, remove_projections, weight_name, why_not

BLOCK_DIAGONAL, SINGLE_HEAD = "block-diagonal", "single-head"
REMOVABLE = (*PROJECTIONS, BLOCK_DIAGONAL, SINGLE_HEAD)
MAX_CONDITION = 1e8
Message = Callable[[str], None]


def no_message(text: str) -> None:
    """Say nothing: the default where a caller may be told what is being done."""


@dataclass(frozen=True)
class Request:
    """The weights to remove: of "query", "key", "value", "output", "block-diagonal"; or "single-head"."""

    remove: tuple[str, ...]
    # Which layers' projections, counted from 0; None: of all layers.
    layers: tuple[int, ...] | None = None
    # Refuse where a matrix to be solved with is worse conditioned.
    max_condition: float = MAX_CONDITION
    # Take bases inside the heads in which rounding loses little (forms.py), and those in which the mean stays zero.
    balance: bool = True
    keep_mean: bool = False


@dataclass(frozen=True)
class Transformed:
    """The same function with fewer weights: `tensors` are lazy, `conditions` those of every matrix solved with."""

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    conditions: dict[str, float] = field(default_factory=dict)
    steps: tuple[str, ...] = ()


def parse_request(
    remove: str, layer: str | int | None = None, *, max_condition: float = MAX_CONDITION, balance: bool = True
) -> Request:
    """Return the request that the command line's words stand for; raise a LeanError that lists the known words.

    Args:
        remove: one of REMOVABLE, or several between commas.
        layer: of the projections, from 0; "0,3"; "all" or None for every layer.
        max_condition, balance: as in `Request`.
    """
    parts = tuple(part.strip() for part in remove.split(","))
    for part in parts:
        if part not in REMOVABLE:
            raise LeanError(f"there is nothing called {part!r} to remove: {suggest(part, REMOVABLE)}")
    if len(set(parts)) < len(parts):
        raise LeanError(f"each thing can be removed once, found {remove!r}")
    layers = None
    if layer is not None and layer != "all":
        try:
            layers = tuple(int(number) for number in str(layer).split(","))
        except ValueError:
            raise LeanError(f"layers are numbers from 0 between commas, or all; found {layer!r}") from None
        if not set(parts) & set(PROJECTIONS):
            raise LeanError(f"{parts[0]} has no layers to choose: it is done wherever it holds")
    return Request(parts, layers, max_condition, balance)


def transform(
    config: LeanConfig, tensors: Mapping[str, Tensor], request: Request, message: Message = no_message
) -> Transformed:
    """Eliminate what `request` asks for; neither `config` nor `tensors` is changed.

    Norms that their epsilon disables are removed first. Only the tensors that are removed are read, and all conditions
    are known when this returns. `message` is called with the name of each step. Raises a LeanError if it is not
    possible exactly, or a matrix is worse conditioned than allowed.
    """
    if SINGLE_HEAD in request.remove:
        if len(request.remove) > 1:
            raise LeanError("single-head turns all four matrices into two; there is nothing to remove beside it")
        return Transformed(*single_head.merge_single_head(config, tensors), steps=("W_K W_Q^T and W_V W_O",))
    model = Transformed(config, tensors)
    if set(request.remove) & set(PROJECTIONS):
        model = _remove_projections(config, tensors, request, message)
    if BLOCK_DIAGONAL in request.remove:
        new, changed, conditions = block_diagonal.make_blocks_identity(
            model.config, model.tensors, request.balance, message
        )
        step = "identity blocks in the heads of " + ", ".join(sorted(conditions))
        model = Transformed(new, changed, {**model.conditions, **conditions}, (*model.steps, step))
        _check_conditions(conditions, request)
    return model


def _remove_projections(
    config: LeanConfig, tensors: Mapping[str, Tensor], request: Request, message: Message
) -> Transformed:
    steps = []
    if centered := norms_disabled(config):
        config, tensors = without_norms(config, tensors)
        steps.append("norms that their epsilon disables, folded into their neighbours")
    count = config.num_hidden_layers
    for layer in request.layers or ():
        if not 0 <= layer < count:
            raise LeanError(f"there is no layer {layer}: layers count from 0 to {count - 1}")
    layers = range(count) if request.layers is None else request.layers
    removals = [Removal(slot, layer) for slot in request.remove if slot in PROJECTIONS for layer in layers]
    stream = Stream(config, centered)
    try:
        assign_bases(removals, stream)
    except LeanError as error:
        raise LeanError(f"{error}; {_alternative(removals, stream)}") from None
    if request.balance:
        message("solving: bases in which rounding loses little")
        tensors = balance_for_rounding(config, tensors, removals)
    if request.keep_mean:
        for removal in removals:
            tensors = keep_mean_zero(config, tensors, removal)
    new, changed, factors = remove_projections(stream, tensors, removals)
    solved = {weight_name(config, removal): removal for removal in removals if is_solved_with(removal, stream)}
    conditions = {}
    for number, (name, removal) in enumerate(solved.items(), 1):
        message(f"solving: {removal}, {number} of {len(solved)} matrices")
        conditions[name] = factors[name]().condition
    _check_conditions(conditions, request)
    steps += [f"{removal} by a change of basis {point_of(config, removal)}" for removal in removals]
    return Transformed(new, changed, conditions, tuple(steps))


def _alternative(removals: list[Removal], stream: Stream) -> str:
    """Say what can be removed instead of `removals`."""
    if possible := [str(removal) for removal in removals if why_not(removal, stream) is None]:
        return f"what does go is any one of them alone, {possible[0]} for example"
    numbers = block_diagonal.saved(stream.config)
    share = numbers / count_parameters(stream.config).total
    return f"possible here: {BLOCK_DIAGONAL}, {share:.2%} of the weights" if numbers else "nothing else applies"


def _check_conditions(conditions: Mapping[str, float], request: Request) -> None:
    for name, condition in conditions.items():
        if math.isinf(condition):
            raise LeanError(f"{name} is singular: nothing can be solved with it, whatever `max_condition`")
        if condition > request.max_condition:
            raise LeanError(
                f"{name} is too badly conditioned: {condition:.2g}, the limit is {request.max_condition:.2g} "
                "(`max_condition`)"
            )
