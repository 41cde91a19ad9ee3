"""Latent keys: a layer caches complex columns `c`, and its key heads are complex-linear maps of them, `k_h = u_h c`.

Rotary positions multiply frequency f of every head by the same `exp(i s w_f)`, which commutes with every complex-linear
map between the heads at that frequency. So `k_h,f = sum of u_h,j c_j` over the columns j of frequency f, of columns
that are rotated before they are cached. Ours; the latent is that of multi-head latent attention (DeepSeek-AI 2024,
https://arxiv.org/abs/2405.04434, section 2.1). TransMLA (Meng et al. 2025, https://arxiv.org/abs/2502.07864) rotates
key heads into each other, frequency by frequency.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .position import Rotation
from .projection_linear import is_plain_linear, is_rewritten

Columns = tuple[int, ...]  # of the latent, by frequency


class LatentKeys:
    """`k_proj` makes the latent, and `k_up_proj` the key heads of it.

    With rotary positions the latent, [batch, positions, 2 P], has the real parts of P complex columns and then the
    imaginary ones, each in the order of their frequencies; dimension i of a head and i + head_dim / 2 are a complex
    number too. Without rotary positions it has `rank` real columns and key heads are any linear map of them.

    Expanded, a layer attends to the key heads. Absorbed, every query head is multiplied by its part of `k_up_proj` and
    attends to the latent itself: the same scores, and cheaper when decoding, where expanding would touch the whole
    history at each step.

    Options:
        columns: complex columns of each of the head_dim / 2 frequencies, from 0 to the number of key heads; by default
            half of the heads. For layers with rotary positions.
        rank: real columns, by default half of the width of the key heads; with rotary positions they are spread evenly
            over the frequencies.
    """

    caches_latent_keys = True

    @dataclass(frozen=True)
    class Options:
        columns: tuple[int, ...] | None = None
        rank: int | None = None

    @staticmethod
    def clash_in_layer(config, num_heads: int, options: Options, rope: str | None) -> str | None:
        """Why a layer whose rotary parameters are in the field `rope` (None: no rotary positions) cannot have it."""
        if config.key_value["type"] != "projected":
            return f"key_value {config.key_value['type']!r} shares heads, and here only a latent of the keys is kept"
        if config.qk_norm:
            return "qk_norm norms every head's key, and the keys are never made when decoding from the latent"
        if options.columns is not None and options.rank is not None:
            return "columns and rank both say how wide the latent is; give one of them"
        width = num_heads * config.head_dim
        if rope is not None:
            return _rotary_clash(config, num_heads, options, getattr(config, rope))
        if options.columns is not None:
            return "columns are of rotary frequencies, and this layer has no rotary positions; give rank in their place"
        if not 1 <= (rank := width // 2 if options.rank is None else options.rank) <= width:
            return f"rank must be from 1 to {width}, the width of its {num_heads} key heads; found {rank}"
        return None

    @staticmethod
    def in_layer(config, num_heads: int, options: Options, rope: str | None) -> Options:
        """The options with their defaults filled in: `columns` with rotary positions, `rank` without."""
        if rope is None:
            rank = num_heads * config.head_dim // 2 if options.rank is None else options.rank
            return replace(options, rank=rank)
        if options.columns is not None:
            return options
        frequencies = config.head_dim // 2
        total = frequencies * ((num_heads + 1) // 2) if options.rank is None else options.rank // 2
        spread = ((f + 1) * total // frequencies - f * total // frequencies for f in range(frequencies))
        return LatentKeys.Options(columns=tuple(spread))

    @staticmethod
    def width(options: Options) -> int:
        """The real columns that are cached, of options that `in_layer` gave."""
        return options.rank or 2 * sum(options.columns or ())

    @staticmethod
    def build(config, num_heads: int, options: Options) -> nn.Linear:
        return nn.Linear(config.hidden_size, LatentKeys.width(options), bias=config.attention_bias)

    @staticmethod
    def build_up(config, num_heads: int, options: Options) -> nn.Module:
        """Return the map of the latent to the key heads; their bias is part of the latent."""
        if options.columns is not None:
            return ComplexUp(num_heads, options.columns)
        up = nn.Linear(LatentKeys.width(options), num_heads * config.head_dim, bias=False)
        up.initial_std = up.in_features**-0.5
        return up


def _rotary_clash(config, num_heads: int, options: LatentKeys.Options, rope: dict) -> str | None:
    frequencies, width = config.head_dim // 2, num_heads * config.head_dim
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"latent keys rotate whole heads; found partial_rotary_factor {rope['partial_rotary_factor']}"
    if options.rank is not None and not (0 < options.rank <= width and options.rank % 2 == 0):
        return f"rank must be even and from 2 to {width}, the width of its {num_heads} key heads; found {options.rank}"
    if options.columns is None:
        return None
    if len(options.columns) != frequencies:
        return f"columns must be {frequencies} numbers, one for each frequency; found {len(options.columns)}"
    if not all(0 <= number <= num_heads for number in options.columns):
        found = next(number for number in options.columns if not 0 <= number <= num_heads)
        return f"columns must be from 0 to {num_heads}, the number of key heads; found {found}"
    return None if any(options.columns) else "columns are 0 for every frequency; give at least one column"


class ComplexUp(nn.Module):
    """The key heads of a latent of complex columns: `k_h,f = sum of u_h,j c_j` over the columns j of frequency f.

    Attributes:
        weight: u, [heads, P, 2], real and imaginary parts.
    """

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
        places = _places(self.columns, latent.device)
        columns = latent.unflatten(-1, (2, -1))[..., places]  # [..., 2, frequencies, most columns of one]
        # Where a frequency has fewer columns, the place is -1: any column, times the zeros that are the weight's last.
        real, imaginary = F.pad(self.weight.to(latent.dtype), (0, 0, 0, 1))[:, places].unbind(-1)
        maps = torch.stack((torch.stack((real, -imaginary)), torch.stack((imaginary, real))))
        return torch.einsum("...ifc,oihfc->...hof", columns, maps).flatten(-3)

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


def absorb(up: nn.Module, query: Tensor) -> Tensor:
    """Queries [batch, query heads, positions, columns] on the latent, of rotated ones [..., head_dim]."""
    if isinstance(up, ComplexUp):
        return up.absorb(query)
    assert isinstance(up, nn.Linear)
    weight = up.weight.to(query.dtype).unflatten(0, (-1, query.shape[-1]))  # [heads, head_dim, rank]
    return torch.einsum("bkgtx,kxr->bkgtr", query.unflatten(1, (len(weight), -1)), weight).flatten(1, 2)


def absorbing_keys_pays(up: nn.Module, query: Tensor, latent: Tensor) -> bool:
    """Whether attending to the latent takes fewer multiplications than making the key heads of it.

    It reads the weight of `up` without a call, so an adapter, hook or quantized weight there leaves the other form.

    Args:
        query: [batch, query heads, queries, head_dim]; latent: [batch, 1, keys, columns].
    """
    if not is_plain_linear(up) and (type(up) is not ComplexUp or is_rewritten(up)):
        return False
    assert isinstance(up, nn.Linear | ComplexUp)
    (heads, queries, head_dim), (keys, width) = query.shape[1:], latent.shape[2:]
    once = up.weight.numel() * (1 if isinstance(up, nn.Linear) else 2)  # all key heads at one position
    group = heads * head_dim // up.out_features
    expanded = keys * once + queries * keys * heads * head_dim
    absorbed = queries * group * once + queries * keys * heads * width
    return absorbed < expanded


def frequencies_of(columns: Columns, device: torch.device) -> Tensor:
    """The frequency of every column, [P]."""
    return _index(_list_frequencies, columns, device)


def _places(columns: Columns, device: torch.device) -> Tensor:
    """The columns of every frequency, [frequencies, most columns of one]; -1 for those that it has fewer."""
    return _index(_list_places, columns, device)


def _list_frequencies(columns: Columns) -> list[int]:
    return [f for f, number in enumerate(columns) for _ in range(number)]


def _list_places(columns: Columns) -> list[list[int]]:
    most, places, end = max(columns), [], 0
    for number in columns:
        places.append([*range(end, end + number), *[-1] * (most - number)])
        end += number
    return places


def _index(make: Callable[[Columns], list], columns: Columns, device: torch.device) -> Tensor:
    """An index made of `columns`, once for every device: no buffer of a module, which would be lost on the meta one."""
    if torch.compiler.is_compiling():
        return torch.tensor(make(columns), device=device)
    return _kept_index(make, columns, device)


@cache
def _kept_index(make: Callable[[Columns], list], columns: Columns, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is used in training as well
        return torch.tensor(make(columns), device=device)
