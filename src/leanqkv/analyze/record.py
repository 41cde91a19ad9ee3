"""All analyses of several models on one text, as a record."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.open import Checkpoint, causal_lm, open_causal_lm
from ..checkpoints.tensors import weights_hash
from ..data import BatchPlan, TokenData, collate, make_batch_plan
from ..data.prepare import fitting_tokenizer
from ..environment import git_commit, hardware, versions
from ..errors import LeanError
from ..files import RECORD_FORMAT, read_json
from ..model.causal_lm import LeanForCausalLM
from .heads import (
    copy_losses,
    induction_scores,
    matching_weights,
    previous_token_scores,
    repeated_tokens,
    uniform_patterns,
    value_layers,
)
from .observe import layer_outputs, observe
from .probe import RATES, phases, probe_losses, slope_interval, train_probes
from .similarity import BUCKETS, bucketed, contributions, head_similarity, off_diagonal_mean, token_similarity
from .weights import attention_spectra, checkpoints, initial_model, initial_spreads, logit_spread, logit_spreads

RECORD = "analysis.json"
DIGITS = 5  # of every figure in the record
BATCH = 8  # sequences whose attention weights are in memory at a time


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        samples: sequences of validation text for similarity, head scores, logit spread and the probes' loss; as many of
            repeated random tokens.
        probe_steps: 0 for no probes.
        probe_batch_size: sequences a step.
    """

    context_length: int
    samples: int = 64
    probe_steps: int = 500
    probe_batch_size: int = 2
    probe_rates: tuple[float, ...] = RATES
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """A model to analyse. `label` is its directory's name; `name` and `seed` are those of its run, where it has one;
    `from_seed` whether the run started from nothing but the seed."""

    label: str
    name: str
    seed: int | None
    from_seed: bool
    opened: Checkpoint


def open_subjects(directories: Sequence[Path]) -> list[Subject]:
    """Opens the directories; no weights are read yet.

    Raises:
        LeanError: not a checkpoint, or of a model that is not a causal language model; two directories of one name;
            models of different vocabularies.
    """
    found: list[Subject] = []
    for directory in directories:
        if not directory.is_dir():
            raise LeanError(f"there is no directory {directory}")
        opened = open_causal_lm(directory)
        if opened.config.mask_type != "causal":
            raise LeanError(f"{directory} holds a model that attends to prefixes; what is analysed are causal ones")
        label = directory.resolve().name
        if label in [other.label for other in found]:
            raise LeanError(f"two of the directories are called {label}; every model needs a name of its own")
        if found and (size := found[0].opened.config.vocab_size) != opened.config.vocab_size:
            raise LeanError(
                f"{found[0].label} has a vocabulary of {size} tokens, {label} one of {opened.config.vocab_size}; "
                "models are analysed side by side on the same tokens"
            )
        run = read_json(directory / "record.json") if (directory / "record.json").exists() else {}
        seed = run.get("seed")
        from_seed = seed is not None and run["initial_sha256"] is None
        found.append(Subject(label, run.get("name", label), seed, from_seed, opened))
    return found


def shared_tokenizer(subjects: Sequence[Subject]) -> Path:
    """The directory of the tokenizer that all have.

    Raises:
        LeanError: none, or different ones.
    """
    first, *others = subjects
    told = [
        fitting_tokenizer(s.opened.directory, s.opened.config.vocab_size).backend_tokenizer.to_str()
        for s in (first, *others)
    ]
    for subject, its in zip(others, told[1:], strict=True):
        if its != told[0]:
            raise LeanError(
                f"{first.label} and {subject.label} have different tokenizers; models are analysed side by side on the "
                "same tokens"
            )
    return first.opened.directory


def common_context(subjects: Sequence[Subject], asked: int | None) -> int:
    """`asked`, or the fewest positions that a model has.

    Raises:
        LeanError: more than a model has, or too few to tell anything.
    """
    fewest = min(subjects, key=lambda subject: subject.opened.config.max_position_embeddings or 0)
    most = fewest.opened.config.max_position_embeddings
    assert most is not None
    learned = any(subject.opened.config.position_embedding_type == "learned" for subject in subjects)
    if asked is not None and asked > most and learned:
        raise LeanError(f"--context-length {asked} is longer than the {most} positions of {fewest.label}")
    context = asked or most
    if context < 2 * BUCKETS:
        raise LeanError(f"sequences of {context} tokens are too short to analyse: it takes {2 * BUCKETS}")
    return context


