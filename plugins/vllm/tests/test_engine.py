"""What the engine does around the model: preemption, cached prefixes, windows, sampling, logprobs, stop strings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus import write_corpus
from engines import OPTIONS, core_of, engine, expected, generate, prompts_of_uneven_length, run
from leanqkv_vllm.kernel_cpu import precision_refusal
from leanqkv_vllm.model import RotaryTables
from leanqkv_vllm.refusals import settings_refusal
from leanqkv_vllm.rows import FEW, Pages
from product.mechanisms import CASES
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from leanqkv import LeanConfig, LeanForCausalLM
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.model.position import RotaryEmbeddings

FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
# By vLLM's kernel, and by leanqkv's.
BOTH = ("gqa+skipv1", "values-from-keys")
BLOCK = OPTIONS["block_size"]


def toward_zero(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a type of eight bits as vLLM's kernel for CPUs does."""
    nearest = states.to(dtype)
    below = (nearest.view(torch.uint8) - 1).view(dtype)
    return torch.where(nearest.to(states.dtype).abs() > states.abs(), below.to(states.dtype), nearest.to(states.dtype))


class RoundedLayer(DynamicLayer):
    """A cache that keeps what a type of eight bits keeps."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.kept = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*(toward_zero(states, self.kept) for states in (key_states, value_states)))


def saved(name: str, place: Path, **fields: Any) -> LeanForCausalLM:
    model = next(case for case in CASES if case.name == name).model(**{**FIELDS, **fields}).float()
    model.save_pretrained(place)
    return model


ROTARY: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        "max_position_embeddings": 1024,
    },
    "windows with rotations of their own": {
        "sliding_window": 32,
        "window_layers": [0, 1, 2],
        "window_rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_made_once_are_those_of_every_step(kind: str, dtype: torch.dtype) -> None:
    config = LeanConfig(position_embedding_type="rope", **{**FIELDS, **ROTARY[kind]})
    rotary = RotaryEmbeddings(config, config.plan)
    like, positions = torch.empty(0, dtype=dtype), torch.tensor([[0, 3, 4, 200, 255, 7]])
    found = RotaryTables(rotary, 256, like)(like, positions)
    wanted = rotary(like, positions)
    assert found.keys() == wanted.keys()
    for field in wanted:
        assert all(map(torch.equal, found[field], wanted[field]))


@pytest.mark.parametrize("name", BOTH)
def test_preempted_requests_and_cached_prefixes(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 8, 100)
    memory = 14 * BLOCK * model.config.plan.kv_bytes_per_token(torch.float32)
    with engine(tmp_path, kv_cache_memory_bytes=memory) as llm:
        assert core_of(llm).model_executor.driver_worker.worker.model_runner.kv_cache_config.num_blocks == 14
        found = run(llm, prompts, 0, 40)
    assert found["tokens"] == expected(model, prompts, 40)
    assert found["preempted"] and found["cached"]


# Latents so wide that it takes a long history for absorbing them to be fewer multiplications.
IN_PLACE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("keys-as-values", "latent-keys", "latent-values", "values-from-keys", "mla")},
    "moe": {"key": [{"type": "latent", "rank": 126, "layers": [0, 1, 2, 3]}]},
    "values-from-keys, before norms": {"key": [{"type": "latent", "before_rotary": True}], "qk_norm": True},
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_nothing_is_gathered_while_decoding(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(case.partition(",")[0], tmp_path, **IN_PLACE[case])
    prompts = torch.randint(1, model.config.vocab_size, (3, 100), generator=torch.Generator().manual_seed(0)).tolist()
    prompts[1] = prompts[1][:70]
    gathered, gather = [], Pages.gather
    monkeypatch.setattr(Pages, "gather", lambda pages, slot: gathered.append(pages.batch.new) or gather(pages, slot))
    with engine(tmp_path) as llm:
        assert generate(llm, prompts, 24) == expected(model, prompts, 24)
    assert gathered and min(gathered) > FEW, "longer pieces of a prompt alone"


@pytest.mark.parametrize("name", BOTH)
def test_a_page_that_is_written_and_read_in_one_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt takes the page of another one, of which more is new, from the step that computes it."""
    model = saved(name, tmp_path)
    draw = torch.randint(1, model.config.vocab_size, (BLOCK + 22,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [draw[: BLOCK + 12], draw[:BLOCK] + draw[BLOCK + 12 :]]
    with engine(tmp_path) as llm:
        found = run(llm, prompts, 0, 24)
    assert found["tokens"] == expected(model, prompts, 24)
    assert found["cached"] == BLOCK and found["steps"] == 24


@pytest.mark.parametrize("name", ["mla", "values-from-keys"])
def test_without_a_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanqkv.inference.attention.compiled_kernels", lambda: None)
    model = saved(name, tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 80)
    with engine(tmp_path) as llm:
        assert generate(llm, prompts, 24) == expected(model, prompts, 24)


def test_latents_within_a_window(tmp_path: Path) -> None:
    """Pages behind the window are given back, and are not read."""
    model = saved("latent-keys", tmp_path, sliding_window=2 * BLOCK, window_layers=[0, 1, 2])
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 150)
    with engine(tmp_path) as llm:
        assert generate(llm, prompts, 60) == expected(model, prompts, 60)


def test_pages_behind_a_window_are_given_back(tmp_path: Path) -> None:
    """256 tokens go through memory for 160."""
    model = saved("sliding_window", tmp_path, sliding_window=2 * BLOCK)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 1, 200)
    memory = 5 * BLOCK * model.config.plan.kv_bytes_per_token(torch.float32)
    with engine(tmp_path, kv_cache_memory_bytes=memory, max_num_batched_tokens=BLOCK) as llm:
        new = 250 - len(prompts[0])
        assert generate(llm, prompts, new) == expected(model, prompts, new)


