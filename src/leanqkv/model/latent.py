"""A latent: narrow columns `c = x W_down` that are cached in place of heads, and the heads `c W_up` made of it.

Attention takes whichever of two equal forms costs fewer multiplications. Expanded, the heads are made of the latent and
attended to as usual: cheapest where there are as many queries as keys. Absorbed, W_up is folded into the query (of
keys) or into the output (of values), and every head attends to the latent itself: cheapest when decoding, where
expanding would touch the whole history at each step. DeepSeek-AI 2024, "DeepSeek-V2", https://arxiv.org/abs/2405.04434,
section 2.1.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .position import Rotation, rotate

Columns = tuple[int, ...]  # complex ones of a latent, by frequency

# Where a module keeps what is registered to run when it does.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def expand(up: nn.Module, latent: Tensor, head_dim: int) -> Tensor:
    """Return the heads [batch, heads, positions, head_dim] of a latent [batch, positions, columns]."""
    return up(latent).unflatten(-1, (-1, head_dim)).transpose(1, 2)


class Absorbing:
    """What an attention does with a latent that it attends to itself; inference replaces both (inference/step.py)."""

    k_up_proj: Any
    v_up_proj: Any
    head_dim: int
    turns_keys = False  # whether key heads are turned when they are read, so that queries cannot be on their latent

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries on the latent of keys."""
        return absorb(self.k_up_proj, query)

    def restore(self, attended: Tensor) -> Tensor:
        """Return outputs of attended latents of values."""
        return restore(self.v_up_proj, attended, self.head_dim)


def absorb(up: Any, query: Tensor) -> Tensor:
    """Return queries [batch, query heads, positions, columns] on the latent of keys, of queries [..., head_dim]."""
    if _is_complex(up):
        return up.absorb(query)
    weight = up.weight.to(query.dtype).unflatten(0, (-1, query.shape[-1]))  # [heads, head_dim, columns]
    return torch.einsum("bkgtx,kxc->bkgtc", query.unflatten(1, (len(weight), -1)), weight).flatten(1, 2)


def restore(up: nn.Linear, attended: Tensor, head_dim: int) -> Tensor:
    """Return outputs [batch, positions, query heads, head_dim], of attended latents of values [..., columns]."""
    weight = up.weight.to(attended.dtype).unflatten(0, (-1, head_dim))  # [heads, head_dim, columns]
    output = torch.einsum("btkgc,kxc->btkgx", attended.unflatten(2, (len(weight), -1)), weight)
    if up.bias is not None:  # every head's weights add up to 1
        output = output + up.bias.to(attended.dtype).view(len(weight), 1, head_dim)
    return output.flatten(2, 3)


def absorbing_pays(up: Any, query: Tensor, positions: int, columns: int) -> bool:
    """Return whether attending to a latent takes fewer multiplications than making the heads of it.

    False where `up` is an adapter, hooked or quantized: absorbing reads its weight without calling it.

    Args:
        query: [batch, query heads, queries, head_dim].
        positions, columns: of the latent.
    """
    if not is_absorbable(up):
        return False
    heads, queries, head_dim = query.shape[1:]
    once = up.weight.numel() * getattr(up, "products", 1)  # all heads at one position
    group = heads * head_dim // up.out_features
    expanded = positions * once + queries * positions * heads * head_dim
    absorbed = queries * group * once + queries * positions * heads * columns
    return absorbed < expanded


def is_absorbable(up: Any) -> bool:
    """Whether the weight of `up` says all that it computes."""
    return (type(up) is nn.Linear or _is_complex(up)) and not is_rewritten(up)


def _is_complex(up: nn.Module) -> bool:
    """Whether `up` is exactly a ComplexUp, of this file or of its other copy.

    transformers loads the code of a checkpoint twice, for the configuration, which makes `up`, and for the model.
    """
    return "absorb" in vars(type(up))


