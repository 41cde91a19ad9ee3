"""The classes of transformers whose checkpoints can be read and written."""

from collections import defaultdict

from ...errors import LeanError
from ...model.config import LeanConfig
from ...model.registry import suggest
from .family import Family, export_tensors, import_tensors
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import LLAMA, MISTRAL, QWEN2, QWEN3

__all__ = ["FAMILIES", "Family", "choose_family", "export_tensors", "import_tensors"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GPT2)}


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
        + ", ".join(f"{' and '.join(names)} ({why})" for why, names in nearest.items())
    )