def test_pages_of_other_sizes_behind_a_window(tmp_path: Path) -> None:
    """Layers with a window and layers without, of unequal size."""
    model = saved("gqa", tmp_path, sliding_window=2 * BLOCK, window_layers=[0, 1, 2])
    prompts = prompts_of_uneven_length(model.config.vocab_size, 4, 150)
    with engine(tmp_path) as llm:
        assert generate(llm, prompts, 60) == expected(model, prompts, 60)


# None of them is 1, so that one left out or turned round is seen.
MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}


@pytest.mark.parametrize("name", BOTH)
def test_logprobs_are_the_models(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path, **MULTIPLIERS)
    [prompt] = prompts_of_uneven_length(model.config.vocab_size, 1, 60)
    with engine(tmp_path) as llm:
        parameters = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=3)
        [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], parameters, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, found in zip(logits, output.outputs[0].logprobs, strict=True):
        for token, one in found.items():
            assert abs(one.logprob - float(row[token])) < 1e-4


def test_a_seed_decides(tmp_path: Path) -> None:
    model = saved("gqa+skipv1", tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 3, 40)

    def sampled(llm: Any, seed: int) -> list[list[int]]:
        parameters = SamplingParams(temperature=1, seed=seed, max_tokens=16, ignore_eos=True, detokenize=False)
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in llm.generate(given, parameters, use_tqdm=False)]

    with engine(tmp_path) as llm:
        once = sampled(llm, 1)
        assert once == sampled(llm, 1) != sampled(llm, 2)
    with engine(tmp_path, max_num_batched_tokens=32) as llm:  # of longer prompts, beside others that sample
        assert sampled(llm, 1) == sampled(llm, 1) == once


@pytest.mark.parametrize("vocabulary, shared", [(128, True), (97, False)])
def test_a_tied_head_is_the_embedding(vocabulary: int, shared: bool, tmp_path: Path) -> None:
    """Where vLLM's has as many rows: it fills these up."""
    model = saved("gqa+skipv1", tmp_path, vocab_size=vocabulary, tie_word_embeddings=True)
    prompts = prompts_of_uneven_length(vocabulary, 2, 20)
    with engine(tmp_path) as llm:
        held = core_of(llm).model_executor.driver_worker.worker.model_runner.model
        embedding, head = held.model.get_input_embeddings().weight, held.lm_head.weight
        assert (embedding.data_ptr() == head.data_ptr()) == shared
        assert generate(llm, prompts, 8) == expected(model, prompts, 8)


