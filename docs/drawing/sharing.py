"""Which values SkipV1's layers share, drawn from the plan."""

import leanqkv

from .svg import BLUE, GREY, INK, ORANGE, document


def shared_values() -> str:
    """Layers from top to bottom, their key and value heads as boxes: cached ones filled, borrowed ones dashed."""
    config = leanqkv.preset("small", "skipv1")
    before, after = (leanqkv.kv_bytes_per_token(c) for c in (leanqkv.preset("small"), config))
    layers, heads = leanqkv.plan(config).layers, config.num_attention_heads
    top, row_height, pitch = 82, 34, 38
    starts = {"keys": 92, "values": 92 + heads * pitch + 22}
    right = starts["values"] + heads * pitch + 18
    own = f'fill="{BLUE}"'
    lent = f'fill="{ORANGE}"'
    borrowed = f'fill="none" stroke="{ORANGE}" stroke-width="2" stroke-dasharray="5 4"'
    parts: list[str] = []

    def text(x: float, y: float, words: str, color: str = INK, size: int = 17, bold: bool = False) -> None:
        weight = ' font-weight="600"' if bold else ""
        parts.append(f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{weight}>{words}</text>')

    def box(x: float, y: float, look: str) -> None:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{pitch - 8}" height="{row_height - 10}" rx="5" {look}/>')

    lending = {head for plan in layers for s in plan.borrowed for head in range(s.start, s.stop)}
    text(18, 32, f"SkipV1: layers 2–{len(layers)} read half of their value heads from layer 1", size=18, bold=True)
    for name, x in starts.items():
        text(x, top - 14, f"{heads} {name.removesuffix('s')} heads", GREY)
    for row, plan in enumerate(layers):
        y = top + row * row_height
        text(18, y + 18, f"layer {row + 1}")
        for name, x in starts.items():
            for source in getattr(plan.layout, name):
                for head in range(source.start, source.stop):
                    lends = row == 0 and name == "values" and head in lending
                    box(x + head * pitch, y, lent if lends else own if source.layer == row else borrowed)
    for row, (look, words) in enumerate(
        ((own, "cached"), (lent, "cached once for all"), (borrowed, "read from layer 1"))
    ):
        box(right, top + row * row_height, look)
        text(right + pitch, top + row * row_height + 18, words)
    text(right, top + 138, "KV cache per token:", GREY)
    text(right, top + 164, f"{before:,} → {after:,} bytes", size=18, bold=True)
    text(right, top + 190, f"−{1 - after / before:.0%} at {len(layers)} layers")
    description = (
        f"SkipV1Former at the size small: every layer caches its keys; layers 2 to {len(layers)} cache half of their "
        f"value heads and read the others from layer 1, so that a token takes {after:,} instead of {before:,} bytes."
    )
    return document(description, 680, top + len(layers) * row_height + 12, "\n".join(parts))
