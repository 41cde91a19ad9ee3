"""The error of attention's output that latent keys cause.

Ours. An error e of key s moves the score of query t by `q_t . e`, and attention's output, to first order, by that times
`A_ts (v_s - o_t) W_O`: A is the pattern, o_t the attended value. So a key counts by how much moving its scores moves
the output, and a direction of it by the queries' energy along it.

Rotary positions multiply the complex number of a frequency by the same phase in every head. A latent therefore mixes
the heads of one frequency, by complex factors, and its columns are chosen frequency by frequency (TransMLA, Meng et al.
2025, https://arxiv.org/abs/2502.07864, rotates heads in the same way). Without rotary positions, and of keys that are
cached before they are turned by these, it mixes everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.config import LeanConfig
from ..model.layout import LayerPlan
from ..model.position import rotate
from .activations import Recorder
from .low_rank import approximate


def can_be_latent(config: LeanConfig, layer: LayerPlan, before_rotary: bool) -> bool:
    """Return whether a layer's keys can be made from a latent, of all frequencies if it is one of keys before rotary
    positions: else they must not be normed, and rotary positions must turn whole heads."""
    if before_rotary:
        return layer.key.kind == "linear"
    rope = {} if layer.rope is None else getattr(config, layer.rope)
    whole_heads = rope.get("partial_rotary_factor", 1.0) == 1.0
    return layer.key.kind == "linear" and not config.qk_norm and whole_heads


def to_complex(heads: Tensor) -> Tensor:
    """Return [..., head_dim / 2] complex numbers of [..., head_dim], one per frequency, as `rotate` pairs them."""
    return torch.complex(*heads.double().chunk(2, dim=-1))


class KeyGrams:
    """Sums over a layer's keys and queries, in float64 on the CPU.

    Attributes:
        keys: each token's keys weighted by how much moving its scores moves the output: [frequencies, heads, heads] of
            complex numbers with rotary positions, else [width, width].
        queries: their energy: [frequencies, heads], else [heads, head_dim, head_dim].
        importance: [heads], the sum of these weights head by head. A latent mixes heads, so a token has one weight for
            all of them, and a head's share of it is taken to be that of all tokens.
        tokens: how many queries were added.
    """

    def __init__(self, output: Tensor, rotary: bool, scaling: float):
        """output: W_O as [heads, group, head_dim, hidden_size]; scaling: the factor on the scores."""
        self.keys: Any = 0.0
        self.queries: Any = 0.0
        self.importance: Any = 0.0
        self.tokens = 0
        self._rotary, self._scaling = rotary, scaling
        self._metric = torch.einsum("hgkd,hgld->hgkl", output, output).flatten(0, 1).float()

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each query's output."""
        heads = recorder.key.shape[1]
        importance = self._importance(recorder, weight).cpu().double()  # [batch, query heads, length]
        key, query = recorder.key.cpu(), recorder.query.cpu().unflatten(1, (heads, -1))
        self.tokens += weight.numel()
        self.importance = self.importance + importance.sum((0, 2)).unflatten(0, (heads, -1)).sum(1)
        weighted = key.double() * importance.sum(1)[:, None, :, None].sqrt()
        if self._rotary:
            turned = to_complex(weighted)
            self.keys = self.keys + torch.einsum("bhsf,bgsf->fhg", turned.conj(), turned)
            self.queries = self.queries + to_complex(query).abs().square().mean(2).sum((0, 2)).T
        else:
            columns = weighted.transpose(1, 2).flatten(2).flatten(0, 1)
            self.keys = self.keys + columns.T @ columns
            grouped = query.double()
            self.queries = self.queries + torch.einsum("bhgtk,bhgtl->hkl", grouped, grouped) / query.shape[2]

    def _importance(self, recorder: Recorder, weight: Tensor) -> Tensor:
        """The squared move of the weighted output for a move of each key's scores by one, [batch, heads, length]."""
        return (weight.square()[:, None, None] @ self._moves(recorder))[:, :, 0]

    def _moves(self, recorder: Recorder) -> Tensor:
        """The squared move of each query's output for a move of each of its scores by one, [batch, heads, queries,
        keys]."""
        group = recorder.query.shape[1] // recorder.values.shape[1]
        values = recorder.values.repeat_interleave(group, 1)
        attended = recorder.heads.transpose(1, 2)  # [batch, heads, length, head_dim]
        metric = self._metric.to(values)
        of_values = (values @ metric * values).sum(-1)[:, :, None]
        of_attended = (attended @ metric * attended).sum(-1)[..., None]
        # In place: the patterns are the largest of a batch's tensors.
        distance = (attended @ (-2 * metric) @ values.mT).add_(of_values).add_(of_attended).clamp_min_(0)
        return distance.mul_(recorder.patterns).mul_(recorder.patterns)

    def _energy(self) -> Tensor:
        """The queries' energy of every head times its share of the importance, as a mean over tokens."""
        shares = self.importance / self.importance.sum().clamp_min(torch.finfo(torch.float64).tiny)
        return self.queries / self.tokens * (shares if self._rotary else shares[:, None, None])

    def latents(self) -> dict[str, Tensor]:
        """Return the best latents of every rank, and the error that each column takes away.

        Returns:
            combine, restore: see `approximate`; by frequency with rotary positions. gains: [frequencies, heads] of
            complex columns, else [width] of real ones.
        """
        energy = self._energy() * self._scaling**2
        if not self._rotary:
            combine, restore, gains = approximate(self.keys, torch.block_diag(*energy))
            return {"combine": combine.contiguous(), "restore": restore.contiguous(), "gains": gains / self.tokens}
        # Over all positions, the real part of a product of two complex numbers has half of its square.
        parts = [
            approximate(keys, torch.diag(square / 2).to(keys)) for keys, square in zip(self.keys, energy, strict=True)
        ]
        combine, restore, gains = (torch.stack(part) for part in zip(*parts, strict=True))
        combine, restore = (torch.view_as_real(matrix).contiguous() for matrix in (combine, restore))
        return {"combine": combine, "restore": restore, "gains": gains / self.tokens}


