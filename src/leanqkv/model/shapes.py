"""The shape of every tensor of a checkpoint, read off modules that are built without memory, on the meta device."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from .config import LeanConfig
from .layers import make_norm
from .layout import BlockWeights
from .mechanisms import DEPTH, TASKS
from .transformer import LeanBlock

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ParameterCount:
    """`non_embedding` leaves out token and position embeddings and an untied output head, as the papers count; of a
    model of images, the map of the patches, the class token, the position embeddings and the head."""

    total: int
    non_embedding: int


def count_parameters(config: LeanConfig) -> ParameterCount:
    """Return the number of parameters of a model; tied tensors count once."""
    embedding = ("model.embed_", "lm_head.", "classifier.")
    sizes = {name: prod(shape) for name, shape in parameter_shapes(config).items()}
    total = sum(sizes.values())
    return ParameterCount(total, total - sum(n for name, n in sizes.items() if name.startswith(embedding)))


def parameter_shapes(config: LeanConfig) -> Shapes:
    """Return name and shape of every tensor in the order of the model, without a head that is tied to the embedding."""
    task, plan, width = TASKS[config.task], config.plan, config.hidden_size
    with torch.device("meta"):
        shapes = _named(f"model.{task.embedding_name}", task.make_embedding(config))
        if config.position_embedding_type == "learned":
            shapes |= _named("model.embed_positions", nn.Embedding(config.max_position_embeddings, width))
        equal_blocks: dict[BlockWeights, nn.Module] = {}
        for i, layer in enumerate(plan.blocks):
            weights = layer.weights
            block = equal_blocks.get(weights) or equal_blocks.setdefault(weights, LeanBlock(config, layer))
            shapes |= _named(f"model.layers.{i}", block)
        for layer in plan.layers:
            if layer.averaged:
                shapes |= _named(f"model.depth_averages.{layer.layer}", DEPTH["average"].build(layer.averaged))
        shapes |= _named("model.norm", make_norm(config, width))
        if config.task == "image_classification":
            shapes |= _named("classifier", nn.Linear(width, config.num_labels or 0))
        elif not config.tie_word_embeddings:
            shapes |= _named("lm_head", nn.Linear(width, config.vocab_size, bias=False))
    return shapes


def _named(prefix: str, module: nn.Module) -> Shapes:
    return {f"{prefix}.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
