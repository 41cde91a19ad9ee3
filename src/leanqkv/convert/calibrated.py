"""Calibrated conversion to first-layer values: attention's patterns stay, its values and W_O are fitted to text.

Ours. Three fits from Gram matrices of activations on calibration tokens, all pulled towards the source's weights:

1. Choose which heads of a layer keep a value, and the first-layer head for each of the others: one assignment problem.
2. Fit the values that the first layer shares to all layers at once.
3. Layer by layer, on the stream of the model as converted so far, fit W_O of all heads and W_V of the layer's own
   heads. The target is the source's residual stream.

No gradient of a loss is taken; memory does not grow with the number of calibration tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..checkpoints.write import Progress
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from .activations import CPU, Activations, Layers
from .heads import (
    ConvertedHeads,
    Made,
    ValueHeads,
    assemble_tensors,
    check_reads_the_stream,
    immovable,
    output_with_bias,
    split_heads,
    target_config,
    value_with_bias,
)
from .least_squares import LayerTerm, add_gram, fit_values, ridge
from .scratch import ADVICE, check_space, map_tensor
from .targets import SkipV1Options

DEFAULTS = SkipV1Options()
# The largest Gram matrix from which values are fitted, in columns: 2 GB in float64.
LARGEST_GRAM = 16_384
# Values are fitted where a product of the layers' Gram matrices with them takes so many operations at most. GPT-2 124M
# takes 5 billion, SmolLM2-135M 11 and 23.
LARGEST_STEP = 8e9
# How much more an error of the first layer counts when the values that it shares are fitted. All layers build on its
# output; the part of its values that it does not use is free for the others. From 100 to 10,000 it makes little
# difference.
FIRST_LAYER_WEIGHT = 1000.0
# A fit stops when a step changes what it misses, as a share, or the values by less.
SHARED_TOLERANCE, LAYER_TOLERANCE = 1e-6, 1e-7


@torch.no_grad()
def calibrated(
    config: LeanConfig,
    tensors: Mapping[str, Tensor],
    tokens: np.ndarray,
    settings: SkipV1Options = DEFAULTS,
    *,
    progress: Progress = lambda done, total: None,
    message: Callable[[str], None] = lambda text: None,
) -> Made:
    """Convert a model of multi-head or grouped-query attention.

    Streams and Gram matrices lie in the temporary directory: 12 bytes for each token and unit of hidden_size, and, for
    the shared values, 8 bytes for each entry of one matrix a layer.

    Args:
        tokens: [sequences, length], calibration tokens.
        progress: called with passes over the tokens done and in all.
        message: called with what is done next.

    Returns:
        the configuration with first-layer values, its tensors in float32, and a report: `lent_values`, whether the
        shared values were fitted (not where the Gram matrix would be too large), and `layers`, for each `kept` (the
        heads that keep a value), `paired` (source head -> first-layer head), `tied_by` (the query or key that keeps
        heads from being chosen, if any) and `missed` (squared error of the attention's output over its square).

    Raises:
        LeanError: the source cannot be converted, the temporary directory has too little space, or activations are
            not finite.
    """
    with tempfile.TemporaryDirectory() as directory:
        calibration = Calibration(config, tensors, tokens, settings, Path(directory), progress, message)
        orders = calibration.choose_orders()
        shared = calibration.fit_shared_values(orders)
        result, layers = calibration.refit_layers(orders, shared)
    return calibration.target, result, {"lent_values": calibration.fits_shared, "layers": layers}


def calibrated_target(config: LeanConfig, ratio: float) -> LeanConfig:
    """Return the source's configuration with first-layer values.

    Raises:
        LeanError: the source cannot be converted, or its blocks read more than the residual stream; says why.
    """
    target = target_config(config, ratio)
    check_reads_the_stream(config)
    return target


def choose(costs: np.ndarray) -> tuple[int, ...]:
    """Return the cheapest order of a layer's heads: those that keep their value, then those for each first-layer head.

    Args:
        costs: [heads, shared heads], the loss when a pattern takes a first-layer head. Keeping a value costs nothing.
    """
    last = linear_sum_assignment(costs.T)[1].tolist()
    return (*(head for head in range(len(costs)) if head not in last), *last)


@dataclass(eq=False)
class Calibration:
    """The three fits, in the order of the methods, on activations that start at the embedding.

    Values are matrices [heads, inputs, head_dim]: the inputs are hidden_size columns and, where values have a bias, one
    of ones. An order is a tuple with the source's head at each place; the first `num_own` places keep a value.
    """

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    tokens: np.ndarray
    settings: SkipV1Options
    directory: Path
    progress: Progress = lambda done, total: None
    message: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        config, settings = self.config, self.settings
        self.target = calibrated_target(config, settings.ratio)
        self.ties = [immovable(layer) for layer in config.plan.layers]
        self.num_heads, self.num_own = config.num_key_value_heads, self.target.plan.layers[1].computed_value_heads
        self.group = config.num_attention_heads // self.num_heads
        self.num_shared, inputs = self.num_heads - self.num_own, config.hidden_size + config.attention_bias
        shared_columns = self.group * (self.num_own * config.head_dim + self.num_shared * inputs)
        own_columns = self.group * (self.num_own * inputs + self.num_shared * config.head_dim)
        step = 2 * config.num_hidden_layers * (self.group * inputs) ** 2 * config.head_dim
        shared_step, own_step = self.num_shared * step, self.num_own * step
        self.fits_shared = settings.refit_lent and shared_columns < LARGEST_GRAM and shared_step < LARGEST_STEP
        self.fits_own = settings.refit_values and own_columns < LARGEST_GRAM and own_step < LARGEST_STEP
        self.chooses = settings.choose and None in self.ties[1:]
        self._passes, self._passes_done = config.num_hidden_layers * (2 * self.chooses + 2 * self.fits_shared + 3), 0
        grams = 8 * config.num_hidden_layers * (shared_columns + config.attention_output_bias) ** 2 * self.fits_shared
        saved = f"save {grams / 1e6:,.1f} MB by `refit_lent=False`, " if grams else ""
        check_space(self.directory, 12 * self.tokens.size * config.hidden_size + grams, f"{saved}or {ADVICE}")
        self.message("embedding the text")
        self.progress(0, self._passes)
        source = Layers(config, self.tensors, self.tokens.shape[1], CPU)
        self.activations = Activations(source, self.target, self.tokens, settings.batch_size, self.directory)
        self.first_layer_values = value_with_bias(self._heads(0))[self.num_own :]

    def choose_orders(self) -> list[tuple[int, ...]]:
        """Return the order of every layer's heads; the first layer and tied heads keep theirs."""
        orders = [tuple(range(self.num_heads))] * self.config.num_hidden_layers
        if self.chooses:
            for layer in self._layers("choosing heads of", 2):
                if layer and not self.ties[layer]:
                    orders[layer] = choose(self.costs(layer))
                self.activations.advance_source(layer)
            self.activations.rewind_source()
        return orders

    def costs(self, layer: int) -> np.ndarray:
        """Return [heads, shared heads]: how much of a head's contribution is lost with each first-layer value.

        The head keeps its pattern, and its W_O is fitted again; on the source's stream, which is at `layer`.
        """
        heads = self._heads(layer)
        values, columns = value_with_bias(heads), self.group * heads.output.shape[-1]
        gram = torch.zeros(self.num_heads, self.num_shared, columns, columns, dtype=torch.float64)
        cross, own = torch.zeros_like(gram), torch.zeros(self.num_heads, columns, columns, dtype=torch.float64)
        for patterns, _, inputs, first in self.activations.attend(layer):
            own_values, shared_values = make_values(inputs, values), make_values(first, self.first_layer_values)
            by_head = patterns.unflatten(1, (self.num_heads, self.group))
            for head in range(self.num_heads):
                attended = torch.einsum("bgts,bsk->btgk", by_head[:, head], own_values[head]).flatten(0, 1).flatten(1)
                features = torch.einsum("bgts,pbsk->pbtgk", by_head[:, head], shared_values).flatten(1, 2).flatten(2)
                own[head] += (attended.T @ attended).double()
                gram[head] += (features.mT @ features).double()
                cross[head] += (features.mT @ attended).double()
        flat = heads.output.transpose(2, 3).flatten(1, 2)  # [heads, columns, hidden_size]
        weight = flat @ flat.mT
        size = torch.einsum("hij,hij->h", own, weight)
        solved = ridge(gram, cross, torch.zeros_like(cross), self.settings.ridge)
        return (size[:, None] - torch.einsum("hpij,hpik,hkj->hp", cross, solved, weight)).clamp_min(0).numpy()

    def fit_shared_values(self, orders: list[tuple[int, ...]]) -> Tensor:
        """Return the values that the first layer shares, fitted to all layers at once; their own values stay.

        The target of every layer is its source's attention output.
        """
        if not self.fits_shared:
            return self.first_layer_values
        terms = []
        for layer in self._layers("fitting shared values to", 2):
            term = self._term(layer, orders[layer], self._own_values(layer, orders[layer]), None)
            self.activations.advance_source(layer)
            weight = (1.0 if layer else FIRST_LAYER_WEIGHT) / (self.activations.source_energy() or 1)
            # The Gram matrices of all layers are needed at once: they wait on disk.
            gram = map_tensor(self.directory / f"gram{layer}", term.gram)
            terms.append(replace(term, gram=gram, weight=weight))
        shared, _, _ = fit_values(
            *(terms, self.first_layer_values, self.settings.ridge, self.settings.sweeps, SHARED_TOLERANCE),
            on_iteration=lambda iteration: self.message(f"fitting shared values: iteration {iteration}"),
        )
        self.activations.rewind_source()
        return shared

    def refit_layers(self, orders: list[tuple[int, ...]], shared: Tensor) -> tuple[LazyTensors, list[dict[str, Any]]]:
        """Return the converted model's tensors in float32, and a report on each layer that was refitted."""
        converted: dict[int, ConvertedHeads] = {}
        assemble, report = assemble_tensors(self.config, self.tensors, converted.get), []
        result = LazyTensors(parameter_shapes(self.target), lambda name: assemble(name).float())
        for layer in self._layers("refitting", 3):
            if layer or self.fits_shared:
                order = orders[layer]
                choice: dict[str, Any] = {}
                converted[layer], error = self.refit(layer, order, shared)
                if layer:
                    paired = {order[place]: place for place in range(self.num_own, self.num_heads)}
                    choice = {"kept": sorted(order[: self.num_own]), "paired": paired}
                    if self.settings.choose and self.ties[layer]:
                        choice["tied_by"] = self.ties[layer]
                report.append({"layer": layer, **choice, "missed": error})
            self.activations.advance(layer, result)
        return result, report

    def refit(self, layer: int, order: tuple[int, ...], shared: Tensor) -> tuple[ConvertedHeads, float]:
        """Return the heads of `layer` with W_O and the own values fitted, and the share of the target that is missed.

        Args:
            shared: the first layer's values, for the other heads.
        """
        values, sweeps = self._own_values(layer, order), self.settings.sweeps
        # Own values that stay are part of the features: W_O alone is left to fit.
        term = self._term(layer, order, None if self.fits_own else values, shared)
        start, updates = (values, max(sweeps - 1, 0)) if self.fits_own else (values[:0], 0)
        fitted, (output,), error = fit_values([term], start, self.settings.ridge, updates, LAYER_TOLERANCE)
        if self.fits_own:
            values = fitted
        if not layer:
            values = torch.cat((values, shared))
        d, rows = self.config.hidden_size, self.config.num_attention_heads * values.shape[2]
        heads = ConvertedHeads(
            values[:, :d].transpose(1, 2),
            values[:, d] if self.config.attention_bias else None,
            output[:rows].view(self.num_heads, self.group, -1, d).transpose(2, 3),
            order,
            output[rows] if self.config.attention_output_bias else None,
        )
        return heads, max(error, 0.0) / (term.target_square or 1)  # rounding may leave less than nothing

    def _term(
        self, layer: int, order: tuple[int, ...], own_values: Tensor | None, shared_values: Tensor | None
    ) -> LayerTerm:
        """The least-squares term of a layer's attention.

        None stands for the values that are to be fitted: the shared ones on the source's stream, the layer's own on the
        converted one. The features of a head are its pattern times its values, or times the inputs of values that are
        to be fitted. A constant follows where the output has a bias.
        """
        gram: Tensor | None = None
        cross: Any = 0
        target_square = 0.0
        for patterns, target, inputs, first in self.activations.attend(layer, shared_values is not None):
            by_place = [
                *([inputs] * self.num_own if own_values is None else make_values(inputs, own_values)),
                *([first] * self.num_shared if shared_values is None else make_values(first, shared_values)),
            ]
            by_head = patterns.unflatten(1, (self.num_heads, self.group))
            parts = [
                torch.einsum("bgts,bsk->btgk", by_head[:, head], value).flatten(2)
                for head, value in zip(order, by_place, strict=True)
            ]
            if self.config.attention_output_bias:
                parts.append(torch.ones_like(target[..., :1]))
            features, flat_target = torch.cat(parts, dim=-1).flatten(0, 1), target.flatten(0, 1)
            if gram is None:
                gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
            add_gram(gram, features)
            cross += (features.T @ flat_target).double()
            target_square += float(flat_target.double().square().sum())
        assert gram is not None
        gram.triu_().add_(gram.triu(1).T)
        leading = 0 if own_values is None else self.group * own_values.shape[0] * own_values.shape[2]
        return LayerTerm(gram, cross, target_square, self._output(layer, order), self.group, leading)

    def _heads(self, layer: int) -> ValueHeads:
        return split_heads(self.config, self.tensors, layer)

    def _own_values(self, layer: int, order: tuple[int, ...]) -> Tensor:
        return value_with_bias(self._heads(layer))[list(order[: self.num_own])]

    def _output(self, layer: int, order: tuple[int, ...]) -> Tensor:
        """W_O by place, [rows, hidden_size], with its bias as the last row.

        Heads that take a first-layer value start at zero; the first layer keeps its own.
        """
        output = self._heads(layer).output[list(order)].transpose(2, 3).clone()
        if layer:
            output[self.num_own :] = 0
        return output_with_bias(self.config, self.tensors, layer, output)

    def _layers(self, phase: str, passes: int) -> Iterator[int]:
        """Yield every layer, and report the passes over the tokens that each takes."""
        for layer in range(self.config.num_hidden_layers):
            self.message(f"{phase} layer {layer + 1} of {self.config.num_hidden_layers}")
            yield layer
            self._passes_done += passes
            self.progress(self._passes_done, self._passes)


def make_values(inputs: Tensor, matrices: Tensor) -> Tensor:
    """Return values [heads, batch, length, head_dim] from inputs [batch, length, inputs] and value matrices."""
    return torch.einsum("btd,hdk->hbtk", inputs, matrices.float())
