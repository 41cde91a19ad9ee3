"""Activations of two models on calibration tokens: the source's, and those of its conversion as far as it has come.

The residual streams of all tokens lie on disk. Of the weights one layer's are in memory at a time, in float32.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from ..model.position import RotaryEmbeddings, make_masks
from ..model.transformer import LeanBlock
from ..presets.edit import with_fields
from .scratch import Stream

CPU = torch.device("cpu")


class Recorder:
    """Stands in for `LeanAttention.attend`: computes eager attention and keeps its patterns and heads.

    Attributes:
        query: [batch, query heads, length, head_dim]; key: [batch, key heads, length, head_dim]; both rotated.
        patterns: attention weights [batch, query heads, length, length].
        values: [batch, value heads, length, head_dim].
        inputs: [batch, length, hidden_size], the normed stream, of which keys and values are made.
        projected_key: [batch, length, width], what `k_proj` makes, before rotary positions.
        heads: the output before W_O, [batch, length, query heads, head_dim].
        output: behind it, [batch, length, hidden_size].
    """

    query: Tensor
    key: Tensor
    patterns: Tensor
    values: Tensor
    inputs: Tensor
    projected_key: Tensor
    heads: Tensor
    output: Tensor

    def __call__(
        self,
        attention: nn.Module,
        query: Tensor,
        key: Tensor,
        values: list[Tensor],
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention as `attend` computes it, of a layer that borrows nothing."""
        self.query, self.key, (self.values,) = query, key, values
        self.heads, self.patterns = eager_attention(attention, query, key, self.values, mask, scaling)
        return self.heads, self.patterns


class Layers:
    """The layers of one model, run one by one on streams that are given; those that read the stream alone.

    Queries from the MLP below and averages over depth read more (see `check_reads_the_stream`).
    """

    def __init__(self, config: LeanConfig, tensors: Mapping[str, Tensor], length: int, device: torch.device):
        self.config = with_fields(config)
        self.config._attn_implementation = "eager"
        self.plan, self.tensors, self.device = self.config.plan, tensors, device
        positions = torch.arange(length, device=device)[None]
        hidden = torch.zeros(1, length, config.hidden_size, device=device)
        rotary = RotaryEmbeddings(self.config, self.plan).to(device)
        self.rotations = rotary(hidden, positions) if len(rotary) else None
        self.masks = make_masks(self.config, self.plan, hidden, None, None, None, positions)

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
        names = [name for name, _ in block.named_parameters()]
        state = {name: self.tensors[f"{prefix}{name}"].to(self.device, torch.float32) for name in names}
        block.load_state_dict(state, assign=True)
        return block.eval()

    def run(self, block: LeanBlock, layer: int, stream: Tensor, borrowed: dict[int, KeyValues] | None = None) -> Tensor:
        """Return the stream [batch, length, hidden_size] after a layer.

        Raises:
            LeanError: it is not finite.
        """
        output, *_ = block(stream, **self._arguments(layer), borrowed=borrowed)
        if not output.isfinite().all():
            raise LeanError(f"the activations after layer {layer} are not finite; is the source a trained model?")
        return output

    def attend(self, block: LeanBlock, layer: int, stream: Tensor) -> tuple[Tensor, Recorder]:
        """Return the normed input [batch, length, hidden_size] of a layer's attention, and its recorder."""
        normed = block.input_layernorm(stream)
        with recording(block) as recorder:
            block.self_attn(normed, **self._arguments(layer))
        return normed, recorder

    def _arguments(self, layer: int) -> dict[str, Any]:
        plan = self.plan.layers[layer]
        return {"layer": plan, "attention_mask": self.masks[plan.window], "position_embeddings": self.rotations}


@contextmanager
def recording(block: LeanBlock) -> Iterator[Recorder]:
    """Record the attention of a block."""
    recorder = Recorder()
    block.self_attn.attend = recorder

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        (recorder.inputs,), recorder.projected_key = inputs, output

    def keep_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
        recorder.output = output

    hooks = (
        block.self_attn.k_proj.register_forward_hook(keep),  # type: ignore[union-attr]
        block.self_attn.o_proj.register_forward_hook(keep_output),
    )
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
        del block.self_attn.attend


