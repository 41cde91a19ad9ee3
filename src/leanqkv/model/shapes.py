"""The shape of every tensor of a checkpoint, read off modules that are built without memory, on the meta device."""

import torch
from torch import nn

from .block import LeanBlock
from .depth_average import DepthAverage
from .norm import make_norm
from .plan import BlockWeights, Plan
from .tasks import TASKS

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config, plan: Plan) -> Shapes:
    """Name to shape, in the order of the model; a head that is tied to the embedding is left out."""
    task = TASKS[config.task]
    with torch.device("meta"):
        shapes = _named(f"model.{task.embedding_name}", task.make_embedding(config))
        if config.position_embedding_type == "learned":
            positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            shapes |= _named("model.embed_positions", positions)
        equal_blocks: dict[BlockWeights, nn.Module] = {}
        for i, weights in enumerate(plan.blocks):
            block = equal_blocks.get(weights) or equal_blocks.setdefault(weights, LeanBlock(config, weights))
            shapes |= _named(f"model.layers.{i}", block)
        for layer in plan.layers:
            if layer.averaged:
                shapes |= _named(f"model.depth_averages.{layer.layer}", DepthAverage(layer.averaged))
        shapes |= _named("model.norm", make_norm(config, config.hidden_size))
        for name, head in task.make_head(config).items():
            shapes |= _named(name, head)
    return shapes


def _named(prefix: str, module: nn.Module) -> Shapes:
    return {f"{prefix}.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
