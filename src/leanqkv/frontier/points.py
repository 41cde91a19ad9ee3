"""The points of a frontier: the source's conversions, each with its cache in several precisions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..convert.grouped_heads import ratios
from ..convert.targets import BUDGETED, SMALLER, SWEPT, TARGETS, read_options
from ..errors import LeanError
from ..model.cache_quantized import BLOCK, KIVI, LeanQuantizedCache, quantized_bytes_per_token
from ..model.config import LeanConfig

SOURCE, KINDS = "source", SMALLER
# SkipV1 is measured from the weights alone.
METHOD = "mean-v"


@dataclass(frozen=True)
class Precision:
    """Bits of the cached keys and values; 16 are the model's own."""

    key_bits: int = 16
    value_bits: int = 16

    @property
    def quantized(self) -> bool:
        """Whether the cache is a quantized one."""
        return self.key_bits < 16

    @property
    def name(self) -> str:
        """As "8/4 bits", keys first."""
        same = self.key_bits == self.value_bits
        return f"{self.key_bits} bits" if same else f"{self.key_bits}/{self.value_bits} bits"

    def bytes_per_token(self, config: LeanConfig) -> float:
        """Return the bytes per token of the cache, scales and offsets included; 16 bits are bfloat16."""
        if not self.quantized:
            return config.plan.kv_bytes_per_token(torch.bfloat16)
        return quantized_bytes_per_token(config.plan, self.key_bits, self.value_bits)

    def cache(self, config: LeanConfig) -> LeanQuantizedCache:
        """Return an empty quantized cache."""
        return LeanQuantizedCache(KIVI, config, key_bits=self.key_bits, value_bits=self.value_bits)

    def states(self, model: Any, ids: Tensor) -> Tensor:
        """Return the last hidden states [batch, length, hidden_size], each token reading the cache as decoding does.

        A block of tokens at a time: it is quantized when it is complete, so those in it read each other whole.
        """
        if not self.quantized:
            return model.model.forward(input_ids=ids, use_cache=False).last_hidden_state
        cache = self.cache(model.config)
        parts = [
            model.model.forward(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
            for part in ids.split(BLOCK, dim=1)
        ]
        return torch.cat(parts, dim=1)


PRECISIONS = (Precision(), Precision(8, 4), Precision(4, 4))


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
    config: LeanConfig, tensors: Mapping[str, Tensor], kinds: Mapping[str, Sequence[float]]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return what can be measured of a source, the source first, and why the others cannot, by label.

    Args:
        kinds: of KINDS, with the shares of the source's cache that those of BUDGETED are fitted to.

    Raises:
        LeanError: nothing can be converted.
    """
    found, refused = [Candidate(SOURCE, SOURCE)], {}
    for kind in (kind for kind in KINDS if kind in kinds):
        for label, given in _points_of(kind, config, kinds[kind]):
            make = partial(TARGETS[kind].make, config, tensors, read_options(kind, given))
            try:
                make()
            except LeanError as error:
                refused[label] = str(error)
            else:
                found.append(Candidate(kind, label, make))
    if len(found) == 1:
        raise LeanError(next(iter(refused.values()), "no kind of reduction is asked for"))
    return found, refused


def _points_of(kind: str, config: LeanConfig, shares: Sequence[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label and options of what is measured of a kind."""
    if kind in BUDGETED:
        for share in sorted(shares, reverse=True):
            yield f"{kind} {100 * share:g}%", {"cache": share}
    elif kind == "gqa":
        for ratio in ratios(config):
            yield f"{kind}, {1 - ratio:.0%} of the heads", {"ratio": ratio}
    elif kind == "skipv1":
        yield f"{kind}, {METHOD}", {"method": METHOD}
    else:
        yield kind, {}
