"""Calibrated merging of value heads: two key heads of a layer read one value, which is fitted to stand for both.

Ours. Two sweeps over the layers, with one layer's weights in memory at a time:

1. On the source's stream, add up Gram matrices of attended values. For every pair of heads they give the best value
   head for both patterns, a weighted low-rank approximation, and what is lost by it. The cheapest pairs of all layers
   are merged.
2. On the stream of the model as converted so far, fit W_O by ridge regression to the source's stream. Its strength is
   the one that misses least on sequences held out from the fit.

A token counts by the inverse mean square of its stream, as what follows reads the normed stream. Nothing is trained.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..checkpoints.write import Progress
from ..errors import LeanError
from ..files import disk_full_is_an_error, read_json, replacing, write_json
from ..model.block import LeanBlock
from ..model.config import LeanConfig
from ..presets.edit import with_fields
from .activations import Layers, Recorder, correction, recording
from .heads import check_convertible, check_reads_the_stream, split_heads
from .least_squares import ridge
from .scratch import Stream

# Every fourth sequence is held out from the fit of W_O.
HELD_OUT = 4
# Strengths of the pull towards the merged source's W_O, as shares of the mean of the Gram matrix's diagonal.
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# A token is a sink where its stream's mean square is so many times the median.
SINK = 100.0
# Where the disk is full; the files lie beside the new model.
ADVICE = "choose an --out on a larger disk"
# Directions in which attended values are smaller than this share of the largest are left alone.
SMALLEST = 1e-9


@dataclass(frozen=True)
class Pair:
    """Value heads of one layer that can be merged.

    Attributes:
        heads: the first one's place holds the merged value.
        cost: squared error of the attention's output, weighted, per token and unit of hidden_size.
        combine: [2 * head_dim, head_dim]: both values, side by side, times this is the merged value.
        restore: [head_dim, 2 * head_dim]: the merged value times this is nearly both values, side by side.
    """

    layer: int
    heads: tuple[int, int]
    cost: float
    combine: Tensor
    restore: Tensor


def merged_target(config: LeanConfig, pairs: Mapping[int, list[tuple[int, int]]]) -> LeanConfig:
    """Return the source's configuration with the pairs of every layer merged."""
    rows = [[layer, second, layer, first] for layer in sorted(pairs) for first, second in sorted(pairs[layer])]
    return with_fields(config, key_value={"type": "borrowed_values", "heads": rows})


def count_merges(config: LeanConfig, ratio: float, layers: tuple[int, ...] | None) -> int:
    """Return how many pairs are merged: as many as SkipV1Former of that ratio borrows heads in those layers.

    Raises:
        LeanError: the source cannot be converted, or there is nothing to merge; says why.
    """
    check_convertible(config)
    check_reads_the_stream(config)
    heads, last = config.num_key_value_heads, config.num_hidden_layers
    assert heads is not None
    if layers is not None and (wrong := [layer for layer in layers if not 0 <= layer < last]):
        raise LeanError(f"--layers: the model has layers 0 to {last - 1}, found {wrong[0]}")
    number = last - 1 if layers is None else len(set(layers))
    if not number:
        raise LeanError("no layer's values would be merged, as in a model of one layer; name its layers by --layers")
    per_layer = floor(ratio * heads) if 0 <= ratio <= 1 else 0
    if not per_layer or 2 * per_layer > heads:
        raise LeanError(
            f"a ratio of {ratio} merges {per_layer} pairs of {heads} value heads a layer. At least one is merged, and "
            "each head with one other at most: choose another --ratio, or a model with more value heads"
        )
    return per_layer * number


def choose_pairs(candidates: list[Pair], count: int) -> dict[int, list[Pair]]:
    """Return the `count` cheapest pairs by layer; a head is in one pair at most.

    Raises:
        LeanError: there are too few.
    """
    chosen: dict[int, list[Pair]] = {}
    taken: set[tuple[int, int]] = set()
    for pair in sorted(candidates, key=lambda candidate: (candidate.cost, candidate.layer, candidate.heads)):
        places = {(pair.layer, head) for head in pair.heads}
        if len(taken) < 2 * count and not places & taken:
            chosen.setdefault(pair.layer, []).append(pair)
            taken |= places
    if len(taken) < 2 * count:
        raise LeanError(f"only {len(taken) // 2} disjoint pairs of value heads can be merged, {count} are asked for")
    return chosen


