"""leanqkv: transformers with fewer attention weights and a smaller KV cache."""

from . import startup  # noqa: F401  # first: loading the libraries takes seconds, in which Ctrl-C may come

# isort: split
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from . import eliminate
from .errors import LeanError
from .model.cache import LeanQuantizedCache, cache_bytes
from .model.causal_lm import LeanForCausalLM
from .model.config import LeanConfig
from .model.image_classification import LeanForImageClassification
from .model.masked_lm import LeanForMaskedLM
from .model.plan import ParameterCount, Plan
from .model.registry import ConfigError
from .model.transformer import LeanModel
from .presets import Recipe, preset, recipe

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "LeanConfig",
    "LeanError",
    "LeanForCausalLM",
    "LeanForImageClassification",
    "LeanForMaskedLM",
    "LeanModel",
    "LeanQuantizedCache",
    "ParameterCount",
    "Plan",
    "Recipe",
    "cache_bytes",
    "count_parameters",
    "eliminate",
    "kv_bytes_per_token",
    "plan",
    "preset",
    "recipe",
]

AutoConfig.register("leanqkv", LeanConfig)
AutoModel.register(LeanConfig, LeanModel)
AutoModelForCausalLM.register(LeanConfig, LeanForCausalLM)
AutoModelForMaskedLM.register(LeanConfig, LeanForMaskedLM)
AutoModelForImageClassification.register(LeanConfig, LeanForImageClassification)


def plan(config: LeanConfig) -> Plan:
    """Per layer: which key and value heads are computed, which are borrowed and from where, what is cached."""
    return config.plan


def count_parameters(config: LeanConfig) -> ParameterCount:
    """`.total` and `.non_embedding`, from the plan; no model is built. Tied tensors count once."""
    return config.plan.count_parameters()


def kv_bytes_per_token(config: LeanConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of cache per token and sequence, over all layers, for elements of `dtype`."""
    return config.plan.kv_bytes_per_token(dtype)
