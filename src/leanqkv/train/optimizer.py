"""The optimizer of a recipe, and the schedule of its learning rate."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from ..presets.recipes import Recipe


class Joined(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, with the groups of all."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {"lr": parts[0].defaults["lr"]})

    def step(self, closure: Any = None) -> Any:
        """Take a step of each; `closure` is not called."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all, in their order."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices (embeddings too) and not on vectors, as in nanoGPT and the papers.

    With "muon" the matrices of the blocks are Muon's (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon),
    at the same learning rate and weight decay: its steps are scaled to the size of AdamW's (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2).
    """
    if recipe.optimizer == "adamw":
        return _adamw(model.parameters(), recipe)
    transformer: Any = model.base_model
    inner = [p for p in transformer.layers.parameters() if p.ndim == 2]
    of_blocks = {id(parameter) for parameter in inner}
    muon = torch.optim.Muon(
        inner, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Joined([muon, _adamw((p for p in model.parameters() if id(p) not in of_blocks), recipe)])


def _adamw(parameters: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    every = list(parameters)
    matrices, vectors = ([p for p in every if (p.ndim >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a linear warm-up, then a cosine to the minimum over `schedule_steps`.

    A shorter run sees only a part of the cosine, a longer run stays at the minimum.
    """
    length = recipe.schedule_steps or recipe.steps
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, num_warmup_steps=recipe.warmup_steps, num_training_steps=length, min_lr=recipe.min_learning_rate
    )
    factor = schedule.lr_lambdas[0]
    # Beyond its length the library's cosine would rise again.
    schedule.lr_lambdas = [lambda step: factor(min(step, length)) for _ in schedule.lr_lambdas]
    return schedule
