"""The compiled model: the same tokens, when it is compiled and when another process reads it from vLLM's cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import expected, prompts_of_uneven_length
from product.mechanisms import CASES

pytestmark = pytest.mark.slow
FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from engines import engine, generate
with engine(sys.argv[2], enforce_eager=False) as llm:
    print("TOKENS", json.dumps(generate(llm, json.loads(sys.argv[3]), 24)))
"""


@pytest.mark.parametrize("name", ["gqa+skipv1", "values-from-keys", "mla+skipv1"])
def test_tokens_of_the_compiled_model(name: str, tmp_path: Path) -> None:
    model = next(case for case in CASES if case.name == name).model(**FIELDS).float()
    model.save_pretrained(tmp_path / "model")
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 80)
    paths = json.dumps([str(Path(__file__).parent)])
    command = [sys.executable, "-c", SCRIPT, paths, str(tmp_path / "model"), json.dumps(prompts)]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    for _ in ("compiled", "read"):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
        assert json.loads(line.removeprefix("TOKENS ")) == expected(model, prompts, 24)
        assert any((tmp_path / "cache").rglob("*aot_compile*"))
