"""Two sweeps over the layers of a model, for conversions that cache less of its values; one layer in memory at a time.

1. On the source's stream, measure what is lost by the ways to reduce each layer's values. From all layers together,
   each reduction then chooses.
2. On the stream of every model as converted so far, fit its W_O by ridge regression to the source's stream. Its
   strength is the one that misses least on sequences held out from the fit.

A token counts by the inverse mean square of its stream, as what follows reads the normed stream; and where a norm
follows attention, by that of its output. Nothing is trained.
Several reductions go through the same sweeps: the source is run once for all of them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..checkpoints.write import Progress
from ..environment import return_freed_memory
from ..errors import LeanError
from ..files import disk_full_is_an_error, read_json, replacing, write_json
from ..job import Job
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..model.transformer import LeanBlock
from .activations import CPU, Layers, Recorder, batches, correction
from .output_fit import Fit, felt_weights, fit_output, token_weights
from .scratch import Stream, check_space

# Every fourth sequence is held out from the fit of W_O.
HELD_OUT = 4
# A reduction that needs few tokens to choose by takes every fourth batch at least.
CHOOSING = 4
BATCH_SIZE = 2  # patterns of more sequences leave the cache of a processor
# Where the disk is full; the files lie beside the new model.
ADVICE = "choose an `out` on a larger disk"
STATE = "state.json"


@dataclass(frozen=True)
class ReducedHeads:
    """The new values of a layer, and the W_O that the fit starts from; float64.

    Attributes:
        value: [key heads, hidden_size (+ 1 with a bias), head_dim]; the normed stream times this is what each key
            head's patterns read.
        output: [rows (+ 1 with an output bias), hidden_size].
        tensors: what makes the values, and the keys if they change, by its name in the attention.
        output_bias: whether the last row of `output` is a bias.
        key: [width, hidden_size (+ 1 with a bias)], what the key heads are together; None: the source's.
    """

    value: Tensor
    output: Tensor
    tensors: dict[str, Tensor]
    output_bias: bool
    key: Tensor | None = None

    def features(self, normed: Tensor, recorder: Recorder) -> Tensor:
        """Return what W_O is applied to, [batch, queries, rows]: every pattern times its value, and ones for a bias."""
        biased = self.value.shape[1] - normed.shape[-1]
        inputs = torch.nn.functional.pad(normed[:, recorder.keys], (0, biased), value=1.0)
        grouped = recorder.patterns.unflatten(1, (len(self.value), -1))
        attended = [  # of each key head, [batch, group, queries, head_dim]
            grouped[:, head] @ (inputs @ value)[:, None] for head, value in enumerate(self.value.to(normed))
        ]
        columns = torch.cat(attended, dim=1).transpose(1, 2).flatten(2)
        return torch.cat((columns, torch.ones_like(columns[..., :1])), -1) if self.output_bias else columns

    def attention_tensors(self, output: Tensor) -> dict[str, Tensor]:
        """Return the tensors that change, in float32, with W_O = `output`."""
        rows = len(output) - self.output_bias
        result = {**self.tensors, "o_proj.weight": output[:rows].T}
        if self.output_bias:
            result["o_proj.bias"] = output[rows]
        return {name: tensor.float().contiguous() for name, tensor in result.items()}


class Grams(Protocol):
    """Sums over a layer's tokens."""

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries of a batch; `weight` [batch, queries] multiplies what each attends to."""


class Reduction(ABC):
    """A way to cache less of the values.

    Attributes:
        config, tensors: the source's.
        name: of its files; no two reductions that go together have the same one.
        measures: of the files with its measurements; reductions with the same one share them.
        least_tokens: how many calibration tokens it needs.
        choosing_tokens: as many it chooses by, or a share of all, if that is more; None: by all.
        first: the first layer that it changes, once it has chosen.
        target: the configuration of the result, once it has chosen.
    """

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    name: str
    measures: str
    least_tokens: int = 0
    choosing_tokens: int | None = None
    first: int
    target: LeanConfig

    @abstractmethod
    def grams(self, layer: int) -> Grams:
        """Return the sums, still empty, that it needs of a layer."""

    @abstractmethod
    def measure(self, layer: int, grams: Any, tokens: int) -> dict[str, Tensor]:
        """Return what choosing needs of a layer, from sums over so many tokens."""

    @abstractmethod
    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Choose what is cached; `measured` returns what `measure` has returned of a layer."""

    @abstractmethod
    def reduce(self, layer: int) -> ReducedHeads:
        """Return a layer's heads as they were chosen."""

    @abstractmethod
    def report(self, layer: int) -> dict[str, Any]:
        """Return what was chosen for a layer."""

    @abstractmethod
    def operations(self, length: int) -> tuple[float, float]:
        """Return what choosing computes in a layer beside a forward pass: operations for each token of sequences of
        `length`, and those of its factorizations in float64, with those of `reduce`."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the most bytes that choosing holds of a layer at one time."""

    @abstractmethod
    def measured_bytes(self) -> int:
        """Return how much `measure` writes for a layer."""

    @abstractmethod
    def made_bytes(self) -> int:
        """Return how much is written, in float32, of what makes the keys and values of all layers; at most."""


