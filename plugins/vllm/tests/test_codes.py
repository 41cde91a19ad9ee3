"""Pages of codes: the tokens of leanqkv's own decoder with the same cache, and as many pages as the bits promise."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import core_of, engine, generate, prompts_of_uneven_length, run
from leanqkv_vllm.codes import Codes, pages_of
from leanqkv_vllm.pages import make_groups
from leanqkv_vllm.refusals import bits_refusal, codes_refusal_on_gpu
from leanqkv_vllm.rows_of_codes import CodesPages
from product.mechanisms import CASES

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.inference.decoder import Decoder
from leanqkv.model.cache_quantized import BLOCK, quantized_bytes_per_token

FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}
# Scores are small: a number whose code is rounded the other way moves logits by up to 0.003 (decoders in float32 and in
# float64), not by 1. So a token may be behind the likeliest one by NEAR.
FIELDS |= {"attention_multiplier": 0.005}
NEAR = 0.01
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 512, "max_num_batched_tokens": 96}
# Heads of several layers, and one tensor of each kind that is no head; what `pytest -m "not slow"` leaves of them.
NAMES = ("baseline", "gqa+skipv1", "yoco", "cla", "resformer", "keys-as-values", "keys-as-values+skipv1", "latent-keys")
NAMES += (
    "latent-values",
    "values-from-keys",
    "latent-keys:before_rotary=true",
    "mla",
    "mla+skipv1",
    "moe",
    "shared blocks",
)
SAMPLE = (("baseline", "8"), ("gqa+skipv1", "4"), ("mla", "8/4"), ("values-from-keys", "4"))
EVERY = [(name, "4") for name in NAMES] + [(name, bits) for name in NAMES[:2] for bits in ("8", "8/4", "2")]


def saved(name: str, place: Path, **fields: Any) -> LeanForCausalLM:
    model = next(case for case in CASES if case.name == name).model(**{**FIELDS, **fields}).float()
    model.save_pretrained(place)
    return model


def coded(bits: Any, **settings: Any) -> dict[str, Any]:
    return {**SETTINGS, **settings, "additional_config": {"cache_bits": bits}}


@torch.inference_mode()
def behind(model: LeanForCausalLM, prompts: Sequence[list[int]], found: list[list[int]], bits: str) -> float:
    """How far a token's logit is behind the largest one at most, with leanqkv's decoder, which reads the same tokens.

    It reads prompts in blocks: each sees those before it as codes."""
    decoder, most = Decoder(model, chunk=BLOCK, cache_bits=bits), 0.0
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = decoder.prefill(torch.tensor([prompt]), room=len(tokens))
        for token in tokens:
            most = max(most, float(logits.max() - logits[0, token]))
            logits = decoder.step(torch.tensor([token]))
    return most


def marked(chosen: Sequence[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*one, marks=[] if one in SAMPLE else [pytest.mark.slow]) for one in chosen]


@pytest.mark.parametrize(("name", "bits"), marked([*SAMPLE, *(one for one in EVERY if one not in SAMPLE)]))
def test_tokens_are_those_of_the_decoder(name: str, bits: str, tmp_path: Path) -> None:
    """Prompts in pieces that end anywhere, cached prefixes in the second round, requests that end and start."""
    model = saved(name, tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 6, 300)
    with engine(tmp_path, **coded(bits)) as llm:
        rounds = [run(llm, prompts, number, 100) for number in range(2)]
    for one in rounds:
        assert behind(model, prompts, one["tokens"], bits) < NEAR
    assert behind(model, prompts, rounds[0]["tokens"], "16") > NEAR
    assert rounds[1]["cached"] >= 4 * BLOCK


@pytest.mark.parametrize("name", ["gqa+skipv1", "values-from-keys"])
def test_preempted_requests(name: str, tmp_path: Path) -> None:
    """A request that starts anew has the same tokens: it does not matter what it computed as one piece before."""
    model = saved(name, tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 12, 200)
    [group] = make_groups(model.config.plan, together=True)
    memory = 34 * Codes(group, CacheBits.of("4"), torch.float32).page_bytes
    with engine(tmp_path, **coded("4", kv_cache_memory_bytes=memory)) as llm:
        assert core_of(llm).model_executor.driver_worker.worker.model_runner.kv_cache_config.num_blocks == 34
        rounds = [run(llm, prompts, number, 100) for number in range(2)]
    for one in rounds:
        assert behind(model, prompts, one["tokens"], "4") < NEAR
    assert rounds[0]["preempted"] and rounds[1]["cached"]


@pytest.mark.parametrize("by_kernel", [True, False])
def test_pieces_behind_unequally_many_pages(by_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two prompts, one of which began later, are rows of one batch: each has its own pages before it."""
    model = saved("gqa+skipv1", tmp_path)
    draw = torch.randint(
        1, model.config.vocab_size, (3, 7 * BLOCK), generator=torch.Generator().manual_seed(0)
    ).tolist()
    prompts, counts = [draw[0][:BLOCK], draw[1], draw[2][: 4 * BLOCK]], []
    whole, lying = CodesPages.whole, CodesPages.lying

    def where_they_lie(pages: CodesPages, slot: Any, newest: Any) -> Any:
        counts.append(pages.counts.tolist())
        return lying(pages, slot, newest)

    def checked(pages: CodesPages, slot: Any, newest: Any) -> torch.Tensor:
        made = whole(pages, slot, newest)
        counts.append(pages.counts.tolist())
        for row, count in enumerate(counts[-1]):
            held, own = pages.cache.codes_of(slot)[pages.blocks[row, :count]], newest[row]
            if count:
                own = torch.cat((pages.codes.layouts[slot].dequantize(held, own.dtype), own), 1)
            assert torch.equal(made[row, :, -own.shape[1] :], own) and not made[row, :, : -own.shape[1]].any()
        return made

    if by_kernel:
        monkeypatch.setattr(CodesPages, "lying", where_they_lie)
        monkeypatch.setattr(CodesPages, "whole", None)  # no tensor is made
    else:
        monkeypatch.setattr("leanqkv_vllm.histories.compiled_kernels", lambda: None)
        monkeypatch.setattr(CodesPages, "whole", checked)
    options = coded("4", max_num_batched_tokens=4 * BLOCK, long_prefill_token_threshold=BLOCK, max_num_seqs=2)
    with engine(tmp_path, **options) as llm:
        assert behind(model, prompts, generate(llm, prompts, 5), "4") < NEAR
    assert [6, 1] in counts or [1, 6] in counts


