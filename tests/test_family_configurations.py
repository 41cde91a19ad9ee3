"""Configurations of transformers in and out: as on the hub, and refused by name where they cannot be expressed."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from refusing import table
from shapes import tiny
from stock_models import SIZES

from leanqkv import LeanError
from leanqkv.checkpoints.families import FAMILIES, choose_family, export_tensors
from leanqkv.checkpoints.open import open_checkpoint

IMPORT_REFUSED, EXPORT_REFUSED = (table(f"configurations/{way}") for way in ("imports", "exports"))


@pytest.mark.parametrize(("family", "settings", "needles"), IMPORT_REFUSED)
def test_a_configuration_that_cannot_be_expressed_is_refused(family, settings, needles, tmp_path):
    sizes = SIZES | {"num_key_value_heads": 2}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | settings | {"model_type": family}))
    with pytest.raises(LeanError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for needle in (str(tmp_path / "config.json"), *needles):
        assert needle in message


def test_settings_that_change_nothing_are_taken():
    """A stored window that is not used, a whole head that is rotated, no quantisation."""
    sizes = SIZES | {"num_key_value_heads": 2}
    plain = FAMILIES["qwen2"].lean_config(sizes).to_dict()
    for settings in (
        {"sliding_window": 16, "max_window_layers": 2},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None, "is_causal": True},
        {"rope_theta": 10000.0, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 3},
    ):
        assert FAMILIES["qwen2"].lean_config(sizes | settings).to_dict() == plain


def test_what_a_config_json_leaves_out_is_the_class_default():
    config = FAMILIES["gpt2"].lean_config({})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (50257, 768, 3072)
    assert (config.hidden_act, config.tie_word_embeddings, config.bos_token_id) == ("gelu_new", True, 50256)
    assert (config.attention_dropout, config.hidden_dropout, config.embedding_dropout) == (0.1, 0.1, 0.1)
    assert FAMILIES["gpt_neox"].lean_config({}).rope_parameters["partial_rotary_factor"] == 0.25
    assert FAMILIES["mistral"].lean_config({}).sliding_window == 4096
    assert FAMILIES["qwen3"].lean_config({}).head_dim == 128


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "olmo2", "gpt_neox"])
def test_original_positions_beside_the_rotary_settings_count(family, rope_type):
    """transformers takes them from there when it makes the frequencies."""
    scaling = {"rope_type": rope_type, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "yarn":
        scaling = {"rope_type": rope_type, "factor": 4.0}
    sizes = SIZES | {"num_key_value_heads": 2, "rope_scaling": scaling, "max_position_embeddings": 64}
    config = FAMILIES[family].lean_config(sizes | {"original_max_position_embeddings": 16})
    assert config.rope_parameters["original_max_position_embeddings"] == 16


ON_THE_HUB = yaml.safe_load((Path(__file__).parent / "hub_configurations.yaml").read_text())


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_configurations_as_on_the_hub(name):
    hf, expected = ON_THE_HUB[name]["config"], ON_THE_HUB[name]["expected"]
    if "dtype" in expected:
        expected = expected | {"dtype": getattr(torch, expected["dtype"])}
    family = FAMILIES[hf["model_type"]]
    config = family.lean_config(hf)
    assert {field: getattr(config, field) for field in expected} == expected
    assert family.lean_config(family.to_stock(config).to_dict()).to_dict() == config.to_dict()
    assert choose_family(config) is family


@pytest.mark.parametrize(("shape", "mechanisms", "overrides", "family", "needles"), EXPORT_REFUSED)
def test_a_model_that_a_class_cannot_hold_is_refused(shape, mechanisms, overrides, family, needles):
    config = tiny(shape, *mechanisms, **overrides)
    for refusing in (
        lambda: FAMILIES[family].to_stock(config),
        lambda: choose_family(config, family),
        lambda: export_tensors(FAMILIES[family], config, {}),
    ):
        with pytest.raises(LeanError) as caught:
            refusing()
        message = str(caught.value)
        assert "\n" not in message
        for needle in (FAMILIES[family].architecture, *needles):
            assert needle in message


def test_no_family_holds_it():
    with pytest.raises(LeanError) as caught:
        choose_family(tiny("llama", "skipv1"))
    assert "LlamaForCausalLM and MistralForCausalLM" in str(caught.value)
    assert "first_layer_values" in str(caught.value)
    assert "GPT2" not in str(caught.value)
    # Those whose settings the model does not have are not near, though they say so in one error.
    assert "Mixtral" not in str(caught.value)
    with pytest.raises(LeanError, match="no family 'lama': did you mean 'llama'"):
        choose_family(tiny("llama"), "lama")
