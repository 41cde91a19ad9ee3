"""The points of a frontier: the source's conversions, each with its cache in several precisions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..cache_bits import CacheBits
from ..convert.grouped_heads import ratios
from ..convert.targets import BUDGETED, SMALLER, SWEPT, TARGETS, read_options
from ..errors import LeanError
from ..model.config import ConfigError, LeanConfig

SOURCE, KINDS = "source", SMALLER
# SkipV1 is measured from the weights alone.
METHOD = "mean-v"
# Measured beside the model's own precision unless others are asked for.
PRECISIONS = (CacheBits(8, 4), CacheBits(4, 4))


@dataclass(frozen=True)
class Candidate:
    """A conversion of the source, or the source itself.

    Attributes:
        make: returns the reduction that fits it to text, or what is made of the weights alone; None: the source.
    """

    kind: str
    label: str
    make: Callable[[], Any] | None = None

    @property
    def fitted(self) -> bool:
        """Whether it is fitted to text."""
        return self.kind in SWEPT

    @property
    def name(self) -> str:
        """Of its files."""
        return self.label.replace(" ", "-").replace("%", "").replace(",", "")


def candidates(
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, Sequence[float]],
    at_context: int | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return what can be measured of a source, the source first, and why the others cannot, by label.

    Args:
        kinds: of KINDS, with the shares of the source's cache that those of BUDGETED are fitted to.
        at_context: tokens of the context at which these are shares.

    Raises:
        LeanError: nothing can be converted.
    """
    found, refused = [Candidate(SOURCE, SOURCE)], {}
    for kind in (kind for kind in KINDS if kind in kinds):
        for label, given in _points_of(kind, config, kinds[kind], at_context):
            make = partial(TARGETS[kind].make, config, tensors, read_options(kind, given))
            twin = label.removeprefix("separate-").removeprefix("unrotated-")
            try:
                made = make()
            except (ConfigError, LeanError) as error:
                refused[label] = str(error)
                continue
            if twin != label and any(other.label == twin for other in found) and (reason := made.same_as_latents):
                refused[label] = f"{reason}: it is the same as {twin}"
            else:
                found.append(Candidate(kind, label, make))
    if len(found) == 1:
        raise LeanError(next(iter(refused.values()), "no kind of reduction is asked for"))
    return found, refused


def _points_of(
    kind: str, config: LeanConfig, shares: Sequence[float], at_context: int | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label and options of what is measured of a kind."""
    if kind in BUDGETED:
        for share in sorted(shares, reverse=True):
            yield f"{kind} {100 * share:g}%", {"cache": share, "at_context": at_context}
    elif kind == "gqa":
        for ratio in ratios(config):
            yield f"{kind}, {1 - ratio:.0%} of the heads", {"ratio": ratio}
    elif kind == "skipv1":
        yield f"{kind}, {METHOD}", {"method": METHOD}
    else:
        yield kind, {}
