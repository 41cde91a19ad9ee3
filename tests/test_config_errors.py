"""What cannot be built is refused with a message that says what clashes, or which names are near."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from refusing import table
from shapes import GPT, tiny
from transformers import AutoConfig
from transformers.utils import logging

from leanqkv import ConfigError, LeanConfig, LeanError, plan, preset
from leanqkv.presets.catalog import MECHANISMS

# Mechanisms, fields, what the message must contain.
REFUSED = table("configurations/fields")


@pytest.mark.parametrize("mechanisms, overrides, parts", REFUSED, ids=lambda x: str(x)[:60])
def test_refused(mechanisms: tuple[str, ...], overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises((LeanError, ConfigError)) as refused:
        tiny("gpt", *mechanisms, **overrides)
    message = str(refused.value)
    assert "\n" not in message, "one line"
    for part in parts:
        assert part in message


def test_unknown_base() -> None:
    with pytest.raises(LeanError, match=re.escape("'gpt2-124' in 'gpt2-124': did you mean 'gpt2-124m'")):
        preset("gpt2-124")


def test_wrong_type_without_a_preset() -> None:
    with pytest.raises((ConfigError, StrictDataclassError), match="hidden_size"):
        LeanConfig(**{**GPT, "hidden_size": "32"})


def test_edited_file_is_checked(tmp_path: Path) -> None:
    tiny("gpt").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "rilu"}))
    with pytest.raises(ConfigError, match=r"'rilu'.*did you mean 'relu'"):
        LeanConfig.from_pretrained(tmp_path)


ANCHORED = ("identity-query", "nonlinear-query", "residual-query", "mlp-query:layers=1")


@pytest.mark.parametrize("key", ["identity-key", "nonlinear-key", "nonlinear-key:anchor=linear", "block-identity-key"])
@pytest.mark.parametrize("query", [*ANCHORED, "nonlinear-query:anchor=linear"])
def test_queries_and_keys_that_both_pass_the_input_on_are_warned_of(query: str, key: str) -> None:
    warning = plan(tiny("gpt", query, key)).warning
    if query not in ANCHORED or key not in ("identity-key", "nonlinear-key"):
        assert warning is None
        return
    assert warning is not None and "\n" not in warning
    slots = {name.partition(":")[0]: MECHANISMS[name.partition(":")[0]] for name in (query, key)}
    layer = 1 if query.startswith("mlp") else 0
    expected = [f"{one.slot} {one.spec['type']!r}" for one in slots.values()]
    assert all(part in warning for part in (*expected, f"layer {layer}", "anchor=linear")), warning


def test_a_configuration_warns_once(caplog) -> None:
    type(logging.get_logger()).warning_once.cache_clear()
    for _ in range(2):
        config = tiny("gpt", "nonlinear-query", "nonlinear-key")
    assert caplog.text.count("both pass the input") == 1 and plan(config).warning in caplog.text


READERS = {
    "from_pretrained": lambda folder: LeanConfig.from_pretrained(folder),
    "AutoConfig": lambda folder: AutoConfig.from_pretrained(folder),
    "from_json_file": lambda folder: LeanConfig.from_json_file(folder / "config.json"),
    "from_dict": lambda folder: LeanConfig.from_dict(json.loads((folder / "config.json").read_text())),
}


@pytest.mark.parametrize("reader", READERS)
def test_unknown_keys_of_a_file_are_kept_with_a_warning(reader: str, tmp_path: Path, caplog) -> None:
    """Other tools leave notes there. Names of properties and methods stay what they are."""
    typo = f"hiden_act_{reader}"  # a message is shown once
    tiny("gpt").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    notes = {typo: {"a": [1]}, "layer_types": ["full_attention"], "to_dict": 1, "rope_theta": 7.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | notes))
    config = READERS[reader](tmp_path)
    assert re.search(rf"'{typo}' is kept and changes nothing; did you mean 'hidden_act'", caplog.text)
    assert getattr(config, typo) == {"a": [1]} and config.rope_parameters is None
    assert config.layer_types == tiny("gpt").layer_types
    assert LeanConfig(**config.as_overrides()) == tiny("gpt")
    config.save_pretrained(tmp_path)
    assert json.loads(file.read_text())[typo] == {"a": [1]}
    with pytest.raises(ConfigError, match=f"unknown configuration key '{typo}': did you mean"):
        LeanConfig(**{typo: 1})


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        *(tiny(shape, name, num_hidden_layers=5) for shape in ("gpt", "llama") for name in MECHANISMS),
        tiny("llama", rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}, qk_norm=True, head_dim=12),
        tiny("gpt", "nonlinear-query:rank=5,anchor=linear,layers=0,2", "gqa", "skipv1:ratio=1.0", eos_token_id=[1, 2]),
        tiny("gpt", key_value={"type": "borrowed_values", "heads": [[0, 2, 0, 0], [1, 0, 0, 3], [2, 1, 0, 1]]}),
    ],
    ids=lambda config: "-".join(str(x["type"]) for x in (*config.query, *config.key, *config.value, config.key_value)),
)
def test_saved_configuration_is_the_same(config: LeanConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    loaded = LeanConfig.from_pretrained(tmp_path)
    version = {"transformers_version": None}  # known to a saved configuration alone
    assert loaded.to_dict() | version == config.to_dict() | version
    assert plan(loaded) == plan(config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "leanqkv"
    for name in ("hidden_size", "num_key_value_heads", "query", "key", "value", "key_value", "rope_parameters"):
        assert written.get(name) == getattr(config, name), name


@pytest.mark.parametrize("key, value", [("partial_rotary_factor", 0.5), ("original_max_position_embeddings", 8)])
def test_rotary_settings_beside_the_others_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    """transformers would read them; where no position is rotary they are notes."""
    for shape in ("llama", "gpt"):
        tiny(shape).save_pretrained(tmp_path / shape)
        file = tmp_path / shape / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"'{key}': rotary positions are set by rope_parameters"):
        LeanConfig.from_pretrained(tmp_path / "llama")
    assert getattr(LeanConfig.from_pretrained(tmp_path / "gpt"), key) == value


def test_defaults_are_filled_in() -> None:
    config = tiny("gpt")
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.query, config.key, config.value, config.key_value) == ([], [], [], {"type": "projected"})


def test_names_and_overrides_say_the_same() -> None:
    named = preset("tiny+skipv1:ratio=0.25+identity-query:layers=0,2+num_hidden_layers=3")
    assert named == preset("tiny", "skipv1:ratio=0.25", "identity-query:layers=0,2", num_hidden_layers=3)
    assert named.key_value == {"type": "first_layer_values", "ratio": 0.25}
    assert named.query == [{"type": "identity", "layers": [0, 2]}]
    assert named != preset("tiny", "skipv1:ratio=0.25", "identity-query:layers=0", num_hidden_layers=3)
