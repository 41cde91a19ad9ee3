"""What a run on text and a run on images do each in their own way: fit, batches, evaluation, what is saved along."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..data import (
    BatchPlan,
    ImageData,
    TokenData,
    batch_plan,
    collate,
    image_batch,
    image_plan,
    processor_settings,
    scaled_pixels,
)
from ..errors import LeanError
from ..evaluate import image_outcomes, sequence_losses
from ..files import write_json
from ..model.causal_lm import LeanForCausalLM
from ..model.config import LeanConfig
from ..model.image_classification import LeanForImageClassification
from .spec import RunSpec

Data = TokenData | ImageData
Autocast = Callable[[], AbstractContextManager]


def build(config: LeanConfig) -> PreTrainedModel:
    """The model to train."""
    return (LeanForImageClassification if reads_images(config) else LeanForCausalLM)(config)


def reads_images(config: LeanConfig) -> bool:
    return config.task == "image_classification"


def random_batch(config: LeanConfig, batch_size: int, context_length: int, device: str) -> dict[str, Any]:
    """Inputs of a training step's shape, for timing."""
    if reads_images(config):
        assert config.num_channels and config.image_size and config.num_labels
        pixels = torch.rand(batch_size, config.num_channels, config.image_size, config.image_size, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch_size,), device=device)}
    tokens = torch.randint(config.vocab_size, (batch_size, context_length), device=device)
    return {"input_ids": tokens, "shift_labels": tokens, "use_cache": False}


def check_trainable(name: str, config: LeanConfig) -> None:
    """Raises:
    LeanError: a model that is neither a next-token model nor an image classifier.
    """
    if config.task == "masked_lm":
        raise LeanError(
            f"{name} is a masked language model; what is trained here are next-token models and image classifiers. "
            "Train it with transformers' Trainer and DataCollatorForLanguageModeling"
        )
    if config.mask_type == "prefix":
        raise LeanError(
            f"{name} attends to prefixes, and text in windows has none: it would train as a causal model. Leave "
            "mask_type out, or train it with transformers' Trainer on batches with a prefix_mask"
        )


def check_fit(name: str, config: LeanConfig, data: Data, context_length: int) -> None:
    """Raises:
    LeanError: data of another kind than the model's; sequences longer than its positions or than the data, or tokens
        beyond its vocabulary; images of another number of channels or classes than the model's.
    """
    check_trainable(name, config)
    if isinstance(data, ImageData) != reads_images(config):
        kinds = ("images", "text") if reads_images(config) else ("text", "images")
        raise LeanError(f"{name} is a model of {kinds[0]}, the data ({data.description}) is {kinds[1]}")
    if isinstance(data, ImageData):
        _check_images(name, config, data, context_length)
        return
    if config.position_embedding_type == "learned" and context_length > config.max_position_embeddings:
        raise LeanError(
            f"a context of {context_length} is longer than the {config.max_position_embeddings} positions of {name}"
        )
    if data.vocab_size > config.vocab_size:
        raise LeanError(f"the data has {data.vocab_size} tokens, {name} only {config.vocab_size}; set vocab_size")
    data.require(context_length)


def _check_images(name: str, config: LeanConfig, data: ImageData, context_length: int) -> None:
    if context_length != config.max_position_embeddings:
        raise LeanError(
            f"{name} cuts an image into {config.max_position_embeddings} tokens, {context_length} are asked for; leave "
            "out --context-length, and compare models of one image_size and patch_size"
        )
    for what, found, field in (
        ("channels", data.channels, "num_channels"),
        ("classes", len(data.labels), "num_labels"),
    ):
        if (expected := getattr(config, field)) != found:
            raise LeanError(f"the images have {found} {what}, {name} {expected}; give it as {name}+{field}={found}")


class TrainingTask(Protocol):
    """One run's data, and what it does with it."""

    plan: BatchPlan

    def prepare(self, model: PreTrainedModel) -> None:
        """Sets what the model is to know of the data."""

    def save(self, directory: Path) -> None:
        """Writes what belongs beside the model: the tokenizer; how pixels are scaled."""

    def collate(self, starts: Sequence[int]) -> dict[str, torch.Tensor]:
        """A batch of entries of the plan, on the CPU."""
        ...

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs, of a batch on the device."""
        ...

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        """`loss`, and of images `accuracy`, on the plan's evaluation."""
        ...


class TextTask(TrainingTask):
    def __init__(self, spec: RunSpec, data: TokenData, batches: Path):
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

    def prepare(self, model: PreTrainedModel) -> None:
        if self.tokenizer is not None:
            assert model.generation_config is not None
            model.generation_config.eos_token_id = self.tokenizer.eos_token_id
            model.generation_config.pad_token_id = self.tokenizer.pad_token_id

    def save(self, directory: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def collate(self, starts: Sequence[int]) -> dict[str, torch.Tensor]:
        return collate(self.tokens, starts, self.context_length)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        starts = self.plan.evaluation_starts
        losses = sequence_losses(model, self.validation, starts, self.context_length, batch_size, autocast)
        return {"loss": losses.mean().item()}


class ImageTask(TrainingTask):
    def __init__(self, spec: RunSpec, data: ImageData, batches: Path):
        self.size, self.channels, self.labels = spec.config["image_size"], data.channels, data.labels
        self.plan = image_plan(
            batches,
            train_images=data.train_images,
            test_images=data.test_images,
            batch_size=spec.recipe.batch_size,
            steps=spec.recipe.steps,
            evaluation_images=spec.evaluation_sequences,
            seed=spec.seed,
        )
        self.train, self.test = data.train(), data.test()

    def prepare(self, model: PreTrainedModel) -> None:
        model.config.id2label = dict(enumerate(self.labels))
        model.config.label2id = {label: number for number, label in enumerate(self.labels)}

    def save(self, directory: Path) -> None:
        write_json(directory / "preprocessor_config.json", processor_settings(self.channels, self.size))

    def collate(self, starts: Sequence[int]) -> dict[str, torch.Tensor]:
        return image_batch(*self.train, starts)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "pixel_values": scaled_pixels(batch["pixel_values"], self.size)}

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        losses, hits = image_outcomes(model, *self.test, self.plan.evaluation_starts, self.size, batch_size, autocast)
        return {"loss": losses.mean().item(), "accuracy": hits.double().mean().item()}


def make_task(spec: RunSpec, data: Data, batches: Path) -> TrainingTask:
    """Makes the batch plan too, or finds the one saved in `batches`."""
    return ImageTask(spec, data, batches) if isinstance(data, ImageData) else TextTask(spec, data, batches)
