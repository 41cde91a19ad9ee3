"""All analyses of several models on one text, as a record."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tensors import weights_hash
from leanqkv.data.batches import check_plan, collate, make_batch_plan
from leanqkv.data.token_files import TokenData, Tokens
from leanqkv.environment import record_header
from leanqkv.errors import LeanError
from leanqkv.evaluate.observe import logit_spread, logit_spreads, observe
from leanqkv.model.causal_lm import LeanForCausalLM
from leanqkv.ranges import POSITIVE, check_each, check_fields
from leanqkv.train.directory import complete_checkpoints

from . import heads, weights
from .probe import RATES, layer_outputs, phases, probe_losses, slope_interval, train_probes
from .similarity import bucketed, contributions, head_similarity, off_diagonal_mean, token_similarity
from .subjects import Subject

RECORD = "analysis.json"
DIGITS = 5  # of every figure in the record
BATCH = 8  # sequences whose attention weights are in memory at a time

Progress = Callable[[str, int, int], None]  # what is being measured, steps done, steps in all


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        samples: sequences of validation text for similarity, head scores, logit spread and the probes' loss; as many of
            repeated random tokens.
        probe_steps: 0 for no probes.
        probe_batch_size: sequences a step.

    Raises:
        LeanError: a number outside of its range.
    """

    context_length: int
    samples: int = 64
    probe_steps: int = 500
    probe_batch_size: int = 2
    probe_rates: tuple[float, ...] = RATES
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_each("a rate of the probes", self.probe_rates, POSITIVE)


@dataclass(frozen=True)
class _Text:
    """What every model reads: batches of tokens and their next tokens, [batch, context_length] each.

    `repeated`: sequences of random tokens, each given twice. `training` is for the probes.
    """

    samples: list[tuple[Tensor, Tensor]]
    repeated: list[Tensor]
    training: Callable[[], Iterator[tuple[Tensor, Tensor]]]


