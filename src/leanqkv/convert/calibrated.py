"""Calibrated: first-layer values, with attention's patterns kept and its output fitted by least squares.

Ours. Layer after layer, on the stream of the model as converted so far, with the residual stream of the source as the
target. Which heads keep a value, and which of the first layer's heads goes with which pattern, is one assignment
problem on Gram matrices (heads can be permuted within a layer exactly); W_O of all heads and W_V of those kept then
take turns in closed form. Nothing is trained; memory does not grow with the number of calibration tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..eliminate.respell import changed
from ..errors import LeanError
from ..model.attention import KeyValues
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from .heads import KeptHeads, ValueHeads, cut, put_back, target_config
from .least_squares import System

Progress = Callable[[int, int], None]
# Columns of a Gram matrix up to which W_V is refitted: 2 GB in float64.
LARGEST_GRAM = 16_384


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    Attributes:
        ratio: of the value heads that become the first layer's.
        choose: which heads keep a value and which pattern takes which first-layer head; else the first heads stay.
        refit_values: W_V of the kept heads, too; else W_O alone.
        sweeps: turns of W_O and W_V, at most.
        ridge: added to the diagonal of a Gram matrix, as a share of its mean.
        batch_size: sequences at a time.
    """

    ratio: float = 0.5
    choose: bool = True
    refit_values: bool = True
    sweeps: int = 30
    ridge: float = 1e-4
    batch_size: int = 8


class Streams:
    """The residual streams of source and converted model, on disk, for all tokens: [sequences, length, hidden_size]."""

    def __init__(self, directory: Path, shape: tuple[int, ...], values: tuple[int, ...]):
        def file(name: str, shape: tuple[int, ...]) -> np.memmap:
            return np.memmap(directory / name, dtype=np.float32, mode="w+", shape=shape)

        self.source, self.converted = file("source", shape), file("converted", shape)
        self.first_values = file("values", values)  # [sequences, heads, length, head_dim]


@torch.no_grad()
def calibrated(
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    tokens: np.ndarray,
    settings: Settings = Settings(),
    progress: Progress = lambda done, total: None,
) -> tuple[LeanConfig, dict[str, Tensor], list[dict[str, Any]]]:
    """Converts a model of multi- or grouped-query attention.

    Args:
        tokens: [sequences, length], calibration tokens.
        progress: is called with passes over the tokens done and in all.

    Returns:
        the configuration with first-layer values, its tensors in float32, and per layer what was chosen and how much of
        the target was missed: `kept`, `paired` (source head -> first-layer head), `missed` (squared error of the
        attention's output over its square).

    Raises:
        LeanError: a source that cannot be converted, or activations that are not finite.
    """
    new = target_config(config, settings.ratio)
    model, result = (LeanForCausalLM(c).eval() for c in (_eager(config), new))
    model.load_state_dict({n: t.float() for n, t in _with_head(config, tensors).items()})
    done: dict[str, Tensor] = {n: tensors[n].float() for n in new.plan.parameter_shapes if n in tensors}
    report: list[dict[str, Any]] = []
    passes = 2 + 3 * (config.num_hidden_layers - 1)
    with tempfile.TemporaryDirectory() as directory:
        d, heads = config.hidden_size, config.num_key_value_heads
        shape = (*tokens.shape, d)
        streams = Streams(Path(directory), shape, (len(tokens), heads, tokens.shape[1], config.head_dim))  # type: ignore[arg-type]
        fit = _Fit(model, result, tokens, streams, settings)
        fit.first_layer()
        progress(2, passes)
        for layer in range(1, config.num_hidden_layers):
            before = 2 + 3 * (layer - 1)
            found, told = fit.layer(layer, cut(config, tensors, layer), partial(_told, progress, before, passes))
            report.append(told)
            compute = put_back(config, tensors, {layer: found}.__getitem__)
            for name in done:
                if name.startswith(f"model.layers.{layer}.self_attn."):
                    done[name] = compute(name).float()
            fit.advance(layer, done)
            progress(before + 3, passes)
    return new, done, report


