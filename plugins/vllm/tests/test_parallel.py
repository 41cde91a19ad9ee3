"""Tensor parallelism on two ranks, and the shares of the weights without any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import expected, prompts_of_uneven_length
from leanqkv_vllm.parallel import Shards, rank_config, refusal
from product.mechanisms import CASES

from leanqkv import LeanForCausalLM

FIELDS = {"hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 256}
SPLIT = ("baseline", "gqa", "skipv1", "skipkv1", "skipv1-yoco", "cla", "yoco", "svformer", "gqa+skipv1", "parallel")
SPLIT += ("biases and qk_norm", "shared blocks", "denseformer", "output-gate", "output-gate:per_head=true")
REFUSED = {
    "mla": "a latent is not split by heads",
    "latent-values": "value 'latent' is not a product",
    "nonlinear-query": "query 'nonlinear' is not a product",
    "resformer": "interpolated_values is not split by heads",
    "moe": "experts are not split",
    "borrowed-values:heads=…": "cannot be split evenly",
}
SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
if __name__ == "__main__":
    from engines import engine, generate
    with engine(sys.argv[2], tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        print("TOKENS", json.dumps(generate(llm, json.loads(sys.argv[3]), 24)))
"""


def case_of(name: str):
    return next(case for case in CASES if case.name == name)


def outputs_of(model: LeanForCausalLM, ids: torch.Tensor, replaced: list | None = None) -> list[torch.Tensor]:
    """What attention and MLP of every layer write, without their biases; `replaced` takes its place in the stream."""
    written: list[torch.Tensor] = []

    def keep(module, _, output):
        bias = 0 if module.bias is None else module.bias
        written.append(output - bias)
        return None if replaced is None else replaced[len(written) - 1] + bias

    writers = [module for block in model.model.layers for module in (block.self_attn.o_proj, block.mlp.down_proj)]
    handles = [module.register_forward_hook(keep) for module in writers]
    model(ids)
    for handle in handles:
        handle.remove()
    return written


@torch.no_grad()
@pytest.mark.parametrize("name", SPLIT)
def test_what_the_ranks_write_adds_up_to_the_whole(name: str) -> None:
    """In every layer, on the stream of the whole model."""
    model = case_of(name).model(**FIELDS)
    assert refusal(model.config, 2) is None
    ids = torch.randint(1, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    whole, parts = outputs_of(model, ids), []
    for rank in range(2):
        shard = Shards(model.config, 2, rank)
        part = LeanForCausalLM(rank_config(model.config, 2)).double().eval()
        part.load_state_dict({key: shard(key, tensor) for key, tensor in model.state_dict().items()})
        parts.append(outputs_of(part, ids, whole))
    for first, second, both in zip(*parts, whole, strict=True):
        torch.testing.assert_close(first + second, both, rtol=0, atol=1e-13 * both.abs().max())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name: str) -> None:
    assert REFUSED[name] in (refusal(case_of(name).config(**FIELDS), 2) or "")


def test_heads_that_do_not_fall_evenly_are_refused() -> None:
    """SkipV1 borrows one of two heads, and one head cannot be split; heads by name have no layout with fewer."""
    config = case_of("skipv1").config(**{**FIELDS, "num_key_value_heads": 2})
    assert "that cannot be split evenly" in (refusal(config, 2) or "")
    key_value = {"type": "borrowed_values", "heads": [[1, 0, 0, 0], [1, 1, 0, 1]]}
    named = case_of("baseline").config(**FIELDS, key_value=key_value)
    assert refusal(named, 2) == "key_value 'borrowed_values' has another layout with fewer heads"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa+skipv1"])
def test_tokens_of_two_ranks(name: str, tmp_path: Path) -> None:
    model = case_of(name).model(**FIELDS).float()
    model.save_pretrained(tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 80)
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "run.py"), json.dumps([str(Path(__file__).parent)]), str(tmp_path)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run([*command, json.dumps(prompts)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert json.loads(line.removeprefix("TOKENS ")) == expected(model, prompts, 24)
