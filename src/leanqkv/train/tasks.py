"""Tasks that models are trained on. The package has one, the next token of a text; `experiments.vision` adds images.

A task is everything that a run does differently for text and for images: the model's class, the data, the batches, the
evaluation, and the files beside the model. All other code asks `task_of(config)`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data import (
    TokenData,
    batch_plan,
    check_plan,
    collate,
    prepare_data,
)
from ..errors import LeanError
from ..evaluate import sequence_losses
from ..evaluate.loss import scoring
from ..evaluate.observe import logit_spreads
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..presets import Recipe
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
    model_class = LeanForCausalLM

    def __init__(self, spec: RunSpec, data: TokenData, batches: Path):
        """Make the batch plan, or read the one saved in `batches`."""
        self.context_length = spec.context_length
        self.plan = batch_plan(
            batches,
            train_tokens=data.train_tokens,
            validation_tokens=data.validation_tokens,
            context_length=spec.context_length,
            batch_size=spec.recipe.batch_size,
            steps=spec.recipe.steps,
            evaluation_sequences=spec.evaluation_sequences,
            seed=spec.seed,
        )
        self.tokens, self.validation, self.tokenizer = data.train(), data.validation(), data.tokenizer()

    @staticmethod
    def prepare_data(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> TokenData:
        """Return data for all these models, made on first use; `text` holds options that are about text."""
        vocab_size = min(config.vocab_size for config in configs)
        return prepare_data(source, vocab_size=vocab_size, progress=progress, **text)

    @staticmethod
    def check_data(name: str, config: LeanConfig, data: TokenData, context_length: int) -> None:
        """Check that data of the right kind fits the model."""
        check_context(name, config, context_length)
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
            model.generation_config.pad_token_id = self.tokenizer.pad_token_id

    def save(self, directory: Path) -> None:
        """Write the files that belong beside the model."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def collate(self, starts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return a batch of entries of the plan, on the CPU."""
        return collate(self.tokens, starts, self.context_length)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs, of a batch that is on the device."""
        return {**batch, **BALANCED}

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        """Return the metrics on the plan's evaluation, `loss` in nats among them."""
        starts = self.plan.evaluation_starts
        losses = sequence_losses(model, self.validation, starts, self.context_length, batch_size, autocast)
        return {"loss": losses.mean().item()}

    def spreads(self, model: Any) -> list[float]:
        """Return the spread of attention's logits in every layer, on the first tokens that are evaluated."""
        inputs = collate(self.validation, self.plan.evaluation_starts[:1], self.context_length)["input_ids"]
        with scoring(model) as device:
            return logit_spreads(model, inputs[:, :SPREAD_TOKENS].to(device))


# By the configuration's `task`; other tasks are classes with the methods of TextTask.
TASKS: dict[str, Any] = {"causal_lm": TextTask}
TrainingTask = Any


def task_of(config: LeanConfig, name: str = "the model") -> Any:
    """Return the class of the task that a model is trained on.

    Raises:
        LeanError: a model that cannot be trained here.
    """
    if config.task == "image_classification" and config.task not in TASKS:
        raise LeanError(
            f"{name} is a model of images; train it from a checkout of leanqkv, with `python -m experiments.vision` in "
            "place of `leanqkv`"
        )
    if config.task not in TASKS:
        raise LeanError(
            f"{name} is a masked language model; leanqkv trains next-token models and image classifiers. "
            "Train it with transformers' Trainer and DataCollatorForLanguageModeling"
        )
    if config.mask_type == "prefix":
        raise LeanError(
            f"{name} attends to prefixes, which windows of a text do not have: it would train as a causal model. Leave "
            "mask_type out, or train it with transformers' Trainer on batches with a prefix_mask"
        )
    return TASKS[config.task]


def prepare(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> Data:
    """Return the data that all these models can be trained on; arguments as `prepare_data` takes them.

    Raises:
        LeanError: models of different tasks; data that is missing, unreadable, or not for this task.
    """
    tasks = {task_of(config) for config in configs}
    if len(tasks) > 1:
        raise LeanError("models of text and models of images cannot be compared with each other")
    return tasks.pop().prepare_data(configs, source, progress, **text)


def check_fit(
    name: str, config: LeanConfig, data: Data, context_length: int, recipe: Recipe, evaluation_sequences: int
) -> None:
    """Check that a model can be trained on `data` in sequences of `context_length` tokens, before anything is written.

    Raises:
        LeanError: a recipe whose batches do not fit in memory, or more to evaluate than there is; data of another kind
            than the model's; sequences longer than its positions or than the data, tokens beyond its vocabulary; images
            of another number of channels or classes than the model's.
    """
    task = task_of(config, name)
    if data.kind != task.reads:
        raise LeanError(f"{name} is a model of {task.reads}, the data ({data.description}) is {data.kind}")
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
        LeanError: a model of images; a teacher of another task or vocabulary, with prefixes, or with fewer positions.
    """
    task, teaches = task_of(config, name), task_of(teacher_config, f"the teacher {teacher_name}")
    if not task.has_tokenizer:
        raise LeanError(f"--teacher is for models of text, and {name} is not one; leave it out")
    if teaches is not task:
        raise LeanError(f"the teacher {teacher_name} is a model of {teaches.reads}, {name} of {task.reads}")
    if (size := teacher_config.vocab_size) != config.vocab_size:
        raise LeanError(f"the teacher has {size:,} tokens, the model {config.vocab_size:,}; they must agree")
    check_context(f"the teacher {teacher_name}", teacher_config, context_length)


def check_context(name: str, config: LeanConfig, context_length: int) -> None:
    """Check that a model takes sequences of `context_length` tokens.

    Raises:
        LeanError: it has fewer positions; of images, another number.
    """
    positions = config.max_position_embeddings
    if not task_of(config).has_tokenizer and context_length != positions:
        raise LeanError(
            f"{name} cuts an image into {positions} tokens, not {context_length}; "
            "leave out --context-length, and compare models of one image_size and patch_size"
        )
    if config.position_embedding_type == "learned" and context_length > positions:
        raise LeanError(f"a context of {context_length} is longer than the {positions} positions of {name}")