class UnrotatedKeyGrams(KeyGrams):
    """The same for keys before rotary positions, of which a latent mixes all columns.

    Query t sees an error e of key s as `(R_s^T q_t) . e`, R_s being the rotation of its position. The energy along the
    directions of a head is so `sum_ts w_ts (R_s^T q_t) (R_s^T q_t)^T`, each score's with its own weight w. With random
    signs z and `u_s = sum_t z_t sqrt(w_ts) R_s^T q_t` it is the expectation of `sum_s u_s u_s^T` (see `ValueGram`).

    Where keys are normed, `u_s` passes back through the norm's derivative at key s, and a key counts the less, the
    longer it is. Where one norm has all heads, what an error in one does to the others is left out.

    Args:
        generator: of the signs.
        norm: of the keys, in float64; None: they have none.
    """

    def __init__(self, output: Tensor, scaling: float, generator: torch.Generator, norm: nn.RMSNorm | None = None):
        super().__init__(output, False, scaling)
        self._generator, self._norm = generator, norm

    def add(self, recorder: Recorder, weight: Tensor) -> None:
        """Add a run of queries; `weight` [batch, queries] multiplies each query's output."""
        assert recorder.rotation is not None
        cos, sin = recorder.rotation
        moves = self._moves(recorder).mul_(weight.square()[:, None, :, None])
        signs = 2 * torch.randint(2, moves.shape[:3], generator=self._generator).to(moves) - 1
        heads = recorder.key.shape[1]
        importance = moves.sum(2).cpu().double().unflatten(1, (heads, -1)).sum(2)  # [batch, heads, keys]
        met = rotate(moves.sqrt_().mT @ (recorder.query * signs[..., None]), (cos, -sin)).cpu().double()
        grouped, columns = met.unflatten(1, (heads, -1)), recorder.projected_key.cpu().double()
        if self._norm is not None:
            grouped, importance = through_norm(self._norm, columns, grouped, importance)
        self.tokens += weight.numel()
        self.importance = self.importance + importance.sum()
        self.queries = self.queries + torch.einsum("bhgsk,bhgsl->hkl", grouped, grouped)
        columns = columns * importance.sum(1)[..., None].sqrt()
        self.keys = self.keys + (columns.mT @ columns).sum(0)

    def _energy(self) -> Tensor:
        return self.queries / self.importance.clamp_min(torch.finfo(torch.float64).tiny)