def analyse(
    subjects: Sequence[Subject],
    data: TokenData,
    settings: Settings,
    device: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The record; models are read and analysed one after the other, all on the same sequences.

    Raises:
        LeanError: text shorter than a sequence; a model whose outputs are not finite.
    """
    data.require(settings.context_length)
    plan = make_batch_plan(
        train_tokens=data.train_tokens,
        validation_tokens=data.validation_tokens,
        context_length=settings.context_length,
        batch_size=settings.probe_batch_size,
        steps=settings.probe_steps,
        evaluation_sequences=settings.samples,
        seed=settings.seed,
    )
    in_all, done = len(subjects) * (1 + settings.probe_steps), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, in_all)

    models = {}
    for subject in subjects:
        model: Any = causal_lm(subject.opened).requires_grad_(False)
        model.to(device)
        work = _Work(subject, model, data, plan, settings)
        models[subject.label] = {
            "name": subject.name,
            "seed": subject.seed,
            "config": subject.opened.config.as_overrides(),
            "weights_sha256": weights_hash(subject.opened.directory),
            **work.looked_at(),
            "spectra": attention_spectra(subject.opened.config, subject.opened.tensors),
            "training": work.over_training(),
        }
        step()
        models[subject.label]["probe"] = work.probed(step) if settings.probe_steps else None
    first = subjects[0].opened.config
    tokens = next(_samples(data, plan, settings))[0]
    return _rounded(
        {
            "record": RECORD_FORMAT,
            "role": "analysis",
            "settings": asdict(settings),
            "data": data.record(),
            "batch_plan": plan.record(),
            "chance": _chance(data, plan, settings),
            "models": models,
            "initial_spread": {"of": subjects[0].label, "by_query": initial_spreads(first, tokens, settings.seed)},
            "hardware": hardware(device),
            "versions": versions(),
            "git_commit": git_commit(),
        }
    )


class _Work:
    def __init__(self, subject: Subject, model: LeanForCausalLM, data: TokenData, plan: BatchPlan, settings: Settings):
        self.subject, self.model, self.data, self.plan, self.settings = subject, model, data, plan, settings
        self.device = model.device

    def looked_at(self) -> dict[str, Any]:
        """What a pass over the samples shows, and one over repeated tokens."""
        model, plans = self.model, self.model.config.plan.layers
        sums: list[dict[str, Tensor]] = [{} for _ in plans]

        def add(layer: int, batch: int, **found: Tensor) -> None:
            for name, value in found.items():
                value = value.double() * batch / self.settings.samples
                sums[layer][name] = sums[layer][name] + value if name in sums[layer] else value

        matched: list[list[tuple[Tensor, int]]] = [[] for _ in plans]
        for tokens, _ in _samples(self.data, self.plan, self.settings):
            seen = observe(model, tokens.to(self.device))
            self._check(seen.layers[-1])
            for i, plan in enumerate(plans):
                output = model.model.layers[plan.block].self_attn.o_proj
                matched[i].append(matching_weights(seen.patterns[i], tokens))
                add(
                    i,
                    len(tokens),
                    heads=head_similarity(seen.heads[i]),
                    contributions=head_similarity(contributions(output, seen.heads[i])),
                    tokens=token_similarity(seen.layers[i]),
                    previous=previous_token_scores(seen.patterns[i]),
                    variance=torch.tensor(logit_spread(seen.patterns[i], plan.window) ** 2),
                )
        repeated = self._repeated()
        copies = []
        for tokens in repeated.split(BATCH):
            copies.append([len(tokens) * loss for loss in copy_losses(model, tokens)])
            for i, patterns in enumerate(observe(model, tokens).patterns):
                add(i, len(tokens), induction=induction_scores(patterns))
        first, second = np.sum(copies, axis=0) / len(repeated)
        return {
            "similarity": {
                **{
                    name: [{"mean": off_diagonal_mean(s[name]), "map": s[name].tolist()} for s in sums]
                    for name in ("heads", "contributions")
                },
                "tokens": [
                    {"mean": off_diagonal_mean(s["tokens"]), "map": bucketed(s["tokens"]).tolist()} for s in sums
                ],
            },
            "heads": {
                "value_layers": [value_layers(plan) for plan in plans],
                "previous_token": [s["previous"].tolist() for s in sums],
                "induction": [s["induction"].tolist() for s in sums],
                "matching": [_ratio(found).tolist() for found in matched],
                "copy_loss": {"first": float(first), "second": float(second)},
            },
            "logit_spread": [s["variance"].sqrt().item() for s in sums],
        }

    def over_training(self) -> list[dict[str, Any]]:
        """Condition numbers and logit spread of the checkpoints that the run still has; and, where the seed of the run
        is known, of the weights it started from."""
        tokens = next(_samples(self.data, self.plan, self.settings))[0]
        opened, config = self.subject.opened, self.subject.opened.config

        def stages() -> Iterator[tuple[int, LeanForCausalLM, Mapping[str, Tensor]]]:
            if self.subject.from_seed:
                assert self.subject.seed is not None
                start = initial_model(config, self.subject.seed)
                yield 0, start, start.state_dict()
            for step, path in checkpoints(opened.directory):
                checkpoint = open_causal_lm(path)
                yield step, causal_lm(checkpoint), checkpoint.tensors

        return [
            {
                "step": step,
                "condition": [{name: m["condition"] for name, m in s.items()} for s in attention_spectra(config, held)],
                "logit_spread": logit_spreads(model, tokens),
            }
            for step, model, held in stages()
        ]

    def probed(self, step: Callable[[], None]) -> dict[str, Any]:
        """Loss of every layer's probe at its best rate, and the slopes of the two phases."""
        s = self.settings
        vocab_size = self.model.config.vocab_size

        def batches() -> Iterator[tuple[list[Tensor], Tensor]]:
            train = self.data.train()
            for starts in self.plan.train_starts:
                batch = collate(train, starts, s.context_length)
                states = layer_outputs(self.model, batch["input_ids"].to(self.device))
                yield [x.flatten(0, 1) for x in states], batch["shift_labels"].flatten().to(self.device)

        heads = train_probes(batches(), steps=s.probe_steps, vocab_size=vocab_size, rates=s.probe_rates, progress=step)
        losses = torch.cat(
            [
                probe_losses(heads, layer_outputs(self.model, tokens.to(self.device)), targets.to(self.device))
                for tokens, targets in _samples(self.data, self.plan, s)
            ],
            dim=-1,
        )
        self._check(losses)
        grid = losses.mean(-1)
        best = grid.argmin(1)
        chosen = losses[torch.arange(len(losses)), best].numpy()
        slopes = [slope_interval(chosen, layers) for layers in phases(len(chosen))]
        return {
            "grid": grid.tolist(),
            "rates": [s.probe_rates[i] for i in best],
            "losses": chosen.mean(1).tolist(),
            "slopes": [
                None if found is None else {"layers": [p.start, p.stop - 1], "slope": found[0], "half_width": found[1]}
                for p, found in zip(phases(len(chosen)), slopes, strict=True)
            ],
        }

    def _repeated(self) -> Tensor:
        size = min(self.data.vocab_size, self.model.config.vocab_size)
        s = self.settings
        return repeated_tokens(size, s.samples, s.context_length // 2, s.seed).to(self.device)

    def _check(self, tensor: Tensor) -> None:
        if not tensor.isfinite().all():
            raise LeanError(f"{self.subject.label}: its outputs are not finite; nothing can be told from them")


def _samples(data: TokenData, plan: BatchPlan, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of validation text and their next tokens, [batch, context_length] each."""
    for first in range(0, settings.samples, BATCH):
        batch = collate(data.validation(), plan.evaluation_starts[first : first + BATCH], settings.context_length)
        yield batch["input_ids"], batch["shift_labels"]


def _chance(data: TokenData, plan: BatchPlan, settings: Settings) -> dict[str, float]:
    """The scores of a head that attends to all positions so far alike."""
    n = settings.context_length
    uniform, repeated = uniform_patterns(n), uniform_patterns(n // 2 * 2)
    found = [matching_weights(uniform, tokens) for tokens, _ in _samples(data, plan, settings)]
    return {
        "previous_token": previous_token_scores(uniform).item(),
        "induction": induction_scores(repeated).item(),
        "matching": _ratio(found).item(),
    }


def _ratio(found: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Weight over queries; zero where no token of the text occurs twice."""
    weight = torch.stack([weight for weight, _ in found]).sum(0)
    return weight / max(1, sum(count for _, count in found))


def _rounded(found: Any) -> Any:
    """Floats to DIGITS significant digits; infinite ones, which JSON does not have, as None."""
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}") if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {name: _rounded(value) for name, value in found.items()}
    return [_rounded(value) for value in found] if isinstance(found, list | tuple) else found
