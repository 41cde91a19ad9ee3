"""Latent keys: the absorbed form and the expanded one are one function, and nothing is passed over by the former."""

import copy
from typing import Any

import pytest
import torch
from latents import CHANGES, assert_enlarged, assert_same_results, results
from shapes import assert_near, randomize, tiny, tokens
from torch import nn
from transformers import DynamicCache, StaticCache

from leanqkv import LeanConfig, LeanForCausalLM, cache_bytes, kv_bytes_per_token
from leanqkv.inference import Decoder
from leanqkv.inference.linear import FewRowsLinear
from leanqkv.model import latent, latent_heads
from leanqkv.model.latent import ComplexUp, absorbing_pays

CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("llama", ("latent-keys",), {}),
    ("llama", ("latent-keys:columns=0,4,1,3",), {"attention_bias": True}),
    ("llama", ("latent-keys:columns=2,1,0,1", "latent-values:rank=3", "gqa"), {"sliding_window": 6}),
    ("llama", ("latent-keys:rank=6", "mqa"), {"rope_layers": [0, 2]}),
    ("llama", ("latent-keys:rank=2", "identity-query"), {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("gpt", ("latent-keys", "gqa", "latent-values"), {"attention_bias": True}),
    ("gpt", ("latent-keys:rank=3", "nonlinear-query"), {"head_dim": 8}),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join((case[0], *case[1], *case[2])))


def config_of(case: tuple[str, tuple[str, ...], dict[str, Any]]) -> LeanConfig:
    shape, names, overrides = case
    return tiny(shape, *names, **overrides)


@every
def test_absorbed_is_expanded(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients and, where there are any, attention weights, with padding and a filled cache."""
    model = randomize(LeanForCausalLM(config_of(case))).double()
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = []
        for absorbed in (True, False):
            monkeypatch.setattr(latent_heads, "absorbing_pays", lambda *_, absorbed=absorbed: absorbed)
            found.append(results(model))
        assert_same_results(*found)


@pytest.mark.parametrize("up", [ComplexUp(2, (2, 0, 1, 1)), nn.Linear(8, 16, bias=False)], ids=["complex", "linear"])
def test_the_form_with_fewer_multiplications_is_taken(up: nn.Module) -> None:
    """Two key heads of 8, four query heads, a latent of 8 columns: 64 multiplications of a complex map make the keys of
    a position and 128 take it into a position's queries; of a linear one 128 and 256. A score takes 8 in both forms."""

    def absorbs(queries: int, keys: int) -> bool:
        return absorbing_pays(up, torch.zeros(1, 4, queries, 8), keys, 8)

    assert absorbs(1, 3) and absorbs(10, 21) and absorbs(1, 1000)
    assert not absorbs(1, 2) and not absorbs(10, 20) and not absorbs(7, 7)


def test_scores_of_a_wide_latent_count() -> None:
    """24 columns for keys of 8: of two queries each key's scores take 2 * 4 * 24 multiplications, not 2 * 4 * 8."""
    up = ComplexUp(4, (3, 3, 3, 3))  # 192 multiplications for the keys of a position

    def absorbs(queries: int, keys: int) -> bool:
        return absorbing_pays(up, torch.zeros(1, 4, queries, 8), keys, 24)

    assert absorbs(1, 2) and absorbs(2, 7) and not absorbs(2, 6)
    assert not absorbs(3, 1000) and not absorbs(4, 1000)


@every
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_decoding_never_makes_the_key_heads(case, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(case)
    model = LeanForCausalLM(config).eval()
    cache = DynamicCache(config=config) if kind is DynamicCache else StaticCache(config, max_cache_len=64)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
        monkeypatch.setattr(latent_heads, "expand", lambda *_: pytest.fail("expanded in a decoding step"))
        model(tokens(1, 1), past_key_values=cache)
    for stored, layer in zip(cache.layers, config.plan.layers, strict=True):
        assert stored.keys.shape[1::2] == (1, layer.key_rank)
        assert layer.cached[0].elements == layer.key_rank


@pytest.mark.parametrize(
    "names, fields, elements",
    [
        (("latent-keys",), {}, 2 * (2 + 2 + 2 + 2) + 32),
        (("latent-keys:columns=0,4,1,3",), {}, 2 * 8 + 32),
        (("latent-keys:rank=6", "latent-values:rank=5", "gqa"), {}, 6 + 5),
        (("latent-keys", "gqa"), {"position_embedding_type": "none"}, 8 + 16),
        (("latent-keys", "mqa"), {}, 8 + 8),
        (("latent-keys:before_rotary=true",), {}, 16 + 32),
        (("latent-keys:before_rotary=true,rank=5", "latent-values:rank=3,keys=true"), {}, 5 + 3),
    ],
)
def test_the_cache_is_as_small_as_the_columns(names, fields, elements: int) -> None:
    config = tiny("llama", *names, **fields)
    assert kv_bytes_per_token(config, dtype=torch.bfloat16) == 2 * 3 * elements
    model = LeanForCausalLM(config).bfloat16().eval()
    with torch.no_grad():
        cache = model(tokens(2, 7), use_cache=True).past_key_values
    assert cache_bytes(cache) == 2 * 7 * 2 * 3 * elements


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "names, fields, shapes",
    [
        (("latent-keys:columns=0,2,1,1", "gqa"), {}, {"k_proj.weight": (8, 32), "k_up_proj.weight": (2, 4, 2)}),
        (("latent-keys:rank=10",), {}, {"k_proj.weight": (10, 32), "k_up_proj.weight": (4, 5, 2)}),
        (("latent-keys", "mqa"), {}, {"k_proj.weight": (8, 32), "k_up_proj.weight": (1, 4, 2)}),
        (("latent-keys:before_rotary=true,rank=5",), {}, {"k_proj.weight": (5, 32), "k_up_proj.weight": (32, 5)}),
        (
            ("latent-keys:rank=5,layers=0",),
            {"rope_layers": [1]},
            {"k_proj.weight": (5, 32), "k_up_proj.weight": (32, 5)},
        ),
    ],
)
def test_the_tensors_of_a_checkpoint(names, fields, shapes: dict[str, tuple[int, ...]], bias: bool) -> None:
    model = LeanForCausalLM(tiny("llama", *names, attention_bias=bias, **fields))
    prefix = "model.layers.0.self_attn.k_"
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    biases = {"k_proj.bias": shapes["k_proj.weight"][:1]} if bias else {}
    assert found == {f"model.layers.0.self_attn.{name}": shape for name, shape in (shapes | biases).items()}


@pytest.mark.parametrize("how", CHANGES)
def test_the_absorbed_form_passes_no_change_over(how: str) -> None:
    """It reads the weight of the up-projection without calling it."""
    for shape in ("llama", "gpt"):
        model = randomize(LeanForCausalLM(tiny(shape, "latent-keys"))).eval()
        assert_enlarged(model, "k_up_proj", how)
        assert not absorbing_pays(model.model.layers[0].self_attn.k_up_proj, torch.zeros(1, 4, 1, 8), 99, 16)


# A norm takes a factor on what it is given away.
OF_KEYS = [("k_up_proj", how) for how in CHANGES] + [("k_norm", how) for how in CHANGES if how != "hook before"]


@pytest.mark.parametrize("name, how", OF_KEYS)
@torch.no_grad()
def test_keys_that_are_turned_pass_no_change_over(name: str, how: str) -> None:
    """Whether it comes before the decoder is made or after."""
    names, ids = ("latent-keys:before_rotary=true", "latent-values:rank=5,keys=true"), tokens(1, 12)
    for late in (False, True):
        model = randomize(LeanForCausalLM(tiny("llama", *names, qk_norm=name == "k_norm"))).eval()
        if not late:
            assert_enlarged(model, name, how)
        decoder = Decoder(model)
        if late:
            assert_enlarged(decoder.model, name, how)
        decoder.prefill(ids[:, :-1], room=1)
        assert_near(decoder.step(ids[:, -1]), decoder.model(ids).logits[:, -1], 1e-5)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_decoder_gives_the_same(case, dtype: torch.dtype) -> None:
    """Against passes over everything so far; its up-projections stay as they are, for their weights are read."""
    model = randomize(LeanForCausalLM(config_of(case)), std=0.5).to(dtype).eval()
    ids = tokens(2, 11)
    decoder = Decoder(model)
    for layer in decoder.model.model.layers:
        assert not isinstance(layer.self_attn.k_up_proj, FewRowsLinear)
        assert isinstance(layer.self_attn.o_proj, FewRowsLinear)
    with torch.no_grad():
        expected = model(ids).logits
        found = [decoder.prefill(ids[:, :7], room=4)] + [decoder.step(ids[:, place]) for place in range(7, 11)]
    assert_near(torch.stack(found, dim=1), expected[:, 6:], 1e-4 if dtype == torch.float32 else 0.1)
    if dtype == torch.float32:
        greedy = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(decoder.generate(ids, max_new_tokens=8), model.generate(ids, **greedy))


@pytest.mark.long_cases
@every
def test_compiled_and_autocast(case) -> None:
    torch._dynamo.reset()
    model = randomize(LeanForCausalLM(config_of(case)), std=0.1).eval()
    ids = tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids).logits
        assert_near(compiled(ids).logits, expected, 1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = model(ids).logits
            cache = model(ids[:, :-1]).past_key_values
            step = model(ids[:, -1:], past_key_values=cache).logits
        assert all(layer.keys.dtype == torch.bfloat16 for layer in cache.layers)
    assert_near(whole, expected, 0.1)
    assert_near(step[:, -1], expected[:, -1], 0.1)


@every
def test_every_way_to_make_a_model(case, tmp_path) -> None:
    """From a file, copied, or on the meta device with weights put in; all train after a pass in inference mode."""
    model = randomize(LeanForCausalLM(config_of(case))).eval()
    ids = tokens(2, 9)
    latent._kept_index.cache_clear()
    with torch.inference_mode():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = LeanForCausalLM(config_of(case)).eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.model.rotary_emb = model.model.rotary_emb  # whose tensors are buffers
    for other in (LeanForCausalLM.from_pretrained(tmp_path).eval(), copy.deepcopy(model), empty):
        assert torch.equal(other(ids).logits, expected)
        other(ids).logits.sum().backward()


@pytest.mark.parametrize("shape, name", [("llama", "latent-keys:columns=0,4,1,3"), ("gpt", "latent-keys:rank=5")])
def test_new_keys_have_the_variance_of_ordinary_ones(shape: str, name: str) -> None:
    """But for frequencies without columns."""
    spreads = []
    for names in ((), (name,)):
        torch.manual_seed(0)
        model = LeanForCausalLM(tiny(shape, *names, hidden_size=256, head_dim=8))
        block = model.model.layers[0].self_attn
        with torch.no_grad():
            keys = block.k_proj(torch.randn(4000, 256))
            keys = keys if block.k_up_proj is None else block.k_up_proj(keys)
        spread = keys.unflatten(-1, (4, -1)).std((0, 1))
        spreads.append(spread[[1, 2, 3, 5, 6, 7]])
    ratio = spreads[1].square().mean().sqrt() / spreads[0].square().mean().sqrt()
    assert 0.6 < ratio < 1.6
