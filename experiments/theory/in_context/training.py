"""The two layers of linear attention trained freely, without Assumption 1.

Wu et al. 2025, appendix A, equations 2 to 4. https://github.com/Zhoutong-Wu/SkipV1Former

`reads_positions` says what the first layer may look at: the tokens alone, as equation 2 has it, or positions alone,
every head mixing tokens by a learned matrix over positions (linear attention whose keys and queries are position
indices, and the last token may look at itself). Only the second can copy x_i to y_i: equation 2 sees the tokens through
`X X^T + Y Y^T`, where no x knows its y.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .statement import FLOAT, Task, sample

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Adam on fresh sequences: linear warm-up, cosine to zero, gradients of a seed clipped to norm one."""

    steps: int = 3000
    batch_size: int = 256
    learning_rate: float = 3e-2
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    initial_scale: float = 0.5
    seeds: int = 6
    choosing_sequences: int = 40_000  # to choose the best seed by
    evaluation_sequences: int = 200_000  # to report


def initial(task: Task, reads_positions: bool, recipe: Recipe) -> Parameters:
    """Return weights by name, [seeds, 2 heads, ...]; the same for both architectures, which have the same tensors."""
    d, length = task.d, 2 * task.n + 1

    def draw(seed: int) -> Parameters:
        generator = torch.Generator().manual_seed(seed)

        def normal(size: int, scale: float) -> Tensor:
            return scale * torch.randn(2, size, size, generator=generator, dtype=FLOAT)

        parameters = {name: normal(d, recipe.initial_scale) for name in ("value_1", "value_2", "score_2")}
        if reads_positions:
            return parameters | {"mixing_1": normal(length, recipe.initial_scale / 2)}
        return parameters | {"score_1": normal(d, recipe.initial_scale)}

    drawn = [draw(seed) for seed in range(recipe.seeds)]
    return {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}


def forward(parameters: Parameters, tokens: Tensor, first_layer_value: bool) -> Tensor:
    """Return predictions [seeds, N, d] for tokens [seeds or 1, N, d, 2n + 1].

    The product of keys and queries is one matrix `score`; H is part of the values. Scores are divided by 2n + 1, a
    factor the weights absorb.
    """
    length = tokens.shape[-1]
    mask = torch.ones(length, dtype=FLOAT)
    mask[-1] = 0

    def head(name: str, index: int) -> Tensor:
        return parameters[name][:, index, None]

    first = torch.zeros((), dtype=FLOAT)
    for h in range(2):
        if "mixing_1" in parameters:
            mixed = tokens @ head("mixing_1", h)
        else:
            mixed = (tokens * mask) @ tokens.transpose(-1, -2) @ head("score_1", h) @ tokens / length
        first = first + head("value_1", h) @ mixed
    out = torch.zeros((), dtype=FLOAT)
    for h in range(2):
        scores = first.transpose(-1, -2) @ (head("score_2", h) @ first[..., -1:]) / length
        value = tokens if first_layer_value and h == 1 else first
        out = out + head("value_2", h) @ ((value * mask) @ scores)
    return out[..., 0]


def train(
    task: Task,
    first_layer_value: bool,
    reads_positions: bool,
    recipe: Recipe,
    progress: Callable[[int], None] | None = None,
) -> Parameters:
    """Train all seeds side by side; a seed has the same sequences and the same start in both architectures."""
    parameters = {name: tensor.requires_grad_() for name, tensor in initial(task, reads_positions, recipe).items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=recipe.learning_rate, betas=recipe.betas)
    generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(recipe.seeds)]
    for step in range(recipe.steps):
        decay = (1 + math.cos(math.pi * step / recipe.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.warmup_steps) * decay
        drawn = [sample(task, recipe.batch_size, generator) for generator in generators]
        tokens, answers = (torch.stack(part) for part in zip(*drawn, strict=True))
        loss = ((forward(parameters, tokens, first_layer_value) - answers) ** 2).sum(-1).mean(-1)
        gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
        norm = torch.stack([(gradient**2).flatten(1).sum(1) for gradient in gradients]).sum(0).sqrt()
        shrink = (1 / norm.clamp_min(1)).reshape(-1, 1, 1, 1)
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient * shrink
        optimizer.step()
        if progress is not None:
            progress(step + 1)
    return {name: tensor.detach() for name, tensor in parameters.items()}


@torch.no_grad()
def errors(
    task: Task, parameters: Parameters, first_layer_value: bool, count: int, seed: int, chunk: int = 2000
) -> Tensor:
    """Return squared errors [seeds, count] on sequences drawn from `seed`, the same for all models."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for begin in range(0, count, chunk):
        tokens, answers = sample(task, min(chunk, count - begin), generator)
        parts.append(((forward(parameters, tokens[None], first_layer_value) - answers) ** 2).sum(-1))
    return torch.cat(parts, 1)
