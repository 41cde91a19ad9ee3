"""SkipV1Former: layers after the source layer compute only some value heads and take the rest from the source layer.

Wu et al. 2025, "Improving Model Representation and Reducing KV Cache via Skip Connections with First Value Heads",
sections 3.2, 5.2 and 6.5, appendices C.4 and C.5. https://github.com/Zhoutong-Wu/SkipV1Former
"""

from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor, nn

from .layout import HeadCounts, HeadLayout, HeadSource, KeyValue, heads, shared_layout

INJECTIONS = ("second_half", "pooling", "dynamic", "odd_even", "resformer")


class PooledHeads(nn.Module):
    """Append the means that later layers inject: of heads j and kept + j, for each of the s injected heads."""

    def __init__(self, config, options: Any):
        super().__init__()
        self.ratio = options.ratio

    def forward(self, values: Tensor, lent: Tensor | None, hidden_states: Tensor) -> Tensor:
        shared = floor(self.ratio * values.shape[1])
        return torch.cat((values, (values[:, :shared] + values[:, -shared:]) / 2), dim=1)


class AddedHeads(PooledHeads):
    """Add the source layer's heads at the same positions to the layer's own: `V_h + V1_h`."""

    def forward(self, values: Tensor, lent: Tensor | None, hidden_states: Tensor) -> Tensor:
        assert lent is not None
        return values + lent[:, : values.shape[1]]


@dataclass(frozen=True)
class FirstLayerValues(KeyValue):
    """With `s = floor(ratio * H_kv)`, layers above the source compute value heads `0 .. H_kv - s - 1`; the remaining
    `s` are the source layer's heads at the same positions (P3 section 3.2). Under MLA, latent columns replace heads.

    Options:
        ratio: share of the value heads that is borrowed, 0 to 1. At 1 every layer uses the source's values alone
            (SVFormer).
        source_layer: counted from 0, so 0 is SkipV1, 1 is SkipV2 and so on; layers up to the source are full (6.5).
        inject: false is the paper's SkipV0 control: the `s` heads are left out, none is borrowed and W_O is narrower
            to match. Our reading: a head without a value adds nothing to the output, so its query and key are not
            built either; the first layer stays full, so that the borrowed heads are all that sets it apart from SkipV1.
        injection: which heads are borrowed (C.4). "second_half": those at the same positions. "pooling": the means of
            the source's heads j and H_kv - s + j, computed and cached once, at the source. "dynamic", our reading: the
            window of s heads moves on by one head with every layer, around the end. "odd_even": the first s heads in
            the paper's odd layers, the last s in the even ones. "resformer": as second_half, and each of the layer's
            own heads becomes `V_h + V1_h`.
        keys: the key heads too (SkipKV1Former, C.5).
        middle_keys: layers above the middle attend with the keys of layer L/2 (SkipV1-YOCO, C.5).
    """

    kind = "first_layer_values"
    ratio: float = 0.5
    source_layer: int = 0
    inject: bool = True
    injection: str = "second_half"
    keys: bool = False
    middle_keys: bool = False

    def layout(self, counts: HeadCounts, layer: int) -> HeadLayout:
        n, source = counts.num_value_heads, self.source_layer
        shared = floor(self.ratio * n)
        kept = n - shared
        if layer <= source:
            pools = layer == source and self.injection == "pooling" and shared > 0
            derived: dict[str, Any] = {"mixer": PooledHeads, "derived_value_heads": shared} if pools else {}
            return shared_layout(counts, layer, layer, **derived)
        own = heads(layer, 0, kept)
        if not self.inject:
            return HeadLayout(kept * (counts.num_query_heads // n), own, own)
        keys = heads(layer, 0, counts.num_key_heads)
        if self.keys:
            kept_keys = counts.num_key_heads - floor(self.ratio * counts.num_key_heads)
            keys = (*heads(layer, 0, kept_keys), *heads(source, kept_keys, counts.num_key_heads))
        elif self.middle_keys and layer > (middle := counts.num_layers // 2 - 1):
            keys = heads(middle, 0, counts.num_key_heads)
        adds = self.injection == "resformer" and kept > 0
        values, mixer = own + self._injected(layer, n, shared), AddedHeads if adds else None
        return HeadLayout(counts.num_query_heads, keys, values, mixer, mixed_with=source if adds else None)

    def _injected(self, layer: int, n: int, shared: int) -> tuple[HeadSource, ...]:
        """The source layer's heads that `layer` attends with after its own."""
        source, kept = self.source_layer, n - shared
        if self.injection == "pooling":
            return heads(source, n, n + shared)
        if self.injection == "odd_even" and layer % 2 == 0:  # the paper counts layers from 1
            return heads(source, 0, shared)
        if self.injection == "dynamic":
            start = (kept + layer - source - 1) % n
            return (*heads(source, start, min(start + shared, n)), *heads(source, 0, max(start + shared - n, 0)))
        return heads(source, kept, n)

    def clash(self, config, counts: HeadCounts) -> str | None:
        n, what = counts.num_value_heads, "latent column" if config.kv_lora_rank else "value head"
        if not 0 <= self.ratio <= 1:
            return f"ratio must be between 0 and 1, found {self.ratio}"
        if self.ratio > 0 and floor(self.ratio * n) == 0:
            return (
                f"ratio {self.ratio} of {n} {what}{'s' if n > 1 else ''} is less than one, so "
                "nothing would be shared; raise the ratio or num_key_value_heads"
            )
        if not 0 <= self.source_layer < counts.num_layers - 1:
            return (
                f"source_layer {self.source_layer} (counted from 0) must lie below the last of "
                f"{counts.num_layers} layers, or no layer is left to borrow from it"
            )
        if self.injection not in INJECTIONS:
            return f"injection must be one of {', '.join(INJECTIONS)}, found {self.injection!r}"
        if self.keys and self.middle_keys:
            return "keys and middle_keys both decide whose keys are shared; use one of them"
        if self.middle_keys and self.source_layer >= counts.num_layers // 2:
            return f"middle_keys needs a source_layer below the middle of {counts.num_layers} layers"
        if not self.inject:
            if config.kv_lora_rank:
                return "inject=false leaves heads out, which a latent (MLA) does not have"
            if floor(self.ratio * n) == n:
                return f"inject=false with ratio {self.ratio} would leave no value heads at all"
            if self.keys or self.middle_keys or self.injection != "second_half":
                return "inject=false borrows nothing, so injection, keys and middle_keys have no meaning with it"
        if self.keys and floor(self.ratio * counts.num_key_heads) == 0 and self.ratio > 0:
            found = f"{counts.num_key_heads} {'rotary key' if config.kv_lora_rank else 'key head'}"
            return f"keys=true has nothing to share: ratio {self.ratio} of {found} is less than one"
        return None