def fit_pair(gram: Tensor, weight: Tensor, layer: int, heads: tuple[int, int], scale: float) -> Pair:
    """Return the pair whose merged value approximates both best.

    The weighted low-rank approximation of both values [tokens, 2 * head_dim] has the Gram matrix of attended values on
    the left and W_O W_O^T on the right.

    Args:
        gram: [2 * head_dim, 2 * head_dim], of both values under the patterns of both heads, in float64.
        weight: the same shape, block diagonal: W_O W_O^T of both heads, summed over their query heads.
        scale: what the cost is divided by.
    """
    width = len(gram) // 2
    left, left_inverse = _roots(gram)
    right, right_inverse = _roots(weight)
    first, sizes, last = torch.linalg.svd(left @ right)
    combine = left_inverse @ (first[:, :width] * sizes[:width])
    restore = last[:width] @ right_inverse
    return Pair(layer, heads, float(sizes[width:].square().sum()) / scale, combine, restore)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root, and its inverse on the directions that count."""
    values, vectors = torch.linalg.eigh(matrix)
    counts = values > SMALLEST * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    roots = values.clamp_min(0).sqrt()
    inverse = torch.where(counts, 1 / roots.where(counts, torch.ones_like(roots)), 0)
    return (vectors * roots) @ vectors.T, (vectors * inverse) @ vectors.T


class AttendedGrams:
    """Gram matrices of one layer's values under its patterns, summed over tokens and the query heads of each group.

    Sums in float64 are on the CPU: Apple's GPUs have no float64.

    Attributes:
        alone: [heads, heads, head_dim, head_dim], float64: under head g's patterns, of the values of head k.
        cross: the same shape: under head g's patterns, of the values of heads g and k.
    """

    def __init__(self, heads: int, width: int):
        self.alone = torch.zeros(heads, heads, width, width, dtype=torch.float64)
        self.cross = torch.zeros_like(self.alone)

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a batch; `weight` [batch, length] multiplies each token's values."""
        values = recorder.values
        heads, width = values.shape[1], values.shape[3]
        side_by_side = values.transpose(1, 2).flatten(2)  # [batch, length, heads * head_dim]
        by_group = recorder.patterns.unflatten(1, (heads, -1))
        for head in range(heads):
            attended = by_group[:, head] @ side_by_side[:, None] * weight[:, None, :, None]
            columns = attended.flatten(0, 2).unflatten(1, (heads, width)).transpose(0, 1)  # [heads, rows, head_dim]
            self.alone[head] += (columns.mT @ columns).cpu().double()
            self.cross[head] += (columns[head].T @ columns).cpu().double()

    def of_pair(self, first: int, second: int) -> Tensor:
        """Return the Gram matrix of both values, side by side, under the patterns of both heads."""
        corner = self.cross[first, second] + self.cross[second, first].T
        upper = torch.cat((self.alone[first, first] + self.alone[second, first], corner), dim=1)
        lower = torch.cat((corner.T, self.alone[first, second] + self.alone[second, second]), dim=1)
        return torch.cat((upper, lower))


@dataclass
class Fit:
    """Sums from which W_O is fitted, or judged; all weighted, in float64.

    Attributes:
        gram: of the features, [columns, columns]; cross: with the target, [columns, hidden_size].
        target: the target's sum of squares.
    """

    gram: Any = 0.0
    cross: Any = 0.0
    target: float = 0.0

    def add(self, features: Tensor, target: Tensor) -> None:
        """Add tokens: features [tokens, columns] and their target [tokens, hidden_size]."""
        self.gram = self.gram + (features.T @ features).cpu().double()
        self.cross = self.cross + (features.T @ target).cpu().double()
        self.target += float(target.cpu().double().square().sum())

    def missed(self, output: Tensor) -> float:
        """Return the share of the target's squares that `output` [columns, hidden_size] misses."""
        error = self.target + float((output * (self.gram @ output - 2 * self.cross)).sum())
        return max(error, 0.0) / (self.target or 1)