class _Fit:
    def __init__(self, source: Any, result: Any, tokens: np.ndarray, streams: Streams, settings: Settings):
        self.source, self.result = source.model, result.model
        self.config, self.new = source.config, result.config
        self.tokens, self.streams, self.settings = tokens, streams, settings
        length = tokens.shape[1]
        positions = torch.arange(length)[None]
        hidden = torch.zeros(1, length, self.config.hidden_size)
        rotary = self.source.rotary_emb
        self.rotation = rotary(hidden, positions) if rotary is not None else None
        self.positions = positions
        seen = torch.ones(length, length).tril().bool()
        window = self.config.sliding_window
        self.masks = {None: torch.zeros(length, length).masked_fill(~seen, -torch.inf)[None, None]}
        if window is not None:
            near = positions.T - positions < window
            self.masks[window] = torch.zeros(length, length).masked_fill(~(seen & near), -torch.inf)[None, None]

    def batches(self) -> Iterator[slice]:
        for start in range(0, len(self.tokens), self.settings.batch_size):
            yield slice(start, start + self.settings.batch_size)

    def first_layer(self) -> None:
        """The embedding and the first layer, which both models have in common."""
        for batch in self.batches():
            hidden = self.source.embed_tokens(torch.from_numpy(self.tokens[batch].astype(np.int64)))
            if self.source.embed_positions is not None:
                hidden = hidden + self.source.embed_positions(self.positions)
            output, key_values = self._block(self.source, 0, hidden, {})
            self.streams.source[batch] = self.streams.converted[batch] = output.numpy()
            assert key_values.values is not None
            self.streams.first_values[batch] = key_values.values.numpy()

    def layer(self, layer: int, heads: ValueHeads, progress: Callable[[int], None]) -> tuple[KeptHeads, dict[str, Any]]:
        n, kept = len(heads.value), self.new.plan.layers[layer].computed_value_heads
        order = tuple(range(n))
        if self.settings.choose:
            order = self._choose(layer, heads, kept)
        progress(1)
        found, missed = self._solve(layer, heads, kept, order)
        progress(2)
        paired = {order[place]: place for place in range(kept, n)}
        return found, {"layer": layer, "kept": sorted(order[:kept]), "paired": paired, "missed": missed}

    def advance(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Both streams through `layer`, the converted one with its new weights."""
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self.result.layers[layer].load_state_dict(own)
        for batch in self.batches():
            source, converted = (torch.from_numpy(s[batch]) for s in (self.streams.source, self.streams.converted))
            self.streams.source[batch] = self._block(self.source, layer, source, {})[0].numpy()
            values = torch.from_numpy(self.streams.first_values[batch])
            output, _ = self._block(self.result, layer, converted, {0: KeyValues(None, values, values)})
            if not output.isfinite().all():
                raise LeanError(f"the activations after layer {layer} are not finite; is the source a trained model?")
            self.streams.converted[batch] = output.numpy()

    def _block(self, model: Any, layer: int, hidden: Tensor, borrowed: dict) -> tuple[Tensor, KeyValues]:
        plan = model.plan.layers[layer]
        mask = self.masks[plan.window]
        output, key_values, _ = model.layers[plan.block](
            hidden, plan, attention_mask=mask, position_embeddings=self.rotation, borrowed=borrowed
        )
        return output, key_values

    def _attended(self, layer: int, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the source's attention on a stream: normed input, output, and the patterns [batch, heads, T, T]."""
        block, plan = self.source.layers[layer], self.source.plan.layers[layer]
        normed = block.input_layernorm(stream)
        mask = self.masks[plan.window]
        output, patterns, _ = block.self_attn(normed, plan, position_embeddings=self.rotation, attention_mask=mask)
        return normed, output, patterns

    def _samples(self, layer: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Per batch: normed input and patterns of the converted stream, first-layer values, and the target."""
        for batch in self.batches():
            source, converted = (torch.from_numpy(s[batch]) for s in (self.streams.source, self.streams.converted))
            _, target, _ = self._attended(layer, source)
            if self.config.attention_skip:
                target = target + source - converted
            normed, _, patterns = self._attended(layer, converted)
            yield normed, patterns, torch.from_numpy(self.streams.first_values[batch]), target

    def _choose(self, layer: int, heads: ValueHeads, kept: int) -> tuple[int, ...]:
        """The order of heads under which least is lost when the last places take the first layer's values.

        The cost of giving the pattern of head h the first-layer head p is what remains of h's contribution after the
        best fit by that value under that pattern. Keeping a value costs nothing.
        """
        n, group = heads.output.shape[:2]
        width, d = heads.value.shape[1:]
        shared = n - kept
        gram = torch.zeros(n, shared, group * width, group * width, dtype=torch.float64)
        cross = torch.zeros(n, shared, group * width, d, dtype=torch.float64)
        size = torch.zeros(n, dtype=torch.float64)
        output = heads.output.float()
        for normed, patterns, first, _ in self._samples(layer):
            value = torch.einsum("btd,hkd->bhtk", normed, heads.value.float())
            if heads.value_bias is not None:
                value = value + heads.value_bias.float()[:, None]
            by_head = patterns.unflatten(1, (n, group))
            for head in range(n):
                own = torch.einsum("bgts,bsk->btgk", by_head[:, head], value[:, head])
                given = torch.einsum("btgk,gok->bto", own, output[head]).flatten(0, 1)
                size[head] += given.double().square().sum()
                for place in range(shared):
                    feature = (
                        torch.einsum("bgts,bsk->btgk", by_head[:, head], first[:, kept + place])
                        .flatten(2)
                        .flatten(0, 1)
                    )
                    gram[head, place] += (feature.T @ feature).double()
                    cross[head, place] += (feature.T @ given).double()
        ridge = self.settings.ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(group * width, dtype=torch.float64)
        solved = torch.linalg.solve(gram + ridge[..., None, None] * eye, cross)
        lost = size[:, None] - (solved * cross).sum((-2, -1))
        costs = torch.cat((torch.zeros(n, kept, dtype=torch.float64), lost), dim=1).numpy()
        rows, places = linear_sum_assignment(costs)
        order = [0] * n
        for head, place in zip(rows.tolist(), places.tolist(), strict=True):
            order[place] = head
        return (*sorted(order[:kept]), *order[kept:])

    def _solve(self, layer: int, heads: ValueHeads, kept: int, order: tuple[int, ...]) -> tuple[KeptHeads, float]:
        """W_O of all heads and, in turns, W_V of the kept ones, from one set of Gram matrices.

        The features of a kept head are its pattern times the input, and one constant for a value bias; those of another
        its pattern times a first-layer head.
        """
        n, group = heads.output.shape[:2]
        width, d = heads.value.shape[1:]
        stays = list(order[:kept])
        value = heads.value[stays].transpose(1, 2)  # W_V itself, [kept, d, width]; with its bias as one more row
        biased = heads.value_bias is not None
        if heads.value_bias is not None:
            value = torch.cat((value, heads.value_bias[stays][:, None]), dim=1)
        constant = bool(self.config.attention_output_bias)
        others = (n - kept) * group * width
        refit = self.settings.refit_values and kept * group * value.shape[1] + others <= LARGEST_GRAM
        # With W_V fixed, what the kept heads give W_O stands in for their input.
        start = value if refit else torch.eye(width, dtype=torch.float64).expand(kept, -1, -1)
        columns = kept * group * start.shape[1] + others + constant
        gram = torch.zeros(columns, columns, dtype=torch.float64)
        cross = torch.zeros(columns, d, dtype=torch.float64)
        size = 0.0
        for normed, patterns, first, target in self._samples(layer):
            by_head = patterns.unflatten(1, (n, group))
            inputs = torch.cat((normed, torch.ones_like(normed[..., :1])), dim=-1) if biased else normed
            parts = []
            for place, head in enumerate(order):
                attended = first[:, place]
                if place < kept:
                    attended = inputs if refit else inputs @ value[place].float()
                parts.append(torch.einsum("bgts,bsk->btgk", by_head[:, head], attended).flatten(2))
            if constant:
                parts.append(torch.ones_like(normed[..., :1]))
            features, flat = torch.cat(parts, dim=-1).flatten(0, 1), target.flatten(0, 1)
            gram += (features.T @ features).double()
            cross += (features.T @ flat).double()
            size += float(flat.double().square().sum())
        system = System(gram, cross, size, kept, n, group, self.settings.ridge)
        output = heads.output[list(order)].transpose(2, 3)  # W_O itself, [n, group, width, d]
        solved, output, bias, missed = system.solve(start, output, constant, self.settings.sweeps if refit else 1)
        value = solved if refit else value
        found = KeptHeads(
            value[:, :d].transpose(1, 2), value[:, d] if biased else None, output.transpose(2, 3), order, bias
        )
        return found, missed


def _told(progress: Progress, before: int, passes: int, now: int) -> None:
    progress(before + now, passes)


def _eager(config: LeanConfig) -> LeanConfig:
    """The same model, whose attention hands out its patterns."""
    found = changed(config)
    found._attn_implementation = "eager"
    return found


def _with_head(config: LeanConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensors[name] for name in config.plan.parameter_shapes}
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found