@dataclass(frozen=True)
class Converted:
    """A model after the sweeps: its tensors of attention are read from files, all others are the source's."""

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    layers: list[dict[str, Any]]


@dataclass
class _LayerFit:
    """The fit of one layer under one reduction."""

    heads: ReducedHeads
    features: Stream
    fitted: Fit = field(default_factory=Fit)
    held_out: Fit = field(default_factory=Fit)
    sinks: Fit = field(default_factory=Fit)
    sink_tokens: int = 0

    def add(self, columns: Tensor, target: Tensor, held: Tensor, sink: Tensor) -> None:
        """Add a batch of weighted features and targets; `held` [batch]: of the sequences that are held out."""
        for fit, rows in ((self.fitted, ~held), (self.held_out, held)):
            fit.add(columns[rows].flatten(0, 1), target[rows].flatten(0, 1))
        chosen = sink & held[:, None].to(sink.device)
        self.sinks.add(columns[chosen], target[chosen])
        self.sink_tokens += int(chosen.sum())

    def solve(self, fits: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return W_O and its part of the report; without `fits` it stays as it is."""
        start, held = self.heads.output, self.held_out
        output, strength, missed = fit_output(self.fitted, held, start) if fits else (start, None, held.missed(start))
        report: dict[str, Any] = {"missed": missed, "ridge": strength}
        if self.sinks.target:
            report |= {"sink_tokens": self.sink_tokens, "missed_sinks": self.sinks.missed(output)}
        return output, report


@dataclass(eq=False)
class Sweeps:
    """Both sweeps. Their files in `directory` let them resume at the layer where they were interrupted.

    Args:
        tokens: [sequences, length], calibration tokens.
        job: what decides the result; files of another job are not used.

    Attributes:
        earlier_seconds: what the interrupted runs that this one goes on from have taken.

    Raises:
        LeanError: too few tokens, too little space on the disk, or reductions with the same name.
    """

    config: LeanConfig
    tensors: Mapping[str, Tensor]
    tokens: np.ndarray
    directory: Path
    reductions: Sequence[Reduction]
    _: KW_ONLY
    batch_size: int = BATCH_SIZE
    device: torch.device = CPU
    job: Mapping[str, Any] | None = None
    progress: Progress = lambda done, total: None
    message: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.measuring, self.batches = measuring(self.reductions), [*batches(self.tokens.shape, self.batch_size)]
        check_enough(self.reductions, len(self.tokens), self.tokens.size)
        names = [one.name for one in self.reductions]
        if twice := [name for name in names if names.count(name) > 1]:
            raise LeanError(f"two reductions would write the same files, {twice[0]}; leave one of them out")
        self.source = Layers(self.config, self.tensors, self.tokens.shape[1], self.device)
        self._job = Job(self.directory, {"job": self.job or {}}, STATE)
        self._begin()
        self.earlier_seconds, self._started = float(self._job.content.get("seconds", 0)), time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds that the sweeps have taken so far, with the interrupted runs."""
        return self.earlier_seconds + time.perf_counter() - self._started

    @torch.no_grad()
    def run(self) -> list[Converted]:
        """Return the converted models, in the reductions' order."""
        for layer in self._sweep("choosing"):
            self._measure(layer)
        for one in self.reductions:
            one.choose(lambda layer, name=one.measures: load_file(self._file(name, layer)))  # type: ignore[misc]
        for layer in self._sweep("fitting"):
            self._fit(layer)
        return [self._converted(one) for one in self.reductions]

    def _converted(self, reduction: Reduction) -> Converted:
        reports = [self._file(reduction.name, layer, "json") for layer in range(self.config.num_hidden_layers)]

        def read(name: str) -> Tensor:
            layer, _, module = name.removeprefix("model.layers.").partition(".self_attn.")
            fitted = load_file(self._file(reduction.name, int(layer))) if module else {}
            tensor = fitted[module] if module in fitted else self.tensors[name]
            # Narrower ones stay: an embedding in float32 is larger than a layer where vocabularies are large.
            return tensor.float() if tensor.dtype == torch.float64 else tensor

        tensors = LazyTensors(parameter_shapes(reduction.target), read)
        return Converted(reduction.target, tensors, [read_json(report) for report in reports])

    def _measure(self, layer: int) -> None:
        """Write what the reductions choose by, and pass the source's stream on."""
        block = self.source.block(layer)
        sums = [one.grams(layer) for one in self.measuring]
        seen = [0] * len(sums)
        for left, batch in reversed(list(enumerate(reversed(self.batches)))):
            wanted = [at for at, one in enumerate(self.measuring) if left % every(one, self.tokens.size) == 0]
            if not wanted:
                continue
            stream = self._read("source", layer, batch)
            weight, _ = token_weights(stream, self.config.norm_eps)
            outputs = []
            for recorder in self.source.attend(block, layer, stream)[1]:
                outputs.append(block.self_attn.o_proj(recorder.heads.flatten(2)))
                felt = weight[:, recorder.queries] * felt_weights(block, outputs[-1])
                for at in wanted:
                    sums[at].add(recorder, felt)
            attended = torch.cat(outputs, dim=1)
            self._stream("source", layer + 1)[batch] = self.source.run(block, layer, stream, attended)
            for at in wanted:
                seen[at] += weight.numel()
        del block, recorder  # factorizations take more memory than activations
        for one, grams, tokens in zip(self.measuring, sums, seen, strict=True):
            self._save(one.measures, layer, one.measure(layer, grams, tokens))

    def _fit(self, layer: int) -> None:
        """Write a layer's attention weights and its report under every reduction, and pass all streams on."""
        block = self.source.block(layer)
        fits = []
        for one in self.reductions:
            heads = one.reduce(layer)
            file, shape = self.directory / f"features-{one.name}", (*self.tokens.shape, len(heads.output))
            fits.append(_LayerFit(heads, Stream(file, shape, ADVICE)))
        for batch in self.batches:
            before = self._read("source", layer, batch)
            attended = self._advance_source(block, layer, batch, before)
            weight, sink = token_weights(before, self.config.norm_eps)
            weight = weight * felt_weights(block, attended)
            held = torch.arange(batch.start, batch.start + len(before)) % HELD_OUT == HELD_OUT - 1
            for one, fit in zip(self.reductions, fits, strict=True):
                after = self._read_converted(one, layer, batch)
                target = attended + correction(self.config, before, after)
                with with_keys(block, fit.heads.key):
                    normed, runs = self.source.attend(block, layer, after)
                columns = torch.cat([fit.heads.features(normed, recorder) for recorder in runs], dim=1)
                fit.features[batch] = columns
                fit.add(columns * weight[..., None], target * weight[..., None], held, sink)
        for one, fit in zip(self.reductions, fits, strict=True):
            # Below the first change there is nothing to make up for.
            output, report = fit.solve(layer >= one.first)
            self._advance(block, layer, one, fit.features, output)
            self._save(one.name, layer, fit.heads.attention_tensors(output))
            write_json(self._file(one.name, layer, "json"), {"layer": layer, **one.report(layer), **report})

    def _advance_source(self, block: LeanBlock, layer: int, batch: slice, stream: Tensor) -> Tensor:
        """Pass the source's stream through a layer and return its attention's output."""
        outputs: list[Tensor] = []
        with block.self_attn.register_forward_hook(lambda *found: outputs.append(found[2][0])):
            self._stream("source", layer + 1)[batch] = self.source.run(block, layer, stream)
        return outputs[0]

    def _advance(self, block: LeanBlock, layer: int, reduction: Reduction, features: Stream, output: Tensor) -> None:
        """Pass a converted stream through a layer whose attention is `features @ output`."""
        weights = output.float().to(self.device)
        for batch in self.batches:
            attended = features[batch].to(self.device) @ weights
            after = self._read_converted(reduction, layer, batch)
            stream = self._stream(f"converted-{reduction.name}", layer + 1)
            stream[batch] = self.source.run(block, layer, after, attended)

    def _sweep(self, phase: str) -> Iterator[int]:
        """Yield every layer that is not done, with the source's stream before it on disk."""
        layers = self.config.num_hidden_layers
        total = 2 * layers
        for layer in range(layers):
            at = layer + (layers if phase == "fitting" else 0)
            self.progress(at, total)
            if self._job.content["done"] > at:
                continue
            self.message(f"{phase}: layer {layer + 1} of {layers}")
            if not layer:
                self._embed()
            yield layer
            return_freed_memory()  # of this layer's sums and factorizations
            self._job.write(done=at + 1, seconds=self.seconds)
        self.progress(total if phase == "fitting" else layers, total)

    def _embed(self) -> None:
        stream = self._stream("source", 0)
        for place, hidden in enumerate(self.source.embed(self.tokens)):
            stream[place : place + 1] = hidden[None]

    def _begin(self) -> None:
        """Take over what an interrupted run of the same job has left, or begin; without a job nothing is taken over."""
        if self._job.spec["job"] and self._job.resume() and self._whole(self._job.content.get("done")):
            return
        check_space(self.directory, disk_bytes(self.config, self.reductions, self.tokens.size), f"or {ADVICE}")
        self._job.write(done=0, seconds=0)  # from here on, the files of another job are invalid

    def _whole(self, done: Any) -> bool:
        """Whether all that is needed after `done` steps is there: a machine that stops may lose files of before."""
        layers = self.config.num_hidden_layers
        if done not in range(2 * layers + 1):
            return False
        measured, fitted = min(done, layers), max(done - layers, 0)
        files = [self._file(one.measures, layer) for one in self.measuring for layer in range(measured)]
        files += [self._file(one.name, layer) for one in self.reductions for layer in range(fitted)]
        try:
            for file in files:
                with safe_open(file, "pt"):
                    pass
            for one in self.reductions:
                for layer in range(fitted):
                    read_json(self._file(one.name, layer, "json"))
            names = ["source"] if done % layers else []
            names += [f"converted-{one.name}" for one in self.reductions] if fitted % layers else []
            return all(self._stream(name, done % layers).whole for name in names)
        except (LeanError, OSError, SafetensorError):
            return False

    def _save(self, name: str, layer: int, tensors: dict[str, Tensor]) -> None:
        with disk_full_is_an_error(self.directory, ADVICE), replacing(self._file(name, layer)) as temporary:
            save_file(tensors, temporary)

    def _stream(self, name: str, layer: int) -> Stream:
        # A layer reads one file and writes the other, so an interruption leaves what it read as it was.
        return Stream(self.directory / f"{name}{layer % 2}", (*self.tokens.shape, self.config.hidden_size), ADVICE)

    def _read(self, name: str, layer: int, batch: slice) -> Tensor:
        return self._stream(name, layer)[batch].to(self.device)

    def _read_converted(self, reduction: Reduction, layer: int, batch: slice) -> Tensor:
        """A converted model's stream before a layer; before the first one it is the source's."""
        return self._read(f"converted-{reduction.name}" if layer else "source", layer, batch)

    def _file(self, name: str, layer: int, kind: str = "safetensors") -> Path:
        return self.directory / f"{name}-{layer}.{kind}"


def check_enough(reductions: Sequence[Reduction], sequences: int, tokens: int) -> None:
    """Check that there are calibration tokens enough.

    Raises:
        LeanError: too few sequences, or tokens.
    """
    if sequences < HELD_OUT:
        raise LeanError(
            f"one of {HELD_OUT} sequences is held out from the fit, and the calibration tokens make {sequences}. "
            "Use more `tokens`, or a shorter `sequence_length`"
        )
    if tokens < (least := max(one.least_tokens for one in reductions)):
        raise LeanError(
            f"{tokens:,} calibration tokens are too few for the width of this model's values, which needs "
            f"{least:,}. Use more `tokens`"
        )


def measuring(reductions: Sequence[Reduction]) -> list[Reduction]:
    """Return one of all reductions with the same measurements."""
    return list({one.measures: one for one in reversed(reductions)}.values())


def every(reduction: Reduction, tokens: int) -> int:
    """Return the k of which a reduction chooses by every kth batch, counted from the last one."""
    least = reduction.choosing_tokens
    return 1 if least is None else max(1, min(CHOOSING, tokens // max(least, 1)))


def disk_bytes(config: LeanConfig, reductions: Sequence[Reduction], tokens: int) -> int:
    """Return the most bytes of all files: streams, measurements, and the attention weights of every reduction."""
    columns = config.num_attention_heads * config.head_dim + config.attention_output_bias
    of_a_reduction = 2 * config.hidden_size + columns
    streams = 4 * tokens * (2 * config.hidden_size + len(reductions) * of_a_reduction)
    weights = 4 * config.hidden_size * (columns + 1)
    of_a_layer = sum(one.measured_bytes() for one in measuring(reductions)) + len(reductions) * weights
    made = sum(one.made_bytes() for one in reductions)
    return streams + config.num_hidden_layers * of_a_layer + made


@contextmanager
def with_keys(block: LeanBlock, key: Tensor | None) -> Iterator[None]:
    """Give a block other keys, [width, hidden_size (+ 1 with a bias)], while the body runs; None: its own."""
    if key is None:
        yield
        return
    projection: Any = block.self_attn.k_proj
    own, inputs = projection.state_dict(), projection.in_features
    other = {"weight": key[:, :inputs], "bias": key[:, inputs:].flatten()}
    projection.load_state_dict({name: other[name].to(tensor) for name, tensor in own.items()}, assign=True)
    try:
        yield
    finally:
        projection.load_state_dict(own, assign=True)
