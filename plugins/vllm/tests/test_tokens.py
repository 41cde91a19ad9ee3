"""Every mechanism gives the tokens that `generate` gives, in pages of exactly the plan's size; or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import core_of, engine, expected, generate, prompts_of_uneven_length
from product.mechanisms import CASES, Case

from leanqkv import LeanForCausalLM

# Heads of 32 columns are the smallest of vLLM's kernel for CPUs; leanqkv's kernel reads others.
FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
REFUSED = {"prefix": "attends in both directions"}
# What `pytest -m "not slow"` leaves: the kernel with pairs, with borrowed heads alone and with a window; leanqkv's.
SAMPLE = ("gqa+skipv1", "skipkv1", "yoco:local=true", "moe", "mla", "values-from-keys", "prefix")
OWN = ("mla", "latent", "keys-as-values", "values-from-keys")


def of(cases: list[Case]) -> list[Any]:
    marks = {case.name: [] if case.name in SAMPLE else [pytest.mark.slow] for case in cases}
    return [pytest.param(case, id=case.name, marks=marks[case.name]) for case in cases]


def saved(case: Case, place: Path, **fields: Any) -> LeanForCausalLM:
    model = case.model(**{**FIELDS, **fields}).float()
    model.save_pretrained(place)
    return model


@pytest.mark.parametrize("case", of([case for case in CASES if case.name not in REFUSED]))
def test_tokens_are_those_of_generate(case: Case, tmp_path: Path) -> None:
    """Prompts in pieces, pages shared by prompts that begin alike, requests of uneven length at a time."""
    model = saved(case, tmp_path)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 6, 100)
    with engine(tmp_path) as llm:
        found = [generate(llm, prompts, 24) for _ in range(2)]  # the second time from cached prefixes
        runner = core_of(llm).model_executor.driver_worker.worker.model_runner
        assert (runner.model.kernel is not None) == (not case.name.startswith(OWN))
        config, sizes = runner.kv_cache_config, {}
        for group in config.kv_cache_groups:
            sizes[group.layer_names[0]] = group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
    assert found[0] == found[1] == expected(model, prompts, 24)
    assert sum(sizes.values()) == model.config.plan.kv_bytes_per_token(torch.float32)


WIDTHS = ("gqa+skipv1", "yoco:local=true", "resformer:mode=per_token", "shared blocks", "mlp-query", "output-gate")


@pytest.mark.parametrize("case", of([case for case in CASES if case.name in WIDTHS]))
def test_heads_of_widths_that_vllms_kernel_does_not_take(case: Case, tmp_path: Path) -> None:
    model = saved(case, tmp_path, num_attention_heads=8)
    prompts = prompts_of_uneven_length(model.config.vocab_size, 6, 100)
    with engine(tmp_path) as llm:
        assert core_of(llm).model_executor.driver_worker.worker.model_runner.model.kernel is None
        assert generate(llm, prompts, 24) == expected(model, prompts, 24)


@pytest.mark.parametrize("case", of([case for case in CASES if case.name in REFUSED]))
def test_what_cannot_run_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    saved(case, tmp_path)
    with pytest.raises(ValueError, match=REFUSED[case.name]), engine(tmp_path):
        pass
