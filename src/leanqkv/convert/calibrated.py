"""Calibrated: first-layer values, with attention's patterns kept and its output fitted by least squares.

Ours. Which heads keep a value, and which of the first layer's heads goes with which pattern, is chosen from Gram
matrices of the source, one assignment problem a layer (heads can be permuted within a layer exactly). The values that
are lent are fitted next, to what all layers need of them at once. Then layer after layer, on the stream of the model as
converted so far, with the residual stream of the source as the target, W_O of all heads and W_V of those kept take
turns in closed form. Every fit is pulled towards the source's weights. Nothing is trained; memory does not grow with
the number of calibration tokens.
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

from ..errors import LeanError
from ..model.attention import KeyValues
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .heads import KeptHeads, ValueHeads, assemble_tensors, split_heads, target_config
from .least_squares import LentShare, System, fit_lent, ridge

Progress = Callable[[int, int], None]
# Columns of a Gram matrix up to which W_V is refitted: 2 GB in float64.
LARGEST_GRAM = 16_384
GRAM_ROWS = 512  # of a Gram matrix at a time
# How much more an error of the first layer's counts when the values that it lends are fitted. All layers build on its
# output; what it does not use of its values is free for the others. From 100 to 10,000 it makes little difference.
FIRST_LAYER = 1000.0


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    Attributes:
        ratio: of the value heads that become the first layer's.
        choose: which heads keep a value and which pattern takes which first-layer head; else the first heads stay.
        refit_lent: the values that the first layer lends; else they are as they were.
        refit_values: W_V of the kept heads, too; else W_O alone.
        sweeps: turns of W_O and W_V, at most.
        ridge: pull towards the source's weights, as a share of the mean of the Gram matrix's diagonal.
        batch_size: sequences at a time.
    """

    ratio: float = 0.5
    choose: bool = True
    refit_lent: bool = True
    refit_values: bool = True
    sweeps: int = 30
    ridge: float = 3e-3
    batch_size: int = 8


class Streams:
    """On disk, for all tokens, [sequences, length, hidden_size] each: the residual streams of the source and of the
    converted model, and what the first layer makes its values from."""

    def __init__(self, directory: Path, shape: tuple[int, ...]):
        self.source, self.converted, self.first = (
            np.memmap(directory / name, dtype=np.float32, mode="w+", shape=shape)
            for name in ("source", "converted", "first")
        )

    def __getitem__(self, batch: slice) -> tuple[Tensor, Tensor, Tensor]:
        source, converted, first = (torch.from_numpy(s[batch]) for s in (self.source, self.converted, self.first))
        return source, converted, first


