"""Tasks that models are trained on: next tokens, masked ones or those after a prefix; `experiments.vision` adds images.

A task is everything that a run does differently for text and for images: the model's class, the data, the batches, the
evaluation, and the files beside the model. All other code asks `task_of(config)`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.batches import batch_plan, check_plan, collate
from ..data.objectives import EVALUATION, TRAINING, AfterPrefix, MaskedTokens, NextToken, prefix_mask
from ..data.prepare import prepare_data
from ..data.token_files import TokenData
from ..data.tokenizer import with_mask_token
from ..errors import LeanError
from ..evaluate.loss import batch_losses, scoring
from ..evaluate.observe import logit_spreads
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.masked_lm import LeanForMaskedLM
from ..presets.recipes import Recipe
from .spec import RunSpec

# TokenData, or data of another task with the same methods.
Data = Any
Autocast = Callable[[], AbstractContextManager]
Progress = Callable[[str], None]


# The loss of experts has their load-balancing loss in it; of all other models this changes nothing.
BALANCED = {"output_router_logits": True}
# Attention weights of all layers are in memory, for a sequence of so many tokens at most.
SPREAD_TOKENS = 256


class TextTask:
    """Next-token prediction. An instance belongs to one run, static methods to all of them."""

    reads = "text"
    has_tokenizer = True
    model_class: Any = LeanForCausalLM
    predicts = NextToken.predicts

    def __init__(self, spec: RunSpec, data: TokenData, batches: Path):
        """Make the batch plan, or read the one saved in `batches`."""
        self.context_length, self.seed = spec.context_length, spec.seed
        self.tokens, self.validation, self.tokenizer = data.train(), data.validation(), data.tokenizer
        self.objective = self.make_objective(spec, data)
        evaluated = ((0, EVALUATION, number) for number in range(spec.evaluation_sequences))
        self.plan = batch_plan(
            batches,
            self.objective.record(),
            (self.objective.draw(stream, spec.context_length) for stream in evaluated),
            train_tokens=data.train_tokens,
            validation_tokens=data.validation_tokens,
            context_length=spec.context_length,
            batch_size=spec.recipe.batch_size,
            steps=spec.recipe.steps,
            evaluation_sequences=spec.evaluation_sequences,
            seed=spec.seed,
        )

    def make_objective(self, spec: RunSpec, data: TokenData) -> NextToken:
        """Return what is predicted; the tokens and the tokenizer are there."""
        return NextToken()

    @staticmethod
    def prepare_data(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> TokenData:
        """Return data for all these models, made on first use; `text` holds options that are about text."""
        vocab_size = min(config.vocab_size for config in configs)
        return prepare_data(source, vocab_size=vocab_size, progress=progress, **text)

    @staticmethod
    def check_data(name: str, config: LeanConfig, data: TokenData, context_length: int) -> None:
        """Raise a LeanError if data of the right kind has tokens that the model does not have, or too few."""
        if data.vocab_size > config.vocab_size:
            raise LeanError(f"the data has {data.vocab_size} tokens, {name} only {config.vocab_size}; set vocab_size")
        data.require(context_length)

    @staticmethod
    def random_batch(config: LeanConfig, batch_size: int, context_length: int, device: str) -> dict[str, Any]:
        """Return inputs of a training step's shape, for timing."""
        tokens = torch.randint(config.vocab_size, (batch_size, context_length), device=device)
        return {"input_ids": tokens, "shift_labels": tokens, "use_cache": False, **BALANCED}

    def configure(self, model: PreTrainedModel) -> None:
        """Give the model the facts of the data that it saves."""
        if self.tokenizer is not None:
            assert model.generation_config is not None
            model.generation_config.eos_token_id = self.tokenizer.eos_token_id
            pad = self.tokenizer.pad_token_id
            model.generation_config.pad_token_id = pad if (pad or 0) < model.config.vocab_size else None

    def save(self, directory: Path) -> None:
        """Write the files that belong beside the model."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def collate(self, entries: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return a batch of entries of the plan, by their numbers, on the CPU."""
        starts, streams = [self.plan.train_starts[i] for i in entries], [(self.seed, TRAINING, i) for i in entries]
        return self.objective.batch(self.tokens, starts, self.context_length, streams)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs, of a batch that is on the device."""
        return {**batch, **BALANCED}

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        """Return the mean loss of all targets of the plan's evaluation, in nats; of drawn ones their number too."""
        starts, length = self.plan.evaluation_starts, self.context_length
        streams = [(0, EVALUATION, number) for number in range(len(starts))]
        parts = (slice(at, at + batch_size) for at in range(0, len(starts), batch_size))
        batches = (self.objective.batch(self.validation, starts[part], length, streams[part]) for part in parts)
        losses, predicted = batch_losses(model, batches, autocast)
        number = int(predicted.sum())
        return {"loss": losses.sum().item() / number} | ({name: number} if (name := self.objective.counted) else {})

    def spreads(self, model: Any) -> list[float]:
        """Return the spread of attention's logits in every layer, on the first tokens that are evaluated."""
        inputs = collate(self.validation, self.plan.evaluation_starts[:1], self.context_length)["input_ids"]
        with scoring(model) as device:
            return logit_spreads(model, inputs[:, :SPREAD_TOKENS].to(device))


