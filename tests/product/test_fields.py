"""Fields that families of transformers bring, under tools that wrap, rewrite or bypass modules: right, or refused."""

from typing import Any

import pytest

from product.groups import GROUPS
from product.mechanisms import Case
from product.tools import Tool, outcome

GROUPED = {"num_hidden_layers": 4, "num_key_value_heads": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "smollm3": {"rope_layers": [0, 2, 3]},
    "olmo2": {"norm_placement": "after", "qk_norm": "width"},
    "gemma3": {
        "norm_placement": "both",
        "norm_offset": 1.0,
        "qk_norm": True,
        "embedding_multiplier": 32**0.5,
        "sliding_window": 4,
        "window_layers": [0, 1, 3],
        "window_rope_parameters": {"rope_theta": 50.0},
    },
    "depth": {"scale_attn_by_inverse_layer_idx": True},
    "windows": {"sliding_window": 4, "window_layers": [0, 2]},
}
# Of each kind of tool one, and those that read what the fields change; the others take longer.
CHOSEN = (
    *("`Decoder`", "static cache", "8-bit cache", "LoRA, `merge_and_unload`", "CPU offload (accelerate)"),
    *("`convert --to nonlinear-query`", "`convert --method mean-v`", "`convert --method calibrated`"),
    *("`eliminate --remove query`", "`eliminate --remove output`", "`export` and `import`, RMSNorm"),
    *("`eliminate` with norms switched off", "`import --dtype bf16`", "`inspect`", "`analyze`"),
)
TOOLS = {tool.name: tool for tools in GROUPS.values() for tool in tools if tool.name in CHOSEN}
# What refuses which; everything else is right.
REFUSED = {
    "8-bit cache": ("gemma3", "windows"),
    "`convert --method mean-v`": ("gemma3", "windows"),
    "`convert --method calibrated`": ("gemma3", "windows"),
    "`eliminate --remove query`": ("olmo2", "gemma3"),
    "`eliminate --remove output`": ("olmo2", "gemma3"),
    "`eliminate` with norms switched off": ("olmo2", "gemma3"),
    "`export` and `import`, RMSNorm": ("depth",),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_right_or_refused(tool: Tool, name: str) -> None:
    if tool.missing:
        pytest.skip(tool.missing)
    case = Case(name, "llama", (), GROUPED | FIELDS[name])
    number, refusal = outcome(tool, case)
    assert (refusal is not None) == (name in REFUSED.get(tool.name, ())), refusal
    if refusal is None:
        assert number <= tool.tolerance
    else:
        assert "\n" not in refusal and any(word in refusal for word in case.words), refusal


def test_all_tools_are_there() -> None:
    assert set(TOOLS) == set(CHOSEN)