class ComplexUp(nn.Module):
    """The key heads of a latent of complex columns: `k_h,f = sum of u_h,j c_j` over the columns j of frequency f.

    Attributes:
        weight: u, [heads, P, 2], real and imaginary parts.
    """

    products = 2  # multiplications of every number of the weight, at one position

    def __init__(self, num_heads: int, columns: Columns):
        super().__init__()
        self.columns, self.out_features = columns, 2 * num_heads * len(columns)
        self.weight = nn.Parameter(torch.empty(num_heads, sum(columns), 2))

    @property
    def initial_std(self) -> Tensor:
        """Of a new weight, [P, 1]: a key has the variance of a latent column, of however many columns it is made."""
        return torch.tensor([[(2 * number) ** -0.5] for number in self.columns for _ in range(number)], device="cpu")

    def forward(self, latent: Tensor) -> Tensor:
        """Key heads side by side, [..., heads * head_dim], of a latent [..., 2 P]."""
        places = _index(_places, self.columns, latent.device)
        # Where a frequency has fewer columns, the place is -1: any column, times the zeros that are the weight's last.
        real, imaginary = F.pad(self.weight.to(latent.dtype), (0, 0, 0, 1))[:, places].transpose(0, 1).unbind(-1)
        # [frequencies, heads * 2, 2 * most columns of one]
        maps = torch.stack((torch.cat((real, -imaginary), -1), torch.cat((imaginary, real), -1)), 2).flatten(1, 2)
        # Tokens come last, so that a column is chosen, and a key's number is put in its place, by copying whole rows.
        both = torch.cat((places, places + latent.shape[-1] // 2), dim=-1) % latent.shape[-1]
        columns = latent.flatten(0, -2).T.contiguous().index_select(0, both.flatten()).unflatten(0, both.shape)
        heads = torch.bmm(maps, columns).transpose(0, 1).flatten(0, 1)  # [heads * head_dim, tokens]
        return heads.T.contiguous().unflatten(0, latent.shape[:-1])

    def absorb(self, query: Tensor) -> Tensor:
        """Queries on the latent, [batch, query heads, positions, 2 P], of rotated ones [..., head_dim].

        `Re(conj(q) u c) = Re(conj(conj(u) q) c)`.
        """
        chosen = query.unflatten(-1, (2, -1))[..., frequencies_of(self.columns, query.device)]
        grouped = chosen.unflatten(1, (len(self.weight), -1))  # [batch, heads, group, positions, 2, P]
        real, imaginary = self.weight.to(query.dtype)[:, None, None].unbind(-1)
        q_real, q_imaginary = grouped.unbind(-2)
        parts = real * q_real + imaginary * q_imaginary, real * q_imaginary - imaginary * q_real
        return torch.cat(parts, dim=-1).flatten(1, 2)


def rotation_of_columns(rotation: Rotation, columns: Columns) -> Rotation:
    """Cosines and sines of a latent's columns, each [batch, positions, 2 P], for `rotate`."""
    cos, sin = (
        table.unflatten(-1, (2, -1))[..., frequencies_of(columns, table.device)].flatten(-2) for table in rotation
    )
    return cos, sin


def rotate_columns(heads: Tensor, rotation: Rotation, columns: Columns) -> Tensor:
    """Rotate a latent's complex columns [batch, heads, positions, 2 P], each at its own frequency."""
    return rotate(heads, rotation_of_columns(rotation, columns))


def frequencies_of(columns: Columns, device: torch.device) -> Tensor:
    """Return the frequency of every column, [P]."""
    return _index(_frequencies, columns, device)


def _frequencies(columns: Columns) -> list[int]:
    return [f for f, number in enumerate(columns) for _ in range(number)]


def _places(columns: Columns) -> list[list[int]]:
    """The columns of every frequency, [frequencies, most columns of one]; -1 for those that it has fewer."""
    most, ends = max(columns), accumulate(columns)
    return [[*range(end - number, end), *[-1] * (most - number)] for number, end in zip(columns, ends, strict=True)]


def _index(make: Callable[[Columns], list], columns: Columns, device: torch.device) -> Tensor:
    """An index made of `columns`, once for every device: no buffer of a module, which would be lost on the meta one."""
    if torch.compiler.is_compiling():
        return torch.tensor(make(columns), device=device)
    return _kept_index(make, columns, device)


@cache
def _kept_index(make: Callable[[Columns], list], columns: Columns, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is used in training as well
        return torch.tensor(make(columns), device=device)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling `module` computes `x weight^T (+ bias)` and nothing else, so that its weight may be read instead.

    False for adapters and quantized layers, which are of other types.
    """
    return type(module) is nn.Linear and not is_rewritten(module)


def is_rewritten(module: nn.Module) -> bool:
    """Whether other code changes what calling `module` computes; True if that is unknown.

    By hooks, by a replaced `forward` (accelerate's offloading), or by parameters of another tensor type (quantized
    weights).
    """
    if "forward" in vars(module) or any(getattr(module, name, True) for name in HOOKS):
        return True
    return any(type(parameter) is not nn.Parameter for parameter in module.parameters(recurse=False))
