"""Norms, MLPs and the embedding of text, as the configuration chooses them.

LayerNorm: https://arxiv.org/abs/1607.06450; RMSNorm: https://arxiv.org/abs/1910.07467; DyT: Zhu et al. 2025,
"Transformers without Normalization", https://arxiv.org/abs/2503.10622
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .registry import ConfigError


class DynamicTanh(nn.Module):
    """DyT: `weight * tanh(alpha x) + bias`, alpha one learned number that starts at 1/2."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def initial_values(self) -> dict[str, float]:
        return {"alpha": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * torch.tanh(self.alpha * x)
        return y if self.bias is None else y + self.bias


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm times `offset + weight`, added in float32 or wider, as Gemma computes it: a narrow sum loses digits."""

    def __init__(self, width: int, eps: float, offset: float):
        self.offset = offset
        super().__init__(width, eps=eps)

    def initial_values(self) -> dict[str, float]:
        return {"weight": 1.0 - self.offset}

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(torch.promote_types(self.weight.dtype, wide)) + self.offset
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_rms_norm(config, width: int) -> nn.RMSNorm:
    """The RMSNorm of `width` features, with the configuration's `norm_eps` and `norm_offset`."""
    if config.norm_offset:
        return OffsetRMSNorm(width, config.norm_eps, config.norm_offset)
    return nn.RMSNorm(width, eps=config.norm_eps)


def make_norm(config, width: int) -> nn.Module:
    """The norm of a stream of `width` features: LayerNorm or DyT (with or without bias), RMSNorm, or none."""
    if config.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    if config.norm_type == "rmsnorm":
        return make_rms_norm(config, width)
    return DynamicTanh(width, config.norm_bias) if config.norm_type == "dyt" else nn.Identity()


def activation(name: str) -> nn.Module:
    """transformers' activation of that name; GPT-2's "gelu_new" as the one operator that it is, not as eight."""
    return ACT2FN["gelu_pytorch_tanh" if name == "gelu_new" else name]


class MLP(nn.Module):
    """`act(x W_up) W_down` (GPT).

    Every kind of MLP returns its output and an auxiliary tensor (`mlp_aux` in transformer.py): the hidden activations,
    which the next layer's query may read, or the router's logits of a mixture of experts, which its loss needs.
    """

    kind = "mlp"
    routes = False  # whether it hands out a router's logits

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = activation(config.hidden_act)

    def hidden(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.up_proj(hidden_states))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden_size] -> the same shape, and the hidden activations [..., intermediate_size]."""
        hidden = self.hidden(hidden_states)
        return self.down_proj(hidden), hidden


class GatedMLP(MLP):
    """`(act(x W_gate) * x W_up) W_down` (LLaMA's SwiGLU with `hidden_act` "silu"; Shazeer 2020, arXiv 2002.05202).

    As in Attention, inference may replace `project`.
    """

    kind = "gated"
    projections = ("gate_proj", "up_proj")  # what `project` gives

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def hidden(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.project(hidden_states)
        return self.activation(gate) * up

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up projection, each [..., intermediate_size]."""
        return self.gate_proj(hidden_states), self.up_proj(hidden_states)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a number, rounded to their dtype first, as in Gemma 3: 34 for sqrt(1152) in bfloat16."""

    def __init__(self, rows: int, width: int, multiplier: float):
        super().__init__(rows, width)
        self.multiplier = multiplier

    @property
    def embed_scale(self) -> Tensor:
        """A tensor of one number; PEFT looks for it under this name."""
        return torch.tensor(self.multiplier, dtype=self.weight.dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale


class Text:
    """Token ids in, a distribution over the vocabulary out."""

    main_input_name = "input_ids"
    embedding_name = "embed_tokens"
    # Its fields with their defaults; None where there is none.
    defaults: dict[str, Any] = {
        "vocab_size": 50304,
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }

    @classmethod
    def check(cls, config, num_labels: int | None) -> None:
        """Refuse fields without a meaning for text and fill in the defaults of its own."""
        for name in ("image_size", "patch_size", "num_channels"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} needs task 'image_classification', found {config.task!r}")
        if num_labels not in (None, 2):  # 2 is what transformers says of every model
            raise ConfigError(
                f"num_labels needs task 'image_classification', found {config.task!r}; no head here classifies text: "
                "put one of your own on the hidden states of AutoModel"
            )
        for name, default in cls.defaults.items():
            if getattr(config, name) is None:
                setattr(config, name, default)
        if config.max_position_embeddings is None:
            config.max_position_embeddings = 1024

    @staticmethod
    def make_embedding(config) -> nn.Module:
        size = config.vocab_size, config.hidden_size
        scaled = config.embedding_multiplier != 1
        return ScaledEmbedding(*size, config.embedding_multiplier) if scaled else nn.Embedding(*size)

    @staticmethod
    def embed(embedding: nn.Module, input_ids, inputs_embeds, pixel_values, attention_mask) -> Tensor:
        """[batch, positions, hidden_size], of token ids or of embeddings that are given."""
        if pixel_values is not None:
            raise ValueError("pixel_values need a model of images; this one reads input_ids")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
        return embedding(input_ids) if inputs_embeds is None else inputs_embeds