def through_norm(norm: nn.RMSNorm, keys: Tensor, met: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return what normed keys meet as directions of the keys before the norm, and how much these count.

    Args:
        norm: of a head, or of all heads together.
        keys: [batch, keys, width], before the norm.
        met: [batch, heads, group, keys, head_dim], of the keys behind it; importance: [batch, heads, keys].
    """
    assert norm.eps is not None
    split = keys.unflatten(-1, (met.shape[1], -1)).transpose(1, 2)  # [batch, heads, keys, head_dim]
    width = norm.normalized_shape[0]
    gain = (norm.weight + getattr(norm, "offset", 0.0)).view(-1, 1, met.shape[-1])  # of all heads, or of each
    square = split.square().mean(-1, keepdim=True)
    if width != met.shape[-1]:
        square = square.mean(1, keepdim=True)
    inverse = (square + norm.eps).rsqrt()
    unit, scaled = (split * inverse)[:, :, None], met * gain[:, None]
    back = (scaled - unit * (unit * scaled).sum(-1, keepdim=True) / width) * inverse[:, :, None]
    return back, importance * (gain.square().mean(-1) * inverse[..., 0].square())


@dataclass(frozen=True)
class KeyLatent:
    """A layer's keys made from a latent, in float64.

    Attributes:
        latent: [columns, inputs], of k_proj; its bias is the last input where there is one.
        up: k_up_proj's weight: [heads, complex columns, 2] with rotary positions, else [width, columns].
        key: [width, inputs]: what the key heads are together.
        columns: complex ones of each frequency; None without rotary positions.
    """

    latent: Tensor
    up: Tensor
    key: Tensor
    columns: list[int] | None


def column_gains(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the error that each real column takes away, descending, [width]."""
    gains = stored["gains"]
    return gains if gains.dim() == 1 else gains.flatten().sort(descending=True).values.repeat_interleave(2) / 2


def columns_of(gains: Tensor, rank: int) -> list[int]:
    """Return how many complex columns of each frequency are worth most, of `rank` real ones in all."""
    order = gains.flatten().argsort(descending=True, stable=True)[: rank // 2]
    return torch.bincount(order // gains.shape[1], minlength=len(gains)).tolist()


def key_latent(stored: Mapping[str, Tensor], key: Tensor, rank: int) -> KeyLatent:
    """Return the best latent of `rank` real columns; key: [heads, head_dim, inputs], W_K with its bias, in float64."""
    if stored["gains"].dim() == 1:
        combine, restore = stored["combine"][:, :rank], stored["restore"][:rank]
        latent, up = combine.T @ key.flatten(0, 1), restore.T
        return KeyLatent(latent, up, up @ latent, None)
    # Copies: tensors of a file begin at multiples of 8 bytes, and some of PyTorch's complex kernels need 16.
    pairs = (stored[name].clone(memory_format=torch.contiguous_format) for name in ("combine", "restore"))
    combine, restore = (torch.view_as_complex(pair) for pair in pairs)
    columns = columns_of(stored["gains"], rank)
    by_frequency = torch.complex(*key.chunk(2, dim=1)).transpose(0, 1)  # [frequencies, heads, inputs]
    parts, ups = [], []
    for frequency, count in enumerate(columns):
        # A key is a row here, so heads are mixed by the transposes.
        parts.append(combine[frequency, :, :count].mT @ by_frequency[frequency])
        ups.append(restore[frequency, :count].mT)  # [heads, count]
    made = torch.stack([up @ part for up, part in zip(ups, parts, strict=True)], dim=1)  # [heads, frequencies, inputs]
    latent, up = torch.cat(parts), torch.cat(ups, dim=1)
    return KeyLatent(
        torch.cat((latent.real, latent.imag)),
        torch.view_as_real(up.resolve_conj()).contiguous(),
        torch.cat((made.real, made.imag), dim=1).flatten(0, 1),
        columns,
    )