def fit_output(fitted: Fit, held_out: Fit, start: Tensor) -> tuple[Tensor, float | None, float]:
    """Return W_O, the strength of its pull towards `start` that misses least on held-out tokens, and what it misses.

    The strength is None where `start` itself misses least.
    """
    options: list[tuple[float, float | None, Tensor]] = [(held_out.missed(start), None, start)]
    for strength in RIDGES:
        output = ridge(fitted.gram, fitted.cross, start, strength)
        options.append((held_out.missed(output), strength, output))
    missed, best, output = min(options, key=lambda option: option[0])
    if best is not None:
        output = ridge(fitted.gram + held_out.gram, fitted.cross + held_out.cross, start, best)
    return output, best, missed


class Merging:
    """The conversion's two sweeps. Its files in `directory` let it go on at the layer where it was interrupted.

    Args:
        tokens: [sequences, length], calibration tokens.
        job: what decides the result; files of another job are not used.

    Attributes:
        earlier_seconds: what the interrupted runs that this one goes on from have taken.
    """

    def __init__(
        self,
        config: LeanConfig,
        tensors: Mapping[str, Tensor],
        tokens: np.ndarray,
        directory: Path,
        *,
        ratio: float = 0.5,
        layers: tuple[int, ...] | None = None,
        batch_size: int = 4,
        device: torch.device | None = None,
        job: Mapping[str, Any] | None = None,
        progress: Progress = lambda done, total: None,
        message: Callable[[str], None] = lambda text: None,
    ):
        self.config, self.tensors, self.tokens, self.directory = config, tensors, tokens, directory
        self.count, self.allowed = count_merges(config, ratio, layers), layers
        if len(tokens) < HELD_OUT:
            raise LeanError(
                f"one of {HELD_OUT} sequences is held out from the fit, and the calibration tokens make {len(tokens)}. "
                "Use more --tokens, or a shorter --sequence-length"
            )
        self.batch_size, self._progress, self._message = batch_size, progress, message
        self.device = device or torch.device("cpu")
        self.source = Layers(config, tensors, tokens.shape[1], self.device)
        self._state = self._begin(json.loads(json.dumps(job or {})))
        self.earlier_seconds, self._started = float(self._state.get("seconds", 0)), time.perf_counter()

    @torch.no_grad()
    def run(self) -> tuple[LeanConfig, LazyTensors, dict[str, Any]]:
        """Return configuration, tensors and report of the converted model.

        The tensors of attention are read from the files in `directory`, all others are the source's, in float32.
        """
        for layer in self._sweep("choosing"):
            self._measure(layer)
        files = [self._file("values", layer) for layer in range(self.config.num_hidden_layers)]
        chosen = choose_pairs(
            [pair for layer, file in enumerate(files) for pair in _read_pairs(file, layer)], self.count
        )
        for layer in self._sweep("fitting"):
            self._fit(layer, chosen.get(layer, []), fits=layer >= min(chosen))
        target = merged_target(self.config, {layer: [pair.heads for pair in pairs] for layer, pairs in chosen.items()})
        report = [read_json(self._file("layer", layer, "json")) for layer in range(self.config.num_hidden_layers)]

        def read(name: str) -> Tensor:
            layer, _, module = name.removeprefix("model.layers.").partition(".self_attn.")
            fitted = load_file(self._file("layer", int(layer))) if module else {}
            return fitted[module] if module in fitted else self.tensors[name].float()

        return target, LazyTensors(target.plan.parameter_shapes, read), {"merged_pairs": self.count, "layers": report}

    def _measure(self, layer: int) -> None:
        """Write the cost of merging each pair of a layer's heads, and pass the source's stream on."""
        block, heads = self.source.block(layer), self.config.num_key_value_heads
        assert heads is not None
        grams = AttendedGrams(heads, self.config.head_dim)  # type: ignore[arg-type]
        for batch in self._batches():
            stream = self._read("source", layer, batch)
            with recording(block) as recorder:
                self._stream("source", layer + 1)[batch] = self.source.run(block, layer, stream)
            grams.add(recorder, token_weights(stream, self.config.norm_eps)[0])
        pairs: dict[str, Tensor] = {}
        output = split_heads(self.config, self.tensors, layer).output.mT  # [heads, group, head_dim, hidden_size]
        weights = torch.einsum("hgkd,hgld->hkl", output, output)
        allowed = self.allowed is None or layer in self.allowed
        for first, second in combinations(range(heads if allowed else 0), 2):
            weight = torch.block_diag(weights[first], weights[second])
            scale = 2 * len(output[0]) * self.tokens.size * self.config.hidden_size
            pair = fit_pair(grams.of_pair(first, second), weight, layer, (first, second), scale)
            name = f"{first}.{second}"
            pairs |= {f"{name}.combine": pair.combine, f"{name}.restore": pair.restore.contiguous()}
            pairs[f"{name}.cost"] = torch.tensor(pair.cost, dtype=torch.float64)
        self._save("values", layer, pairs or {"none": torch.zeros(1)})

    def _fit(self, layer: int, pairs: list[Pair], fits: bool) -> None:
        """Write a layer's attention weights and its report, and pass both streams on.

        Args:
            fits: whether W_O is fitted; below the first merged layer there is nothing to make up for.
        """
        block, merged = self.source.block(layer), merge_heads(self.config, self.tensors, layer, pairs)
        places = {second: first for pair in pairs for first, second in [pair.heads]}
        features = Stream(self.directory / "features", (*self.tokens.shape, merged.output.shape[0]), ADVICE)
        fitted, held_out, sinks, sink_tokens = Fit(), Fit(), Fit(), 0
        for batch in self._batches():
            before = self._read("source", layer, batch)
            after = before if not self._differ(layer) else self._read("converted", layer, batch)
            with recording(block) as recorder:
                self._stream("source", layer + 1)[batch] = self.source.run(block, layer, before)
            target = recorder.heads.flatten(2) @ block.self_attn.o_proj.weight.T
            if self.config.attention_output_bias:
                target = target + block.self_attn.o_proj.bias
            target = target + correction(self.config, before, after)
            normed, recorder = self.source.attend(block, layer, after)
            columns = merged.features(normed, recorder.patterns, places)
            features[batch] = columns
            weight, sink = token_weights(before, self.config.norm_eps)
            columns, target = columns * weight[..., None], target * weight[..., None]
            held = torch.arange(batch.start, batch.start + len(before)) % HELD_OUT == HELD_OUT - 1
            for fit, rows in ((fitted, ~held), (held_out, held)):
                fit.add(columns[rows].flatten(0, 1), target[rows].flatten(0, 1))
            chosen = sink & held[:, None].to(sink.device)
            sinks.add(columns[chosen], target[chosen])
            sink_tokens += int(chosen.sum())
        strength: float | None = None
        output, missed = merged.output, held_out.missed(merged.output)
        if fits:
            output, strength, missed = fit_output(fitted, held_out, merged.output)
        report = {"layer": layer, "merged": [list(pair.heads) for pair in pairs], "missed": missed, "ridge": strength}
        if sinks.target:
            report |= {"sink_tokens": sink_tokens, "missed_sinks": sinks.missed(output)}
        self._advance(block, layer, features, output)
        self._save("layer", layer, merged.tensors(output))
        write_json(self._file("layer", layer, "json"), report)

    def _advance(self, block: LeanBlock, layer: int, features: Stream, output: Tensor) -> None:
        """Pass the converted stream through a layer whose attention is `features @ output`."""
        weights = output.float().to(self.device)
        for batch in self._batches():
            attended = features[batch].to(self.device) @ weights
            after = self._read("converted" if self._differ(layer) else "source", layer, batch)
            block.self_attn.forward = _returning(attended)  # type: ignore[method-assign]
            self._stream("converted", layer + 1)[batch] = self.source.run(block, layer, after)

    def _differ(self, layer: int) -> bool:
        """Whether the converted model's stream is another one before a layer: not before the first."""
        return layer > 0

    def _sweep(self, phase: str) -> Iterator[int]:
        """Yield every layer that is not done, with the source's stream before it on disk."""
        layers = self.config.num_hidden_layers
        total = 2 * layers
        for layer in range(layers):
            at = layer + (layers if phase == "fitting" else 0)
            self._progress(at, total)
            if self._state["done"] > at:
                continue
            self._message(f"{phase}: layer {layer + 1} of {layers}")
            if not layer:
                self._embed()
            yield layer
            self._state["done"] = at + 1
            self._state["seconds"] = self.earlier_seconds + time.perf_counter() - self._started
            write_json(self.directory / STATE, self._state)
        self._progress(total if phase == "fitting" else layers, total)

    def _embed(self) -> None:
        stream = self._stream("source", 0)
        for place, hidden in enumerate(self.source.embed(self.tokens)):
            stream[place : place + 1] = hidden[None]

    def _begin(self, job: dict[str, Any]) -> dict[str, Any]:
        """The state of an interrupted run of the same job, or a new one."""
        try:
            state = read_json(self.directory / STATE)
        except LeanError:
            state = {}
        if job and state.get("job") == job and self._whole(state.get("done")):
            return state
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        assert heads is not None and width is not None
        columns = self.config.num_attention_heads * width + self.config.attention_output_bias
        streams = 4 * self.tokens.size * (4 * self.config.hidden_size + columns)
        # Of each layer, every pair with its cost in float64, and W_V and W_O with their biases.
        pairs = 8 * heads * (heads - 1) // 2 * (4 * width**2 + 1)
        weights = 4 * (self.config.hidden_size + 1) * (columns + heads * width + 1)
        needed = streams + self.config.num_hidden_layers * (pairs + weights)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise LeanError(
                f"calibration needs {needed / 1e6:,.1f} MB in {self.directory.parent}, which has {free / 1e6:,.1f} MB "
                f"free. Use fewer --tokens, or {ADVICE}"
            )
        # From here on the files are another job's no more.
        state = {"job": job, "done": 0}
        write_json(self.directory / STATE, state)
        return state

    def _whole(self, done: Any) -> bool:
        """Whether all that is needed after `done` steps is there: a machine that stops may lose files of before."""
        layers = self.config.num_hidden_layers
        if done not in range(2 * layers + 1):
            return False
        measured, fitted = min(done, layers), max(done - layers, 0)
        files = [self._file("values", layer) for layer in range(measured)]
        try:
            for file in (*files, *(self._file("layer", layer) for layer in range(fitted))):
                with safe_open(file, "pt"):
                    pass
            for layer in range(fitted):
                read_json(self._file("layer", layer, "json"))
            names = [name for name, needed in (("source", done % layers), ("converted", fitted % layers)) if needed]
            return all(self._stream(name, done % layers).whole for name in names)
        except (LeanError, OSError, SafetensorError):
            return False

    def _batches(self) -> Iterator[slice]:
        for start in range(0, len(self.tokens), self.batch_size):
            yield slice(start, min(start + self.batch_size, len(self.tokens)))

    def _save(self, name: str, layer: int, tensors: dict[str, Tensor]) -> None:
        with disk_full_is_an_error(self.directory, ADVICE), replacing(self._file(name, layer)) as temporary:
            save_file(tensors, temporary)

    def _stream(self, name: str, layer: int) -> Stream:
        # A layer reads one file and writes the other, so an interruption leaves what it read as it was.
        return Stream(self.directory / f"{name}{layer % 2}", (*self.tokens.shape, self.config.hidden_size), ADVICE)

    def _read(self, name: str, layer: int, batch: slice) -> Tensor:
        return self._stream(name, layer)[batch].to(self.device)

    def _file(self, name: str, layer: int, kind: str = "safetensors") -> Path:
        return self.directory / f"{name}{layer}.{kind}"


