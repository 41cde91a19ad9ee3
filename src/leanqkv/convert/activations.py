"""Activations of two models on calibration tokens: the source's, and those of its conversion as far as it has come."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import LeanError
from ..model.attention import KeyValues
from ..model.config import LeanConfig
from ..model.masks import make_masks
from ..model.transformer import LeanModel
from ..presets.edit import with_fields
from .scratch import Stream


class Activations:
    """The residual streams of both models at one layer, from the embedding on; on disk, for all tokens.

    Blocks are run one by one, so a source whose blocks read more than the stream is none for it: queries from the MLP
    below and averages over depth (see `calibrated_target`).

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
        self.config, self.batch_size = config, batch_size
        self._source, self._converted = (LeanModel(with_fields(c)).eval() for c in (config, target))
        self._source.set_attn_implementation("eager")  # which returns its patterns
        names = (name for name in config.plan.parameter_shapes if name.startswith("model."))
        self._source.load_state_dict({name.removeprefix("model."): tensors[name].float() for name in names})
        self.source, self.converted, self.first = (
            Stream(directory / name, (*tokens.shape, config.hidden_size)) for name in ("source", "converted", "first")
        )
        positions = torch.arange(tokens.shape[1])[None]
        hidden = torch.zeros(1, tokens.shape[1], config.hidden_size)
        rotary = self._source.rotary_emb
        self._rotation = None if rotary is None else rotary(hidden, positions)
        self._masks = make_masks(self._source.config, self._source.plan, hidden, None, None, None, positions)
        for batch in self.batches():
            hidden = self._source.embed_tokens(torch.from_numpy(tokens[batch].astype(np.int64)))
            if self._source.embed_positions is not None:
                hidden = hidden + self._source.embed_positions(positions)
            self.source[batch] = self.converted[batch] = hidden
            self.first[batch] = self._source.layers[0].input_layernorm(hidden)

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
        for batch in self.batches():
            self.source[batch] = self._block(self._source, layer, self.source[batch], {})

    def advance(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Pass both streams through `layer`, the converted one with the weights of that layer in `tensors`."""
        self.advance_source(layer)
        prefix = f"model.layers.{layer}."
        weights = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        self._converted.layers[layer].load_state_dict(weights)
        for batch in self.batches():
            values = self._converted.layers[0].self_attn.v_proj(self.first[batch])
            values = values.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            borrowed = {0: KeyValues(None, values, values)}
            self.converted[batch] = self._block(self._converted, layer, self.converted[batch], borrowed)

    def attend(self, layer: int, batch: slice, converted: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the patterns and the target of the source's attention in `layer`, and the inputs of values.

        On the source's stream the target is the attention's output; on the converted one, what brings that stream back
        to the source's.

        Returns:
            attention weights [batch, query heads, length, length], the target [batch, length, hidden_size], and the
            inputs of this layer's and of the first layer's values, [batch, length, hidden_size], with a column of ones
            more where values have a bias.
        """
        source = self.source[batch]
        normed, patterns, target = self._attention(layer, source)
        if converted:
            stream = self.converted[batch]
            normed, patterns, _ = self._attention(layer, stream)
            if self.config.attention_skip:
                target = target + source - stream
        return patterns, target, self._with_ones(normed), self._with_ones(self.first[batch])

    def _with_ones(self, inputs: Tensor) -> Tensor:
        return torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1) if self.config.attention_bias else inputs

    def _attention(self, layer: int, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed input, patterns and output of the source's attention on a stream."""
        block, plan = self._source.layers[layer], self._source.plan.layers[layer]
        normed, mask = block.input_layernorm(stream), self._masks[plan.window]
        output, patterns, _ = block.self_attn(normed, plan, position_embeddings=self._rotation, attention_mask=mask)
        return normed, patterns, output

    def _block(self, model: Any, layer: int, stream: Tensor, borrowed: dict[int, KeyValues]) -> Tensor:
        """The stream after `layer`."""
        plan = model.plan.layers[layer]
        mask = self._masks[plan.window]
        output, _, _ = model.layers[layer](
            stream, plan, attention_mask=mask, position_embeddings=self._rotation, borrowed=borrowed
        )
        if not output.isfinite().all():
            raise LeanError(f"the activations after layer {layer} are not finite; is the source a trained model?")
        return output
