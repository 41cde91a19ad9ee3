"""`leanqkv serve --engine vllm`: the command that vLLM's server is started with, and what is refused before that."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shapes import randomize, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from leanqkv import LeanForCausalLM
from leanqkv.inference import vllm_engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    randomize(LeanForCausalLM(tiny("llama", "skipv1"))).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def plugin(monkeypatch) -> SimpleNamespace:
    """Takes the place of the plugin, which is tested where vLLM is installed."""
    stand_in = SimpleNamespace(TESTED=("1.2.3",), refusal=lambda config: None)
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_engine, "import_module", lambda name: stand_in)
    monkeypatch.setattr(vllm_engine, "version", lambda package: "1.2.3")
    return stand_in


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that this process would have become."""
    commands: list[list[str]] = []

    def become(path: str, command: list[str]) -> None:
        assert path == command[0]
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    return commands


def test_options_go_through(directory, plugin, started, unwrapped) -> None:
    asked = ("serve", str(directory), "--engine", "vllm", "--port", "81", "--", "--max-model-len", "32", "--seed", "1")
    code, _, errors = unwrapped(*asked)
    assert code == 0 and not errors
    model = ["--model", str(directory), "--served-model-name", "model", "--host", "127.0.0.1", "--port", "81"]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert started == [[*server, *model, "--block-size", "128", "--max-model-len", "32", "--seed", "1"]]


@pytest.mark.parametrize("asked", [["--block-size", "16"], ["--block-size=16"]])
def test_the_page_on_a_cpu_can_be_chosen(directory, plugin, started, unwrapped, asked, monkeypatch) -> None:
    assert unwrapped("serve", str(directory), "--engine", "vllm", "--", *asked)[0] == 0
    assert started[0][-len(asked) :] == asked and "128" not in started[0]
    monkeypatch.setattr(vllm_engine, "default_device", lambda: "cuda")
    assert unwrapped("serve", str(directory), "--engine", "vllm")[0] == 0
    assert "--block-size" not in started[1]


def test_bits_of_the_cache_are_the_plugins(directory, plugin, started, unwrapped) -> None:
    asked = ("serve", str(directory), "--engine", "vllm", "--cache-bits", "8/4")
    assert unwrapped(*asked, "--", "--seed", "1")[0] == 0
    assert started[0][-2:] == ["--seed", "1"] and "--block-size" not in started[0]
    assert started[0][started[0].index("--additional-config") + 1] == '{"cache_bits": "8/4"}'
    code, _, errors = unwrapped(*asked, "--", "--additional-config={}")
    assert code == 2 and 'add it there: {"cache_bits": "8/4"}' in errors and len(started) == 1


def test_another_version_is_a_warning(directory, plugin, started, unwrapped) -> None:
    plugin.TESTED = ("1.0.0", "1.1.0")
    code, _, errors = unwrapped("serve", str(directory), "--engine", "vllm")
    assert code == 0 and "vLLM 1.2.3 has not been tested with leanqkv-vllm; tested: 1.0.0, 1.1.0" in errors and started


def test_without_the_plugin(directory, started, unwrapped) -> None:
    code, _, errors = unwrapped("serve", str(directory), "--engine", "vllm")
    assert code == 2 and "needs vLLM and the plugin leanqkv-vllm" in errors and not started


def test_what_vllm_cannot_run(directory, plugin, started, unwrapped) -> None:
    plugin.refusal = lambda config: "it is a pity"
    code, _, errors = unwrapped("serve", str(directory), "--engine", "vllm")
    assert code == 2 and f"error: {directory}: it is a pity" in errors and not started


def test_a_checkpoint_of_another(tmp_path, plugin, started, unwrapped) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=97)).save_pretrained(tmp_path / "stock")
    code, _, errors = unwrapped("serve", str(tmp_path / "stock"), "--engine", "vllm")
    assert code == 2 and "a checkpoint of LlamaForCausalLM, which vLLM serves by itself" in errors and not started
