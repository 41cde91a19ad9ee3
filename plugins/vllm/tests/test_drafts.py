"""Drafts from the prompt, in a process of their own: with numba loaded vLLM 0.32.0 cannot start a second engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import expected, prompts_of_uneven_length
from product.mechanisms import CASES

pytestmark = pytest.mark.slow
FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
DRAFT = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from engines import engine, generate
with engine(sys.argv[2], speculative_config=json.loads(sys.argv[4])) as llm:
    print("TOKENS", json.dumps(generate(llm, json.loads(sys.argv[3]), 40)))
"""


@pytest.mark.parametrize("name", ["gqa+skipv1", "values-from-keys"])
def test_drafts_from_the_prompt(name: str, tmp_path: Path) -> None:
    """Tokens that are proposed and rejected are written into the pages, and written over."""
    model = next(case for case in CASES if case.name == name).model(**FIELDS).float()
    model.save_pretrained(tmp_path)
    [start] = prompts_of_uneven_length(model.config.vocab_size, 1, 20)
    given = [json.dumps([str(Path(__file__).parent)]), str(tmp_path), json.dumps([start * 4]), json.dumps(DRAFT)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert json.loads(line.removeprefix("TOKENS ")) == expected(model, [start * 4], 40)
