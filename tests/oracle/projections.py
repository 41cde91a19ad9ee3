"""Queries, keys and values: each function gives [positions, heads * head_dim] and its factor on the attention scale.

`x` is the normed input of attention, `width` is heads * head_dim: where fewer heads are built than the input has
slices, an identity takes the leading ones. `hidden` is what entered the W_down of the previous block's MLP.
"""

from typing import Any

import torch
from torch import Tensor

from .basic import ACTIVATIONS, Tensors, layernorm, linear, rmsnorm

Projected = tuple[Tensor, float]
Hidden = Tensor | None  # None in the first layer


def linear_projection(x: Tensor, hidden: Hidden, tensors: Tensors, config: Any, name: str, width: int) -> Projected:
    """X W"""
    return linear(x, tensors, name), 1.0


def identity_query_or_key(
    x: Tensor,
    hidden: Hidden,
    tensors: Tensors,
    config: Any,
    name: str,
    width: int,
    scale: float = 0.5,
    bias: bool = False,
) -> Projected:
    """Q = X (+ b) (or K = X), and the attention scale is halved: 1 / (2 sqrt(d_k))"""
    return x[:, :width] + (tensors[f"{name}.bias"] if bias else 0), scale


def identity_value(
    x: Tensor, hidden: Hidden, tensors: Tensors, config: Any, name: str, width: int, bias: bool = False
) -> Projected:
    """V = X (+ b)"""
    return x[:, :width] + (tensors[f"{name}.bias"] if bias else 0), 1.0


