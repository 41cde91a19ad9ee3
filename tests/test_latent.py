"""Multi-head latent attention: its two forms are one function, and its cache is what the paper says it is."""

import pytest
import torch
from latents import CHANGES, assert_enlarged, assert_same_results, results
from shapes import randomize, tiny, tokens
from transformers import DynamicCache, StaticCache

from leanqkv import LeanForCausalLM, cache_bytes, kv_bytes_per_token, preset
from leanqkv.model.attention_latent import LatentAttention

CASES = [
    ("gpt", ("mla",), {}),
    ("llama", ("mla",), {}),
    ("llama", ("mla", "skipv1"), {"attention_bias": True}),
    ("llama", ("mla:rank=10,rope_dim=6", "skipv1:injection=dynamic,ratio=0.75"), {"num_hidden_layers": 4}),
    ("llama", ("mla", "skipv1:injection=pooling"), {}),
    ("llama", ("mla", "resformer:mode=per_layer"), {}),
    ("llama", ("mla", "yoco"), {"num_hidden_layers": 4}),
    ("llama", ("mla", "cla-v", "identity-query"), {}),
    ("llama", ("mla", "identity-query"), {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join((case[0], *case[1], *case[2])))
def test_absorbed_is_expanded(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients and, where there are any, attention weights, with padding and a filled cache."""
    shape, names, overrides = case
    model = randomize(LeanForCausalLM(tiny(shape, *names, **overrides))).double()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = []
        for absorbed in (True, False):
            monkeypatch.setattr(LatentAttention, "_absorbing_pays", lambda *_, absorbed=absorbed: absorbed)
            found.append(results(model))
        assert_same_results(*found)


def test_the_cheaper_form_is_taken() -> None:
    """One query on a long history: absorbed. As many queries as keys: expanded."""
    config = preset("llama-350m", "mla", num_hidden_layers=2, vocab_size=64)
    attention = LatentAttention(config, config.plan.blocks[0])

    def absorbs(queries: int, keys: int) -> bool:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        return attention._absorbing_pays(torch.zeros(1, 16, queries, 64), [torch.zeros(1, 1, keys, 256)], mask)

    assert absorbs(1, 100) and absorbs(1, 100_000) and absorbs(4, 100)
    assert not absorbs(100, 100) and not absorbs(1, 1) and not absorbs(1000, 2000)
    # On a long history, multiplications per key of t queries: 256 * (64 + 64) + t * (64 + 64) expanded, t * (256 + 256)
    # absorbed; equal at t = 85.3.
    assert absorbs(85, 100_000) and not absorbs(86, 100_000)


@pytest.mark.parametrize("names", [("mla",), ("mla", "skipv1")])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_decoding_never_expands_or_joins_the_latent(names, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama", *names)
    model = LeanForCausalLM(config).eval()
    cache = DynamicCache(config=config) if kind is DynamicCache else StaticCache(config, max_cache_len=64)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
        monkeypatch.setattr(LatentAttention, "_expanded", lambda *_, **__: pytest.fail("expanded in a decoding step"))
        model(tokens(1, 1), past_key_values=cache)
    for stored, layer in zip(cache.layers, config.plan.layers, strict=True):
        assert [tensor.num_heads for tensor in layer.cached] == [1]
        assert stored.keys.shape[-1] == layer.cached[0].head_dim
        assert stored.values.numel() == 0


@pytest.mark.parametrize("how", CHANGES)
def test_the_absorbed_form_passes_no_change_over(how: str) -> None:
    """It reads the weights of the up-projections without calling them."""
    for name in ("k_up_proj", "v_up_proj"):
        assert_enlarged(randomize(LeanForCausalLM(tiny("llama", "mla", "skipv1"))).eval(), name, how)


# P3, Table 2, on the shape of LLaMA-350M: 24 layers, 16 heads of 64, G = H/2; d_c = 256, d_R = 32.
TABLE_2 = [
    (("gqa",), torch.float32, 98_304),
    (("gqa", "skipv1"), torch.float32, 74_752),
    (("mla",), torch.bfloat16, 13_824),
    # The paper prints 7,680 = 24 * (128 + 32) * 2, without the half of layer 1's latent that the others borrow.
    (("mla", "skipv1"), torch.bfloat16, 7_936),
]


@pytest.mark.parametrize("names, dtype, expected", TABLE_2, ids=lambda x: str(x))
def test_table_2_of_p3(names: tuple[str, ...], dtype: torch.dtype, expected: int) -> None:
    """From the formula at the paper's size, and measured on a real cache of the same layers, narrower elsewhere."""
    config = preset("llama-350m", *names)
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == ((256, 32) if "mla" in names else (None, None))
    assert kv_bytes_per_token(config, dtype=dtype) == expected
    narrow = preset("llama-350m", *names, hidden_size=64, head_dim=64, intermediate_size=8, vocab_size=97)
    model = LeanForCausalLM(narrow).to(dtype).eval()
    for length in (1, 5):
        with torch.no_grad():
            cache = model(input_ids=tokens(1, length), use_cache=True).past_key_values
        assert cache_bytes(cache) == length * expected
