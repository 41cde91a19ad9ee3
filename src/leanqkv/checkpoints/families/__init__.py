"""The classes of transformers whose checkpoints can be read and written."""

from collections import defaultdict

from ...errors import LeanError
from ...model.config import LeanConfig
from ...model.registry import suggest
from .family import Family, export_tensors, import_tensors
from .gemma3 import GEMMA3
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import GRANITE, LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from .moe import MIXTRAL, QWEN3_MOE
from .qwen3_next import QWEN3_NEXT

__all__ = ["FAMILIES", "NOT_THESE", "Family", "choose_family", "export_tensors", "import_tensors", "norm_offset_of"]

# In the order of preference for an export.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GPT2),
        *(GRANITE, SMOLLM3, OLMO2, GEMMA3, PHI3, MIXTRAL, QWEN3_MOE, QWEN3_NEXT),
    )
}

# Of the classes that refuse a model for one reason, so many are named.
NAMED = 3
# Classes near to these that are refused, and why.
NOT_THESE = {
    "gemma2": "it caps attention scores and logits (soft-capping)",
    "gemma3": "it reads images; its language model alone, a 'gemma3_text' checkpoint, can be opened",
    "gpt_oss": "its attention has sinks",
    **dict.fromkeys(("qwen2_moe", "granitemoeshared", "deepseek_v2", "deepseek_v3"), "all tokens share some experts"),
}


def norm_offset_of(config: LeanConfig) -> float:
    """Return the `norm_offset` of the classes with its placement of norms; a gate's class has QK-norm."""
    wanted = config.norm_placement, config.output_gate is not None and bool(config.qk_norm)
    for fixed in (family.fixed for family in FAMILIES.values()):
        if (fixed.get("norm_placement", "before"), "output_gate" in fixed) == wanted:
            return fixed.get("norm_offset", 0.0)
    return 0.0


def choose_family(config: LeanConfig, name: str | None = None) -> Family:
    """Return the family called `name`, or the plainest one that holds the model with the fewest biases of zeros.

    Raises a LeanError that says why there is none.
    """
    if name is not None:
        if name not in FAMILIES:
            raise LeanError(f"there is no family {name!r}: {suggest(name, FAMILIES)}")
        FAMILIES[name].to_stock(config)
        return FAMILIES[name]
    reasons = {family.model_type: family.reasons(config) for family in FAMILIES.values()}
    if able := [FAMILIES[name] for name in reasons if not reasons[name]]:
        return min(able, key=lambda family: family.zeros(config))
    fewest = min(map(len, reasons.values()))
    nearest = defaultdict(list)
    for name, why in reasons.items():
        if len(why) == fewest:
            nearest["; ".join(why)].append(FAMILIES[name].architecture)
    raise LeanError(
        "no class of transformers can hold this model, the nearest are "
        + ", ".join(f"{' and '.join(names[:NAMED])} ({why})" for why, names in nearest.items())
    )
