"""LLaMA (TinyLlama), Mistral, Qwen2, Qwen3, Granite, SmolLM3, OLMo 2 and Phi-3: one layout with variations."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ...errors import LeanError
from ...model.config import MULTIPLIERS, LeanConfig
from .family import ATTENTION_BIASES, Family


def same_modules(*names: str) -> dict[str, tuple[str, ...]]:
    """Return modules of a layer that have one name here and there."""
    return {name: (name,) for name in names}


QK_NORMS = same_modules("self_attn.q_norm", "self_attn.k_norm")
_MODULES = same_modules(
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def read_windows(stock: PreTrainedConfig) -> dict[str, Any]:
    """Return the sliding window and its layers, as `layer_types` says them."""
    kinds = list(stock.layer_types)
    windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if other := sorted({*kinds} - {"sliding_attention", "full_attention"}):
        raise LeanError(f"layer_types {', '.join(other)} cannot be expressed here, only sliding and full attention")
    if not windowed:
        return {"sliding_window": None}
    if stock.sliding_window is None or not getattr(stock, "use_sliding_window", True):
        raise LeanError(
            "layer_types has sliding_attention, but there is no window: use_sliding_window "
            f"{getattr(stock, 'use_sliding_window', None)!r}, sliding_window {stock.sliding_window!r}"
        )
    return {"sliding_window": stock.sliding_window, "window_layers": windowed if len(windowed) < len(kinds) else None}


def write_windows(config: LeanConfig) -> dict[str, Any]:
    """Return the inverse of `read_windows`."""
    windows = [layer.window for layer in config.plan.layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def _write_qwen_windows(config: LeanConfig) -> dict[str, Any]:
    theirs = write_windows(config)
    first = [*theirs["layer_types"], "sliding_attention"].index("sliding_attention")
    return theirs | {"use_sliding_window": config.sliding_window is not None, "max_window_layers": first}


def _read_granite(stock: PreTrainedConfig) -> dict[str, Any]:
    multipliers = {name: float(getattr(stock, name)) for name in MULTIPLIERS}
    head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
    if multipliers["attention_multiplier"] == head_dim**-0.5:
        multipliers["attention_multiplier"] = None  # type: ignore[assignment]
    return multipliers


def _write_granite(config: LeanConfig) -> dict[str, Any]:
    multipliers = {name: getattr(config, name) for name in MULTIPLIERS}
    if config.attention_multiplier is None:
        multipliers["attention_multiplier"] = config.head_dim**-0.5
    return multipliers


def _read_smollm3(stock: PreTrainedConfig) -> dict[str, Any]:
    with_rope = [layer for layer in range(stock.num_hidden_layers) if stock.no_rope_layers[layer]]
    rope_layers = with_rope if len(with_rope) < stock.num_hidden_layers else None
    return read_windows(stock) | {"rope_layers": rope_layers}


def _write_smollm3(config: LeanConfig) -> dict[str, Any]:
    rope = [int(layer.rope is not None) for layer in config.plan.layers]
    return write_windows(config) | {"use_sliding_window": config.sliding_window is not None, "no_rope_layers": rope}


def _write_phi3(config: LeanConfig) -> dict[str, Any]:
    original = (config.rope_parameters or {}).get("original_max_position_embeddings")
    return {} if original is None else {"original_max_position_embeddings": original}


LLAMA = Family(
    model_type="llama",
    fixed={
        "position_embedding_type": "rope",
        "norm_type": "rmsnorm",
        "mlp_type": "gated",
        "scaled_residual_init": False,
    },
    settings={
        **{name: name for name in ("intermediate_size", "num_key_value_heads", "head_dim", "hidden_act")},
        "attention_dropout": "attention_dropout",
        "norm_eps": "rms_norm_eps",
    },
    biases={**ATTENTION_BIASES, "mlp_bias": "mlp_bias"},
    partial_rope=False,
    prefix="model.",
    modules={"embed_tokens": "embed_tokens", "norm": "norm"},
    layer="layers.{}",
    layer_modules=_MODULES,
    head="lm_head",
    ignorable=("rotary_emb.inv_freq",),
)
_WITHOUT_HEAD_DIM = {ours: theirs for ours, theirs in LLAMA.settings.items() if ours != "head_dim"}
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    settings={**LLAMA.settings, "sliding_window": "sliding_window"},
    biases={},
    ordinary={"layer_types": None},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    settings=_WITHOUT_HEAD_DIM,
    biases={"attention_bias": True},
    read=read_windows,
    write=_write_qwen_windows,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    fixed={**LLAMA.fixed, "qk_norm": True},
    biases=ATTENTION_BIASES,
    layer_modules=_MODULES | QK_NORMS,
    read=read_windows,
    write=_write_qwen_windows,
)
GRANITE = replace(LLAMA, model_type="granite", settings=_WITHOUT_HEAD_DIM, read=_read_granite, write=_write_granite)
SMOLLM3 = replace(LLAMA, model_type="smollm3", settings=_WITHOUT_HEAD_DIM, read=_read_smollm3, write=_write_smollm3)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    fixed={**LLAMA.fixed, "norm_placement": "after", "qk_norm": "width"},
    settings=_WITHOUT_HEAD_DIM,
    biases=ATTENTION_BIASES,
    layer_modules={
        **{name: ours for name, ours in _MODULES.items() if "layernorm" not in name},
        **QK_NORMS,
        "post_attention_layernorm": ("attention_output_layernorm",),
        "post_feedforward_layernorm": ("mlp_output_layernorm",),
    },
)
PHI3 = replace(
    LLAMA,
    model_type="phi3",
    settings={**_WITHOUT_HEAD_DIM, "hidden_dropout": "resid_pdrop", "sliding_window": "sliding_window"},
    biases={},
    partial_rope=True,
    layer_modules={
        **same_modules("input_layernorm", "self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj"),
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    write=_write_phi3,
)
