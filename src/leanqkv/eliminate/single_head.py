"""Merge the four matrices of one attention head, (W_Q, W_K, W_V, W_O), into two: W_K W_Q^T and W_V W_O.

Karbevski & Mijoski 2025, Proposition 4.1: `Attn(X, W_Q, W_K, W_V, W_O) = Attn(X, Id, W_K W_Q^T, W_V W_O, Id)`, whatever
the norm and the skips. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..presets.edit import set_mechanisms


def why_not(config: LeanConfig) -> str | None:
    """Return why the four matrices cannot become two, or None."""
    if config.num_attention_heads != 1:
        return f"it has {config.num_attention_heads} heads a layer, and the identity holds for one"
    if config.kv_lora_rank is not None:
        return "keys and values are made from a latent (MLA)"
    if config.head_dim != config.hidden_size:
        return f"its head is {config.head_dim} wide, not hidden_size ({config.hidden_size})"
    if config.position_embedding_type == "rope":
        return "rotary positions act between W_Q and W_K"
    if config.qk_norm:
        return "QK-norm acts between W_Q and W_K"
    if config.key_value["type"] != "projected":  # type: ignore[index]
        return "its layers share keys or values, which their different W_Q and W_O read"
    for layer in config.plan.layers:
        for slot in ("query", "key", "value", "output"):
            if (kind := getattr(layer, slot).kind) != "linear":
                return f"the {slot} of layer {layer.layer} is {kind!r}, not a plain matrix"
    return None


def merge_single_head(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """Return the same function with two attention matrices a layer instead of four; no matrix is inverted.

    Without biases the query and the output are identities, as in the paper. With them the key is the identity, not the
    query: what the query's bias adds to the scores is then still a bias, `b_Q W_K^T`, and nothing need be solved for.
    The key's bias adds the same to all of a query's scores and goes. `b_V W_O + b_O` is the value's bias: attention
    weights sum to one. Raises a LeanError with the reason where `why_not` has one.
    """
    if reason := why_not(config):
        raise LeanError(f"four matrices cannot become two: {reason}")
    biased = bool(config.attention_bias)
    specs = {
        "key" if biased else "query": {"type": "identity", "scale": 1.0},
        "output": {"type": "identity", "bias": bool(config.attention_output_bias) and not biased},
    }
    new = config
    for slot, spec in specs.items():
        new = set_mechanisms(new, slot, dict.fromkeys(range(config.num_hidden_layers), spec))

    def compute(name: str) -> Tensor:
        attention, _, tensor = name.rpartition("self_attn.")
        if not attention:
            return tensors[name]

        def of(name: str) -> Tensor:
            return tensors[f"{attention}self_attn.{name}"].double()

        # Stored weights are the transposes of the papers' matrices.
        match tensor:
            case "k_proj.weight":
                return of("q_proj.weight").T @ of("k_proj.weight")
            case "q_proj.weight":
                return of("k_proj.weight").T @ of("q_proj.weight")
            case "q_proj.bias":
                return of("k_proj.weight").T @ of("q_proj.bias")
            case "v_proj.weight":
                return of("o_proj.weight") @ of("v_proj.weight")
            case "v_proj.bias":
                added = of("o_proj.bias") if config.attention_output_bias else torch.zeros(config.hidden_size)
                return of("o_proj.weight") @ of("v_proj.bias") + added
            case _:
                return tensors[name]

    return new, LazyTensors(new.plan.parameter_shapes, compute)
