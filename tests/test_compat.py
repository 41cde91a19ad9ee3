"""What rests on names that other packages may drop gives the same without them."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from shapes import randomize, tiny, tokens

from leanqkv import LeanForCausalLM, compat
from leanqkv.errors import LeanError
from leanqkv.inference import Decoder, attention, step

PROMPT, NEW = 9, 12


@pytest.fixture
def fresh():
    """Forget, before and after, what this process has found out about PyTorch."""
    caches = (compat.warn_without_kernels, attention.compiled_kernels, step.compiled_kernels)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="module")
def model() -> LeanForCausalLM:
    config = tiny("llama", "gqa", "skipv1", "nonlinear-query", max_position_embeddings=64)
    return randomize(LeanForCausalLM(config), std=0.2).eval()


@pytest.fixture
def expected(model):
    return model.generate(tokens(2, PROMPT), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def decoded(decoder: Decoder) -> torch.Tensor:
    return decoder.generate(tokens(2, PROMPT), max_new_tokens=NEW, pad_token_id=0)


def failing(*args, **kwargs):
    raise RuntimeError("no compiler\nand much that it says")


@pytest.mark.parametrize("missing", [True, False])
def test_decoding_without_the_kernel(model, expected, fresh, monkeypatch, missing):
    if missing:
        monkeypatch.delattr("torch._inductor.codecache.CppCodeCache")
    else:
        monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", failing)
    reason = "cannot import name 'CppCodeCache'" if missing else "no compiler;"
    with pytest.warns(RuntimeWarning, match=f"cannot be compiled: {reason}") as told:
        assert torch.equal(decoded(Decoder(model)), expected)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(decoded(Decoder(model)), expected)


def test_an_error_in_the_kernel_is_told(fresh):
    with pytest.warns(RuntimeWarning, match=r"cannot be compiled: (.*error:|No working C\+\+ compiler)"):
        assert compat.compile_cpp("this is not C++") is None


def test_decoding_where_the_attention_cannot_be_told(model, expected, monkeypatch):
    assert compat.attention_implementation(model) == "sdpa"
    assert compat.attention_implementation(SimpleNamespace(config=SimpleNamespace())) is None
    monkeypatch.setattr("leanqkv.inference.decoder.attention_implementation", lambda model: None)
    decoder = Decoder(model)
    assert torch.equal(decoded(decoder), expected)
    assert compat.attention_implementation(decoder.model) == "sdpa"


def test_one_device(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    arguments._n_gpu = 4
    compat.use_one_device(arguments)
    assert arguments.n_gpu == 1
    compat.use_one_device(SimpleNamespace(n_gpu=1))
    with pytest.raises(LeanError, match="2 GPUs are visible; start with torchrun"):
        compat.use_one_device(SimpleNamespace(n_gpu=2))


def test_transformers_is_quiet_for_a_while_only():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(LookupError), compat.quiet_transformers():
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
        raise LookupError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
