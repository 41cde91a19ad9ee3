"""LeanConfig: everything that defines the function a checkpoint computes."""

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .cache import LAYER_TYPE
from .plan import Plan, make_plan
from .registry import ConfigError, suggest

CHOICES = {
    "position_embedding_type": ("learned", "rope", "none"),
    "norm_type": ("layernorm", "rmsnorm"),
    "mlp_type": ("mlp", "gated"),
    "hidden_act": tuple(ACT2FN),
}

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)

# What transformers itself writes into a config.json or passes along when it loads one, beyond declared fields.
_TRANSFORMERS_KEYS = {
    *("auto_map", "model_type", "name_or_path", "_name_or_path", "_commit_hash", "num_labels", "torch_dtype"),
    *("attn_implementation", "experts_implementation", "output_attentions", "quantization_config"),
}


@strict
class LeanConfig(PreTrainedConfig):
    """Configuration of a LeanForCausalLM. Unknown keys and combinations that cannot be built raise ConfigError.

    Shape (the names are those of `transformers`):
        vocab_size, hidden_size (d), intermediate_size, num_hidden_layers (L), num_attention_heads (H),
        num_key_value_heads (null: H), head_dim (null: d / H), max_position_embeddings.
        position_embedding_type: "learned", "rope" or "none"; rope_parameters as in transformers (rope_type,
            rope_theta, partial_rotary_factor, ...).
        norm_type: "layernorm" or "rmsnorm", before attention, before the MLP and at the end; norm_eps; norm_bias
            (LayerNorm only).
        mlp_type: "mlp" (up, activation, down) or "gated" (SwiGLU with hidden_act "silu").
        attention_bias (query, key, value), attention_output_bias, mlp_bias, tie_word_embeddings.
        qk_norm: RMSNorm of every query and key head, before RoPE, as in Qwen3.
    Mechanisms (see `leanqkv presets`):
        query, key, value: which layers depart from a linear projection, for example
            `[{"type": "identity", "layers": [0, 3]}]`; without `layers`, all of them.
        key_value: how heads are shared between layers, for example `{"type": "first_layer_values", "ratio": 0.5}`.
    Training:
        attention_dropout, hidden_dropout, embedding_dropout: active in training mode alone.
        initializer_range: standard deviation of the initial draws; scaled_residual_init: 1 / sqrt(2 L) of it for the
            two matrices of a block that write the residual stream (GPT-2).
    """

    model_type = "leanqkv"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 1024
    position_embedding_type: str = "learned"
    rope_parameters: dict | None = None
    norm_type: str = "layernorm"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    mlp_type: str = "mlp"
    hidden_act: str = "gelu"
    mlp_bias: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    query: list | None = None
    key: list | None = None
    value: list | None = None
    key_value: dict | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    initializer_range: float = 0.02
    scaled_residual_init: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        known = {field.name for field in fields(self)} | _TRANSFORMERS_KEYS
        # Generation settings may be passed to `from_pretrained`, which routes them through the configuration.
        known |= set(GenerationConfig._get_default_generation_params())
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"unknown configuration key {name!r}: {suggest(name, known)}")
        for name, choices in CHOICES.items():
            found = getattr(self, name)
            if found not in choices:
                raise ConfigError(f"{name} {found!r} is not known: {suggest(str(found), choices)}")
        for name in SIZES:
            found = getattr(self, name)
            if found is None and name in ("num_key_value_heads", "head_dim"):
                continue
            if not isinstance(found, int) or found < 1:
                raise ConfigError(f"{name} must be a whole number, at least 1, found {found!r}")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1, found {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide num_attention_heads "
                f"({self.num_attention_heads}): each key/value head serves an equal group of query heads"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                    f"({self.num_attention_heads}); change one of them or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.position_embedding_type == "rope":
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0} | (self.rope_parameters or {})
            kind = self.rope_parameters["rope_type"]
            if kind not in (kinds := ("default", *ROPE_INIT_FUNCTIONS)):
                raise ConfigError(f"rope_parameters: rope_type {kind!r} is not known: {suggest(str(kind), kinds)}")
            rotated = int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))
            if rotated < 2 or rotated % 2:
                raise ConfigError(
                    "rotary positions need an even number of dimensions, head_dim * partial_rotary_factor; found "
                    f"{rotated} of {self.head_dim}"
                )
        elif self.rope_parameters:
            raise ConfigError(
                f"rope_parameters have no effect with position_embedding_type {self.position_embedding_type!r}; "
                'use "rope" or leave them out'
            )
        if self.norm_bias and self.norm_type != "layernorm":
            raise ConfigError("norm_bias needs norm_type 'layernorm': an RMSNorm has no bias")
        self.query = self.query or []
        self.key = self.key or []
        self.value = self.value or []
        self.key_value = self.key_value or {"type": "projected"}
        make_plan(self)  # refuses what cannot be built
        rope_parameters = self.rope_parameters
        super().__post_init__(**kwargs)
        if rope_parameters is None:
            self.rope_parameters = None  # transformers fills in defaults that nothing here would read

    @property
    def plan(self) -> Plan:
        return make_plan(self)

    def as_overrides(self) -> dict[str, Any]:
        """What differs from the defaults: `LeanConfig(**overrides)` is equal to this configuration."""
        return {key: value for key, value in self.to_diff_dict().items() if key != "transformers_version"}

    @property
    def layer_types(self) -> list[str]:
        """Tells transformers' DynamicCache and StaticCache which cache layer to make; see cache.py."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Our layer type is not in transformers' closed list."""
