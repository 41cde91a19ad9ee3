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


def choose_family(config: LeanConfig, asked: str | None = None) -> Family:
    """The family that `asked` names, or the one that holds the model with the fewest biases of zeros, the plainest
    first.

    Raises:
        LeanError: `asked` is none, or cannot hold the model; no family can. Says why.
    """
    if asked is not None:
        if asked not in FAMILIES:
            raise LeanError(f"there is no family {asked!r}: {suggest(asked, FAMILIES)}")
        FAMILIES[asked].to_stock(config)
        return FAMILIES[asked]
    reasons = {name: family.reasons(config) for name, family in FAMILIES.items()}
    if able := [FAMILIES[name] for name, found in reasons.items() if not found]:
        return min(able, key=lambda family: family.zeros(config))
    nearest = min(map(len, reasons.values()))
    alike = defaultdict(list)
    for name, found in reasons.items():
        if len(found) == nearest:
            alike["; ".join(found)].append(FAMILIES[name].architecture)
    raise LeanError(
        "no class of transformers can hold this model, the nearest are "
        + ", ".join(f"{' and '.join(names)} ({why})" for why, names in alike.items())
    )