def analyze_models(
    subjects: Sequence[Subject],
    data: TokenData,
    settings: Settings,
    device: str,
    progress: Progress = lambda part, done, total: None,
) -> dict[str, Any]:
    """Analyze the models one after the other, all on the same sequences, and return the record.

    Raises:
        LeanError: text shorter than a sequence, or with fewer of them than asked for; a model whose outputs are not
            finite.
    """
    length, config = settings.context_length, subjects[0].opened.config
    data.require(length)
    check_plan(
        steps=settings.probe_steps,
        batch_size=settings.probe_batch_size,
        evaluation_sequences=settings.samples,
        different=data.evaluations(length),
    )
    plan = make_batch_plan(
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        context_length=length,
        batch_size=settings.probe_batch_size,
        steps=settings.probe_steps,
        evaluation_sequences=settings.samples,
        seed=settings.seed,
    )
    starts = [plan.evaluation_starts[first : first + BATCH] for first in range(0, settings.samples, BATCH)]
    size = min(data.vocab_size, config.vocab_size)
    text = _Text(
        samples=list(_batches(data.validation(), starts, length)),
        repeated=list(heads.repeated_tokens(size, settings.samples, length // 2, settings.seed).split(BATCH)),
        training=partial(_batches, data.train(), [plan.batch(i) for i in range(plan.steps)], length),
    )
    total, done = sum(_steps(subject, settings) for subject in subjects) + len(weights.QUERY_KINDS), 0

    def step(part: str) -> None:
        nonlocal done
        done += 1
        progress(part, done, total)

    models = {subject.label: _Analysis(subject, text, settings, device, step).run() for subject in subjects}
    tokens = text.samples[0][0]
    spreads = weights.initial_spreads(config, tokens, settings.seed, lambda: step("logits before training"))
    content = {
        "settings": asdict(settings),
        "data": data.record(),
        "batch_plan": plan.record(),
        "chance": _chance([tokens for tokens, _ in text.samples]),
        "models": models,
        "initial_spread": {"of": subjects[0].label, "by_query": spreads},
    }
    return record_header("analysis", ", ".join(models), device) | _rounded(content)


def _steps(subject: Subject, settings: Settings) -> int:
    """How often the analysis of a model reports progress."""
    batches, probe_steps = math.ceil(settings.samples / BATCH), settings.probe_steps
    stages = len(complete_checkpoints(subject.opened.directory)) + subject.from_seed
    layers = subject.opened.config.num_hidden_layers
    return 2 * batches + layers + stages + (probe_steps + batches if probe_steps else 0)


class _Analysis:
    """The analysis of one model; `step` is called with the name of the part of which a step is done."""

    def __init__(self, subject: Subject, text: _Text, settings: Settings, device: str, step: Callable[[str], None]):
        self.subject, self.text, self.settings, self.device = subject, text, settings, device
        self.config = subject.opened.config
        model: Any = load_model(subject.opened, torch.float32).requires_grad_(False)
        self.model: LeanForCausalLM = model.to(device)
        self.step: Callable[[str], None] = lambda part: step(f"{subject.label}: {part}")

    def run(self) -> dict[str, Any]:
        """Return the model's part of the record."""
        opened = self.subject.opened
        return {
            "name": self.subject.name,
            "seed": self.subject.seed,
            "config": self.config.as_overrides(),
            "weights_sha256": weights_hash(opened.directory),
            **self.attention(),
            "spectra": weights.attention_spectra(self.config, opened.tensors, lambda: self.step("weights")),
            "training": [self.stage(*stage) for stage in self.stages()],
            "probe": self.probes() if self.settings.probe_steps else None,
        }

    def attention(self) -> dict[str, Any]:
        """Return similarities, head scores and logit spread, averaged over text; induction over repeated tokens."""
        plans, blocks = self.config.plan.layers, self.model.model.layers
        sums: list[dict[str, Any]] = [defaultdict(float) for _ in plans]
        for tokens, _ in self.text.samples:
            seen = observe(self.model, tokens.to(self.device))
            self.check_finite(seen.layers[-1])
            share = len(tokens) / self.settings.samples
            for i, (layer, plan) in enumerate(zip(sums, plans, strict=True)):
                outputs, patterns = seen.heads[i], seen.patterns[i]
                weight, queries = heads.matching_weights(patterns, tokens)
                _add(layer, 1, matching=weight, queries=torch.tensor(queries))
                _add(
                    layer,
                    share,
                    heads=head_similarity(outputs),
                    contributions=head_similarity(contributions(blocks[plan.block].self_attn.o_proj, outputs)),
                    tokens=token_similarity(seen.layers[i]),
                    previous_token=heads.previous_token_scores(patterns),
                    variance=torch.tensor(logit_spread(patterns, plan.window) ** 2),
                )
            self.step("attention on text")
        losses = np.zeros(2)
        for batch in self.text.repeated:
            tokens, share = batch.to(self.device), len(batch) / self.settings.samples
            losses += share * np.array(heads.copy_losses(self.model, tokens))
            for layer, patterns in zip(sums, observe(self.model, tokens).patterns, strict=True):
                _add(layer, share, induction=heads.induction_scores(patterns))
            self.step("attention on repeated tokens")
        self.check_finite(torch.from_numpy(losses))
        return {
            "similarity": {
                name: [{"mean": off_diagonal_mean(at[name]), "map": map_of(at[name]).tolist()} for at in sums]
                for name, map_of in (
                    ("heads", torch.as_tensor),
                    ("contributions", torch.as_tensor),
                    ("tokens", bucketed),
                )
            },
            "heads": {
                "value_layers": [heads.value_layers(plan) for plan in plans],
                "previous_token": [layer["previous_token"].tolist() for layer in sums],
                "induction": [layer["induction"].tolist() for layer in sums],
                "matching": [(layer["matching"] / layer["queries"].clamp_min(1)).tolist() for layer in sums],
                "copy_loss": {"first": losses[0], "second": losses[1]},
            },
            "logit_spread": [layer["variance"].sqrt().item() for layer in sums],
        }

    def stages(self) -> Iterator[tuple[int, LeanForCausalLM, Mapping[str, Tensor]]]:
        """Yield the weights that the run started from, where its seed is known, and the checkpoints that are left."""
        if self.subject.from_seed:
            assert self.subject.seed is not None
            start = weights.initial_model(self.config, self.subject.seed)
            yield 0, start, start.state_dict()
        for number, path in complete_checkpoints(self.subject.opened.directory).items():
            checkpoint = open_causal_lm(path)
            yield number, load_model(checkpoint, torch.float32), checkpoint.tensors

    def stage(self, number: int, model: LeanForCausalLM, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return condition numbers and logit spread of a stage of training."""
        spectra = weights.attention_spectra(self.config, tensors)
        condition = [{name: matrix["condition"] for name, matrix in layer.items()} for layer in spectra]
        spreads = logit_spreads(model, self.text.samples[0][0])
        self.step("checkpoints")
        return {"step": number, "condition": condition, "logit_spread": spreads}

    def probes(self) -> dict[str, Any]:
        """Return the loss of every layer's probe at its best rate, and the slopes of the two phases."""

        def outputs(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], Tensor]]:
            for tokens, targets in batches:
                yield layer_outputs(self.model, tokens.to(self.device)), targets.to(self.device)

        probes = train_probes(
            (([layer.flatten(0, 1) for layer in states], at.flatten()) for states, at in outputs(self.text.training())),
            steps=self.settings.probe_steps,
            vocab_size=self.config.vocab_size,
            rates=self.settings.probe_rates,
            progress=lambda: self.step("training the probes"),
        )
        parts = []
        for states, targets in outputs(self.text.samples):
            parts.append(probe_losses(probes, states, targets))
            self.step("loss of the probes")
        losses = torch.cat(parts, dim=-1)
        self.check_finite(losses)
        grid = losses.mean(-1)
        best = grid.argmin(1)
        chosen = losses[torch.arange(len(losses)), best].numpy()
        return {
            "grid": grid.tolist(),
            "rates": [self.settings.probe_rates[i] for i in best],
            "losses": chosen.mean(1).tolist(),
            "slopes": [_slope(chosen, layers) for layers in phases(len(chosen))],
        }

    def check_finite(self, tensor: Tensor) -> None:
        if not tensor.isfinite().all():
            raise LeanError(f"{self.subject.label}: its outputs are not finite, so there is nothing to analyze")


def _batches(tokens: Tokens, starts: Iterable[np.ndarray], length: int) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in starts:
        batch = collate(tokens, rows, length)
        yield batch["input_ids"], batch["shift_labels"]


def _add(sums: dict[str, Any], share: float, **values: Tensor) -> None:
    for name, value in values.items():
        sums[name] += share * value.double()


def _slope(losses: np.ndarray, layers: range) -> dict[str, Any] | None:
    interval = slope_interval(losses, layers)
    if interval is None:
        return None
    return {"layers": [layers.start, layers.stop - 1], "slope": interval[0], "half_width": interval[1]}


def _chance(samples: Sequence[Tensor]) -> dict[str, float]:
    """The scores of a head that attends to all positions so far alike."""
    n = samples[0].shape[1]
    uniform, repeated = heads.uniform_patterns(n), heads.uniform_patterns(n // 2 * 2)
    matching, queries = zip(*(heads.matching_weights(uniform, tokens) for tokens in samples), strict=True)
    return {
        "previous_token": heads.previous_token_scores(uniform).item(),
        "induction": heads.induction_scores(repeated).item(),
        "matching": sum(matching).item() / max(1, sum(queries)),
    }


def _rounded(value: Any) -> Any:
    """Floats to DIGITS significant digits; infinite ones, which JSON does not have, as None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
