"""The targets of `leanqkv convert`: the options of each, whether it is fitted to text, and the module that makes it.

PyTorch is imported when something is converted, so that the command line shows its help without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar

from ..errors import LeanError, listed
from ..ranges import check_fields

CALIBRATED, METHODS = "calibrated", ("mean-v", "mean-vo", "top-v", "top-vo", "svd")
FREEDOMS = ("choose", "refit_lent", "refit_values")


@dataclass(frozen=True)
class LatentsOptions:
    """Options of latents.

    Attributes:
        cache: share of the source's cache to take at most.
        at_context: tokens of the context at which that share is counted; None: one that every window holds.
        layers: those whose values may be reduced; None: all.
        device: where to calibrate; None: the CPU.
    """

    separate: ClassVar[bool] = False
    unrotated: ClassVar[bool] = False
    cache: float = 0.84
    at_context: int | None = None
    layers: tuple[int, ...] | None = None
    device: str | None = None


class SeparateLatentsOptions(LatentsOptions):
    """Options of latents whose values are made of their latent alone."""

    separate = True


class UnrotatedLatentsOptions(LatentsOptions):
    """Options of latents whose keys are cached before rotary positions."""

    unrotated = True


@dataclass(frozen=True)
class MergedValuesOptions:
    """Options of merged values: the share of the value heads that go, and as of latents."""

    ratio: float = 0.5
    layers: tuple[int, ...] | None = None
    device: str | None = None


@dataclass(frozen=True)
class SkipV1Options:
    """Options of first-layer values.

    Attributes:
        method: "calibrated", or one of METHODS, which read the weights alone and of all others take `ratio`.
        ratio: share of the value heads that take the first layer's values.
        choose: choose which heads keep a value, and the first-layer head for each of the others. Else, and in layers
            whose query or key ties heads to their places, the first heads keep theirs.
        refit_lent: fit the values that the first layer shares. Else they stay.
        refit_values: fit W_V of the heads that keep a value. Else W_O alone.
        sweeps: steps of a fit of values, at most.
        ridge: pull towards the source's weights, as a share of the mean of the Gram matrix's diagonal.
        batch_size: sequences per forward pass.

    Raises:
        LeanError: an unknown method, a number outside of its range, or a freedom that the method does not have.
    """

    method: str = CALIBRATED
    ratio: float = 0.5
    choose: bool = True
    refit_lent: bool = True
    refit_values: bool = True
    sweeps: int = 30
    ridge: float = 3e-3
    batch_size: int = 8

    def __post_init__(self) -> None:
        from ..model.registry import suggest

        if self.method not in (*METHODS, CALIBRATED):
            raise LeanError(f"there is no method {self.method!r}: {suggest(self.method, [*METHODS, CALIBRATED])}")
        if self.method != CALIBRATED and not all(getattr(self, name) for name in FREEDOMS):
            raise LeanError(_not_taken(FREEDOMS[0], False, "skipv1"))
        check_fields(self)


@dataclass(frozen=True)
class GroupedHeadsOptions:
    """Options of grouped heads: the share of the key and value heads that go."""

    ratio: float = 0.5


@dataclass(frozen=True)
class NonlinearQueryOptions:
    """Options of nonlinear queries: the seed of their new matrices."""

    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A conversion.

    Attributes:
        options: its dataclass of options.
        module: whose function `convert` makes it of a configuration, tensors and options: a Reduction, or from the
            weights alone a configuration, tensors and entries of the report.
        swept: whether it is fitted in sweeps over the layers.
        smaller: whether it makes the cache smaller.
    """

    options: type
    module: str
    swept: bool = False
    smaller: bool = True

    def takes(self, option: str) -> bool:
        """Return whether it has that option."""
        return option in {field.name for field in fields(self.options)}

    def make(self, source: Any, tensors: Mapping[str, Any], options: Any) -> Any:
        """Return what `convert` of its module returns, of the configuration `source` and its tensors.

        Raises:
            LeanError: the source cannot be converted; says why.
        """
        return import_module(f".{self.module}", __package__).convert(source, tensors, options)


TARGETS = {
    "latents": Target(LatentsOptions, "latents", swept=True),
    "separate-latents": Target(SeparateLatentsOptions, "latents", swept=True),
    "unrotated-latents": Target(UnrotatedLatentsOptions, "latents", swept=True),
    "merged-values": Target(MergedValuesOptions, "merged_values", swept=True),
    "skipv1": Target(SkipV1Options, "methods"),
    "gqa": Target(GroupedHeadsOptions, "grouped_heads"),
    "nonlinear-query": Target(NonlinearQueryOptions, "nonlinear_query", smaller=False),
}
SWEPT = [name for name, target in TARGETS.items() if target.swept]
SMALLER = [name for name, target in TARGETS.items() if target.smaller]
# Those that are fitted to a share of the source's cache.
BUDGETED = [name for name, target in TARGETS.items() if target.takes("cache")]


def read_options(to: str, given: Mapping[str, Any]) -> Any:
    """Return the options of a target, of which `given` were asked for.

    Raises:
        LeanError: an unknown target, an option that it does not take, or a bad value.
    """
    from ..model.registry import suggest

    if to not in TARGETS:
        raise LeanError(f"there is no conversion to {to!r}: {suggest(to, TARGETS)}")
    for name, value in given.items():
        if not TARGETS[to].takes(name):
            raise LeanError(_not_taken(name, value, to))
    return TARGETS[to].options(**given)


def _not_taken(name: str, value: Any, to: str) -> str:
    if name in FREEDOMS:
        freedoms = listed([f"`{freedom}=False`" for freedom in FREEDOMS])
        return f"{freedoms} are for `to=skipv1` `method={CALIBRATED}`; leave them out"
    first, *others = (taker for taker, target in TARGETS.items() if target.takes(name))
    instead = "say by `cache` how much to keep" if name == "ratio" and to in BUDGETED else "leave it out"
    shown = f"`method={value}`" if name == "method" else f"`{name}`"
    return f"{shown} is for {listed([f'`to={first}`', *others])}; {instead}"