STATE = "state.json"


@dataclass(frozen=True)
class MergedHeads:
    """A layer's values after merging, and the W_O that the fit starts from; float64.

    Attributes:
        value: [own heads, hidden_size (+ 1 with a bias), head_dim]; kept: their places.
        output: [rows (+ 1 with an output bias), hidden_size].
    """

    value: Tensor
    kept: list[int]
    output: Tensor
    value_bias: bool
    output_bias: bool
    heads: int

    def features(self, normed: Tensor, patterns: Tensor, places: Mapping[int, int]) -> Tensor:
        """Return what W_O is applied to, [batch, length, rows]: every pattern times its value, and ones for a bias."""
        inputs = torch.cat((normed, torch.ones_like(normed[..., :1])), -1) if self.value_bias else normed
        values = torch.einsum("btd,hdk->hbtk", inputs, self.value.to(normed))
        by_place = [values[self.kept.index(places.get(head, head))] for head in range(self.heads)]
        grouped = patterns.unflatten(1, (self.heads, -1))
        attended = [
            grouped[:, head] @ value[:, None] for head, value in enumerate(by_place)
        ]  # [batch, group, length, k]
        columns = torch.cat(attended, dim=1).transpose(1, 2).flatten(2)
        return torch.cat((columns, torch.ones_like(columns[..., :1])), -1) if self.output_bias else columns

    def tensors(self, output: Tensor) -> dict[str, Tensor]:
        """Return the attention tensors that change, in float32, with W_O = `output`."""
        inputs = self.value.shape[1] - self.value_bias
        rows = len(output) - self.output_bias
        result = {
            "v_proj.weight": self.value[:, :inputs].transpose(1, 2).flatten(0, 1),
            "o_proj.weight": output[:rows].T,
        }
        if self.value_bias:
            result["v_proj.bias"] = self.value[:, inputs].flatten()
        if self.output_bias:
            result["o_proj.bias"] = output[rows]
        return {name: tensor.float().contiguous() for name, tensor in result.items()}


