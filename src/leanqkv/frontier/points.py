"""What is measured: the source's conversions, each with its cache in several precisions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..convert.grouped_heads import ratios, with_grouped_heads
from ..convert.latents import Latents
from ..convert.merged_values import MergedValues
from ..convert.methods import METHODS, with_first_layer_values
from ..convert.sweeps import Reduction
from ..errors import LeanError
from ..model.cache_quantized import BLOCK, KIVI, LeanQuantizedCache, quantized_bytes_per_token
from ..model.config import LeanConfig

SOURCE, LATENTS, SEPARATE, MERGED, SKIPV1, GQA = KINDS = (
    *("source", "latents", "separate-latents", "merged-values", "skipv1", "gqa"),
)
FITTED_TO_SIZE = (LATENTS, SEPARATE)
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
        make: the reduction that fits it to text; None where it comes from the weights alone.
        weights: configuration and tensors from the weights alone; None where it is fitted.
    """

    kind: str
    label: str
    make: Callable[[], Reduction] | None = None
    weights: Callable[[], tuple[LeanConfig, Mapping[str, Tensor]]] | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        return self.label.replace(" ", "-").replace("%", "").replace(",", "")


def candidates(
    config: LeanConfig, tensors: Mapping[str, Tensor], kinds: Mapping[str, Sequence[float]]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return what can be measured of a source, the source first, and why the others cannot, by label.

    Args:
        kinds: of KINDS, with the shares of the source's cache that those of FITTED_TO_SIZE are fitted to.

    Raises:
        LeanError: nothing can be converted.
    """
    found, refused = [Candidate(SOURCE, SOURCE)], {}

    def add(candidate: Candidate) -> None:
        try:
            for made in (candidate.make, candidate.weights):
                if made is not None:
                    made()
        except LeanError as error:
            refused[candidate.label] = str(error)
        else:
            found.append(candidate)

    for kind in FITTED_TO_SIZE:
        for share in sorted(kinds.get(kind, ()), reverse=True):
            make = partial(Latents, config, tensors, share, separate=kind == SEPARATE)
            add(Candidate(kind, f"{kind} {100 * share:g}%", make=make))
    if MERGED in kinds:
        add(Candidate(MERGED, MERGED, make=lambda: MergedValues(config, tensors)))
    if SKIPV1 in kinds:
        mean = METHODS[METHOD]
        label = f"{SKIPV1}, {METHOD}"
        add(Candidate(SKIPV1, label, weights=lambda: with_first_layer_values(config, tensors, mean, 0.5)))
    for ratio in ratios(config) if GQA in kinds else ():
        label = f"{GQA}, {1 - ratio:.0%} of the heads"
        add(Candidate(GQA, label, weights=partial(with_grouped_heads, config, tensors, ratio)))
    if len(found) == 1:
        raise LeanError(next(iter(refused.values()), "no kind of reduction is asked for"))
    return found, refused
