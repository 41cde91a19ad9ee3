"""The task of models of images: their class. The methods are those of `leanqkv.train.tasks.TextTask`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from leanqkv.data.batches import BatchPlan, Draws, kept_plan
from leanqkv.errors import LeanError
from leanqkv.evaluate.loss import scoring, uncompiled
from leanqkv.files import write_json
from leanqkv.model.config import LeanConfig
from leanqkv.model.image_classification import LeanForImageClassification
from leanqkv.train.spec import RunSpec
from leanqkv.train.tasks import BALANCED, Autocast, Progress

from .images import ImageData, image_batch, prepare_images, processor_settings, scaled_pixels


class ImageTask:
    """Classification of images: the methods of TextTask, for images."""

    reads = "images"
    has_tokenizer = False
    model_class = LeanForImageClassification

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

    @staticmethod
    def prepare_data(configs: Sequence[LeanConfig], source: str | None, progress: Progress, **text: Any) -> ImageData:
        for name, value in text.items():
            if value not in (None, "text", 1):  # the defaults
                option = "--" + name.replace("_", "-")
                raise LeanError(f"{option} is about text, and a model of images reads none; leave it out")
        return prepare_images(source, progress=progress)

    @staticmethod
    def check_data(name: str, config: LeanConfig, data: ImageData, context_length: int) -> None:
        for noun, count, field in (
            ("channels", data.channels, "num_channels"),
            ("classes", len(data.labels), "num_labels"),
        ):
            if (expected := getattr(config, field)) != count:
                raise LeanError(f"the images have {count} {noun}, {name} {expected}; give it as {name}+{field}={count}")

    @staticmethod
    def random_batch(config: LeanConfig, batch_size: int, context_length: int, device: str) -> dict[str, Any]:
        assert config.num_channels and config.image_size and config.num_labels
        pixels = torch.rand(batch_size, config.num_channels, config.image_size, config.image_size, device=device)
        labels = torch.randint(config.num_labels, (batch_size,), device=device)
        return {"pixel_values": pixels, "labels": labels, **BALANCED}

    def configure(self, model: PreTrainedModel) -> None:
        model.config.id2label = dict(enumerate(self.labels))
        model.config.label2id = {label: number for number, label in enumerate(self.labels)}

    def save(self, directory: Path) -> None:
        write_json(directory / "preprocessor_config.json", processor_settings(self.channels, self.size))

    def collate(self, entries: Sequence[int]) -> dict[str, torch.Tensor]:
        return image_batch(*self.train, [self.plan.train_starts[i] for i in entries])

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "pixel_values": scaled_pixels(batch["pixel_values"], self.size), **BALANCED}

    def evaluate(self, model: torch.nn.Module, batch_size: int, autocast: Autocast) -> dict[str, float]:
        losses, hits = image_outcomes(model, *self.test, self.plan.evaluation_starts, self.size, batch_size, autocast)
        return {"loss": losses.mean().item(), "accuracy": hits.double().mean().item()}

    def spreads(self, model: Any) -> list[float]:
        return []  # it is measured for models that predict tokens


def make_image_plan(
    *, train_images: int, test_images: int, batch_size: int, steps: int, evaluation_images: int, seed: int
) -> BatchPlan:
    """Draw an order of all training images for every epoch and cut batches from it, across the ends of epochs too.

    The evaluation takes `evaluation_images` of the test split, the same for every seed.
    """

    def draw(random: np.random.Generator) -> np.ndarray:
        return random.permutation(train_images)

    train = Draws(np.random.default_rng([seed, 0]), draw, train_images, steps * batch_size)
    evaluation = np.sort(np.random.default_rng([0, 1]).permutation(test_images)[:evaluation_images])
    return BatchPlan.drawn(train, batch_size, evaluation)


def image_plan(directory: Path, **sizes: int) -> BatchPlan:
    """Return the plan of these `sizes`, the arguments of `make_image_plan`. Raises as `kept_plan`."""
    name = "seed{seed}-{steps}x{batch_size}-of-{train_images}-images-{evaluation_images}-of-{test_images}.json"
    return kept_plan(directory / name.format(**sizes), make_image_plan(**sizes))


def image_outcomes(
    model: nn.Module,
    images: np.ndarray,
    classes: np.ndarray,
    indices: Sequence[int] | np.ndarray,
    size: int,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, with dropout off, each image's cross-entropy in nats, float64, and whether its class scored highest."""
    losses, hits = [], []
    with scoring(model) as device:
        for first in range(0, len(indices), batch_size):
            batch = image_batch(images, classes, indices[first : first + batch_size])
            pixels, labels = scaled_pixels(batch["pixel_values"].to(device), size), batch["labels"].to(device)
            with autocast():
                logits = uncompiled(model)(pixels).logits
            losses.append(nn.functional.cross_entropy(logits.float(), labels, reduction="none").cpu().double())
            hits.append((logits.argmax(-1) == labels).cpu())
    return torch.cat(losses), torch.cat(hits)
