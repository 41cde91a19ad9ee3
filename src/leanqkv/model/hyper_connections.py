"""Hyper-connections: n residual streams, mixed before and after every sublayer, in place of the skip connections.

`X' = R X + p F(m X)` with the streams X [n, hidden_size], F the attention or the MLP with its norm, and the mappings
m [n], what F reads; p [n], where its output goes; R [n, n], how the streams mix. All streams begin as the embedding.

Zhu et al. 2025, "Hyper-Connections", equations 2-5 (static, where m, p and R are learned) and 10-13 (dynamic, where
they also depend on the token), https://arxiv.org/abs/2409.19606. Xie et al. 2025, "mHC: Manifold-Constrained
Hyper-Connections", equations 7-9, https://arxiv.org/abs/2512.24880. Cited by Karbevski & Mijoski 2025 (P1), section 6.

Readings: the streams are averaged at the end, where the first paper adds them up, so that the model starts as the one
with skip connections also where no norm takes the factor n out; initial weights are that model's, without the factor
sqrt(n). The norm of the dynamic mappings is an RMSNorm without a weight, which would be a factor of the matrix that
reads it; a model without norms has none here either.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Mechanism

MODES = ("static", "dynamic", "mhc")
SINKHORN_ITERATIONS = 20
INITIAL_SCALE = 0.01  # of what the token adds to the mappings
# mHC's positive mappings start near the first paper's: this much of one stream, the rest of the others alike.
OWN_SHARE = 0.97


class HyperConnection(nn.Module):
    """The mappings of one sublayer. `pre`, `post` and `residual` (target by source) are m, p and R, or what the token
    adds to; mHC's are logits. `weight` makes that of the token, `scale` weighs it: of pre and residual, of post; with
    mHC of pre, of post, of residual. R is a vector, for vectors have no weight decay: the paper's has none.

    place: of the sublayer among all of them. It first reads stream `place % streams`: with mHC most of it.
    """

    def __init__(self, config, mode: str, streams: int, place: int):
        super().__init__()
        self.mode, self.streams, self.place = mode, streams, place
        self.eps = None if config.norm_type == "none" else config.norm_eps
        self.pre, self.post = nn.Parameter(torch.empty(streams)), nn.Parameter(torch.empty(streams))
        self.residual = nn.Parameter(torch.empty(streams * streams))
        if mode != "static":
            per_stream = (streams + 2, config.hidden_size)
            of_all = (streams * (streams + 2), streams * config.hidden_size)
            self.weight = nn.Parameter(torch.empty(per_stream if mode == "dynamic" else of_all))
            self.scale = nn.Parameter(torch.empty(2 if mode == "dynamic" else 3))

    def initial_values(self) -> dict[str, Tensor | float]:
        """The function of a skip connection: streams that are equal stay so."""
        own = torch.eye(self.streams)
        values: dict[str, Tensor | float] = {"weight": 0.0, "scale": INITIAL_SCALE, "post": 1.0}
        if self.mode == "mhc":
            own = own * OWN_SHARE + (1 - own) * (1 - OWN_SHARE) / (self.streams - 1)
            pre = own[self.place % self.streams].logit()
            return values | {"pre": pre, "post": 0.0, "residual": own.log().flatten()}
        return values | {"pre": own[self.place % self.streams], "residual": own.flatten()}

    def forward(self, streams: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """streams: [..., n, hidden_size].

        Returns:
            what the sublayer reads, [..., hidden_size]; a function from its output to the streams after it.
        """
        with torch.autocast(streams.device.type, enabled=False):  # a stream keeps its precision, as with skips
            pre, post, residual = (mapping.to(streams.dtype) for mapping in self._mappings(streams))
            # Of a static mixing, the gradient of `@` takes ten times as long.
            of_all = torch.einsum("...ij,...jd->...id", torch.cat((pre.unsqueeze(-2), residual), -2), streams)
            read, mixed = of_all.split([1, self.streams], -2)
        return read.squeeze(-2), lambda output: mixed + post.unsqueeze(-1) * output.unsqueeze(-2)

    def _mappings(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """m, p and R in float32 or wider: the same for all tokens, or [..., n], [..., n] and [..., n, n]."""
        n = self.streams
        mixing = self.residual.unflatten(-1, (n, n))
        if self.mode == "static":
            return self.pre, self.post, mixing
        features = streams.to(torch.promote_types(streams.dtype, torch.float32))
        if self.mode == "mhc":
            features = features.flatten(-2)
        if self.eps is not None:
            features = F.rms_norm(features, features.shape[-1:], eps=self.eps)
        of_token = F.linear(features, self.weight.to(features.dtype))
        if self.mode == "dynamic":  # one row per stream, which is the source in R
            pre, post, residual = of_token.tanh().split([1, 1, n], dim=-1)
            mixed = mixing + self.scale[0] * residual.mT
            return self.pre + self.scale[0] * pre.squeeze(-1), self.post + self.scale[1] * post.squeeze(-1), mixed
        pre, post, residual = of_token.split([n, n, n * n], dim=-1)
        return (
            (self.pre + self.scale[0] * pre).sigmoid(),
            2 * (self.post + self.scale[1] * post).sigmoid(),
            doubly_stochastic(mixing + self.scale[2] * residual.unflatten(-1, (n, n))),
        )


def doubly_stochastic(logits: Tensor) -> Tensor:
    """Sinkhorn and Knopp's iteration on `exp(logits)`, [..., n, n]: columns, then rows, are divided by their sums.

    The first is one of logarithms: `exp` could underflow to a column of zeros. After it no sum is below 1 / n^2.
    """
    matrix = logits.log_softmax(-2).softmax(-1)
    for _ in range(SINKHORN_ITERATIONS - 1):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


@dataclass(frozen=True)
class HyperConnections(Mechanism):
    """n streams in place of one. mode: "static", "dynamic" or "mhc" (doubly stochastic mixing)."""

    kind = "hyper"
    streams: int = 4
    mode: str = "dynamic"

    def build(self, config, place: int) -> HyperConnection:
        return HyperConnection(config, self.mode, self.streams, place)

    def spread(self, hidden_states: Tensor) -> Tensor:
        """The streams before the first layer, [..., n, hidden_size]: copies."""
        return hidden_states.unsqueeze(-2).expand(*hidden_states.shape[:-1], self.streams, -1)

    def clash(self, config, heads: None = None) -> str | None:
        if self.mode not in MODES:
            return f"mode must be one of {', '.join(MODES)}, found {self.mode!r}"
        least = 2 if self.mode == "mhc" else 1
        if not least <= self.streams <= 64:
            return f"streams must be from {least} to 64 with mode {self.mode!r}, found {self.streams}"
        if not (config.attention_skip and config.mlp_skip):
            return (
                "they take the place of the skip connections, and this model lacks some (attention_skip "
                f"{config.attention_skip}, mlp_skip {config.mlp_skip})"
            )
        if config.depth_average is not None:
            return "averages over depth (depth_average) are of one stream, and these are several; use one of the two"
        return None