def test_a_page_is_found_from_the_step_after_its_last_token(tmp_path: Path) -> None:
    """In the step that computes it, it holds numbers until that is done."""
    model = saved("gqa+skipv1", tmp_path)
    draw = torch.randint(1, model.config.vocab_size, (BLOCK + 22,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [draw[: BLOCK + 12], draw[:BLOCK] + draw[BLOCK + 12 :]]
    with engine(tmp_path, **coded("4", max_num_batched_tokens=256)) as llm:
        rounds = [run(llm, prompts, number, 24) for number in range(2)]
    for one in rounds:
        assert behind(model, prompts, one["tokens"], "4") < NEAR
    assert [one["cached"] for one in rounds] == [0, 2 * BLOCK]


@pytest.mark.parametrize("name", ["gqa+skipv1", "keys-as-values", "values-from-keys", "mla", "mla+skipv1"])
def test_no_codes_are_gathered_while_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(name, tmp_path)
    prompts = torch.randint(1, model.config.vocab_size, (3, 150), generator=torch.Generator().manual_seed(0)).tolist()
    prompts[1] = prompts[1][:70]
    made, whole = [], CodesPages.whole
    monkeypatch.setattr(CodesPages, "whole", lambda pages, *given: made.append(pages.batch.new) or whole(pages, *given))
    with engine(tmp_path, **coded("4")) as llm:
        assert behind(model, prompts, generate(llm, prompts, 60), "4") < NEAR
    if name == "gqa+skipv1":
        assert not made, "heads are read where they lie by pieces of a prompt too"
    else:
        assert made and min(made) > 1, "pieces of a prompt alone"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanqkv.inference.attention.compiled_kernels", lambda: None)
    model = saved("gqa+skipv1", tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 3, 200)
    with engine(tmp_path, **coded("8/4")) as llm:
        assert behind(model, prompts, generate(llm, prompts, 70), "8/4") < NEAR


def test_layers_with_a_window(tmp_path: Path) -> None:
    """They keep every token, and see the window alone."""
    model = saved("gqa", tmp_path, sliding_window=90, window_layers=[0, 1, 2])
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 300)
    with engine(tmp_path, **coded("4")) as llm:
        assert behind(model, prompts, generate(llm, prompts, 70), "4") < NEAR


SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
if __name__ == "__main__":
    from engines import engine, generate
    with engine(sys.argv[2], **json.loads(sys.argv[4])) as llm:
        print("TOKENS", json.dumps(generate(llm, json.loads(sys.argv[3]), 70)))
"""
PROCESSES: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "two ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    model = saved("gqa+skipv1", tmp_path / "model", hidden_size=256, num_attention_heads=8)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 200)
    (tmp_path / "run.py").write_text(SCRIPT)
    given = [json.dumps([str(Path(__file__).parent)]), str(tmp_path / "model"), json.dumps(prompts)]
    command = [sys.executable, str(tmp_path / "run.py"), *given, json.dumps(coded("4", **PROCESSES[name]))]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    found = json.loads(line.removeprefix("TOKENS "))
    assert behind(model, prompts, found, "4") < NEAR < behind(model, prompts, found, "16")


@pytest.mark.parametrize("bits", ["4", "8/4", "8"])
def test_pages_for_the_same_memory(bits: str, tmp_path: Path) -> None:
    """In bfloat16, heads of 64 columns: 3.55 times as many of 4 bits, without what vLLM adds."""
    model = saved("baseline", tmp_path, hidden_size=256)
    plan, tokens = model.config.plan, {}
    for given in ("16", bits):
        with engine(tmp_path, **coded(given, dtype="bfloat16", kv_cache_memory_bytes=2**24)) as llm:
            config = core_of(llm).model_executor.driver_worker.worker.model_runner.kv_cache_config
            tokens[given] = config.num_blocks * BLOCK
    key_bits, _, value_bits = (bits if "/" in bits else f"{bits}/{bits}").partition("/")
    of_a_token = quantized_bytes_per_token(plan, int(key_bits), int(value_bits))
    assert tokens[bits] == 2**24 // (BLOCK * of_a_token) * BLOCK
    assert tokens[bits] / tokens["16"] >= {"4": 3.5, "8/4": 2.4, "8": 1.85}[bits]


@pytest.mark.parametrize("tail", [7, 18, 34, 70])
def test_pages_that_a_request_takes(tail: int) -> None:
    """As many as it had at its fullest: one of codes for a block, and its numbers lie in that one and those behind."""
    most = 0
    for tokens in range(1, 4 * BLOCK):
        most = max(most, tokens // BLOCK + -(-(tokens % BLOCK) // tail))
        assert pages_of(tokens, tail) == most


def test_a_block_that_ends_near_the_end_of_the_longest_request(tmp_path: Path) -> None:
    """The token that fills it lies in no page of numbers: there is none behind those of the other tokens."""
    model = saved("baseline", tmp_path, num_attention_heads=2)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, model.config.vocab_size, (count,), generator=draw).tolist() for count in (60, 127, 130)]
    with engine(tmp_path, **coded("4", max_model_len=144)) as llm:
        groups = core_of(llm).scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        assert [(BLOCK - 1) % group.kv_cache_spec.tail for group in groups] == [0]
        found = run(llm, prompts, 0, 10)["tokens"]
    assert behind(model, prompts, found, "4") < NEAR


ON_GPU = {
    "values-from-keys": (
        torch.bfloat16,
        "layer 0 makes values of its keys",
    ),
    "mla+skipv1": (torch.bfloat16, "the latent of layer 1 comes from several layers"),
    "baseline": (torch.bfloat16, None),
    "mla": (torch.float32, None),
}


@pytest.mark.parametrize("name", ON_GPU)
def test_what_is_refused_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    dtype, match = ON_GPU[name]
    config = next(case for case in CASES if case.name == name).model(**FIELDS).config
    cache = SimpleNamespace(user_specified_block_size=False, cache_dtype="auto")
    given: Any = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=dtype), speculative_config=None)
    found = bits_refusal(config, CacheBits.of("4"), given)
    if match is None:
        assert found is None
    else:
        assert found is not None and found.startswith("cache_bits 4 is not possible on a GPU: ") and match in found
    assert codes_refusal_on_gpu(wide_latents(), dtype) is not None
    platform.is_cuda_alike, platform.device_name = lambda: False, "tpu"
    assert bits_refusal(config, CacheBits.of("4"), given).endswith("GPUs of NVIDIA and AMD; found tpu")


def wide_latents() -> Any:
    """The plan of a model with latents of 1,032 columns."""
    values = [{"type": "latent", "rank": 1032, "layers": [0]}]
    return LeanConfig(hidden_size=2048, num_attention_heads=32, num_hidden_layers=1, value=values).plan


REFUSED = {
    "bits": ({"additional_config": {"cache_bits": "5"}}, "cache_bits.* is 16, 8, 4, 2, or KEYS/VALUES"),
    "page": ({"block_size": 32}, "cache_bits 4 needs pages of 64 tokens; found block_size 32, give 64"),
    "precision": ({"kv_cache_dtype": "fp8"}, "cache_bits 4 and kv_cache_dtype 'fp8' are both the cache's precision"),
    "drafts": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        "cache_bits 4 is not possible with speculative_config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(name: str, tmp_path: Path) -> None:
    settings, match = REFUSED[name]
    saved("gqa", tmp_path)
    with pytest.raises(Exception, match=match), engine(tmp_path, **{**coded("4"), **settings}):
        pass
    # Drafts import llvmlite, over which vLLM stumbles when it looks through all modules for the next engine's kernels.
    for module in [module for module in sys.modules if module.startswith("llvmlite")]:
        del sys.modules[module]
