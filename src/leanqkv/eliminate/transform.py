"""One request for an elimination, carried out on a configuration and its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.registry import suggest
from . import block_diagonal, layernorm_free, single_head
from .forms import balance_for_rounding, keeping_the_mean
from .projections import PROJECTIONS, Removal, check, is_solved_with, place_of, remove_projections, weight_name, why_not

BLOCK_DIAGONAL, SINGLE_HEAD = "block-diagonal", "single-head"
WHAT = (*PROJECTIONS, BLOCK_DIAGONAL, SINGLE_HEAD)
MAX_CONDITION = 1e8


@dataclass(frozen=True)
class Request:
    """What to remove.

    Attributes:
        remove: of "query", "key", "value", "output"; "block-diagonal"; "single-head".
        layers: which layers' projections, counted from 0; None: of all layers.
        max_condition: refuse where a matrix to be solved with is worse conditioned.
        balance: take bases inside the heads in which little is lost to rounding (forms.py); else the plain form.
        keep_mean: take them such that the stream's mean stays zero (see forms.keeping_the_mean).
    """

    remove: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    max_condition: float = MAX_CONDITION
    balance: bool = True
    keep_mean: bool = False


@dataclass(frozen=True)
class Transformed:
    """The same function with fewer weights: `tensors` are lazy, `conditions` those of every matrix solved with."""

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    conditions: dict[str, float] = field(default_factory=dict)
    steps: tuple[str, ...] = ()


def parse_request(remove: str, layer: str | int | None = None, **options) -> Request:
    """`remove` as on the command line, "query,output"; `layer`: a number, "0,3", "all" or None for all.

    Raises:
        LeanError: something else; says what is known.
    """
    parts = tuple(part.strip() for part in remove.split(","))
    for part in parts:
        if part not in WHAT:
            raise LeanError(f"there is nothing called {part!r} to remove: {suggest(part, WHAT)}")
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
    return Request(parts, layers, **options)


def transform(config: LeanConfig, tensors: Mapping[str, Tensor], request: Request) -> Transformed:
    """Eliminates what `request` asks for; neither `config` nor `tensors` is changed.

    Norms that their epsilon disables are removed first. All conditions are known when this returns; of the tensors only
    those that are removed have been read.

    Raises:
        LeanError: it is not possible exactly, or a matrix is worse conditioned than allowed; says why and which.
    """
    new = Transformed(config, tensors)
    slots = [part for part in request.remove if part in PROJECTIONS]
    if SINGLE_HEAD in request.remove:
        if len(request.remove) > 1:
            raise LeanError("single-head turns all four matrices into two; there is nothing to remove beside it")
        return Transformed(*single_head.merge_single_head(config, tensors), steps=("W_K W_Q^T and W_V W_O",))
    if slots:
        if layernorm_free.norms_disabled(config):
            step = "norms that their epsilon disables, folded into their neighbours"
            new = Transformed(*layernorm_free.without_norms(config, tensors), steps=(step,))
        new = _projections(new, slots, request, centred=new.config is not config)
    if BLOCK_DIAGONAL in request.remove:
        blocks = block_diagonal.make_blocks_identity(new.config, new.tensors, search=request.balance)
        step = "identity blocks in the heads of " + ", ".join(sorted(blocks[2]))
        new = Transformed(blocks[0], blocks[1], {**new.conditions, **blocks[2]}, (*new.steps, step))
        _within_limit(blocks[2], request)
    return new


def _projections(model: Transformed, slots: list[str], request: Request, centred: bool) -> Transformed:
    config, count = model.config, model.config.num_hidden_layers
    for layer in request.layers or ():
        if not 0 <= layer < count:
            raise LeanError(f"there is no layer {layer}: layers count from 0 to {count - 1}")
    layers = range(count) if request.layers is None else request.layers
    removals = [Removal(slot, layer) for slot in slots for layer in layers]
    try:
        check(config, removals)
    except LeanError as error:
        raise LeanError(f"{error}; {_instead(config, removals)}") from None
    for removal in removals:
        if centred and (reason := layernorm_free.why_not_after(config, removal)):
            raise LeanError(f"{removal} cannot be eliminated exactly: {reason}")
    tensors = model.tensors
    if request.balance:
        tensors = balance_for_rounding(config, tensors, removals)
    if request.keep_mean:
        for removal in removals:
            tensors = keeping_the_mean(config, tensors, removal)
    new, changed, factors = remove_projections(config, tensors, removals)
    solved = {weight_name(config, removal): removal for removal in removals if is_solved_with(config, removal)}
    conditions = {name: factors[name]().condition for name in solved if name in factors}
    _within_limit(conditions, request)
    steps = tuple(f"{removal} by a change of basis {place_of(config, removal)}" for removal in removals)
    return Transformed(new, changed, {**model.conditions, **conditions}, (*model.steps, *steps))


def _instead(config: LeanConfig, removals: list[Removal]) -> str:
    """What a person may do who cannot have these."""
    if possible := [str(removal) for removal in removals if why_not(config, removal) is None]:
        return f"what does go is any one of them alone, {possible[0]} for example"
    numbers = block_diagonal.saved(config)
    share = numbers / config.plan.count_parameters().total
    return f"what does apply here: {BLOCK_DIAGONAL}, {share:.2%} of the weights" if numbers else "nothing else applies"


def _within_limit(conditions: Mapping[str, float], request: Request) -> None:
    for name, condition in conditions.items():
        if math.isinf(condition):
            raise LeanError(f"{name} is singular: nothing can be solved with it, whatever --max-condition")
        if condition > request.max_condition:
            raise LeanError(
                f"{name} is too badly conditioned: {condition:.2g}, the limit is {request.max_condition:.2g} "
                "(--max-condition)"
            )