def test_text_ends_at_a_stop_string(tmp_path: Path) -> None:
    content = write_corpus(tmp_path / "text.txt").read_text()
    model = saved("gqa+skipv1", tmp_path / "model", vocab_size=300)
    train_tokenizer(iter([content]), model.config.vocab_size).save_pretrained(tmp_path / "model")
    with engine(tmp_path / "model", skip_tokenizer_init=False) as llm:
        whole = llm.generate(["import"], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        text = whole[0].outputs[0].text
        stop = text[len(text) // 2 :][:3]
        [ended] = llm.generate(["import"], SamplingParams(temperature=0, max_tokens=20, stop=stop), use_tqdm=False)
    assert ended.outputs[0].text == text[: text.index(stop)] and ended.outputs[0].finish_reason == "stop"


def test_positions_whose_frequencies_change_are_refused() -> None:
    """Unit of what the engine's settings ask for: such a length takes a model with a long context to reach."""
    config = next(case for case in CASES if case.name == "baseline").config(
        position_embedding_type="rope", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    given = SimpleNamespace(max_model_len=config.cached_positions + 1, dtype=torch.float32)
    settings = SimpleNamespace(
        model_config=given, quant_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=1)
    )
    settings.cache_config = SimpleNamespace(cache_dtype="auto")
    assert "others beyond 64 tokens" in (settings_refusal(config, settings) or "")
    given.max_model_len -= 1
    assert settings_refusal(config, settings) is None
    settings.kv_transfer_config = SimpleNamespace()
    assert "kv_transfer_config is not possible" in (settings_refusal(config, settings) or "")


REFUSED = {
    "weights": ("gqa+skipv1", {"quantization": "fp8", "dtype": "bfloat16"}, "quantized weights"),
    "cache": ("gqa+skipv1", {"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype 'int8_per_token_head' is not"),
    "cache of latents": ("values-from-keys", {"kv_cache_dtype": "fp8"}, "leanqkv's own code attends"),
    "pipeline": ("gqa+skipv1", {"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(name: str, tmp_path: Path) -> None:
    mechanism, options, match = REFUSED[name]
    saved(mechanism, tmp_path)
    with pytest.raises(Exception, match=match), engine(tmp_path, **options):
        pass


ROUNDED = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", ["gqa+skipv1", "skipkv1"])
def test_a_cache_of_eight_bits(name: str, precision: str, tmp_path: Path) -> None:
    """Log probabilities are those of a model whose cache rounds as the type does, and the bytes are a quarter."""
    if reason := precision_refusal(precision):
        pytest.skip(reason)
    model = saved(name, tmp_path)
    [prompt] = prompts_of_uneven_length(model.config.vocab_size, 1, 100)
    with engine(tmp_path, kv_cache_dtype=precision) as llm:
        config = core_of(llm).model_executor.driver_worker.worker.model_runner.kv_cache_config
        parameters = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=3)
        [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], parameters, use_tqdm=False)
    [group] = config.kv_cache_groups
    spec = group.kv_cache_spec
    assert spec.page_size_bytes == spec.block_size * model.config.plan.kv_bytes_per_token(torch.float8_e4m3fn)
    tokens = torch.tensor([prompt + list(output.outputs[0].token_ids)])
    cache = Cache(layers=[RoundedLayer(ROUNDED[precision]) for _ in model.config.plan.layers])
    with torch.no_grad():
        rounded = model(tokens, past_key_values=cache).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found = output.outputs[0].logprobs
    wrong = [
        max(
            abs(one.logprob - float(row[token]))
            for row, place in zip(logits, found, strict=True)
            for token, one in place.items()
        )
        for logits in (rounded, exact)
    ]
    assert wrong[0] < 1e-4 < 1 < wrong[1]
