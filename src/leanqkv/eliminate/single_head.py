"""Merge the four matrices of one attention head, (W_Q, W_K, W_V, W_O), into two: W_K W_Q^T and W_V W_O.

Karbevski & Mijoski 2025, Proposition 4.1: `Attn(X, W_Q, W_K, W_V, W_O) = Attn(X, Id, W_K W_Q^T, W_V W_O, Id)`, whatever
the norm and the skips. https://arxiv.org/abs/2510.23912
"""

from collections.abc import Mapping

from torch import Tensor

from ..checkpoints.stream import PROJECTIONS
from ..checkpoints.tensors import LazyTensors
from ..errors import LeanError
from ..model.config import LeanConfig
from ..model.shapes import parameter_shapes
from ..presets.edit import set_mechanisms

# Which projection's weight each of the others is multiplied by.
FACTORS = {"q_proj": "k_proj", "k_proj": "q_proj", "v_proj": "o_proj"}


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
        return "QK-norm (qk_norm) acts between W_Q and W_K"
    gate = config.plan.layers[0].output_gate
    if gate is not None and not gate.per_head:
        return "a gate of every column (output_gate) acts between W_V and W_O; one number a head would not matter"
    if (kind := config.key_value["type"]) != "projected":  # type: ignore[index]
        return f"its layers share keys or values (key_value is {kind!r}), which their different W_Q and W_O read"
    for layer in config.plan.layers:
        for slot in PROJECTIONS:
            if (kind := getattr(layer, slot).kind) != "linear":
                return f"the {slot} of layer {layer.layer} is {kind!r}, not a plain matrix"
    return None


def merge_single_head(config: LeanConfig, tensors: Mapping[str, Tensor]) -> tuple[LeanConfig, LazyTensors]:
    """Return the same function with two attention matrices a layer instead of four; raise a LeanError if `why_not`.

    Without biases the query and the output are identities, as in the paper. With them the key is the identity, so that
    the query's bias stays a bias, `b_Q W_K^T`. The key's bias adds the same to all of a query's scores and goes.
    `b_V W_O + b_O` is the value's bias: attention weights sum to one. A gate of the head multiplies the value's bias
    and not b_O, which then stays the output's.
    """
    if reason := why_not(config):
        raise LeanError(f"four matrices cannot become two: {reason}")
    biased, output_biased = bool(config.attention_bias), bool(config.attention_output_bias)
    joined = biased and output_biased and config.output_gate is None
    specs = {
        "key" if biased else "query": {"type": "identity", "scale": 1.0},
        "output": {"type": "identity", "bias": output_biased and not joined},
    }
    new = config
    for slot, spec in specs.items():
        new = set_mechanisms(new, slot, dict.fromkeys(range(config.num_hidden_layers), spec))

    def compute(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        attention, _, projection = module.rpartition(".")
        if projection not in FACTORS:
            return tensors[name]
        # Stored weights are the transposes of the papers' matrices.
        factor = tensors[f"{attention}.{FACTORS[projection]}.weight"].double()
        product = (factor if projection == "v_proj" else factor.T) @ tensors[name].double()
        if projection == "v_proj" and kind == "bias" and joined:
            product = product + tensors[f"{attention}.o_proj.bias"].double()
        return product

    return new, LazyTensors(parameter_shapes(new), compute)