def merge_heads(config: LeanConfig, tensors: Mapping[str, Tensor], layer: int, pairs: list[Pair]) -> MergedHeads:
    """Return a layer's heads with `pairs` merged: combined values, and W_O that restores both from them."""
    heads = split_heads(config, tensors, layer)
    value = heads.value.transpose(1, 2)
    if heads.value_bias is not None:
        value = torch.cat((value, heads.value_bias[:, None]), dim=1)
    value, output = value.clone(), heads.output.mT.clone()  # output: [heads, group, head_dim, hidden_size]
    width = value.shape[2]
    for pair in pairs:
        first, second = pair.heads
        value[first] = value[first] @ pair.combine[:width] + value[second] @ pair.combine[width:]
        output[first] = pair.restore[:, :width] @ output[first]
        output[second] = pair.restore[:, width:] @ output[second]
    gone = {pair.heads[1] for pair in pairs}
    kept = [head for head in range(len(value)) if head not in gone]
    flat = output.flatten(0, 2)
    if config.attention_output_bias:
        flat = torch.cat((flat, tensors[f"model.layers.{layer}.self_attn.o_proj.bias"].double()[None]))
    return MergedHeads(
        value[kept], kept, flat, heads.value_bias is not None, config.attention_output_bias, len(heads.value)
    )


def _returning(attended: Tensor) -> Callable[..., Any]:
    """An attention that was computed before."""
    return lambda *_, **__: (attended, None, None)


def token_weights(stream: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return what each token's error is multiplied by, [batch, length], and which tokens are sinks.

    `epsilon` is the norms': without it, a token whose embedding is zero would count for all others.
    """
    square = stream.cpu().double().square().mean(-1)
    weights, sinks = (square + epsilon).rsqrt().float(), square > SINK * square.median()
    return weights.to(stream.device), sinks.to(stream.device)


def _read_pairs(file: Path, layer: int) -> Iterator[Pair]:
    stored = load_file(file)
    for name in (name.removesuffix(".cost") for name in stored if name.endswith(".cost")):
        first, second = map(int, name.split("."))
        cost = float(stored[f"{name}.cost"])
        yield Pair(layer, (first, second), cost, stored[f"{name}.combine"], stored[f"{name}.restore"])
