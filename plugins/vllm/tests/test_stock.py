"""vLLM without the plugin: its backend for models of transformers, on the code that comes with a checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import expected, prompts_of_uneven_length
from product.mechanisms import CASES

pytestmark = pytest.mark.slow  # a process for each
FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
FIELDS |= {"mlp_type": "gated"}  # whose code is in the folder in place of the default's
RUNS = ("baseline", "gqa", "mqa", "identity-query", "nonlinear-query", "residual-query", "biases and qk_norm")
REFUSED = {"skipv1": "first_layer_values", "mla": "kv_lora_rank", "latent-values": "latent", "shared blocks": "share"}
SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from engines import engine, generate
with engine(sys.argv[2], trust_remote_code=True, model_impl="transformers") as llm:
    print("TOKENS", json.dumps(generate(llm, json.loads(sys.argv[3]), 24)))
"""


def without_plugin(place: Path, prompts: list[list[int]]) -> subprocess.CompletedProcess[str]:
    """What a process says that loads no plugins; the checkpoint's own code runs in it, whatever is installed."""
    paths = json.dumps([str(Path(__file__).parent)])
    command = [sys.executable, "-c", SCRIPT, paths, str(place), json.dumps(prompts)]
    environment = {**os.environ, "VLLM_PLUGINS": "none", "HF_HOME": str(place / "home")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def case_of(name: str):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", RUNS)
def test_tokens_without_the_plugin(name: str, tmp_path: Path) -> None:
    model = case_of(name).model(**FIELDS).float()
    model.save_pretrained(tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 80)
    done = without_plugin(tmp_path, prompts)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert json.loads(line.removeprefix("TOKENS ")) == expected(model, prompts, 24)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_plugin_says_so(name: str, tmp_path: Path) -> None:
    case_of(name).model(**FIELDS).float().save_pretrained(tmp_path)
    done = without_plugin(tmp_path, [[1, 2]])
    assert done.returncode != 0
    assert "cannot run this model without the plugin leanqkv-vllm" in done.stderr and REFUSED[name] in done.stderr
