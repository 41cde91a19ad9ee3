"""leanqkv: transformers with fewer attention weights and a smaller KV cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import auto_classes, startup

if TYPE_CHECKING:
    import torch

    from . import eliminate
    from .errors import LeanError
    from .model.cache import cache_bytes
    from .model.cache_quantized import LeanQuantizedCache
    from .model.causal_lm import LeanForCausalLM
    from .model.config import LeanConfig
    from .model.image_classification import LeanForImageClassification
    from .model.masked_lm import LeanForMaskedLM
    from .model.plan import Plan
    from .model.registry import ConfigError
    from .model.shapes import ParameterCount, count_parameters
    from .model.transformer import LeanModel
    from .presets import preset
    from .presets.recipes import Recipe, recipe

__version__ = "0.1.0"

# By module: a name is imported when it is first used, because torch and transformers take seconds to load.
_NAMES = {
    "errors": ("LeanError",),
    "model.cache": ("cache_bytes",),
    "model.cache_quantized": ("LeanQuantizedCache",),
    "model.causal_lm": ("LeanForCausalLM",),
    "model.config": ("LeanConfig",),
    "model.image_classification": ("LeanForImageClassification",),
    "model.masked_lm": ("LeanForMaskedLM",),
    "model.plan": ("Plan",),
    "model.registry": ("ConfigError",),
    "model.shapes": ("ParameterCount", "count_parameters"),
    "model.transformer": ("LeanModel",),
    "presets": ("preset",),
    "presets.recipes": ("Recipe", "recipe"),
}
__all__ = sorted({"eliminate", "kv_bytes_per_token", "plan"}.union(*_NAMES.values()))


def __getattr__(name: str) -> Any:
    if name == "eliminate":
        return import_module(".eliminate", __name__)
    for module, names in _NAMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f".{module}", __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def plan(config: "LeanConfig") -> "Plan":
    """Per layer: which key and value heads are computed, which are borrowed and from where, what is cached."""
    return config.plan


def kv_bytes_per_token(config: "LeanConfig", dtype: "torch.dtype | None" = None) -> int:
    """Bytes of cache per token and sequence, over all layers, for elements of `dtype`; bfloat16 by default."""
    import torch

    return config.plan.kv_bytes_per_token(dtype or torch.bfloat16)