@torch.no_grad()
def calibrated(
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    tokens: np.ndarray,
    settings: Settings = Settings(),
    progress: Progress = lambda done, total: None,
) -> tuple[LeanConfig, dict[str, Tensor], dict[str, Any]]:
    """Converts a model of multi- or grouped-query attention.

    Args:
        tokens: [sequences, length], calibration tokens.
        progress: is called with passes over the tokens done and in all.

    Returns:
        the configuration with first-layer values, its tensors in float32, and a report: `lent_values`, whether those
        were fitted (not where their Gram matrix would be too large), and `layers`, of each `kept`, `paired` (source
        head -> first-layer head) and `missed` (squared error of the attention's output over its square).

    Raises:
        LeanError: a source that cannot be converted, or activations that are not finite.
    """
    new = target_config(config, settings.ratio)
    model, result = (LeanForCausalLM(c).eval() for c in (_eager(config), new))
    model.load_state_dict({n: t.float() for n, t in _with_head(config, tensors).items()})
    done: dict[str, Tensor] = {n: tensors[n].float() for n in new.plan.parameter_shapes if n in tensors}
    heads = partial(split_heads, config, tensors)
    layers = range(config.num_hidden_layers)
    n, kept = config.num_key_value_heads, new.plan.layers[1].computed_value_heads
    assert n is not None and config.head_dim is not None
    columns = kept * config.head_dim + (n - kept) * (config.hidden_size + config.attention_bias)
    refit_lent = settings.refit_lent and config.num_attention_heads // n * columns < LARGEST_GRAM
    in_all = 1 + len(layers) * (settings.choose + refit_lent + 2)
    passes = iter(range(1, in_all + 1))

    def passed() -> None:
        progress(next(passes), in_all)

    def put(layer: int, found: KeptHeads) -> None:
        compute = assemble_tensors(config, tensors, {layer: found}.get)
        for name in done:
            if name.startswith(f"model.layers.{layer}.self_attn."):
                done[name] = compute(name).float()

    with tempfile.TemporaryDirectory() as directory:
        fit = _Fit(model, result, tokens, Path(directory), settings)
        fit.start()
        passed()
        orders = [tuple(range(n))] * len(layers)
        lent = _rows(heads(0))[kept:]
        if settings.choose:
            for layer in layers:
                if layer:
                    orders[layer] = choose(fit.costs(layer, heads(layer), lent))
                fit.advance_source(layer)
                passed()
            fit.rewind()
        if refit_lent:
            fits = []
            for layer in layers:
                fits.append(fit.shares(layer, heads(layer), kept, orders[layer]))
                passed()
            lent = fit_lent(fits, lent, settings.ridge, settings.sweeps)
            del fits
            fit.rewind()
        report = []
        for layer in layers:
            if layer or refit_lent:
                found, missed = fit.attention(layer, heads(layer), lent, orders[layer])
                put(layer, found)
                paired = {orders[layer][place]: place for place in range(kept, n)}
                told = {"kept": sorted(orders[layer][:kept]), "paired": paired} if layer else {}
                report.append({"layer": layer, **told, "missed": missed})
            passed()
            fit.advance(layer, done)
            passed()
    return new, done, {"lent_values": refit_lent, "layers": report}


def choose(costs: np.ndarray) -> tuple[int, ...]:
    """The order of a layer's heads under which least is lost: those that keep their value, then those that take the
    first layer's, in the order of these.

    Args:
        costs: [heads, lent heads], what is lost when a pattern takes a first-layer head. Keeping a value costs nothing.
    """
    last = linear_sum_assignment(costs.T)[1].tolist()
    return (*(head for head in range(len(costs)) if head not in last), *last)


