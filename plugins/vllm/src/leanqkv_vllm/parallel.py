"""Tensor parallelism: every rank computes an equal share of the heads and of the MLP.

The heads of a source, such as the first layer's half of SkipV1's values, are split among the ranks on their own. So a
rank computes a model of fewer heads with the same layout, and borrows from no other rank.
"""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce

from leanqkv import LeanConfig
from leanqkv.model.layout import LayerPlan
from leanqkv.model.plan import Plan
from leanqkv.model.registry import ConfigError

KEYS, VALUES, ATTENDED = "keys", "values", "attended"
Space = tuple[str, int]  # heads that a layer computes, or that it attends with
# Tensors of a block that are split, by the end of their names: along rows, or along columns.
MLP_ROWS, MLP_COLUMNS = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"


def refusal(config: LeanConfig, size: int) -> str | None:
    """Return why a model cannot be split among so many ranks; None: it can."""
    for layer in config.plan.layers:
        for slot in ("query", "key", "value", "output"):
            if (kind := getattr(layer, slot).kind) != "linear":
                return f"{slot} {kind!r} is not a product that can be split by heads"
        if layer.latent is not None or layer.layout.mixer is not None:
            return f"{'a latent' if layer.latent else layer.key_value.kind} is not split by heads"
    if config.mlp_type == "moe":
        return "experts are not split"
    if config.qk_norm == "width":
        return "qk_norm 'width' norms the heads of all ranks together"
    if config.intermediate_size % size:
        return f"intermediate_size {config.intermediate_size} is no multiple of it"
    edges = Heads(config.plan).edges
    for (name, layer), places in edges.items():
        if any((stop - start) % size for start, stop in pairwise(places)):
            return f"the heads ({name}) of layer {layer} come in runs that cannot be split evenly"
    first_user = _first_users(config.plan)
    for layer in config.plan.layers:
        first = first_user[layer.block].layer
        if any(edges.get((name, layer.layer)) != edges.get((name, first)) for name in (KEYS, VALUES, ATTENDED)):
            return f"layers {first} and {layer.layer} share a block, and their heads come in other runs"
    try:
        same = _same_layout(config.plan, rank_config(config, size).plan, size)
    except ConfigError:
        same = False
    return None if same else f"key_value {config.key_value['type']!r} has another layout with fewer heads"


def rank_config(config: LeanConfig, size: int) -> LeanConfig:
    """Return the configuration of what one of `size` ranks computes."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    fields = {name: getattr(config, name) // size for name in names}
    return LeanConfig(**{**config.as_overrides(), **fields, "head_dim": config.head_dim})


def _same_layout(whole: Plan, part: Plan, size: int) -> bool:
    """Whether every source of a rank's layers is a source of the whole model's, with 1 / size of its heads."""
    for layer, of_rank in zip(whole.layers, part.layers, strict=True):
        for name in (KEYS, VALUES):
            wanted = [(s.layer, s.start // size, s.stop // size) for s in getattr(layer.layout, name)]
            if wanted != [(s.layer, s.start, s.stop) for s in getattr(of_rank.layout, name)]:
                return False
    return True


def _first_users(plan: Plan) -> dict[int, LayerPlan]:
    """The first layer that uses each block."""
    return {layer.block: layer for layer in reversed(plan.layers)}


class Heads:
    """How the heads of every layer fall into runs whose sources are the same everywhere.

    Attributes:
        edges: where runs begin and end, by space.
    """

    def __init__(self, plan: Plan):
        found: dict[Space, set[int]] = defaultdict(lambda: {0})
        while True:
            before = sum(map(len, found.values()))
            for layer in plan.layers:
                self._spread(layer, found)
            if sum(map(len, found.values())) == before:
                break
        self.edges = {space: sorted(edges) for space, edges in found.items()}

    @staticmethod
    def _spread(layer: LayerPlan, found: dict[Space, set[int]]) -> None:
        """An edge among a layer's heads is one among those of their sources, and the other way round."""
        attended = found[ATTENDED, layer.layer]
        for name in (KEYS, VALUES):
            at = 0
            for source in getattr(layer.layout, name):
                lent, end = found[name, source.layer], at + source.num_heads
                attended |= {at, end} | {at + e - source.start for e in lent if source.start <= e <= source.stop}
                lent |= {source.start + e - at for e in attended if at <= e <= end}
                at = end

    def of_rank(self, space: Space, size: int, rank: int) -> list[int]:
        """Return the heads of a rank: an equal part of every run."""
        chosen: list[int] = []
        edges = self.edges[space]
        for start, stop in pairwise(edges):
            part = (stop - start) // size
            chosen += range(start + rank * part, start + (rank + 1) * part)
        return chosen


class Shards:
    """A rank's part of every tensor of a checkpoint."""

    def __init__(self, config: LeanConfig, size: int, rank: int):
        self.config, self.size, self.rank = config, size, rank
        self.heads = Heads(config.plan)
        self.first_user = _first_users(config.plan)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of the tensor of that name; the whole of what every rank has."""
        parts = name.split(".")
        if parts[:2] != ["model", "layers"]:
            return tensor
        layer, module = self.first_user[int(parts[2])], ".".join(parts[3:-1])
        if module == "self_attn.o_proj":
            return self._pick(tensor, self._queries(layer), 1) if tensor.ndim == 2 else tensor
        if module.startswith("self_attn.") and module.endswith("_proj"):
            spaces = {"k_proj": (KEYS, layer.layer), "v_proj": (VALUES, layer.layer)}
            space = spaces.get(module.removeprefix("self_attn."))
            heads = self._queries(layer) if space is None else self.heads.of_rank(space, self.size, self.rank)
            per_head = module == "self_attn.g_proj" and layer.output_gate.per_head
            return tensor[heads] if per_head else self._pick(tensor, heads, 0)
        if module in MLP_ROWS:
            return tensor.chunk(self.size, 0)[self.rank]
        return tensor.chunk(self.size, 1)[self.rank] if module == MLP_COLUMNS and tensor.ndim == 2 else tensor

    def _queries(self, layer: LayerPlan) -> list[int]:
        """The query heads of a rank: those that read its key heads."""
        attended = self.heads.of_rank((ATTENDED, layer.layer), self.size, self.rank)
        group = layer.num_query_heads // self.heads.edges[ATTENDED, layer.layer][-1]
        return [head * group + member for head in attended for member in range(group)]

    def _pick(self, tensor: Tensor, heads: list[int], dim: int) -> Tensor:
        split = tensor.unflatten(dim, (-1, self.config.head_dim))
        return split.index_select(dim, torch.tensor(heads)).flatten(dim, dim + 1)


class Reduced(nn.Module):
    """A linear layer whose input is spread over the ranks."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.product, self.bias = nn.Linear(1, 1, bias=False, device="meta"), linear.bias
        self.product.weight = linear.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output = tensor_model_parallel_all_reduce(self.product(inputs))
        return output if self.bias is None else output + self.bias


def reduce_outputs(model: Any) -> None:
    """Add up what the ranks write into the stream."""
    for block in model.layers:
        block.self_attn.o_proj = Reduced(block.self_attn.o_proj)
        block.mlp.down_proj = Reduced(block.mlp.down_proj)
