"""Odd values in config.json and generation_config.json x fields x families: taken, or one sentence, quickly."""

import json
import shutil
import time
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from leanqkv import LeanConfig, LeanError, LeanForCausalLM
from leanqkv.checkpoints.open import GENERATION, open_checkpoint, read_generation_config
from leanqkv.inference.decoder import Decoder, logits_warpers

DEEP = "[" * 400 + "]" * 400
ODD = [
    *("null", '"x"', '""', "-1", "0", "1", "1.5", "1e30", str(10**9), str(10**30), "NaN", "Infinity", "true", "false"),
    *(
        "[]",
        "{}",
        "[[]]",
        '["a"]',
        '[1, "x"]',
        '{"a": 1}',
        '{"type": ["a"]}',
        '[{"type": ["a"]}]',
        '{"rope_type": ["a"]}',
    ),
    *(
        DEEP,
        '{"a":' * 400 + "1" + "}" * 400,
        f'"{"y" * 10_000}"',
        f"[{', '.join(['1'] * 3000)}]",
        '"[red]"',
        '"\\ud800"',
    ),
]
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "leanqkv": {},
    "llama": {"intermediate_size": 48},
    "gpt2": {},
    "gemma3_text": {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2},
}
# Keys of any configuration that no class declares.
GENERAL = {
    "torch_dtype",
    "num_labels",
    "id2label",
    "quantization_config",
    "architectures",
    "rope_scaling",
    "rope_theta",
}
SAMPLE = 4  # of the odd values a field; others are the next field's


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    for name, settings in FAMILIES.items():
        config = (
            CONFIG_MAPPING[name](**SIZES, **settings, max_position_embeddings=64)
            if settings or name == "gpt2"
            else None
        )
        model = AutoModelForCausalLM.from_config(config) if config else LeanForCausalLM(tiny("llama", "gqa", "skipv1"))
        model.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field(family, checkpoints):
    stored = json.loads((checkpoints / family / "config.json").read_text())
    declared = (
        {field.name for field in fields(LeanConfig)} if family == "leanqkv" else CONFIG_MAPPING[family]().to_dict()
    )
    directory = shutil.copytree(checkpoints / family, checkpoints / "odd", dirs_exist_ok=True)
    values, taken = iter(ODD * 1000), 0
    for name in sorted({*stored, *declared, *GENERAL}):
        rest = json.dumps({key: value for key, value in stored.items() if key != name})
        for value in islice(values, SAMPLE):
            (directory / "config.json").write_text(f"{rest[:-1]}, {json.dumps(name)}: {value}}}")
            start = time.process_time()
            try:
                taken += open_checkpoint(directory).config is not None
            except LeanError as error:
                assert len(str(error).splitlines()) == 1, (name, value[:50])
            assert time.process_time() - start < 2, (name, value[:50])
    assert taken > 20
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 10**9}, "num_labels must be a whole number up to"),
        ({"dtype": "evil"}, "dtype 'evil' is not known"),
        ({"dtype": ["float32"]}, "dtype ['float32'] is not known"),
        ({"key_value": {"type": ["a"]}}, "has no type ['a']"),
        ({"model_type": "y" * 10_000}, "yyy…yyy"),
        ({"block_type": "y" * 10_000}, "yyy…yyy"),
        ({"hidden_act": ["y"] * 10_000}, "'y', "),
        ({"id2label": ["x"]}, "id2label must give names to numbers"),
        ({"quantization_config": "x"}, "quantization_config must be an object"),
        ({"eos_token_id": 10**30}, "eos_token_id must be from -1 to"),
        ({"deep": json.loads(DEEP)}, "config.json is nested more than 100 levels deep"),
    ],
    ids=lambda given: next(iter(given))[:20] if isinstance(given, dict) else "",
)
def test_a_person_reads_one_short_line(changes, message, checkpoints, tmp_path, monkeypatch, cli):
    directory = shutil.copytree(checkpoints / "leanqkv", tmp_path / "odd")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("inspect", "odd")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert message in err.replace("yy", "yyy") or message in err
    assert len(err) < 1600


def test_settings_of_generation(tmp_path):
    """Taken settings generate and are written again; the others are refused with the file's name."""
    model, ids = LeanForCausalLM(tiny("gpt", num_hidden_layers=1)).eval(), torch.ones(1, 3, dtype=torch.long)
    decoder, values = Decoder(model), iter([*ODD, str(2**40), "[1, 2]", "[1, 1e30]", "-0.5", "2.0", "0.5"] * 100)
    taken = 0
    for name in GenerationConfig().to_dict():
        for value in islice(values, SAMPLE):
            (tmp_path / GENERATION).write_text(f'{{"{name}": {value}}}')
            try:
                settings = read_generation_config(tmp_path)
            except LeanError as error:
                assert GENERATION in str(error) and len(str(error).splitlines()) == 1
                continue
            decoder.generation_config = settings
            decoder.generate(ids, max_new_tokens=2)
            warpers = logits_warpers(float(settings.temperature or 1), settings.top_k, settings.top_p)
            assert warpers(None, torch.randn(1, 97)).shape == (1, 97), (name, value)
            json.dumps(settings.to_diff_dict())
            taken += 1
    assert taken > 30


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("eos_token_id", "x", "must be a token's id, or a list of them, found 'x'"),
        ("eos_token_id", [1, "x"], "found [1, 'x']"),
        ("eos_token_id", 2.5, "found 2.5"),
        ("eos_token_id", 10**30, "found 1000000"),
        ("eos_token_id", {"a": 1}, "found {'a': 1}"),
        ("temperature", -1, "must be a number from 0, finite, found -1"),
        ("top_p", 2, "must be a number from 0 to 1, found 2"),
        ("top_k", 1.5, "must be a whole number from 0, found 1.5"),
        ("do_sample", "x", "must be true or false, found 'x'"),
    ],
)
def test_wrong_settings_of_generation_are_named(name, value, message, tmp_path):
    (tmp_path / GENERATION).write_text(json.dumps({name: value}))
    with pytest.raises(LeanError) as error:
        read_generation_config(tmp_path)
    assert f"{GENERATION}: {name}" in str(error.value) and message in str(error.value)