class MaskedTask(TextTask):
    """Prediction of masked tokens, by an encoder. A tokenizer without a mask token is given one."""

    model_class = LeanForMaskedLM
    predicts = MaskedTokens.predicts

    def make_objective(self, spec: RunSpec, data: TokenData) -> NextToken:
        assert self.tokenizer is not None
        self.tokenizer = with_mask_token(self.tokenizer, spec.config["vocab_size"])
        return MaskedTokens.of(self.tokenizer, data.vocab_size)

    @staticmethod
    def prepare_data(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> TokenData:
        return TextTask.prepare_data(configs, source, progress, **text, left_free=1)  # for the mask token

    @staticmethod
    def check_data(name: str, config: LeanConfig, data: TokenData, context_length: int) -> None:
        TextTask.check_data(name, config, data, context_length)
        if (tokenizer := data.tokenizer) is None:
            raise LeanError(
                f"{name} predicts masked tokens, and the data ({data.description}) has no tokenizer that says which "
                "token is the mask; give `tokenizer`, the one that made these tokens"
            )
        with_mask_token(tokenizer, config.vocab_size)

    @staticmethod
    def random_batch(config: LeanConfig, batch_size: int, context_length: int, device: str) -> dict[str, Any]:
        tokens = torch.randint(config.vocab_size, (batch_size, context_length), device=device)
        return {"input_ids": tokens, "labels": tokens, **BALANCED}

    def configure(self, model: PreTrainedModel) -> None:
        """Nothing: an encoder does not generate."""


class PrefixTask(TextTask):
    """Prediction of what follows a prefix."""

    predicts = AfterPrefix.predicts

    def make_objective(self, spec: RunSpec, data: TokenData) -> NextToken:
        return AfterPrefix()

    @staticmethod
    def random_batch(config: LeanConfig, batch_size: int, context_length: int, device: str) -> dict[str, Any]:
        batch = TextTask.random_batch(config, batch_size, context_length, device)
        return {**batch, "prefix_mask": prefix_mask([context_length // 2] * batch_size, context_length).to(device)}


# By the configuration's `task`, and of models with prefixes; others are classes with the methods of TextTask.
TASKS: dict[str, Any] = {"causal_lm": TextTask, "masked_lm": MaskedTask, "prefix_lm": PrefixTask}
TrainingTask = Any


def task_of(config: LeanConfig, name: str = "the model") -> Any:
    """Return the class of the task that a model is trained on.

    Raises:
        LeanError: a model that cannot be trained here.
    """
    if (task := TASKS.get("prefix_lm" if config.mask_type == "prefix" else config.task)) is not None:
        return task
    raise LeanError(
        f"{name} is a model of images; train it from a checkout of leanqkv, with `python -m experiments.vision` in "
        "place of `leanqkv`"
    )


def prepare(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> Data:
    """Return the data that all these models can be trained on; arguments as `prepare_data` takes them.

    Raises:
        LeanError: models of different tasks; data that is missing, unreadable, or not for this task.
    """
    first, *others = dict.fromkeys(task_of(config) for config in configs)
    for other in others:
        if first.reads != other.reads:
            raise LeanError("models of text and models of images cannot be compared with each other")
        raise LeanError(
            f"a model that predicts {first.predicts} and one that predicts {other.predicts} cannot be compared: their "
            "losses are of different tokens"
        )
    return first.prepare_data(configs, source, progress, **text)


def check_fit(
    name: str, config: LeanConfig, data: Data, context_length: int, recipe: Recipe, evaluation_sequences: int
) -> None:
    """Check that a model can be trained on `data` in sequences of `context_length` tokens, before anything is written.

    Raises:
        LeanError: data of another kind than the model's, or that its task refuses; a recipe whose batches do not fit in
            memory, or more to evaluate than there is.
    """
    task = task_of(config, name)
    if data.kind != task.reads:
        raise LeanError(f"{name} is a model of {task.reads}, the data ({data.description}) is {data.kind}")
    check_context(name, config, context_length)
    task.check_data(name, config, data, context_length)
    check_plan(
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        evaluation_sequences=evaluation_sequences,
        different=data.evaluations(context_length),
    )


def check_teacher(
    name: str, config: LeanConfig, teacher_name: str, teacher_config: LeanConfig, context_length: int
) -> None:
    """Check that a model can be trained on another one's predictions for sequences of `context_length` tokens.

    Raises:
        LeanError: a model or teacher that does not predict every next token; a teacher of another vocabulary, or with
            fewer positions.
    """
    task, teaches = task_of(config, name), task_of(teacher_config, f"the teacher {teacher_name}")
    if not task.has_tokenizer:
        raise LeanError(f"`teacher` is for models of text, and {name} is not one; leave it out")
    if teaches.reads != task.reads:
        raise LeanError(f"the teacher {teacher_name} is a model of {teaches.reads}, {name} of {task.reads}")
    for each, tasked in ((f"the teacher {teacher_name}", teaches), (name, task)):
        if tasked is not TextTask:
            raise LeanError(
                f"`teacher` is for models that predict {TextTask.predicts}, and {each} predicts {tasked.predicts}; "
                "leave it out"
            )
    if (size := teacher_config.vocab_size) != config.vocab_size:
        raise LeanError(f"the teacher has {size:,} tokens, the model {config.vocab_size:,}; they must agree")
    check_context(f"the teacher {teacher_name}", teacher_config, context_length)


def check_context(name: str, config: LeanConfig, context_length: int) -> None:
    """Raise a LeanError if a model has fewer than `context_length` positions; of images, another number."""
    positions = config.max_position_embeddings
    if not task_of(config).has_tokenizer and context_length != positions:
        raise LeanError(
            f"{name} cuts an image into {positions} tokens, not {context_length}; "
            "leave out `context_length`, and compare models of one image_size and patch_size"
        )
    if config.position_embedding_type == "learned" and context_length > positions:
        raise LeanError(f"a context of {context_length} is longer than the {positions} positions of {name}")
