"""Combinations and options of a source under every conversion: right by a number, or refused by name.

product/rewriting.py has every mechanism by itself.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from converting import BIASES, CONVERSIONS, TOLERANCES, conversion_error, source
from shapes import tokens

from leanqkv import LeanError
from leanqkv.convert.calibrated import calibrated
from leanqkv.convert.targets import SkipV1Options
from leanqkv.presets.catalog import MECHANISMS
from leanqkv.presets.names import parse_name

# Slots whose refusal names no `type`.
WORDS = {"heads": "value heads", "depth_average": "depth_average"}
COMBINED: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [
    (("gqa",), BIASES | {"qk_norm": True, "norm_bias": False}),
    (("gqa", "identity-query"), {}),
    (("identity-query", "identity-key"), {}),
    (("identity-query:layers=1,bias=true",), {}),
    (("residual-query:layers=0,2",), {"attention_bias": True}),
    (("identity-key:bias=true",), {"block_type": "parallel"}),
    (("block-identity-key:start=4,width=6",), {"attention_bias": True, "position_embedding_type": "none"}),
    (("block-identity-value:layers=2",), {}),
    (("nonlinear-query:rank=3",), {}),
    (("nonlinear-key:layers=1",), {}),
    (("nonlinear-value:anchor=linear",), {}),
    (("mlp-query:layers=2",), {}),
    (("denseformer:period=2", "gqa"), {}),
    ((), {"block_type": "parallel_shared_norm"}),
    ((), {"attention_skip": False, "norm_type": "none"}),
    ((), {"norm_type": "dyt", "head_dim": 6}),
    ((), {"hidden_dropout": 0.5, "attention_dropout": 0.5, "embedding_dropout": 0.5}),
]


def words(mechanisms: tuple[str, ...]) -> list[str]:
    """One of them is in every refusal of such a source."""
    presets = [MECHANISMS[name] for name, _ in parse_name("+".join(("tiny", *mechanisms))).mechanisms]
    return [WORDS.get(preset.slot) or repr(preset.spec["type"]) for preset in presets]


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("mechanisms, fields", COMBINED, ids=str)
def test_right_or_refused(mechanisms: tuple[str, ...], fields: Mapping[str, Any], conversion: str) -> None:
    config, tensors = source("llama", *mechanisms, **fields)
    try:
        error = conversion_error(config, tensors, conversion)
    except LeanError as refusal:
        assert any(word in str(refusal) for word in words(mechanisms)), refusal
    else:
        assert error <= TOLERANCES[conversion]


@pytest.mark.parametrize(
    "mechanism, ties",
    [
        ("identity-query", ["query 'identity'"] * 2),
        ("residual-query:layers=2", [None, "query 'residual'"]),
        ("nonlinear-query", ["query 'nonlinear'"] * 2),
        ("identity-key", ["key 'identity'"] * 2),
        ("nonlinear-key", ["key 'nonlinear'"] * 2),
        ("block-identity-key", [None, None]),
        ("gqa", [None, None]),
    ],
)
def test_heads_are_chosen_where_they_can_move(mechanism: str, ties: list[str | None]) -> None:
    config, tensors = source("gpt", mechanism)
    reports = [
        calibrated(config, tensors, tokens(8, 16).numpy(), SkipV1Options(sweeps=1, choose=choose))[2]["layers"][1:]
        for choose in (True, False)
    ]
    assert [[layer.get("tied_by") for layer in report] for report in reports] == [ties, [None, None]]
    first = list(range(config.num_key_value_heads // 2))
    assert all(
        layer["kept"] == first for report in reports for layer in report if report is reports[1] or "tied_by" in layer
    )
