"""The residual stream of a model: where its basis may differ, and which tensors write or read it.

A skip connection gives the stream one basis before and after it; a sublayer without a skip leaves the stream after it
free to take another. The theorems of Karbevski & Mijoski 2025 (section 4) and Graef 2024 (Table 1) follow from that.
"""

from collections.abc import Iterator
from typing import NamedTuple

from scipy.cluster.hierarchy import DisjointSet

from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


class StreamPoint(NamedTuple):
    """A point on the stream: before layer `layer` (the last one: before the head), or `middle`, between its attention
    and its MLP."""

    layer: int
    middle: bool = False

    def __str__(self) -> str:
        return f"between attention and MLP of layer {self.layer}" if self.middle else f"before layer {self.layer}"


class StreamTensor(NamedTuple):
    """A tensor that reads the stream at a point (along its last axis) or writes it there (along `axis`)."""

    name: str
    point: StreamPoint
    writes: bool = False
    axis: int = -1


class Stream:
    """The stream of `config`, a model without norms.

    Attributes:
        centered: whether the mean that disabled norms subtract has been folded into the tensors that write the stream.
        tensors: every tensor that reads or writes the stream, by name.
        basis_of: point -> a point that stands for all points with the same basis.
        start, end: the basis that the embeddings write, and the one that the head reads.
        blocked: such a representative -> why the basis must stay as it is.
    """

    def __init__(self, config: LeanConfig, centered: bool = False):
        self.config, self.centered = config, centered
        shapes = parameter_shapes(config)
        self.tensors = {tensor.name: tensor for tensor in _possible_tensors(config) if tensor.name in shapes}
        points = [StreamPoint(i, middle) for i in range(config.num_hidden_layers) for middle in (False, True)]
        bases = DisjointSet([*points, StreamPoint(config.num_hidden_layers)])
        for one, other in _joined(config):
            bases.merge(one, other)
        self.basis_of = {point: bases[point] for point in bases}
        self.start, self.end = (bases[StreamPoint(layer)] for layer in (0, config.num_hidden_layers))
        self.blocked: dict[StreamPoint, str] = {}
        for point, reason in _blocked(config):
            self.blocked.setdefault(self.basis_of[point], reason)

    def why_joined(self) -> str:
        """Say why points of this model share a basis."""
        config = self.config
        reasons = []
        if config.attention_skip or config.mlp_skip:
            carriers = "skip connections" if config.hyper_connections is None else "hyper-connections"
            reasons.append(f"{carriers} carry the stream past them")
        elif config.block_type != "serial":
            reasons.append("in a parallel block the outputs of attention and MLP are added")
        if config.num_hidden_groups and config.num_hidden_groups < config.num_hidden_layers:
            reasons.append("layers share one block (num_hidden_groups)")
        if config.depth_average is not None:
            reasons.append("averages over depth (depth_average) mix the layers' outputs")
        return " and ".join(reasons)


def after_attention(config: LeanConfig, layer: int) -> StreamPoint:
    """Return the point that the output projection of `layer` writes."""
    return StreamPoint(layer, middle=True) if config.block_type == "serial" else StreamPoint(layer + 1)


def _possible_tensors(config: LeanConfig) -> Iterator[StreamTensor]:
    """Every tensor that reads or writes the stream, whether this model has it or not."""
    start, end = StreamPoint(0), StreamPoint(config.num_hidden_layers)
    for name in ("embed_tokens.weight", "embed_positions.weight", "embed_patches.class_token"):
        yield StreamTensor(f"model.{name}", start, writes=True)
    for name in ("projection.weight", "projection.bias"):
        yield StreamTensor(f"model.embed_patches.{name}", start, writes=True, axis=0)
    for name in ("lm_head.weight", "classifier.weight"):
        yield StreamTensor(name, end)
    for layer in config.plan.layers:
        block, before = f"model.layers.{layer.block}", StreamPoint(layer.layer)
        middle, after = after_attention(config, layer.layer), StreamPoint(layer.layer + 1)
        for name in ("q_proj", "q_rope_proj", "k_rope_proj", "kv_down_proj", "k_proj", "v_proj", "g_proj"):
            yield StreamTensor(f"{block}.self_attn.{name}.weight", before)
        if getattr(layer.key_value, "mode", None) == "per_token":  # a gate computed from the stream
            yield StreamTensor(f"{block}.self_attn.mixer.weight", before)
        for name in ("up_proj.weight", "gate_proj.weight", "router.weight", "experts.up_proj", "experts.gate_proj"):
            yield StreamTensor(f"{block}.mlp.{name}", middle if config.block_type == "serial" else before)
        # Streams begin as copies, mix, and take the same outputs, so they have one basis. These read each of them.
        yield StreamTensor(f"{block}.attention_connection.weight", before)
        yield StreamTensor(f"{block}.mlp_connection.weight", middle)
        for name in ("weight", "bias"):
            yield StreamTensor(f"{block}.self_attn.o_proj.{name}", middle, writes=True, axis=0)
            yield StreamTensor(f"{block}.mlp.down_proj.{name}", after, writes=True, axis=0)
        yield StreamTensor(f"{block}.mlp.experts.down_proj", after, writes=True, axis=1)


def _joined(config: LeanConfig) -> Iterator[tuple[StreamPoint, StreamPoint]]:
    """Pairs of points that have one basis."""
    first_user: dict[int, int] = {}
    for layer in config.plan.layers:
        i = layer.layer
        before, middle, after = StreamPoint(i), after_attention(config, i), StreamPoint(i + 1)
        if config.block_type == "serial":
            if config.attention_skip:
                yield before, middle
            if config.mlp_skip:
                yield middle, after
        elif config.mlp_skip:
            yield before, after
        # Layers that share a block see their streams in the same basis, and leave them in the same.
        j = first_user.setdefault(layer.block, i)
        yield StreamPoint(j), before
        yield after_attention(config, j), middle
        yield StreamPoint(j + 1), after
        for averaged in layer.averaged:
            yield StreamPoint(averaged), after


def _blocked(config: LeanConfig) -> Iterator[tuple[StreamPoint, str]]:
    """Points where the stream must stay in its basis, and why."""
    for layer in config.plan.layers:
        i = layer.layer
        for slot in PROJECTIONS:
            kind = getattr(layer, slot).kind
            reads_all = kind in ("linear", "latent") or (slot == "value" and kind == "keys")
            if reads_all or not layer.computed_heads(slot):
                continue
            yield (
                after_attention(config, i) if slot == "output" else StreamPoint(i),
                f"the {slot} of layer {i} is {kind!r}: it passes on the stream's own coordinates, and a change of "
                "basis would have to give it a full matrix",
            )
