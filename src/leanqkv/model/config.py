"""LeanConfig: everything that defines the function a checkpoint computes."""

import ast
from collections.abc import Callable
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_relative_imports
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .cache import layer_type
from .mechanisms import ATTENTIONS, KEY_VALUES, MLPS, TASKS
from .plan import LAYER_SLOTS, MODEL_SLOTS, Plan, make_plan
from .registry import ConfigError, by_kind, suggest

# A whole number that may be left out: `__post_init__` fills it in (but for the vocabulary of a model of images).
if TYPE_CHECKING:
    FilledIn = int
else:
    FilledIn = int | None

CHOICES = {
    "position_embedding_type": ("learned", "rope", "none"),
    "norm_type": ("layernorm", "rmsnorm", "dyt", "none"),
    "block_type": ("serial", "parallel", "parallel_shared_norm"),
    "mlp_type": tuple(MLPS),
    "norm_placement": ("before", "after", "both"),
    "group_order": ("runs", "turns"),
    "mask_type": ("causal", "prefix", "bidirectional"),
    "task": tuple(TASKS),
    "hidden_act": tuple(ACT2FN),
}

# `inspect` compares every layer with the others.
LARGEST_SIZE, MOST_LAYERS = 2**31 - 1, 1000
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
OPTIONAL_SIZES = (
    *("vocab_size", "num_key_value_heads", "head_dim", "num_hidden_groups", "kv_lora_rank", "sliding_window"),
    *("num_local_experts", "num_experts_per_tok", "image_size", "patch_size", "num_channels"),
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
# What numbers must be, in words and as a test; null is for the settings that may be left out.
NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (*SIZES, *OPTIONAL_SIZES), ("a whole number, at least 1", lambda number: type(number) is int and number >= 1)
    ),
    **dict.fromkeys(TOKENS, (f"from -1 to {LARGEST_SIZE:,}", lambda number: -1 <= number <= LARGEST_SIZE)),  # -1: none
    **dict.fromkeys(MULTIPLIERS, ("positive and finite", lambda number: 0 < number < inf)),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "embedding_dropout"),
        ("at least 0 and below 1", lambda number: 0 <= number < 1),
    ),
    **dict.fromkeys(
        ("norm_eps", "initializer_range", "router_aux_loss_coef"),
        ("at least 0 and finite", lambda number: 0 <= number < inf),
    ),
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "norm_topk_prob": True}
# What the variants of rotary positions compute with; transformers only warns of a value that is wrong.
ROPE_SCALING = {
    **dict.fromkeys(("linear", "dynamic"), ("factor",)),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
# By architecture: where the classes are that transformers' Auto classes load from a checkpoint's folder.
AUTO_CLASSES = {
    "LeanModel": {"AutoModel": "transformer.LeanModel"},
    "LeanForCausalLM": {"AutoModel": "transformer.LeanModel", "AutoModelForCausalLM": "causal_lm.LeanForCausalLM"},
    "LeanForMaskedLM": {"AutoModelForMaskedLM": "masked_lm.LeanForMaskedLM"},
    "LeanForImageClassification": {
        "AutoModelForImageClassification": "image_classification.LeanForImageClassification"
    },
}

# What transformers itself writes into a config.json or passes along when it loads one, beyond declared fields.
_TRANSFORMERS_KEYS = {
    *("auto_map", "model_type", "name_or_path", "_name_or_path", "_commit_hash", "num_labels", "torch_dtype"),
    *("attn_implementation", "experts_implementation", "output_attentions", "quantization_config"),
    # Only models with experts have it: by its presence clients such as TRL know them.
    "output_router_logits",
}
# Keys that earlier checkpoints and records hold and that never decided the function: read over.
_RETIRED_KEYS = ("fuse_projections",)
# What transformers would read beside `rope_parameters` too.
_ROTARY_KEYS = ("partial_rotary_factor", "original_max_position_embeddings")
# Passed along beside the keys of a file: other tools may have written some of them.
_READ_FROM_FILE = "_read_from_file"

logger = logging.get_logger(__name__)


@strict
class LeanConfig(PreTrainedConfig):
    """Configuration of a model of this library. Unknown keys and combinations that cannot be built raise ConfigError;
    unknown keys of a file, where other tools leave notes of their own, are kept with a warning.

    Shape (the names are those of `transformers`):
        vocab_size, hidden_size (d), intermediate_size, num_hidden_layers (L), num_attention_heads (H),
        num_key_value_heads (null: H), head_dim (null: d / H), max_position_embeddings.
        position_embedding_type: "learned", "rope" or "none"; rope_parameters as in transformers (rope_type,
            rope_theta, partial_rotary_factor, ...). rope_layers: those with rotary positions, the others have none;
            null: all. window_rope_parameters: of the layers with a sliding window, where theirs differ (Gemma 3).
        norm_type: "layernorm", "rmsnorm", "dyt" or "none", for attention, for the MLP and at the end; norm_eps;
            norm_bias (LayerNorm and DyT). norm_offset: added to the weight of every RMSNorm, qk_norm's too, where it is
            applied (1: Gemma). norm_placement: attention and MLP have their norm "before" them, "after"
            them, on what they add to the stream (OLMo 2), or "both" (Gemma 3).
        block_type: "serial"; "parallel", attention and MLP side by side, each with its own norm (GPT-NeoX);
            "parallel_shared_norm", one norm for both (GPT-J).
        attention_skip, mlp_skip: whether the block has these skip connections; in a parallel block, both or none.
        num_hidden_groups: blocks of weights, each used by as many layers (1: ALBERT); null: one a layer. group_order:
            a block's layers come in "runs" (AABB) or the blocks take "turns" (ABAB, as TRM repeats two layers).
        mlp_type: "mlp" (up, activation, down), "gated" (SwiGLU with hidden_act "silu") or "moe", num_local_experts
            gated MLPs of which every token takes num_experts_per_tok; norm_topk_prob: their shares add up to one;
            router_aux_loss_coef weighs their load-balancing loss, which is part of the loss, with the routers' logits
            in the output, where output_router_logits is set.
        attention_bias (query, key, value), attention_output_bias, mlp_bias, tie_word_embeddings.
        embedding_multiplier of the token embeddings, rounded to their dtype (Gemma 3); residual_multiplier of what
            attention and MLP add to the stream; attention_multiplier: factor on q k^T, null: 1 / sqrt(head_dim);
            scale_attn_by_inverse_layer_idx: layer i divides that factor by i + 1 (GPT-2); logits_scaling, which
            divides the logits (Granite).
        qk_norm: RMSNorm of every query and key head, before RoPE, as in Qwen3; "width": of all query heads of a layer
            together, and of all its keys (OLMo 2).
        kv_lora_rank: columns of the latent of multi-head latent attention (MLA); null: none. qk_rope_head_dim: width of
            its rotary key, 0 without rotary positions.
        mask_type: "causal", "prefix" (tokens of `prefix_mask` see each other) or "bidirectional".
        sliding_window: how many positions a token attends to, its own included; null: all. window_layers: the layers
            it holds in; null: all.
        task: "causal_lm", "masked_lm" or "image_classification"; decides the class that a checkpoint is.
    Images (with that task alone, and then without a vocabulary: vocab_size, tie_word_embeddings and bos_, eos_ and
    pad_token_id stay null):
        image_size, in pixels, of a square image; patch_size, which divides it; num_channels (null: 3);
            num_labels or id2label, as in transformers (2).
        The tokens are the class token and the patches row by row; max_position_embeddings is their number, and rotary
        positions count along them.
    Mechanisms (see `leanqkv presets`):
        query, key, value, output: which layers depart from a linear projection, for example
            `[{"type": "identity", "layers": [0, 3]}]`; without `layers`, all of them.
        key_value: how heads are shared between layers, for example `{"type": "first_layer_values", "ratio": 0.5}`.
        output_gate: a gate of attention's heads before the output projection, `{"type": "sigmoid"}`; null: none.
        depth_average: DenseFormer's averages over depth, `{"dilation": 1, "period": 1}`; null: none.
        hyper_connections: several streams in place of the skip connections, `{"type": "hyper", "streams": 4, "mode":
            "dynamic"}`; null: none.
    Training:
        attention_dropout, hidden_dropout, embedding_dropout: active in training mode alone.
        initializer_range: standard deviation of the initial draws; scaled_residual_init: 1 / sqrt(2 L) of it for the
            two matrices of a block that write the residual stream (GPT-2).
    """

    model_type = "leanqkv"
    keys_to_ignore_at_inference = ["past_key_values"]
    # A folder may lack the mechanisms of a default configuration, which transformers before 5.20 would make.
    has_no_defaults_at_init = True

    vocab_size: FilledIn = None  # type: ignore[assignment]
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: FilledIn = None  # type: ignore[assignment]
    head_dim: FilledIn = None  # type: ignore[assignment]
    max_position_embeddings: FilledIn = None  # type: ignore[assignment]
    position_embedding_type: str = "learned"
    rope_parameters: dict | None = None
    window_rope_parameters: dict | None = None
    rope_layers: list[int] | None = None
    norm_type: str = "layernorm"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_placement: str = "before"
    block_type: str = "serial"
    attention_skip: bool = True
    mlp_skip: bool = True
    num_hidden_groups: int | None = None
    group_order: str = "runs"
    mlp_type: str = "mlp"
    hidden_act: str = "gelu"
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    router_aux_loss_coef: float | None = None
    norm_topk_prob: bool | None = None
    mlp_bias: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    logits_scaling: float = 1.0
    qk_norm: bool | str = False
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    mask_type: str | None = None
    sliding_window: int | None = None
    window_layers: list[int] | None = None
    task: str = "causal_lm"
    image_size: int | None = None
    patch_size: int | None = None
    num_channels: int | None = None
    tie_word_embeddings: bool | None = None
    query: list | None = None
    key: list | None = None
    value: list | None = None
    output: list | None = None
    key_value: dict | None = None
    output_gate: dict | None = None
    depth_average: dict | None = None
    hyper_connections: dict | None = None
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
        unknown = self._take_unknown(kwargs)
        if self.mask_type is None:
            self.mask_type = "causal" if self.task == "causal_lm" else "bidirectional"
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} {value!r} is not known: {suggest(str(value), choices)}")
        dtype = getattr(self, "dtype", None)
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"dtype {dtype!r} is not known; say float32, bfloat16 or float16")
        TASKS[self.task].check(self, kwargs.get("num_labels"))
        self._check_numbers()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
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
        self._check_positions()
        self._check_shape()
        for slot in LAYER_SLOTS:
            setattr(self, slot, getattr(self, slot) or [])
        self.key_value = self.key_value or {"type": "projected"}
        if warning := make_plan(self).warning:  # which refuses what cannot be built
            logger.warning_once(warning)
        rope_parameters = self.rope_parameters
        if self.mlp_type == "moe":
            kwargs.setdefault("output_router_logits", False)
        super().__post_init__(**kwargs)
        if rope_parameters is None:
            self.rope_parameters = None  # transformers fills in defaults that nothing here would read
        for name, value in unknown.items():
            if not hasattr(self, name) and not hasattr(type(self), name):  # what is computed stays so
                setattr(self, name, value)

    def _take_unknown(self, given: dict[str, Any]) -> dict[str, Any]:
        """Take the keys out of `given` that mean nothing here: refused, but for those of a file."""
        for name in _RETIRED_KEYS:
            given.pop(name, None)
        known, from_file = self._known_keys(), given.pop(_READ_FROM_FILE, False)
        unknown = {name: given.pop(name) for name in [*given] if name not in known}
        for name in unknown:
            rotary = name in _ROTARY_KEYS and self.position_embedding_type == "rope"
            hint = "rotary positions are set by rope_parameters" if rotary else suggest(name, known)
            if rotary or not from_file:
                raise ConfigError(f"unknown configuration key {name!r}: {hint}")
            hint = f"; {hint}" if "did you mean" in hint else ""
            logger.warning_once(f"unknown configuration key {name!r} is kept and changes nothing{hint}")
        return unknown

    def _check_numbers(self) -> None:
        for name, (words, is_valid) in NUMBERS.items():
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                if number is None and name not in SIZES:
                    continue
                if not is_valid(number):
                    raise ConfigError(f"{name} must be {words}, found {number!r}")
                most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
                if name in (*SIZES, *OPTIONAL_SIZES) and number > most:
                    raise ConfigError(f"{name} can be {most:,} at most, found {number:,}")

    @classmethod
    def _known_keys(cls) -> set[str]:
        # Generation settings may be passed to `from_pretrained`, which routes them through the configuration.
        generation = GenerationConfig._get_default_generation_params()
        return {field.name for field in fields(cls)} | _TRANSFORMERS_KEYS | set(generation)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, which reads files so; unknown keys are kept with a warning."""
        return super().from_dict({**config_dict, _READ_FROM_FILE: True}, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        """As in transformers; unknown keys are kept with a warning."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def _check_positions(self) -> None:
        if self.kv_lora_rank is None and self.qk_rope_head_dim is not None:
            raise ConfigError("qk_rope_head_dim is the rotary key's width beside a latent; it needs kv_lora_rank")
        if self.position_embedding_type != "rope":
            for name in ("rope_parameters", "window_rope_parameters", "rope_layers"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} have no effect with position_embedding_type {self.position_embedding_type!r}; "
                        'use "rope" or leave them out'
                    )
            if self.qk_rope_head_dim:
                raise ConfigError(
                    f"qk_rope_head_dim ({self.qk_rope_head_dim}) needs position_embedding_type 'rope'; without it "
                    "there is no rotary key, leave it out or give 0"
                )
            if self.kv_lora_rank is not None:
                self.qk_rope_head_dim = 0
            return
        if self.kv_lora_rank is not None:
            if self.rope_layers or self.window_rope_parameters:
                raise ConfigError("rope_layers and window_rope_parameters: a latent has one rotary key in all layers")
            if self.qk_rope_head_dim is None:
                self.qk_rope_head_dim = self.head_dim // 2
        self._check_layers("rope_layers")
        self.rope_parameters = self._checked_rope("rope_parameters", self.rope_parameters or {})
        if self.window_rope_parameters is not None:
            if self.sliding_window is None:
                raise ConfigError("window_rope_parameters need a sliding_window: no other layers have them")
            self.window_rope_parameters = self._checked_rope("window_rope_parameters", self.window_rope_parameters)

    def _checked_rope(self, field: str, given: dict) -> dict:
        """Rotary parameters with their defaults filled in."""
        parameters = {"rope_type": "default", "rope_theta": 10000.0} | given
        kind = parameters["rope_type"]
        if kind not in (kinds := ("default", *ROPE_INIT_FUNCTIONS)):
            raise ConfigError(f"{field}: rope_type {kind!r} is not known: {suggest(str(kind), kinds)}")
        if self.kv_lora_rank is not None and "partial_rotary_factor" in parameters:
            raise ConfigError("partial_rotary_factor has no meaning with a latent: qk_rope_head_dim says what rotates")
        for name, value in parameters.items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, (int, float)) and not isinstance(number, bool) and not 0 <= number < inf:
                    raise ConfigError(f"{field}: {name} must be at least 0 and finite, found {number}")
                if isinstance(number, (str, dict)) and name not in ("rope_type", "type"):
                    raise ConfigError(f"{field}: {name} must be a number, found {number!r}")
        share = parameters.get("partial_rotary_factor", 1.0)
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"{field}: partial_rotary_factor must be above 0, at most 1, found {share!r}")
        theta = parameters.get("rope_theta")
        if not isinstance(theta, (int, float)) or not theta:
            raise ConfigError(f"{field}: rope_theta must be a positive number, found {theta!r}")
        rotated = int(self.rotary_head_dim * share)
        if rotated < 2 or rotated % 2:
            raise ConfigError(
                "rotary positions need an even number of dimensions, head_dim * partial_rotary_factor (with a latent "
                f"qk_rope_head_dim); found {rotated} of {self.rotary_head_dim}"
            )
        if kind == "dynamic" and rotated < 4:
            raise ConfigError(f"{field}: rope_type 'dynamic' needs 4 rotated dimensions or more, found {rotated}")
        defaults = {"original_max_position_embeddings": self.max_position_embeddings}
        for name in ROPE_SCALING.get(kind, ()):
            if not _is_positive(value := parameters.get(name, defaults.get(name))):
                raise ConfigError(f"{field}: rope_type {kind!r} needs {name}, a number above 0, found {value!r}")
        for name in ("short_factor", "long_factor") if kind == "longrope" else ():
            factors = parameters.get(name)
            if not isinstance(factors, list) or len(factors) != rotated // 2 or not all(map(_is_positive, factors)):
                raise ConfigError(f"{field}: rope_type {kind!r} needs {name}, a list of {rotated // 2} numbers above 0")
        return parameters

    def _check_layers(self, name: str) -> None:
        """A list of layers that a setting holds in: null says all of them, other settings say none."""
        if (layers := getattr(self, name)) is None:
            return
        if not layers or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers:
            raise ConfigError(
                f"{name} must name some layers, ascending, from 0 to {self.num_hidden_layers - 1}, found {layers}"
            )

    def _check_shape(self) -> None:
        for name, default in EXPERTS.items():
            if self.mlp_type == "moe" and getattr(self, name) is None:
                setattr(self, name, default)
        if clash := self._clash():
            raise ConfigError(clash)
        if self.mlp_type != "moe":
            self.router_aux_loss_coef = 0.0  # a number: clients multiply by it
        self._check_layers("window_layers")

    def _clash(self) -> str | None:
        """Return which settings do not go together, and why; None where all do."""
        if self.norm_placement != "before" and self.norm_type == "none":
            return f"norm_placement {self.norm_placement!r} has no effect with norm_type 'none'"
        if self.norm_placement != "before" and self.block_type != "serial":
            return f"norm_placement {self.norm_placement!r} needs block_type 'serial': {self.block_type!r}"
        if self.qk_norm not in (False, True, "width"):
            return f"qk_norm must be true, false or 'width', found {self.qk_norm!r}"
        if self.norm_offset and (self.norm_type != "rmsnorm" or not -inf < self.norm_offset < inf):
            return f"norm_offset needs norm_type 'rmsnorm' and a finite number: {self.norm_type!r}, {self.norm_offset}"
        if self.norm_bias and self.norm_type not in ("layernorm", "dyt"):
            return f"norm_bias needs norm_type 'layernorm' or 'dyt': {self.norm_type!r} has no bias"
        if self.block_type != "serial" and self.attention_skip != self.mlp_skip:
            return (
                "a parallel block has one skip connection around attention and MLP together; attention_skip and "
                f"mlp_skip must be equal, found {self.attention_skip} and {self.mlp_skip}"
            )
        if self.num_hidden_groups is not None and self.num_hidden_layers % self.num_hidden_groups:
            return (
                f"num_hidden_groups ({self.num_hidden_groups}) must divide num_hidden_layers "
                f"({self.num_hidden_layers}): each block serves as many layers"
            )
        if self.group_order != "runs" and self.num_hidden_groups is None:
            return f"group_order {self.group_order!r} has no effect without num_hidden_groups"
        for name in EXPERTS if self.mlp_type != "moe" else ():
            if getattr(self, name) is not None and (name, getattr(self, name)) != ("router_aux_loss_coef", 0):
                return f"{name} needs mlp_type 'moe', found {self.mlp_type!r}"
        chosen, experts = self.num_experts_per_tok or 0, self.num_local_experts or 0
        if chosen > experts:
            return f"num_experts_per_tok ({chosen}) is more than num_local_experts ({experts})"
        if self.mlp_type == "moe" and self.mlp_bias:
            return "mlp_bias: experts have no biases; leave it out with mlp_type 'moe'"
        if self.kv_lora_rank is not None and self.num_key_value_heads != self.num_attention_heads:
            return (
                f"num_key_value_heads ({self.num_key_value_heads}) has no meaning with a latent (kv_lora_rank): each "
                f"of the {self.num_attention_heads} heads makes its own key and value from it; leave it out"
            )
        if self.kv_lora_rank is not None and self.qk_norm:
            return (
                "qk_norm cannot act with a latent (kv_lora_rank): it norms every head's key, and the keys are never "
                "made when decoding from the latent"
            )
        if self.task == "causal_lm" and self.mask_type == "bidirectional":
            return (
                "a causal_lm cannot attend bidirectionally: it would see the token it is to predict; use task=masked_lm"
            )
        if self.task != "causal_lm" and self.mask_type != "bidirectional":
            return f"task {self.task!r} attends bidirectionally, found mask_type {self.mask_type!r}"
        if self.sliding_window == 1:
            return "sliding_window must be at least 2: within 1 a token attends to itself alone"
        if self.sliding_window is not None and self.mask_type != "causal":
            return f"sliding_window needs mask_type 'causal', found {self.mask_type!r}"
        if self.window_layers is not None and self.sliding_window is None:
            return f"window_layers {self.window_layers} need a sliding_window"
        return None

    @property
    def rotary_head_dim(self) -> int:
        """Width of the head that rotary positions act on: the rotary key's under MLA."""
        width = self.qk_rope_head_dim if self.kv_lora_rank is not None else self.head_dim
        assert width is not None
        return width

    @property
    def num_experts(self) -> int:
        """As clients know `num_local_experts`; only models with experts have it."""
        if self.mlp_type != "moe" or self.num_local_experts is None:
            raise AttributeError("num_experts: a model without experts has none")
        return self.num_local_experts

    @property
    def cached_positions(self) -> int | None:
        """How far decoding with a cache can go: the positions that have an embedding, or up to which "longrope" and
        "dynamic" turn all keys by the same frequencies; null: any number."""
        if self.position_embedding_type == "learned":
            return self.max_position_embeddings
        ropes = [rope for rope in (self.rope_parameters, self.window_rope_parameters) if rope]
        whole = self.max_position_embeddings
        ends = [
            rope.get("original_max_position_embeddings", whole) if rope["rope_type"] == "longrope" else whole
            for rope in ropes
            if rope["rope_type"] in ("longrope", "dynamic")
        ]
        return min(ends, default=None)

    @property
    def bidirectional(self) -> bool:
        return self.mask_type == "bidirectional"

    @property
    def plan(self) -> Plan:
        return make_plan(self)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the code that loads the checkpoint: the files that this configuration needs."""
        classes = {"AutoConfig": "config.LeanConfig", **AUTO_CLASSES.get((self.architectures or [""])[0], {})}
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **classes}
        if self._auto_class is None and not Path(save_directory).is_file():  # else transformers copies, or refuses
            self._save_code(Path(save_directory), {place.partition(".")[0] for place in classes.values()})
        super().save_pretrained(save_directory, *args, **kwargs)

    def _save_code(self, directory: Path, pending: set[str]) -> None:
        """Copy the modules in `pending` and all that they import; of mechanisms.py the lines that are needed."""
        directory.mkdir(parents=True, exist_ok=True)
        copied: set[str] = set()
        while pending:
            file = f"{(name := pending.pop())}.py"
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            (directory / file).write_text(self._own_lines(text) if name == "mechanisms" else text, encoding="utf-8")
            copied.add(name)
            pending |= {*get_relative_imports(directory / file)} - copied

    def _own_lines(self, mechanisms: str) -> str:
        """The source of mechanisms.py without the classes that this configuration does not name."""
        used: list[Any] = [MLPS[self.mlp_type], TASKS[self.task], KEY_VALUES["projected"], by_kind]
        used += [ATTENTIONS[layer.attention] for layer in self.plan.layers]
        for slot, table in LAYER_SLOTS.items():
            used += [table[spec["type"]] for spec in ({"type": "linear"}, *getattr(self, slot))]
        for slot, table in MODEL_SLOTS.items():
            spec = getattr(self, slot)  # one of averages over depth has no type
            used += [] if spec is None else [table[spec.get("type", "average")]]
        names, tree = {part.__name__ for part in used}, ast.parse(mechanisms)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                node.names = [alias for alias in node.names if alias.name in names]
            elif isinstance(node, ast.Call):
                node.args = [argument for argument in node.args if ast.unparse(argument) in names]
            elif isinstance(node, ast.Dict):
                kept = [i for i, value in enumerate(node.values) if ast.unparse(value) in names]
                node.keys, node.values = [node.keys[i] for i in kept], [node.values[i] for i in kept]
        tree.body = [node for node in tree.body if getattr(node, "names", True)]
        return f"{ast.unparse(tree)}\n"

    def as_overrides(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults: `LeanConfig(**overrides)` equals this configuration, except
        for keys of other tools."""
        keys = self._known_keys() - {"transformers_version"}
        if self.mlp_type != "moe" or not getattr(self, "output_router_logits", False):
            keys.remove("output_router_logits")
        overrides = {key: value for key, value in self.to_diff_dict().items() if key in keys}
        if self.mlp_type != "moe":
            overrides["router_aux_loss_coef"] = None
        if self.id2label == {i: f"LABEL_{i}" for i in range(self.num_labels or 0)}:  # said by the number alone
            names = (overrides.pop("id2label", None), overrides.pop("label2id", None))
            overrides |= {"num_labels": self.num_labels} if any(names) else {}
        return overrides

    @property
    def layer_types(self) -> list[str]:
        """The name of every layer's cache layer for transformers' DynamicCache and StaticCache; see cache.py."""
        return [layer_type(layer) for layer in self.plan.layers]

    def validate_layer_type(self) -> None:
        """Our layer type is not in transformers' closed list."""


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0
