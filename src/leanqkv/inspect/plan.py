"""What `leanqkv inspect` shows: the plan of every layer, the parameters and the cache, read off the configuration."""

from itertools import groupby

import torch
from rich.table import Table

from ..model.config import LeanConfig
from ..model.layout import HeadSource
from ..model.plan import LayerPlan

# Fields that change what a block computes, shown where they differ from their default.
BLOCK_FIELDS = (
    *("task", "mask_type", "sliding_window", "block_type", "attention_skip", "mlp_skip", "norm_type", "mlp_type"),
    *("num_local_experts", "num_experts_per_tok", "num_hidden_groups", "qk_norm", "depth_average"),
)


def layer_table(config: LeanConfig, title: str) -> Table:
    """One row for every run of layers that are described alike."""
    table = Table(title=title, title_justify="left")
    heads = ("rotary key", "latent") if config.kv_lora_rank else ("keys", "values")
    for column in ("layer", "query", *heads, "cached per token (bf16)"):
        table.add_column(column, justify="right" if column[:3] in ("lay", "cac") else "left")
    for row, run in groupby(config.plan.layers, _describe):
        layers = [layer.layer for layer in run]
        table.add_row(f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]), *row)
    return table


def summary(config: LeanConfig) -> list[str]:
    """Lines on the block, the parameters and the cache."""
    plan, count = config.plan, config.plan.count_parameters()
    plain = LeanConfig()
    fields = [(name, getattr(config, name)) for name in BLOCK_FIELDS if getattr(config, name) != getattr(plain, name)]
    lines = ["blocks: " + ", ".join(f"{name} {value}" for name, value in fields)] if fields else []
    lines.append(f"parameters: {count.total:,} ({count.non_embedding:,} without embeddings and output head)")
    if config.bidirectional:
        return [*lines, "KV cache: none, the model reads its whole input at once"]
    full = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # type: ignore[operator]
    windows = sorted({layer.window for layer in plan.layers if layer.window is not None and layer.cached})
    until = f" until a window of {windows[0]} is full" if windows else ""
    for dtype in (torch.bfloat16, torch.float32):
        size = plan.kv_bytes_per_token(dtype)
        share = f"{size / (full * dtype.itemsize):.1%} of MHA"
        lines.append(f"KV cache, {str(dtype).removeprefix('torch.')}: {size:,} bytes per token{until}, {share}")
    return lines


def _describe(layer: LayerPlan) -> tuple[str, ...]:
    query = f"{layer.query.kind} ({layer.num_query_heads} heads)"
    key, value = ("", "") if layer.latent else (layer.key.kind, layer.value.kind)
    keys, values = _heads(key, layer.layout.keys, layer.layer), _heads(value, layer.layout.values, layer.layer)
    if layer.layout.mixed_with is not None:
        values += f", mixed with layer {layer.layout.mixed_with}"
    elif layer.layout.mixer is not None:
        values += f", and {layer.layout.derived_value_heads} means of them"
    size = f"{2 * sum(cached.elements for cached in layer.cached):,} B"
    window = f", last {layer.window - 1} tokens" if layer.window is not None and layer.cached else ""
    return query, keys, values, size + window


def _heads(kind: str, sources: tuple[HeadSource, ...], layer: int) -> str:
    def span(source: HeadSource) -> str:
        return f"{source.start}-{source.stop - 1}" if source.num_heads > 1 else str(source.start)

    def origin(source: HeadSource) -> str:
        return f" {kind}".rstrip() if source.layer == layer else f" of layer {source.layer}"

    return ", ".join(span(source) + origin(source) for source in sources) or "none"
