"""Activations of two models on calibration tokens: the source's, and those of its conversion as far as it has come.

The residual streams of all tokens lie on disk. Of the weights one layer's are in memory at a time, in float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import LeanError
from ..model.attention import KeyValues, eager_attention
from ..model.config import LeanConfig
from ..model.mechanisms import TASKS
from ..model.position import RotaryEmbeddings, Rotation, make_masks, rotation_of
from ..model.transformer import LeanBlock
from ..presets.edit import with_fields
from .scratch import Stream

CPU = torch.device("cpu")
# Attention weights that are in memory at a time, in numbers: 64 MB.
PATTERNS_AT_A_TIME = 2**24
# Tokens that go through a layer at a time, unless one sequence has more.
TOKENS_AT_A_TIME = 4096


@dataclass(frozen=True)
class Recorder:
    """Eager attention of a run of queries over the keys that any of them sees; keys are rotated.

    Attributes:
        queries, keys: their positions.
        query: [batch, query heads, queries, head_dim]; key: [batch, key heads, keys, head_dim].
        patterns: attention weights [batch, query heads, queries, keys].
        values: [batch, value heads, keys, head_dim].
        inputs: [batch, keys, hidden_size], the normed stream, of which keys and values are made.
        projected_key: [batch, keys, width], what `k_proj` makes, before rotary positions.
        heads: the output before W_O, [batch, queries, query heads, head_dim].
        rotation: cosines and sines of the keys' positions, each [1, keys, rotated dimensions]; None without.
    """

    queries: slice
    keys: slice
    query: Tensor
    key: Tensor
    patterns: Tensor
    values: Tensor
    inputs: Tensor
    projected_key: Tensor
    heads: Tensor
    rotation: Rotation | None


class Layers:
    """The layers of one model, run one by one on streams that are given; those that read the stream alone.

    Queries from the MLP below and averages over depth read more (see `check_reads_the_stream`).
    """

    def __init__(self, config: LeanConfig, tensors: Mapping[str, Tensor], length: int, device: torch.device):
        self.config = with_fields(config)
        self.config._attn_implementation = "sdpa"
        self.plan, self.tensors, self.device = self.config.plan, tensors, device
        self._positions = torch.arange(length, device=device)
        # Of a stream's shape, dtype and device; it takes no memory.
        self._like = torch.zeros((), device=device).expand(1, length, config.hidden_size)
        rotary = RotaryEmbeddings(self.config, self.plan).to(device)
        self.rotations = rotary(self._like, self._positions[None]) if len(rotary) else None

    @cached_property
    def masks(self) -> dict[int | None, Any]:
        """The mask of every window (see `make_masks`)."""
        return make_masks(self.config, self.plan, self._like, None, None, None, self._positions[None])

    def embed(self, tokens: np.ndarray) -> Iterator[Tensor]:
        """Yield the stream [length, hidden_size] of every sequence before the first layer."""
        with torch.device("meta"):
            embedding = TASKS[self.config.task].make_embedding(self.config)
        rows = self.tensors["model.embed_tokens.weight"]
        positions: Any = 0
        if self.config.position_embedding_type == "learned":
            positions = self.tensors["model.embed_positions.weight"][: tokens.shape[1]].float()
        for sequence in torch.from_numpy(tokens.astype(np.int64)):
            # The rows of a sequence alone: all of them in float32 are larger than a layer where vocabularies are large.
            weights = {"weight": rows[sequence].float()}
            yield functional_call(embedding, weights, (torch.arange(len(sequence)),)) + positions

    def block(self, layer: int) -> LeanBlock:
        """Return the block of a layer with its weights in float32."""
        weights = self.plan.blocks[self.plan.layers[layer].block]
        with torch.device("meta"):
            block = LeanBlock(self.config, weights)
        prefix = f"model.layers.{weights.layer}."
        state = {name: self.tensors[f"{prefix}{name}"].to(self.device, torch.float32) for name in block.state_dict()}
        block.load_state_dict(state, assign=True)
        return block.eval()

    def run(
        self,
        block: LeanBlock,
        layer: int,
        stream: Tensor,
        attended: Tensor | None = None,
        borrowed: dict[int, KeyValues] | None = None,
    ) -> Tensor:
        """Return the stream [batch, length, hidden_size] after a layer.

        Args:
            attended: the output of its attention, of the same shape, if it has been computed.

        Raises:
            LeanError: it is not finite.
        """
        plan = self.plan.layers[layer]
        if attended is None:
            given = {"attention_mask": self.masks[plan.window], "position_embeddings": self.rotations}
            output, *_ = block(stream, layer=plan, borrowed=borrowed, **given)
        else:
            block.self_attn.forward = lambda *_, **__: (attended, None, None)  # type: ignore[method-assign]
            output, *_ = block(stream, layer=plan)
            del block.self_attn.forward
        if not output.isfinite().all():
            raise LeanError(f"the activations after layer {layer} are not finite; is the source a trained model?")
        return output

    def attend(self, block: LeanBlock, layer: int, stream: Tensor) -> tuple[Tensor, Iterator[Recorder]]:
        """Return the normed input [batch, length, hidden_size] of a layer's attention, and its attention.

        Attention comes run by run of queries, of which PATTERNS_AT_A_TIME bounds the patterns. The layer borrows
        nothing.
        """
        plan, attention, projected = self.plan.layers[layer], block.self_attn, []
        normed, rotation = block.input_layernorm(stream), rotation_of(plan, self.rotations)
        with attention.k_proj.register_forward_hook(lambda *found: projected.append(found[2])):  # type: ignore[union-attr]
            query, key, values, _ = attention.project_heads(normed, None, rotation)

        def runs() -> Iterator[Recorder]:
            length = query.shape[2]
            step = max(1, PATTERNS_AT_A_TIME // query[:, :, 0, 0].numel() // length)
            for start in range(0, length, step):
                queries = slice(start, min(start + step, length))
                keys = slice(0 if plan.window is None else max(0, start - plan.window + 1), queries.stop)
                distance = self._positions[queries, None] - self._positions[keys]
                seen = (distance >= 0) & (distance < (plan.window or length))
                mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
                here = query[:, :, queries], key[:, :, keys], values[:, :, keys]
                heads, patterns = eager_attention(attention, *here, mask, plan.attention_scale(plan.layer))
                turned = None if rotation is None else (rotation[0][:, keys], rotation[1][:, keys])
                made_of = normed[:, keys], projected[0][:, keys]
                yield Recorder(queries, keys, here[0], here[1], patterns, here[2], *made_of, heads, turned)

        return normed, runs()


def correction(config: LeanConfig, source: Tensor, stream: Tensor) -> Tensor | float:
    """Return what attention's output must add to bring a stream back to the source's; 0 where none can.

    No output of W_O does so without a skip connection, or where a norm follows it.
    """
    if not config.attention_skip or config.norm_placement != "before":
        return 0.0
    return (source - stream) / config.residual_multiplier


def batches(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """Yield the batches in which sequences [sequences, length] go through a layer: `most`, if not too many tokens."""
    sequences, length, *_ = shape
    step = max(1, min(most, TOKENS_AT_A_TIME // length))
    for start in range(0, sequences, step):
        yield slice(start, min(start + step, sequences))


class Activations:
    """The residual streams of both models at one layer, from the embedding on; on disk, for all tokens.

    Attributes:
        source, converted: the streams, float32 [sequences, length, hidden_size].
        first: the input of the first layer's values, of the same shape.
        batches: the sequences that go through a layer together.
    """

    def __init__(self, layers: Layers, target: LeanConfig, tokens: np.ndarray, batch_size: int, directory: Path):
        self.config, self.target, self._layers = layers.config, target, layers
        self.batches = [*batches(tokens.shape, batch_size)]
        self._loaded: tuple[int, LeanBlock] | None = None
        self.source, self.converted, self.first = (
            Stream(directory / name, (*tokens.shape, self.config.hidden_size))
            for name in ("source", "converted", "first")
        )
        norm = self._block(0).input_layernorm
        for place, hidden in enumerate(self._layers.embed(tokens)):
            here = slice(place, place + 1)
            self.source[here] = self.converted[here] = hidden[None]
            self.first[here] = norm(hidden[None])

    def rewind_source(self) -> None:
        """Set the source's stream back to the embedding, where the converted one still is."""
        for batch in self.batches:
            self.source[batch] = self.converted[batch]

    def source_energy(self) -> float:
        """Return the sum of the squares of the source's stream."""
        return sum(float(self.source[batch].double().square().sum()) for batch in self.batches)

    def advance_source(self, layer: int) -> None:
        """Pass the source's stream through `layer`."""
        block = self._block(layer)
        for batch in self.batches:
            self.source[batch] = self._layers.run(block, layer, self.source[batch])

    def advance(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Pass both streams through `layer`, the converted one with the weights of that layer in `tensors`."""
        self.advance_source(layer)
        converted = Layers(self.target, tensors, self.source.shape[1], CPU)
        block, weight = converted.block(layer), tensors["model.layers.0.self_attn.v_proj.weight"]
        bias = tensors["model.layers.0.self_attn.v_proj.bias"] if self.config.attention_bias else None
        for batch in self.batches:
            values = nn.functional.linear(self.first[batch], weight, bias)
            values = values.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            borrowed = {0: KeyValues(None, values, values)}
            self.converted[batch] = converted.run(block, layer, self.converted[batch], borrowed=borrowed)

    def attend(self, layer: int, converted: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield the patterns and the target of the source's attention in `layer`, and the inputs of values.

        On the source's stream the target is the attention's output; on the converted one, what brings that stream back
        to the source's.

        Yields:
            of each run of queries: attention weights [batch, query heads, queries, keys], the target [batch, queries,
            hidden_size], and the inputs of this layer's and of the first layer's values, [batch, keys, hidden_size],
            with a column of ones more where values have a bias.
        """
        block = self._block(layer)
        for batch in self.batches:
            source, first, missing = self.source[batch], self._with_ones(self.first[batch]), None
            normed, runs = self._layers.attend(block, layer, source)
            pairs: Iterator[tuple[Recorder, Recorder]] = ((run, run) for run in runs)
            if converted:
                stream = self.converted[batch]
                normed, others = self._layers.attend(block, layer, stream)
                pairs, missing = zip(runs, others, strict=True), correction(self.config, source, stream)
            inputs = self._with_ones(normed)
            for wanted, given in pairs:
                target = block.self_attn.o_proj(wanted.heads.flatten(2))
                if isinstance(missing, Tensor):
                    target = target + missing[:, wanted.queries]
                yield given.patterns, target, inputs[:, given.keys], first[:, given.keys]

    def _with_ones(self, inputs: Tensor) -> Tensor:
        return torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1) if self.config.attention_bias else inputs

    def _block(self, layer: int) -> LeanBlock:
        """The source's block, kept until another one is asked for."""
        if self._loaded is None or self._loaded[0] != layer:
            self._loaded = None
            self._loaded = layer, self._layers.block(layer)
        return self._loaded[1]