def latent_key(
    x: Tensor,
    hidden: Hidden,
    tensors: Tensors,
    config: Any,
    name: str,
    width: int,
    columns: list[int] | None = None,
    rank: int | None = None,
    before_rotary: bool = False,
) -> Projected:
    """c = X W_c (+ b). Without rotary positions, or before them, `rank` real columns, half of the heads' width by
    default; K = c W_u. With them P complex columns, each of a frequency, K_h,f = sum over the columns j of frequency f
    of u_h,j c_j. By default every frequency has half of the heads; of `rank` / 2 columns the first f have the share
    f / all, rounded down. Dimensions f and f + d_k / 2 of a head are a complex number, before it is turned by the
    position."""
    latent, up = linear(x, tensors, name), tensors[name.replace("k_proj", "k_up_proj") + ".weight"]
    assert not before_rotary or up.ndim == 2
    if up.ndim == 2:
        assert latent.shape[1] == (width // 2 if rank is None else rank)
        return latent @ up.T, 1.0
    frequencies, total, heads = config.head_dim // 2, latent.shape[1] // 2, width // config.head_dim
    if rank is not None:
        before = [f * (rank // 2) // frequencies for f in range(frequencies + 1)]
        columns = [before[f + 1] - before[f] for f in range(frequencies)]
    elif columns is None:
        columns = [(heads + 1) // 2] * frequencies
    assert sum(columns) == total and list(up.shape) == [heads, total, 2]
    real_and_imaginary = []
    for head in up:
        key, j = [torch.zeros(len(x), dtype=torch.complex128)] * frequencies, 0
        for f, number in enumerate(columns):
            for _ in range(number):
                key[f] = key[f] + torch.complex(*head[j]) * torch.complex(latent[:, j], latent[:, total + j])
                j += 1
        real_and_imaginary += [number.real for number in key] + [number.imag for number in key]
    return torch.stack(real_and_imaginary, dim=1), 1.0


def latent_value(
    x: Tensor,
    hidden: Hidden,
    tensors: Tensors,
    config: Any,
    name: str,
    width: int,
    rank: int | None = None,
    keys: Tensor | None = None,
) -> Projected:
    """c = X W_c of `rank` columns, half of the heads' width by default; V = c W_u (+ b). With keys, c is followed by
    what is cached of these as it was before it was turned."""
    latent = linear(x, tensors, name)
    assert latent.shape[1] == (width // 2 if rank is None else rank)
    if keys is not None:
        latent = torch.cat((latent, keys), dim=1)
    return linear(latent, tensors, name.replace("v_proj", "v_up_proj")), 1.0


def block_identity(
    x: Tensor,
    hidden: Hidden,
    tensors: Tensors,
    config: Any,
    name: str,
    columns: int,
    start: int = 0,
    width: int | None = None,
) -> Projected:
    """K_g = X W_g, where rows start ... start + w - 1 of the last w columns of every head's W_g [d, d_k] are the
    identity matrix; w = d_k by default"""
    n, d = config.head_dim, config.hidden_size
    w = width or n
    free, plain = tensors[f"{name}.weight"].T, tensors.get(f"{name}.plain_weight")
    matrix = torch.zeros(d, columns, dtype=x.dtype)
    for column in range(columns):
        head, place = divmod(column, n)
        for row in range(d):
            if place < n - w:
                matrix[row, column] = plain[head * (n - w) + place, row]
            elif start <= row < start + w:
                matrix[row, column] = float(row - start == place - (n - w))
            else:
                matrix[row, column] = free[row if row < start else row - w, head * w + place - (n - w)]
    return x @ matrix + tensors.get(f"{name}.bias", torch.zeros(columns, dtype=x.dtype)), 1.0


def residual_query(
    x: Tensor, hidden: Hidden, tensors: Tensors, config: Any, name: str, width: int, scale: float = 1.0
) -> Projected:
    """Q = (X + X W_Q) / 2"""
    return (x[:, :width] + linear(x, tensors, name)) / 2, scale


def nonlinear(
    x: Tensor,
    hidden: Hidden,
    tensors: Tensors,
    config: Any,
    name: str,
    width: int,
    activation: str = "gelu",
    rank: int | None = None,
    norm_in: bool = True,
    norm_out: bool = True,
    anchor: str = "identity",
    scale: float = 1.0,
) -> Projected:
    """Q = (X + f(X)) / 2 with f(X) = LayerNorm(act(RMSNorm(X) W_1) W_2), W_1 [d, r], W_2 [r, d], r = d / 2 by default;
    with the anchor "linear", X W_Q in place of the first X. K and V likewise; there r is by default the largest with
    which W_1 [d, r] and W_2 [r, width] have no more entries than W_K [d, width]"""
    d = config.hidden_size
    if rank is None:
        rank = d // 2 if name.endswith("q_proj") else max(r for r in range(d) if d * r + r * width <= d * width)
    w_1, w_2 = tensors[f"{name}.down_proj.weight"].T, tensors[f"{name}.up_proj.weight"].T
    assert w_1.shape == (d, rank) and w_2.shape == (rank, width)
    f = rmsnorm(x, tensors[f"{name}.norm_in.weight"], config.norm_eps) if norm_in else x
    f = ACTIVATIONS[activation](f @ w_1) @ w_2
    if norm_out:
        f = layernorm(f, tensors[f"{name}.norm_out.weight"], None, config.norm_eps)
    anchored = linear(x, tensors, f"{name}.anchor") if anchor == "linear" else x[:, :width]
    return (anchored + f) / 2, scale


def query_from_mlp(
    x: Tensor, hidden: Hidden, tensors: Tensors, config: Any, name: str, width: int, scale: float = 1.0
) -> Projected:
    """Q = (X + hidden[0:d] W') / 2; in the first layer, which no MLP precedes, Q = X W"""
    if hidden is None:
        return linear(x, tensors, name), 1.0
    return (x[:, :width] + linear(hidden[:, : config.hidden_size], tensors, name)) / 2, scale


QUERIES = {
    "linear": linear_projection,
    "identity": identity_query_or_key,
    "residual": residual_query,
    "nonlinear": nonlinear,
    "from_mlp": query_from_mlp,
}
KEYS = {
    "linear": linear_projection,
    "identity": identity_query_or_key,
    "nonlinear": nonlinear,
    "block_identity": block_identity,
    "latent": latent_key,
}
VALUES = {
    "linear": linear_projection,
    "identity": identity_value,
    "nonlinear": nonlinear,
    "block_identity": block_identity,
    "latent": latent_value,
}