class _Fit:
    def __init__(self, source: Any, result: Any, tokens: np.ndarray, directory: Path, settings: Settings):
        self.source, self.result = source.model, result.model
        self.config = source.config
        self.tokens, self.directory, self.settings = tokens, directory, settings
        self.streams = Streams(directory, (*tokens.shape, self.config.hidden_size))
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

    def start(self) -> None:
        """The embedding, and the input of the first layer's values."""
        for batch in self.batches():
            hidden = self.source.embed_tokens(torch.from_numpy(self.tokens[batch].astype(np.int64)))
            if self.source.embed_positions is not None:
                hidden = hidden + self.source.embed_positions(self.positions)
            self.streams.source[batch] = self.streams.converted[batch] = hidden.numpy()
            self.streams.first[batch] = self.source.layers[0].input_layernorm(hidden).numpy()

    def rewind(self) -> None:
        """The source's stream back to the embedding, where the converted one still is."""
        self.streams.source[:] = self.streams.converted

    def advance_source(self, layer: int) -> None:
        for batch in self.batches():
            source = torch.from_numpy(self.streams.source[batch])
            self.streams.source[batch] = _finite(self._block(self.source, layer, source, {})[0], layer).numpy()

    def advance(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Both streams through `layer`, the converted one with its new weights."""
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self.result.layers[layer].load_state_dict(own)
        self.advance_source(layer)
        for batch in self.batches():
            _, converted, first = self.streams[batch]
            values = self.result.layers[0].self_attn.v_proj(first)
            values = values.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            output, _ = self._block(self.result, layer, converted, {0: KeyValues(None, values, values)})
            self.streams.converted[batch] = _finite(output, layer).numpy()

    def costs(self, layer: int, heads: ValueHeads, lent: Tensor) -> np.ndarray:
        """[heads, lent heads]: what is lost of a head's contribution when its pattern is given that value and W_O is
        fitted again; on the source's stream."""
        n, group, _, width = heads.output.shape
        columns = group * width
        gram = torch.zeros(n, len(lent), columns, columns, dtype=torch.float64)
        cross, own = torch.zeros_like(gram), torch.zeros(n, columns, columns, dtype=torch.float64)
        values = _rows(heads)
        for batch in self.batches():
            source, _, first = self.streams[batch]
            normed, _, patterns = self._attended(layer, source)
            own_values, lent_values = self._values(normed, values), self._values(first, lent)
            by_head = patterns.unflatten(1, (n, group))
            for head in range(n):
                attended = torch.einsum("bgts,bsk->btgk", by_head[:, head], own_values[head]).flatten(0, 1).flatten(1)
                features = torch.einsum("bgts,pbsk->pbtgk", by_head[:, head], lent_values).flatten(1, 2).flatten(2)
                own[head] += (attended.T @ attended).double()
                gram[head] += (features.mT @ features).double()
                cross[head] += (features.mT @ attended).double()
        flat = heads.output.transpose(2, 3).flatten(1, 2)  # [n, columns, d]
        weight = flat @ flat.mT
        size = torch.einsum("hij,hij->h", own, weight)
        solved = ridge(gram, cross, torch.zeros_like(cross), self.settings.ridge)
        return (size[:, None] - torch.einsum("hpij,hpik,hkj->hp", cross, solved, weight)).clamp_min(0).numpy()

    def shares(self, layer: int, heads: ValueHeads, kept: int, order: tuple[int, ...]) -> LentShare:
        """What a layer has a say in of the values that are lent: its source's attention as features of those, and of
        the kept heads as they are. The source's stream goes through the layer."""
        values = _rows(heads)

        def features(place: int, normed: Tensor, first: Tensor) -> Tensor:
            return self._values(normed, values[order[place]][None])[0] if place < kept else self._biased(first)

        gram, cross, size = self._gram(layer, order, features)
        self.advance_source(layer)
        stored = np.memmap(self.directory / f"gram{layer}", dtype=np.float64, mode="w+", shape=tuple(gram.shape))
        stored[:] = gram
        energy = float(np.square(self.streams.source, dtype=np.float64).sum())
        output = self._output(layer, heads, kept, order)
        bias = self._output_bias(layer)
        weight = (1.0 if layer else FIRST_LAYER) / (energy or 1)
        return LentShare(torch.from_numpy(stored), cross, size, output, bias, kept, weight)

    def attention(self, layer: int, heads: ValueHeads, lent: Tensor, order: tuple[int, ...]) -> tuple[KeptHeads, float]:
        """W_O of all heads and, in turns, W_V of the kept ones, from one set of Gram matrices.

        The features of a kept head are its pattern times the input, and one constant for a value bias; those of another
        its pattern times a value that is lent.
        """
        n, group, d, width = heads.output.shape
        kept = n - len(lent)
        value = _rows(heads)[list(order[:kept])]
        others = len(lent) * group * width
        refit = self.settings.refit_values and kept * group * value.shape[1] + others < LARGEST_GRAM
        # With W_V fixed, what the kept heads give W_O stands in for their input.
        start = value if refit else torch.eye(width, dtype=torch.float64).expand(kept, -1, -1)

        def features(place: int, normed: Tensor, first: Tensor) -> Tensor:
            if place >= kept:
                return self._values(first, lent[place - kept][None])[0]
            return self._biased(normed) if refit else self._values(normed, value[place][None])[0]

        gram, cross, size = self._gram(layer, order, features, converted=True)
        system = System(gram, cross, size, kept, n, group, self.settings.ridge)
        sweeps = self.settings.sweeps if refit else 1
        output, bias = self._output(layer, heads, kept, order), self._output_bias(layer)
        solved, output, bias, missed = system.solve(start, output, bias, sweeps)
        rows = solved if refit else value
        if not layer:
            rows = torch.cat((rows, lent))
        found = rows[:, :d].transpose(1, 2), rows[:, d] if self.config.attention_bias else None
        return KeptHeads(*found, output.transpose(2, 3), order, bias), missed

    def _gram(
        self,
        layer: int,
        order: tuple[int, ...],
        features: Callable[[int, Tensor, Tensor], Tensor],
        converted: bool = False,
    ) -> tuple[Tensor, Tensor, float]:
        """Gram matrix of the heads' features, by place, each under its pattern; its products with the target; and the
        target's square. `features` makes a place's [batch, T, columns] of the layer's input and of the first's."""
        constant = self._output_bias(layer) is not None
        gram: Tensor | None = None
        cross: Any = 0
        size = 0.0
        for batch in self.batches():
            source, stream, first = self.streams[batch]
            normed, target, patterns = self._attended(layer, source)
            if converted:
                if self.config.attention_skip:
                    target = target + source - stream
                normed, _, patterns = self._attended(layer, stream)
            by_head = patterns.unflatten(1, (len(order), -1))
            parts = [
                torch.einsum("bgts,bsk->btgk", by_head[:, head], features(place, normed, first)).flatten(2)
                for place, head in enumerate(order)
            ]
            if constant:
                parts.append(torch.ones_like(normed[..., :1]))
            joined, flat = torch.cat(parts, dim=-1).flatten(0, 1), target.flatten(0, 1)
            if gram is None:
                gram = torch.zeros(joined.shape[1], joined.shape[1], dtype=torch.float64)
            for start in range(0, len(gram), GRAM_ROWS):  # the upper half; the lower is the same
                rows = slice(start, start + GRAM_ROWS)
                gram[rows, start:] += joined[:, rows].T @ joined[:, start:]
            cross += (joined.T @ flat).double()
            size += float(flat.double().square().sum())
        assert gram is not None
        return gram.triu_().add_(gram.triu(1).T), cross, size

    def _output(self, layer: int, heads: ValueHeads, kept: int, order: tuple[int, ...]) -> Tensor:
        """W_O [n, group, width, d] by place. That of a head which takes another value starts at zero; the first layer
        keeps its own."""
        output = heads.output[list(order)].transpose(2, 3).clone()
        if layer:
            output[kept:] = 0
        return output

    def _output_bias(self, layer: int) -> Tensor | None:
        bias = self.source.layers[self.source.plan.layers[layer].block].self_attn.o_proj.bias
        return None if bias is None else bias.double()

    def _biased(self, inputs: Tensor) -> Tensor:
        """With a column of ones where values have a bias."""
        return torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1) if self.config.attention_bias else inputs

    def _values(self, inputs: Tensor, rows: Tensor) -> Tensor:
        """[heads, batch, T, width] of inputs [batch, T, d] and W_V [heads, d, width], with a bias as one more row."""
        return torch.einsum("btd,hdk->hbtk", self._biased(inputs), rows.float())

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


def _rows(heads: ValueHeads) -> Tensor:
    """W_V itself, [heads, d, width], with its bias as one more row."""
    value = heads.value.transpose(1, 2)
    return value if heads.value_bias is None else torch.cat((value, heads.value_bias[:, None]), dim=1)


def _finite(output: Tensor, layer: int) -> Tensor:
    if not output.isfinite().all():
        raise LeanError(f"the activations after layer {layer} are not finite; is the source a trained model?")
    return output


def _eager(config: LeanConfig) -> LeanConfig:
    """The same model, whose attention hands out its patterns."""
    return with_fields(config, attn_implementation="eager")


def _with_head(config: LeanConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensors[name] for name in config.plan.parameter_shapes}
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found
