"""SkipV1Former: layers after the source layer compute only some value heads and take the rest from the source layer.

Wu et al. 2025, "Improving Model Representation and Reducing KV Cache via Skip Connections with First Value Heads",
sections 3.2, 5.2 and 6.5. https://github.com/Zhoutong-Wu/SkipV1Former
"""

from dataclasses import dataclass
from math import floor

from .layout import HeadLayout, HeadSource


class FirstLayerValues:
    """With `s = floor(ratio * H_kv)`, layers above the source compute value heads `0 .. H_kv - s - 1`; the remaining
    `s` are the source layer's heads at the same positions (P3 section 3.2).

    Options:
        ratio: share of the value heads that is borrowed, 0 to 1. At 1 every layer uses the source's values alone.
        source_layer: counted from 0, so 0 is SkipV1, 1 is SkipV2 and so on; layers up to the source are full (6.5).
        inject: false is the paper's SkipV0 control: the `s` heads are left out, none is borrowed and W_O is narrower
            to match. Our reading: a head without a value adds nothing to the output, so its query and key are not
            built either; the first layer stays full, so that the borrowed heads are all that sets it apart from SkipV1.
    """

    @dataclass(frozen=True)
    class Options:
        ratio: float = 0.5
        source_layer: int = 0
        inject: bool = True

    @staticmethod
    def layout(config, options: Options, layer: int) -> HeadLayout:
        heads = config.num_key_value_heads
        group = config.num_attention_heads // heads
        full = (HeadSource(layer, 0, heads),)
        if layer <= options.source_layer:
            return HeadLayout(config.num_attention_heads, full, full)
        kept = heads - floor(options.ratio * heads)
        own = (HeadSource(layer, 0, kept),) if kept else ()
        if not options.inject:
            return HeadLayout(kept * group, own, own)
        borrowed = (HeadSource(options.source_layer, kept, heads),) if kept < heads else ()
        return HeadLayout(config.num_attention_heads, full, own + borrowed)

    @staticmethod
    def clash(config, options: Options) -> str | None:
        heads = config.num_key_value_heads
        if not 0 <= options.ratio <= 1:
            return f"ratio must be between 0 and 1, found {options.ratio}"
        if options.ratio > 0 and floor(options.ratio * heads) == 0:
            return (
                f"ratio {options.ratio} of {heads} value head{'s' if heads > 1 else ''} is less than one head, so "
                "nothing would be shared; raise the ratio or num_key_value_heads"
            )
        if not options.inject and floor(options.ratio * heads) == heads:
            return f"inject=false with ratio {options.ratio} would leave no value heads at all"
        if not 0 <= options.source_layer < config.num_hidden_layers - 1:
            return (
                f"source_layer {options.source_layer} (counted from 0) must lie below the last of "
                f"{config.num_hidden_layers} layers, or no layer is left to borrow from it"
            )
        return None
