"""Hyper-connections: the mappings of one sublayer, token by token and stream by stream."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .basic import Tensors


def rms_normed(x: Tensor, config: Any) -> Tensor:
    """x / sqrt(mean(x^2) + eps); x itself in a model without norms."""
    if config.norm_type == "none":
        return x
    return x / torch.sqrt(sum(v * v for v in x) / len(x) + config.norm_eps)


def sinkhorn_knopp(logits: list[list[Tensor]]) -> list[list[Tensor]]:
    """mHC, equation 9: of exp(logits), 20 times, T_r(T_c(M)): first every column, then every row sums to 1."""
    m, n = [[torch.exp(entry) for entry in row] for row in logits], len(logits)
    for _ in range(20):
        columns = [sum(m[i][j] for i in range(n)) for j in range(n)]
        m = [[m[i][j] / columns[j] for j in range(n)] for i in range(n)]
        m = [[m[i][j] / sum(m[i]) for j in range(n)] for i in range(n)]
    return m


def mappings(h: list[Tensor], tensors: Tensors, config: Any, name: str) -> tuple[list, list, list[list]]:
    """H^pre [n], H^post [n] and H^res [n][n], target by source, of one token with the streams h.

    Hyper-Connections, equations 10-13: A_m = s_a tanh(norm(h) W_m) + A_m, B likewise with s_b, A_r with s_a, where
    H^res is A_r transposed. mHC, equations 7-8: logits a x' phi + b of the flattened x' = RMSNorm(x), and a sigmoid,
    twice a sigmoid, and Sinkhorn-Knopp.
    """
    n, mode = len(h), config.hyper_connections.get("mode", "dynamic")
    pre, post = tensors[f"{name}.pre"], tensors[f"{name}.post"]
    flat = tensors[f"{name}.residual"]
    residual = [[flat[n * i + j] for j in range(n)] for i in range(n)]
    if mode == "static":
        return list(pre), list(post), residual
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
    if mode == "dynamic":
        w_m, w_beta, w_r = weight[0], weight[1], weight[2:]
        normed = [rms_normed(stream, config) for stream in h]
        return (
            [scale[0] * torch.tanh(normed[j] @ w_m) + pre[j] for j in range(n)],
            [scale[1] * torch.tanh(normed[j] @ w_beta) + post[j] for j in range(n)],
            [[scale[0] * torch.tanh(normed[j] @ w_r[i]) + residual[i][j] for j in range(n)] for i in range(n)],
        )
    x = rms_normed(torch.cat(h), config)
    of_token = [row @ x for row in weight]
    return (
        [1 / (1 + torch.exp(-(scale[0] * of_token[j] + pre[j]))) for j in range(n)],
        [2 / (1 + torch.exp(-(scale[1] * of_token[n + j] + post[j]))) for j in range(n)],
        sinkhorn_knopp([[scale[2] * of_token[2 * n + n * i + j] + residual[i][j] for j in range(n)] for i in range(n)]),
    )


def connected(
    streams: list[Tensor], sublayer: Callable[[Tensor], Tensor], tensors: Tensors, config: Any, name: str
) -> list[Tensor]:
    """mHC, equation 3: x' = H^res x + H^post^T F(H^pre x), for streams [positions, hidden]"""
    n, positions = len(streams), range(len(streams[0]))
    of_token = [mappings([stream[t] for stream in streams], tensors, config, name) for t in positions]
    read = torch.stack([sum(of_token[t][0][j] * streams[j][t] for j in range(n)) for t in positions])
    output = sublayer(read)
    return [
        torch.stack(
            [
                sum(of_token[t][2][i][j] * streams[j][t] for j in range(n)) + of_token[t][1][i] * output[t]
                for t in positions
            ]
        )
        for i in range(n)
    ]
