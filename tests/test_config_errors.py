"""What cannot be built is refused with a message that says what clashes, or which names are near."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from shapes import GPT, tiny
from transformers import AutoConfig

from leanqkv import ConfigError, LeanConfig, LeanError, plan, preset
from leanqkv.presets import MECHANISMS

ROPE = {"position_embedding_type": "rope"}


def borrowed(heads: Any, **fields: Any) -> dict[str, Any]:
    options = {name: fields.pop(name) for name in ("ratio", "head") if name in fields}
    return {"key_value": {"type": "borrowed_values", "heads": heads, **options}, **fields}


# mechanisms, overrides, what the message must contain
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = [
    # names
    (("identity-quer",), {}, ("identity-quer", "did you mean", "identity-query")),
    (("skipv1", "nonsense"), {}, ("nonsense", "valid", "skipv1", "mqa")),
    (("identity-query:scal=1.0",), {}, ("scal", "did you mean 'scale'")),
    (("skipv1:layers=1",), {}, ("first_layer_values", "layers", "source_layer")),
    (("mqa:group_size=2",), {}, ("mqa", "group_size")),
    (("gqa:groups=2",), {}, ("gqa", "groups", "group_size")),
    ((), {"hiden_size": 32}, ("hiden_size", "did you mean 'hidden_size'")),
    ((), {"flavour": 3}, ("flavour", "valid")),
    ((), {"norm_type": "layrnorm"}, ("norm_type", "layrnorm", "'layernorm'")),
    ((), {"mlp_type": "swiglu"}, ("mlp_type", "swiglu", "gated")),
    ((), {"hidden_act": "gelo"}, ("hidden_act", "gelo", "'gelu'")),
    ((), {"position_embedding_type": "alibi"}, ("position_embedding_type", "alibi", "rope")),
    ((), {"query": [{"type": "identit"}]}, ("query", "identit", "did you mean 'identity'")),
    ((), {"query": [{"layers": [0]}]}, ("query", "type", "nonlinear")),
    ((), {"key": [{"type": "nonlinear"}]}, ("key", "nonlinear", "'linear'")),
    ((), {"key_value": {"type": "first_layer"}}, ("key_value", "first_layer", "first_layer_values")),
    (("nonlinear-query:activation=silu",), {}, ("activation", "silu", "relu2")),
    (("nonlinear-query:anchor=none",), {}, ("anchor", "identity", "linear")),
    # types
    (("identity-query:scale=big",), {}, ("scale", "a number", "'big'")),
    (("identity-query:scale=true",), {}, ("scale", "a number", "True")),
    (("nonlinear-query:rank=2.5",), {}, ("rank", "whole number", "2.5")),
    (("nonlinear-query:norm_in=3",), {}, ("norm_in", "true or false", "3")),
    (("nonlinear-query:activation=3",), {}, ("activation", "a name", "3")),
    (("skipv1:inject=1",), {}, ("inject", "true or false", "1")),
    (("skipv1:source_layer=0.5",), {}, ("source_layer", "whole number", "0.5")),
    (("identity-query:layers=1.5",), {}, ("layers", "whole numbers", "1.5")),
    (("identity-query:layers=",), {}, ("layers", "whole numbers", "None")),
    (("identity-query:layers",), {}, ("layers", "no value")),
    ((), {"query": ["identity"]}, ("query", "identity")),
    ((), {"query": [{"type": "identity", "layers": 1}]}, ("query", "layers", "1")),
    ((), {"query": {"type": "identity"}}, ("query", "list")),
    ((), {"key_value": "first_layer_values"}, ("key_value", "dict")),
    ((), {"hidden_size": "32"}, ("hidden_size", "int", "'32'")),
    ((), {"qk_norm": 1}, ("qk_norm", "bool")),
    ((), {"num_hidden_layers": 0}, ("num_hidden_layers", "at least 1", "0")),
    ((), {"vocab_size": -4}, ("vocab_size", "at least 1", "-4")),
    ((), {"head_dim": 0}, ("head_dim", "0")),
    ((), {"max_position_embeddings": 0}, ("max_position_embeddings", "0")),
    ((), {"attention_dropout": 1.5}, ("attention_dropout", "1.5")),
    # combinations across layers
    (("mlp-query",), {"num_hidden_groups": 1}, ("num_hidden_groups", "layers 0 and 1", "same mechanisms")),
    (("resformer",), {"num_hidden_groups": 1}, ("num_hidden_groups", "layers 0 and 1")),
    (("skipv1",), {"num_hidden_groups": 1}, ("num_hidden_groups", "layers 0 and 1")),
    (("residual-query:layers=1,3",), {"num_hidden_groups": 2, "num_hidden_layers": 4}, ("num_hidden_groups",)),
    ((), {"num_hidden_groups": 2}, ("num_hidden_groups (2)", "divide", "(3)")),
    (("identity-key:layers=3", "yoco"), {"num_hidden_layers": 4}, ("key 'identity' in layer 3", "no keys of its own")),
    (("identity-value:layers=2,3", "yoco-v"), {"num_hidden_layers": 4}, ("layer 2", "no values of its own")),
    (("keys-as-values:layers=0",), ROPE, ("keys", "all layers or none")),
    (("keys-as-values", "skipv1-yoco"), {"num_hidden_layers": 4}, ("layer 2", "nothing to reuse")),
    (("yoco:local=true",), {"num_hidden_layers": 4}, ("local", "sliding_window")),
    (("yoco-v",), {"num_hidden_layers": 1}, ("shared_middle", "at least 2")),
    (("cla:group_size=1",), {}, ("group_size", "at least 2", "found 1")),
    (("fusedkv-lite",), {"num_hidden_layers": 1}, ("first_values_middle_keys", "at least 2")),
    (("skipv2:middle_keys=true",), {"num_hidden_layers": 2}, ("source_layer",)),
    (("skipkv1:middle_keys=true",), {}, ("keys and middle_keys",)),
    (("skipv0:injection=pooling",), {}, ("inject=false", "no meaning")),
    (("skipv1:injection=rotate",), {}, ("injection", "second_half", "'rotate'")),
    (("resformer:mode=per_head",), {}, ("mode", "per_layer", "'per_head'")),
    (("resformer:mode=per_token,weight=1.0",), {}, ("weight", "between 0 and 1")),
    # borrowed values
    (("borrowed-values:ratio=0.75",), {}, ("ratio", "between 0 and 0.5", "0.75")),
    (("borrowed-values:ratio=-0.5",), {}, ("ratio", "between 0 and 0.5", "-0.5")),
    (("borrowed-values", "mqa"), {}, ("ratio 0.5 of 1 value head is less than one",)),
    (("borrowed-values", "mla"), {}, ("borrowed_values", "latent (MLA)")),
    (("borrowed-values", "skipv1"), {}, ("borrowed-values", "skipv1", "clash")),
    (("borrowed-values:heads=1",), {}, ("heads", "rows of four whole numbers", "found 1")),
    (("borrowed-values",), {"num_hidden_groups": 1}, ("num_hidden_groups", "layers 0 and 1")),
    ((), borrowed([]), ("heads", "at least one", "found []")),
    ((), borrowed([[1, 0, 0, 0], [1, 2, 3]]), ("heads", "rows of four", "found [1, 2, 3]")),
    ((), borrowed([[1, 0, 0, 0], [1, 2, 0, 1.0]]), ("heads", "whole numbers", "found [1, 2, 0, 1.0]")),
    ((), borrowed([[1, True, 0, 0]]), ("heads", "whole numbers", "True")),
    ((), borrowed([[1, None, 0, 0]]), ("heads", "whole numbers", "None")),
    ((), borrowed("1000"), ("heads", "rows of four", "'1000'")),
    ((), borrowed({"1": [1, 0, 0, 0]}), ("heads", "rows of four")),
    ((), borrowed(None), ("heads", "rows of four", "None")),
    ((), borrowed([[3, 0, 0, 0]]), ("[3, 0, 0, 0]", "3 layers of 4 value heads")),
    ((), borrowed([[1, 4, 0, 0]]), ("[1, 4, 0, 0]", "3 layers of 4 value heads")),
    ((), borrowed([[1, 0, 0, 4]]), ("[1, 0, 0, 4]", "3 layers of 4 value heads")),
    ((), borrowed([[1, -1, 0, 0]]), ("[1, -1, 0, 0]", "counted from 0")),
    ((), borrowed([[1, 0, -1, 0]]), ("[1, 0, -1, 0]", "counted from 0")),
    ((), borrowed([[1, 0, 2, 0]]), ("[1, 0, 2, 0]", "the same or an earlier")),
    (("gqa",), borrowed([[1, 2, 0, 0]]), ("[1, 2, 0, 0]", "3 layers of 2 value heads")),
    ((), borrowed([[1, 0, 0, 0], [1, 0, 0, 1]]), ("head 0 of layer 1", "two rows")),
    ((), borrowed([[1, 0, 1, 0]]), ("[1, 0, 1, 0]", "borrowed itself")),
    ((), borrowed([[1, 0, 0, 0], [2, 0, 1, 0]]), ("[2, 0, 1, 0]", "borrowed itself")),
    ((), borrowed([[1, 0, 0, 0]], ratio=0.25), ("heads", "leave ratio out")),
    ((), borrowed([[1, 0, 0, 0]], head=1), ("'head'", "did you mean 'heads'")),
    (("mla",), borrowed([[1, 0, 0, 0]]), ("borrowed_values", "latent (MLA)")),
    (("keys-as-values",), borrowed([[1, 0, 0, 0]]), ("layer 1", "1, 2, 3", "value 'keys'")),
    (("identity-value:layers=1",), borrowed([[1, i, 0, i] for i in range(4)]), ("layer 1", "no values of its own")),
    ((), borrowed([[1, 3, 0, 0]], num_hidden_groups=1), ("num_hidden_groups", "layers 0 and 1")),
    # latent keys
    (("latent-keys:columns=1,5,0,1",), ROPE, ("key 'latent' in layer 0", "from 0 to 4", "found 5")),
    (("latent-keys:columns=1,-1,0,1",), ROPE, ("columns", "from 0 to 4", "found -1")),
    (("latent-keys:columns=1,3,0,1", "gqa"), ROPE, ("from 0 to 2", "key heads", "found 3")),
    (("latent-keys:columns=1,1,1",), ROPE, ("columns must be 4 numbers", "frequency", "found 3")),
    (("latent-keys:columns=0,0,0,0",), ROPE, ("columns are 0", "at least one")),
    (("latent-keys:columns=3",), ROPE, ("columns must be 4 numbers", "found 1")),
    (("latent-keys:columns=1,1.5,1,1",), ROPE, ("'columns'", "whole numbers", "1.5")),
    ((), {"key": [{"type": "latent", "columns": 4}], **ROPE}, ("'columns'", "list of whole numbers", "found 4")),
    ((), {"key": [{"type": "latent", "columns": []}], **ROPE}, ("'columns'", "list of whole numbers", "found []")),
    ((), {"key": [{"type": "latent", "columns": [True] * 4}], **ROPE}, ("'columns'", "True")),
    (("latent-keys:rank=4,columns=1,1,0,0",), ROPE, ("columns and rank", "one of them")),
    (("latent-keys:rank=5",), ROPE, ("rank must be even", "from 2 to 32", "found 5")),
    (("latent-keys:rank=34",), ROPE, ("rank", "from 2 to 32", "found 34")),
    (("latent-keys:rank=18", "gqa"), ROPE, ("rank", "from 2 to 16", "2 key heads", "found 18")),
    (("latent-keys:rank=0",), ROPE, ("rank", "found 0")),
    (("latent-keys:rank=-2",), ROPE, ("rank", "found -2")),
    (("latent-keys:rank=0",), {}, ("rank must be from 1 to 32", "found 0")),
    (("latent-keys:rank=33",), {}, ("rank must be from 1 to 32", "4 key heads", "found 33")),
    (("latent-keys:columns=1,1,0,0",), {}, ("columns", "no rotary positions", "rank")),
    (("latent-keys:columns=1,1,0,0",), ROPE | {"rope_layers": [0, 1]}, ("in layer 2", "no rotary positions")),
    (("latent-keys:rnak=4",), {}, ("rnak", "did you mean 'rank'")),
    (("latent-keys",), {"qk_norm": True}, ("key 'latent'", "qk_norm")),
    (("latent-keys", "mla"), {}, ("key 'latent'", "kv_lora_rank")),
    (("latent-keys", "skipv1"), {}, ("key 'latent'", "key_value 'first_layer_values'")),
    (("latent-keys", "cla"), {"num_hidden_layers": 4}, ("key 'latent'", "key_value 'shared_adjacent'")),
    (("latent-keys", "keys-as-values"), {}, ("value 'keys' in layer 0", "key 'latent'")),
    (("latent-keys", "identity-key"), {}, ("layer 0", "two key", "'latent'", "'identity'")),
    (
        ("latent-keys",),
        ROPE | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        ("latent keys rotate whole heads", "partial_rotary_factor 0.5"),
    ),
    (
        ("latent-keys",),
        ROPE | {"rope_layers": [0, 2], "num_hidden_groups": 2, "num_hidden_layers": 4},
        ("num_hidden_groups", "layers 0 and 1"),
    ),
    (("denseformer:dilation=0",), {}, ("depth_average", "dilation", "0")),
    (("denseformer:peroid=2",), {}, ("depth_average", "peroid", "period")),
    (("mla", "gqa"), {}, ("num_key_value_heads", "kv_lora_rank")),
    (("mla",), {"qk_norm": True}, ("qk_norm", "kv_lora_rank")),
    (("mla", "identity-key"), {}, ("key 'identity'", "kv_lora_rank")),
    (("mla", "skipv0"), {}, ("inject=false", "MLA")),
    (("mla", "skipkv1"), {}, ("keys=true", "nothing to share")),
    (("mla:rank=8", "mla"), {}, ("mla and mla clash",)),
    (("mla",), {"kv_lora_rank": 4}, ("mla and kv_lora_rank clash",)),
    (("mla:ranks=8",), {}, ("mla", "ranks", "rope_dim")),
    (("mla:rope_dim=3",), ROPE, ("even", "qk_rope_head_dim", "3")),
    (("mla:rope_dim=4",), {}, ("qk_rope_head_dim (4)", "'rope'")),
    ((), {"qk_rope_head_dim": 4}, ("qk_rope_head_dim", "kv_lora_rank")),
    (("mlp-query",), {"mlp_type": "moe"}, ("from_mlp", "experts")),
    (("mlp-query",), {"intermediate_size": 16}, ("from_mlp", "intermediate_size (16)")),
    (("no-output",), {"head_dim": 4}, ("output 'identity'", "hidden_size (32)")),
    # block shapes
    ((), {"block_type": "paralel"}, ("block_type", "did you mean", "'parallel'")),
    ((), {"block_type": "parallel", "mlp_skip": False}, ("parallel block", "one skip")),
    ((), {"num_local_experts": 4}, ("num_local_experts", "mlp_type 'moe'")),
    ((), {"mlp_type": "moe", "num_experts_per_tok": 9}, ("num_experts_per_tok (9)", "(8)")),
    ((), {"mlp_type": "moe", "mlp_bias": True}, ("mlp_bias", "experts")),
    ((), {"sliding_window": 1}, ("sliding_window", "at least 2")),
    ((), {"mask_type": "bidirectional"}, ("causal_lm", "masked_lm")),
    ((), {"task": "masked_lm", "mask_type": "causal"}, ("masked_lm", "bidirectionally")),
    ((), {"sliding_window": 4, "window_layers": []}, ("window_layers", "[]")),
    ((), {"sliding_window": 4, "window_layers": [1, 3]}, ("window_layers", "0 to 2", "[1, 3]")),
    ((), {"sliding_window": 4, "window_layers": [1, 0]}, ("window_layers", "ascending", "[1, 0]")),
    ((), {"window_layers": [1]}, ("window_layers", "sliding_window")),
    ((), ROPE | {"rope_layers": [-1]}, ("rope_layers", "[-1]")),
    ((), {"rope_layers": [1]}, ("rope_layers", "position_embedding_type 'learned'")),
    ((), ROPE | {"window_rope_parameters": {}}, ("window_rope_parameters", "sliding_window")),
    (
        (),
        ROPE | {"sliding_window": 4, "window_rope_parameters": {"rope_theta": 0}},
        ("window_rope_parameters", "rope_theta", "0"),
    ),
    (("mla",), ROPE | {"rope_layers": [1]}, ("rope_layers", "latent")),
    (
        ("skipv1",),
        {"sliding_window": 4, "window_layers": [1, 2]},
        ("layer 1", "layer 0", "sliding window: None, not 4"),
    ),
    (("skipv1",), {"sliding_window": 4, "window_layers": [0]}, ("layer 1", "layer 0", "sliding window: 4, not None")),
    (("skipkv1",), ROPE | {"rope_layers": [0]}, ("layer 1", "layer 0", "rotary positions: rope_parameters, not None")),
    (("keys-as-values", "skipv1"), ROPE | {"rope_layers": [1, 2]}, ("layer 1", "layer 0", "rotary positions")),
    ((), {"norm_placement": "behind"}, ("norm_placement", "'behind'")),
    ((), {"norm_placement": "after", "norm_type": "none"}, ("norm_placement 'after'", "norm_type 'none'")),
    ((), {"norm_placement": "both", "block_type": "parallel"}, ("norm_placement 'both'", "serial", "'parallel'")),
    ((), {"qk_norm": "head"}, ("qk_norm", "'width'", "'head'")),
    ((), {"residual_multiplier": 0.0}, ("residual_multiplier", "positive", "0.0")),
    ((), {"logits_scaling": float("inf")}, ("logits_scaling", "finite", "inf")),
    ((), {"attention_multiplier": -1.0}, ("attention_multiplier", "-1.0")),
    ((), {"norm_topk_prob": True}, ("norm_topk_prob", "mlp_type 'moe'")),
    # heads
    ((), {"num_attention_heads": 5}, ("hidden_size", "32", "num_attention_heads", "5")),
    ((), {"num_key_value_heads": 3}, ("num_key_value_heads", "3", "num_attention_heads", "4")),
    ((), {"num_key_value_heads": 0}, ("num_key_value_heads", "0")),
    (("gqa:group_size=3",), {}, ("gqa", "group_size", "4", "3")),
    (("gqa", "mqa"), {}, ("gqa", "mqa", "clash")),
    (("identity-query",), {"head_dim": 10}, ("identity", "layer 0", "head_dim", "hidden_size", "4 * 10 != 32")),
    (("residual-query:layers=1",), {"head_dim": 10}, ("residual", "layer 1", "4 * 10 != 32")),
    (("nonlinear-query",), {"head_dim": 10}, ("nonlinear", "4 * 10 != 32", "anchor=linear")),
    (("gqa", "identity-key"), {}, ("key 'identity'", "4", "2", "MHA")),
    (("mqa", "identity-value:layers=2"), {}, ("value 'identity'", "layer 2", "MHA")),
    # layers
    (("identity-query:layers=0,3",), {}, ("layers", "0 to 2", "3")),
    (("identity-query:layers=-1",), {}, ("layers", "0 to 2", "-1")),
    (("identity-query:layers=1,1",), {}, ("layer 1", "two query")),
    (("identity-query", "nonlinear-query"), {}, ("layer 0", "'identity'", "'nonlinear'")),
    (("identity-query:layers=0,1", "residual-query:layers=1,2"), {}, ("layer 1", "'identity'", "'residual'")),
    # sharing
    (("skipv1", "skipv2"), {}, ("skipv1", "skipv2", "clash")),
    (("skipv1", "skipv0"), {}, ("skipv1", "skipv0", "clash")),
    (("mqa", "skipv1"), {}, ("ratio", "0.5", "1 value head", "num_key_value_heads")),
    (("skipv1:ratio=1.5",), {}, ("ratio", "between 0 and 1", "1.5")),
    (("skipv1:ratio=-0.5",), {}, ("ratio", "between 0 and 1", "-0.5")),
    (("skipv1:ratio=.nan",), {}, ("ratio", "must be a number", "nan")),
    (("skipv0:ratio=1.0",), {}, ("ratio", "1.0", "no value heads")),
    (("skipv3",), {}, ("source_layer", "2", "3 layers")),
    (("skipv1:source_layer=-1",), {}, ("source_layer", "-1")),
    # positions and norms
    ((), {"rope_parameters": {"rope_theta": 1e4}}, ("rope_parameters", "'learned'", "rope")),
    ((), ROPE | {"head_dim": 7}, ("even", "head_dim", "7")),
    ((), ROPE | {"rope_parameters": {"rope_type": "yarm"}}, ("rope_type", "yarm", "yarn")),
    ((), ROPE | {"rope_parameters": {"rope_type": "linear"}}, ("rope_type 'linear' needs factor", "None")),
    ((), ROPE | {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, ("rope_type 'yarn' needs factor", "found 0")),
    ((), ROPE | {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ("factor must be a number", "'2'")),
    (
        (),
        ROPE | {"sliding_window": 4, "window_rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        ("window_rope_parameters", "'llama3' needs low_freq_factor"),
    ),
    (
        (),
        ROPE | {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0]}},
        ("rope_type 'longrope' needs long_factor", "a list of 4 numbers"),
    ),
    ((), {"norm_type": "rmsnorm", "norm_bias": True}, ("norm_bias", "layernorm", "rmsnorm")),
]


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
        tiny("gpt", **borrowed([[0, 2, 0, 0], [1, 0, 0, 3], [2, 1, 0, 1]])),
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