def correction(config: LeanConfig, source: Tensor, stream: Tensor) -> Tensor | float:
    """Return what attention's output must add to bring a stream back to the source's; 0 where none can.

    No output of W_O does so without a skip connection, or where a norm follows it.
    """
    if not config.attention_skip or config.norm_placement != "before":
        return 0.0
    return (source - stream) / config.residual_multiplier


class Activations:
    """The residual streams of both models at one layer, from the embedding on; on disk, for all tokens.

    Attributes:
        source, converted: the streams, float32 [sequences, length, hidden_size].
        first: the input of the first layer's values, of the same shape.
    """

    def __init__(
        self,
        config: LeanConfig,
        target: LeanConfig,
        tensors: Mapping[str, Tensor],
        tokens: np.ndarray,
        batch_size: int,
        directory: Path,
    ):
        self.config, self.target, self.batch_size = config, target, batch_size
        self._layers = Layers(config, tensors, tokens.shape[1], CPU)
        self._loaded: tuple[int, LeanBlock] | None = None
        self.source, self.converted, self.first = (
            Stream(directory / name, (*tokens.shape, config.hidden_size)) for name in ("source", "converted", "first")
        )
        norm = self._block(0).input_layernorm
        for place, hidden in enumerate(self._layers.embed(tokens)):
            here = slice(place, place + 1)
            self.source[here] = self.converted[here] = hidden[None]
            self.first[here] = norm(hidden[None])

    def batches(self) -> Iterator[slice]:
        """Yield the batches of sequences."""
        for start in range(0, self.source.shape[0], self.batch_size):
            yield slice(start, start + self.batch_size)

    def rewind_source(self) -> None:
        """Set the source's stream back to the embedding, where the converted one still is."""
        for batch in self.batches():
            self.source[batch] = self.converted[batch]

    def source_energy(self) -> float:
        """Return the sum of the squares of the source's stream."""
        return sum(float(self.source[batch].double().square().sum()) for batch in self.batches())

    def advance_source(self, layer: int) -> None:
        """Pass the source's stream through `layer`."""
        block = self._block(layer)
        for batch in self.batches():
            self.source[batch] = self._layers.run(block, layer, self.source[batch])

    def advance(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Pass both streams through `layer`, the converted one with the weights of that layer in `tensors`."""
        self.advance_source(layer)
        converted = Layers(self.target, tensors, self.source.shape[1], CPU)
        block, weight = converted.block(layer), tensors["model.layers.0.self_attn.v_proj.weight"]
        bias = tensors["model.layers.0.self_attn.v_proj.bias"] if self.config.attention_bias else None
        for batch in self.batches():
            values = nn.functional.linear(self.first[batch], weight, bias)
            values = values.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            borrowed = {0: KeyValues(None, values, values)}
            self.converted[batch] = converted.run(block, layer, self.converted[batch], borrowed)

    def attend(self, layer: int, batch: slice, converted: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the patterns and the target of the source's attention in `layer`, and the inputs of values.

        On the source's stream the target is the attention's output; on the converted one, what brings that stream back
        to the source's.

        Returns:
            attention weights [batch, query heads, length, length], the target [batch, length, hidden_size], and the
            inputs of this layer's and of the first layer's values, [batch, length, hidden_size], with a column of ones
            more where values have a bias.
        """
        block, source = self._block(layer), self.source[batch]
        normed, recorder = self._layers.attend(block, layer, source)
        target = block.self_attn.o_proj(recorder.heads.flatten(2))
        if converted:
            stream = self.converted[batch]
            normed, recorder = self._layers.attend(block, layer, stream)
            target = target + correction(self.config, source, stream)
        return recorder.patterns, target, self._with_ones(normed), self._with_ones(self.first[batch])

    def _with_ones(self, inputs: Tensor) -> Tensor:
        return torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1) if self.config.attention_bias else inputs

    def _block(self, layer: int) -> LeanBlock:
        """The source's block, kept until another one is asked for."""
        if self._loaded is None or self._loaded[0] != layer:
            self._loaded = None
            self._loaded = layer, self._layers.block(layer)
        return self._loaded[1]
