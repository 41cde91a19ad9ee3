"""The decoder: the tokens of `model.generate`, from a cache that is allocated once."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import PROMPT, build, names
from shapes import assert_near, tokens
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from variants import SCATTERED

from leanqkv import LeanForCausalLM, cache_bytes
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.inference.attention import (
    CHUNK_TOKENS,
    attend_one_query,
    length_chunks,
    one_query_attention,
    one_query_attention_to_both,
)
from leanqkv.inference.cache import AllocatedLayer, keep_rows, let_grow, token_bytes
from leanqkv.inference.linear import FewRowsLinear, shared_copy, use_products
from leanqkv.model.latent_heads import LatentAndKeys

NEW = 12
SHAPES = [
    ("gpt", {}),
    ("llama", {}),
    ("llama", {"sliding_window": 4}),
    ("llama", {"mask_type": "prefix"}),
    ("llama", {"key_value": SCATTERED}),
]


def both(model: LeanForCausalLM, ids: torch.Tensor, seed: int = 0, **options) -> tuple[torch.Tensor, torch.Tensor]:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    torch.manual_seed(seed)
    with torch.no_grad():
        # transformers samples among the 50 likeliest tokens unless told otherwise.
        theirs = {"do_sample": False, "top_k": 0, **options}
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **theirs)
    torch.manual_seed(seed)
    actual = Decoder(model, chunk=4).generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
    return actual, expected


@pytest.mark.parametrize("mechanisms", names(), ids="+".join)
def test_every_mechanism_gives_the_same_tokens(mechanisms):
    model = build("llama", *mechanisms, num_hidden_layers=6 if "skipv4" in mechanisms else 4)
    actual, expected = both(model, tokens(2, PROMPT))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape, fields", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {"do_sample": True, "temperature": 1.3, "top_p": 0.6},
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_way_of_choosing_gives_the_same_tokens(shape, fields, options):
    ids = tokens(3, PROMPT)
    padding = torch.ones_like(ids)
    padding[0, :5] = padding[2, :1] = 0
    for mask in (torch.ones_like(ids), padding):
        actual, expected = both(build(shape, **fields), ids, seed=3, attention_mask=mask, **options)
        assert torch.equal(actual, expected)


def test_a_sequence_ends_with_its_last_token_and_is_filled_up():
    model, ids = build("llama"), tokens(4, PROMPT)
    free, _ = both(model, ids)
    ends = [int(free[0, PROMPT + 3]), int(free[2, PROMPT + 6])]
    for eos in (ends, ends[0]):
        actual, expected = both(model, ids, eos_token_id=eos, pad_token_id=1)
        assert torch.equal(actual, expected)
    assert (both(model, ids, eos_token_id=ends, pad_token_id=1)[0] == 1).any()
    one, expected = both(model, ids[:1], eos_token_id=ends)
    assert one.shape == expected.shape == (1, PROMPT + 4)


@pytest.mark.parametrize("mechanisms", [(), ("skipv1",), ("gqa", "skipv1"), ("mla",), ("yoco",), ("keys-as-values",)])
def test_the_cache_is_what_the_formula_says(mechanisms):
    """To the byte, its storages whole: there is room for the tokens that attention reads, and no more."""
    model = build("llama", *mechanisms, num_hidden_layers=4)
    decoder = Decoder(model)
    decoder.generate(tokens(2, PROMPT), max_new_tokens=NEW)
    assert cache_bytes(decoder.cache) == 2 * (PROMPT + NEW - 1) * model.config.plan.kv_bytes_per_token(torch.float32)


@pytest.mark.parametrize("mechanisms", [(), ("skipv1",), ("gqa", "skipkv1"), ("latent-keys", "latent-values")], ids=str)
@pytest.mark.parametrize("length", [1, 7, 30])
def test_a_window_is_moved_within_its_memory(mechanisms, length):
    """Over several of its ends: the logits of the whole text at once, and no more kept than the plan says."""
    model = build("llama", *mechanisms, sliding_window=9, max_position_embeddings=256).float()
    ids, decoder = tokens(2, length + 170, model.config.vocab_size), Decoder(model)
    with torch.no_grad():
        expected = model(ids).logits
    found = [decoder.prefill(ids[:, :length], room=170)]
    memory = set()
    for place in range(length, ids.shape[1] - 1):
        found.append(decoder.step(ids[:, place]))
        memory |= {layer.keys.untyped_storage().data_ptr() for layer in decoder.cache.layers}
        assert token_bytes(decoder.cache) == 2 * model.config.plan.kv_bytes(place + 1, torch.float32)
    assert_near(torch.stack(found, dim=1), expected[:, length - 1 : -1], 1e-4)
    assert len(memory) < 170  # not new memory for every step
    kept, rest = decoder.cache, ids[1:, -1]
    keep_rows(kept, torch.tensor([1]), kept.get_seq_length())
    let_grow(kept)
    assert_near(decoder.step(rest), expected[1:, -1], 1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 5, PROMPT, 100])
def test_chunks_of_the_prompt_do_not_matter(chunk):
    model, ids = build("llama", "gqa", "skipv1"), tokens(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(Decoder(model, chunk=chunk).generate(ids, mask, max_new_tokens=NEW), expected)


@pytest.mark.parametrize(
    "mechanisms, fields, bits, rows, padded, expected",
    [
        ((), {}, None, 1, False, [16, 4, 4, 1]),
        ((), {}, None, 2, False, [8, 4, 4, 4, 4, 1]),
        ((), {}, None, 8, False, [4, 4, 4, 4, 4, 4, 1]),
        ((), {}, None, 2, True, [4, 4, 4, 4, 4, 4, 1]),
        ((), {"sliding_window": 3}, None, 1, False, [4, 4, 4, 4, 4, 4, 1]),
        ((), {"mask_type": "prefix"}, None, 1, False, [25]),
        ((), {}, "4", 1, False, [16, 9]),
        ((), {}, "4", 2, False, [16, 9, 16, 9]),
        ((), {}, "4", 2, True, [16, 9, 16, 3]),
        (("latent-keys", "latent-values"), {}, None, 1, False, [16, 9]),
        (("latent-keys", "latent-values"), {}, None, 2, True, [8, 8, 8, 1]),
        (("latent-keys", "latent-values"), {}, "8", 2, False, [16, 9, 16, 9]),
        (("mla",), {}, None, 1, False, [16, 9]),
    ],
)
def test_the_pieces_of_a_prompt(mechanisms, fields, bits, rows, padded, expected, monkeypatch):
    monkeypatch.setattr("leanqkv.inference.decoder.PREFILL_TOKENS", 16)
    monkeypatch.setattr("leanqkv.inference.decoder.PIECE_TOKENS", 4)
    model, ids, lengths = build("llama", *mechanisms, **fields), tokens(rows, 25), []
    decoder, mask = Decoder(model, cache_bits=bits), torch.ones_like(ids)
    if padded:
        mask[-1, :6] = 0
    forward = decoder._forward
    monkeypatch.setattr(
        decoder, "_forward", lambda new, *rest, **kept: (lengths.append(new.shape[1]), forward(new, *rest, **kept))[1]
    )
    found = decoder.prefill(ids, mask, room=0)
    assert lengths == expected
    options: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "kivi"}}
    options["cache_config"] |= {"key_bits": int(bits or 8), "value_bits": int(bits or 8)}
    theirs = {**options, "prefill_chunk_size": 16} if bits else {}
    for row, own in enumerate(mask.bool()):
        told = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        alone = model.generate(ids[row : row + 1, own], **told, **theirs).logits[0]
        assert_near(found[row : row + 1], alone, 1e-4)


@pytest.mark.parametrize("rows", [2, 3])
def test_quantized_prompts_do_not_depend_on_each_other(rows, monkeypatch):
    monkeypatch.setattr("leanqkv.inference.decoder.PREFILL_TOKENS", 192)
    monkeypatch.setattr("leanqkv.inference.decoder.PIECE_TOKENS", 16)
    model, ids = build("llama", "gqa", max_position_embeddings=512), tokens(rows, 150)
    together = Decoder(model, cache_bits=4).prefill(ids, room=0)
    for row in range(rows):
        alone = Decoder(model, cache_bits=4).prefill(ids[row : row + 1], room=0)
        assert_near(together[row : row + 1], alone, 1e-5)


def test_it_stops_when_told_and_tells_every_token():
    model, ids, seen = build("llama"), tokens(2, PROMPT), []
    actual = Decoder(model).generate(ids, max_new_tokens=NEW, callback=lambda new: seen.append(new) or len(seen) == 5)
    assert torch.equal(actual[:, PROMPT:], torch.stack(seen, dim=1)) and actual.shape[1] == PROMPT + 5


def test_what_does_not_fit_is_refused():
    decoder = Decoder(build("gpt"))
    assert decoder.generate(tokens(1, 60), max_new_tokens=5).shape == (1, 65)  # the last is not taken in
    with pytest.raises(ValueError, match="60 and 5 tokens more do not fit the model's 64 positions"):
        decoder.generate(tokens(1, 60), max_new_tokens=6)
    with pytest.raises(ValueError, match="the prompt is empty"):
        decoder.generate(tokens(1, 4)[:, :0], max_new_tokens=5)
    layer = AllocatedLayer(3)
    layer.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match="room for 3 tokens, 4 are to be kept"):
        layer.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))


@pytest.mark.parametrize("number", [0, -1])
def test_no_new_tokens_are_refused_as_in_transformers(number):
    model = build("llama")
    with pytest.raises(ValueError, match="must be greater than 0"):
        model.generate(tokens(1, 4), max_new_tokens=number)
    with pytest.raises(ValueError, match=f"max_new_tokens is {number}; ask for at least 1"):
        Decoder(model).generate(tokens(1, 4), max_new_tokens=number)


IDS = tokens(2, PROMPT)
NO_PROMPTS = {
    "one dimension": ((IDS[0],), "int64 of shape [9]; give token ids [batch, length]"),
    "three dimensions": ((IDS[None],), "int64 of shape [1, 2, 9]; give token ids"),
    "numbers": ((IDS.float(),), "the prompt is float32 of shape [2, 9]; give token ids"),
    "truths": ((IDS.bool(),), "the prompt is bool of shape [2, 9]; give token ids"),
    "no sequence": ((IDS[:0],), "the batch is empty; give at least one prompt"),
    "no token": ((IDS[:, :0],), "the prompt is empty; give at least one token"),
    "a short mask": ((IDS, torch.ones(2, 5)), "attention_mask has shape [2, 5]; give it the prompt's, [2, 9]"),
    "one mask": ((IDS, torch.ones(9)), "attention_mask has shape [9]"),
}


@pytest.mark.parametrize("case", NO_PROMPTS)
def test_what_is_no_prompt_is_refused_in_one_line(case):
    given, message = NO_PROMPTS[case]
    decoder = Decoder(build("llama"))
    for refusing in (lambda: decoder.generate(*given, max_new_tokens=2), lambda: decoder.prefill(*given, room=1)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            refusing()
        assert "\n" not in str(caught.value)


def test_room_for_nothing_more():
    model = build("llama")
    decoder = Decoder(model)
    with torch.no_grad():
        expected = model(IDS).logits[:, -1]
    assert torch.allclose(decoder.prefill(IDS, room=0), expected, atol=1e-5)
    with pytest.raises(ValueError, match="room for 9 tokens, 10 are to be kept"):
        decoder.step(IDS[:, 0])
    with pytest.raises(ValueError, match="room is -1 tokens; give 0 or more"):
        decoder.prefill(IDS, room=-1)
    assert torch.equal(*(decoder.generate(ids, max_new_tokens=3) for ids in (IDS, IDS.int())))


@torch.no_grad()
def get_other_memory(model):
    for weight in model.parameters():
        weight.data = 1.3 * weight


@torch.no_grad()
def learn(model):
    for weight in model.parameters():
        weight.mul_(1.3)


def get_a_hook(model):
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, given, found: 2 * found)


def get_another_layer(model):
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(*model.model.layers[1].mlp.down_proj.weight.shape[::-1])


BETWEEN = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "memory": get_other_memory,
    "training": learn,
    "hook": get_a_hook,
    "layer": get_another_layer,
}
COPIED = [(), ("latent-keys", "latent-values"), ("latent-keys:before_rotary=true",), ("mla",), ("nonlinear-query",)]


@pytest.mark.parametrize("mechanisms", COPIED, ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_a_model_gets_between_two_prompts_is_seen(mechanisms, between):
    """Also where weights are read from copies."""
    model, ids = build("llama", *mechanisms), tokens(2, PROMPT)

    def logits(decoder: Decoder) -> torch.Tensor:
        return torch.stack([decoder.prefill(ids, room=3), *(decoder.step(ids[:, place]) for place in range(3))])

    decoder = Decoder(model)
    before = logits(decoder)
    BETWEEN[between](model)
    found = logits(decoder)
    assert found.equal(logits(Decoder(model)))
    assert not torch.allclose(found.float(), before, atol=1e-3)
    assert decoder.model is not (made := Decoder(model)).model and logits(made).equal(found)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_of_other_rows_than_the_prompts_is_refused(bits, steps):
    """And changes nothing."""
    model, ids = build("llama", "gqa"), tokens(2, PROMPT)
    decoder, other = (Decoder(model, cache_bits=bits) for _ in range(2))
    for one in (decoder, other):
        one.prefill(ids, room=steps + 1)
        for place in range(steps):
            one.step(ids[:, place])
    for rows in (1, 3):
        with pytest.raises(
            ValueError, match=rf"a step of \[rows, heads\] \[{rows}, .\] does not fit a cache of \[2, .\]"
        ):
            decoder.step(torch.ones(rows, dtype=torch.long))
    assert decoder.step(ids[:, 5]).equal(other.step(ids[:, 5]))


@pytest.mark.parametrize("bits", [None, 8, 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_copy_of_a_cache_is_one_of_its_own(bits, rows):
    """Past the ends of blocks, which quantized caches turn into codes."""
    model, ids = build("llama", "skipv1", max_position_embeddings=300), tokens(rows, 60)
    decoder = Decoder(model, cache_bits=bits)
    decoder.prefill(ids, room=80)
    for place in range(2):
        decoder.step(ids[:, place])
    kept, copied = decoder.cache, copy.deepcopy(decoder.cache)
    expected = torch.stack([decoder.step(ids[:, place % 60]) for place in range(70)])
    del kept
    decoder.cache = copied
    assert torch.stack([decoder.step(ids[:, place % 60]) for place in range(70)]).equal(expected)


@pytest.mark.parametrize("mechanisms", [("gqa", "skipv1"), ("mla",), ("skipv1:ratio=1",)])
def test_the_cache_is_one_for_transformers_own_generation_as_well(mechanisms):
    """Beams select sequences; a crop and a reset go back."""
    model, ids = build("llama", *mechanisms), tokens(2, PROMPT)
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = model.generate(ids, **options)
        actual = model.generate(ids, past_key_values=allocate_cache(model.config, PROMPT + NEW), **options)
        assert torch.equal(actual, expected)
        one, other = allocate_cache(model.config, 2 * PROMPT), DynamicCache(config=model.config)
        for cache in (one, other):
            model(ids, past_key_values=cache)
            cache.crop(-3)
            cache.batch_select_indices(torch.tensor([1]))
        logits = [model(ids[1:, :4], past_key_values=cache).logits for cache in (one, other)]
        assert torch.equal(*logits)
        one.reset()
        assert one.get_seq_length() == 0
        assert torch.equal(model(ids, past_key_values=one).logits, model(ids).logits)


@pytest.mark.parametrize("allocated", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_a_reset_forgets_all_tokens_where_transformers_keeps_zeros(window, allocated, monkeypatch):
    monkeypatch.setattr(DynamicLayer, "reset", CacheLayerMixin.reset, raising=False)  # as in transformers 5.17
    model, ids = build("llama", "skipv1", sliding_window=window), tokens(2, PROMPT)
    config = model.config
    cache = allocate_cache(config, PROMPT) if allocated else DynamicCache(config=config)
    expected = model(ids).logits
    for _ in range(2):
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
        assert cache.get_seq_length() == PROMPT
        cache.reset()
        assert cache.get_seq_length() == cache_bytes(cache) == 0


def with_products(model: nn.Module) -> nn.Module:
    copied = shared_copy(model)
    use_products(copied)
    return copied


def test_a_model_with_products_shares_the_parameters_and_leaves_the_model():
    model = build("llama", "nonlinear-query")
    before = {name: type(module) for name, module in model.named_modules()}
    copied = with_products(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    mine = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in copied.parameters()} == mine
    for layer in copied.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert attention.project.layers == [attention.q_proj.down_proj, attention.k_proj, attention.v_proj]
        assert mlp.project.layers == [mlp.gate_proj, mlp.up_proj]
        alone = [attention.q_proj.up_proj, attention.o_proj, mlp.down_proj]
        assert all(isinstance(linear, FewRowsLinear) for linear in alone)
        # What is part of a joined product has no product of its own.
        assert not any(isinstance(linear, FewRowsLinear) for linear in (attention.k_proj, attention.q_proj.down_proj))
    assert not any("project" in vars(module) for layer in model.model.layers for module in (layer.self_attn, layer.mlp))


def test_what_is_not_a_plain_layer_is_not_replaced():
    class Doubled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8), nn.Linear(8, 8))
    model[2].register_forward_hook(lambda module, inputs, output: output + 1)
    copied = with_products(model)
    assert isinstance(copied[1], Doubled) and type(copied[2]) is nn.Linear
    inputs = torch.randn(3, 8)
    assert torch.allclose(copied(inputs), model(inputs), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "group, head_dim, value_dim, mask",
    [(1, 16, 16, "none"), (3, 64, 64, "boolean"), (3, 20, 20, "additive"), (2, 40, 16, "none"), (1, 8, 72, "none")],
)
def test_attention_of_one_query(dtype, group, head_dim, value_dim, mask, needs_compiler):
    """Against attention written out in float64, on views of larger buffers whose other places are not numbers."""
    for length in (1, 7, 40, 33, 300):
        generator = torch.Generator().manual_seed(length)

        def drawn(heads: int, positions: int, width: int) -> torch.Tensor:
            return torch.randn(2, heads, positions, width, generator=generator).to(dtype)  # noqa: B023

        query, key, value = drawn(2 * group, 1, head_dim), drawn(2, length, head_dim), drawn(2, length, value_dim)
        buffers = [torch.full((2, 2, length + 5, width), torch.nan, dtype=dtype) for width in (head_dim, value_dim)]
        for buffer, held in zip(buffers, (key, value), strict=True):
            buffer[:, :, :length] = held
        key_view, value_view = (buffer[:, :, :length] for buffer in buffers)
        seen = torch.rand(2, 1, 1, length, generator=generator) < 0.7
        seen[..., -1] = True
        given = {
            "none": None,
            "boolean": seen,
            "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype),
        }[mask]
        with torch.no_grad():
            by_kernel, _ = attend_one_query(nn.Module(), query, key_view, [value_view], given, 0.3)
            # The second head's values lie somewhere else.
            split = one_query_attention(query, key_view, [value_view[:, :1], value[:, 1:].clone()], given, 0.3)
        spread = key.double().repeat_interleave(group, dim=1), value.double().repeat_interleave(group, dim=1)
        scores = query.double() @ spread[0].mT * 0.3
        if given is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ spread[1]).transpose(1, 2)
        assert split is not None
        nothing = torch.zeros(1, 1, 1, length, dtype=torch.bool)
        assert not one_query_attention(query, key_view, [value_view], nothing, 0.3).any()
        # One rounding of the result; float32, in which the sums are, rounds them as well.
        eps = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
        for output in (by_kernel, split):
            assert output.shape == expected.shape and output.dtype == dtype
            assert (output.double() - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 60, 69, 130])
def test_what_is_not_a_number_stays_so(place, dtype, chunks, monkeypatch, needs_compiler):
    """As in PyTorch, wherever it stands; other heads are not touched."""
    monkeypatch.setattr("leanqkv.inference.attention.length_chunks", lambda heads, length, threads: chunks)
    query, key, value = (torch.randn(1, 2, length, 16).to(dtype) for length in (1, 131, 131))
    key[0, 0, place, 3] = torch.nan
    output = one_query_attention(query, key, [value], None, 0.3)
    assert output is not None and output[0, 0, 0].isnan().all() and output[0, 0, 1].isfinite().all()


THREADS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("threads", THREADS)
def test_all_threads_have_the_same_work(heads, threads):
    chunks = length_chunks(heads, 32_768, threads)
    assert chunks == 1 if heads >= threads else heads * chunks % threads == 0
    assert length_chunks(heads, CHUNK_TOKENS, threads) == 1, "too short to be worth it"
    for length in (1, 2 * CHUNK_TOKENS, 5 * CHUNK_TOKENS + 3):
        assert 1 <= length_chunks(heads, length, threads) <= max(1, length // CHUNK_TOKENS)


def test_one_head_is_cut_into_a_part_for_every_thread(monkeypatch):
    """MQA at batch 1; of two sequences, or of own and borrowed values, the heads of one call count."""
    calls = []

    def kernel(call) -> bool:
        calls.append((call._obj.batch * call._obj.heads, call._obj.chunks))
        return True

    monkeypatch.setattr("leanqkv.inference.attention.compiled_kernels", lambda: {torch.float32: kernel})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for batch, heads in ((1, (1,)), (2, (1,)), (1, (1, 3)), (2, (4,))):
        query, key = torch.randn(batch, 2 * sum(heads), 1, 8), torch.randn(batch, sum(heads), 8 * CHUNK_TOKENS, 8)
        one_query_attention(query, key, [torch.randn(batch, own, key.shape[2], 8) for own in heads], None, 1.0)
    assert calls == [(1, 8), (2, 4), (1, 8), (3, 8), (8, 1)]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, group", [(1, 6), (2, 3), (6, 1)], ids=["MQA", "GQA", "MHA"])
def test_attention_of_one_query_in_parts(heads, group, dtype, threads, monkeypatch, needs_compiler):
    """Against float64, with a part for every thread even where there are fewer positions than parts.

    Sequences of different lengths, one part or more of which is hidden; of the last sequence nothing is to be seen.
    """
    monkeypatch.setattr("leanqkv.inference.attention.length_chunks", lambda heads, length, threads: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for length in (1, 2, 7, 40, 301):
        generator = torch.Generator().manual_seed(length)
        query = 4 * torch.randn(4, heads * group, 1, 20, generator=generator)  # weights of very different sizes
        key, value = (torch.randn(4, heads, length, width, generator=generator) for width in (20, 24))
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        first_seen = torch.tensor([0, length // 2, length - 1, length])
        mask = (torch.arange(length) >= first_seen[:, None])[:, None, None]
        spread = (tensor.double().repeat_interleave(group, dim=1) for tensor in (key, value))
        scores = query.double() @ next(spread).mT * 0.3
        expected = (scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0) @ next(spread)).transpose(1, 2)
        output = one_query_attention(query, key, [value], mask, 0.3)
        assert output is not None and not output[3].any()
        # One rounding of the result; in float32 also those of scores up to 20 and of the sums.
        eps = torch.finfo(dtype).eps * (32 if dtype == torch.float32 else 1)
        assert (output.double() - expected).abs().max() <= eps * expected.abs().max(), length


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("latent_keys", [False, True])
@pytest.mark.parametrize("turned", [0, 8, 12], ids=["not turned", "in part", "turned"])
def test_attention_of_one_query_to_a_latent_and_keys(turned, latent_keys, dtype, threads, monkeypatch, needs_compiler):
    """Against float64: all heads read one latent, with the keys behind it that are turned back by given tables."""
    monkeypatch.setattr("leanqkv.inference.attention.length_chunks", lambda heads, length, threads: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    heads, group, width, rank = 3, 2, 12, 5
    for length, rows in ((2, 1), (7, 2), (301, 1)):
        generator = torch.Generator().manual_seed(length)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)  # noqa: B023

        kept = drawn(2, 1 if latent_keys else heads, length + 3, width)[:, :, :length]
        latent = drawn(2, 1, length + 3, rank)[:, :, :length]
        query, new, key = drawn(2, heads * group, 1, width), drawn(2, 1, width * kept.shape[1]), kept
        if latent_keys:
            key = kept.expand(-1, heads, -1, -1)
        tables = (drawn(rows, length, turned), drawn(rows, length, turned)) if turned else None
        frequencies = (0, 1, 3, 2) if latent_keys and turned == 8 else None  # of 6 complex columns
        seen = torch.rand(2, 1, 1, length, generator=generator) < 0.7
        seen[..., -1] = True
        both = LatentAndKeys(latent, kept, new, tables, frequencies)
        turning = tables and tuple(table.double() for table in tables)
        exact = LatentAndKeys(latent.double(), kept.double(), new.double(), turning, frequencies)
        for mask in (None, seen):
            scores = query.double() @ key.double().repeat_interleave(group, dim=1).mT * 0.3
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            expected = (scores.softmax(-1) @ exact.joined()).transpose(1, 2)
            output = one_query_attention_to_both(query, key, both, mask, 0.3)
            assert output is not None and output.shape == expected.shape and output.dtype == dtype
            eps = torch.finfo(dtype).eps * (32 if dtype == torch.float32 else 1)
            assert (output.double() - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [16, 31, 33, 64, 65])
def test_a_latent_whose_columns_have_one_of_many_frequencies(count, dtype, needs_compiler):
    """Against float64: 37 complex columns, of any of these frequencies."""
    generator = torch.Generator().manual_seed(count)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kept, latent, new, query = drawn(3, 1, 130, 74), drawn(3, 1, 130, 21), drawn(3, 1, 74), drawn(3, 5, 1, 74)
    tables = drawn(3, 130, 2 * count), drawn(3, 130, 2 * count)
    columns = torch.randint(count, (37,), generator=generator).bincount(minlength=count)
    both = LatentAndKeys(latent, kept, new, tables, tuple(columns.tolist()))
    cos, sin = (table.double() for table in tables)
    exact = LatentAndKeys(latent.double(), kept.double(), new.double(), (cos, sin), both.frequencies)
    scores = query.double() @ kept.double().mT * 0.1
    expected = (scores.softmax(-1) @ exact.joined()).transpose(1, 2)
    output = one_query_attention_to_both(query, kept.expand(-1, 5, -1, -1), both, None, 0.1)
    assert output is not None
    eps = torch.finfo(dtype).eps * (32 if dtype == torch.float32 else 1)
    assert (output.double() - expected).abs().max() <= eps * expected.abs().max()


def test_a_latent_and_keys_that_the_kernel_is_not_made_for(needs_compiler):
    query, key, new = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 16)
    latent, table = torch.randn(2, 1, 5, 3), torch.randn(1, 5, 8)
    known = LatentAndKeys(latent, key, new, (table, table))
    assert one_query_attention_to_both(query, key, known, None, 1.0) is not None
    others = {
        "a table of another length": LatentAndKeys(latent, key, new, (table[:, :4], table)),
        "a table of other rows": LatentAndKeys(latent, key, new, (table.expand(3, -1, -1), table)),
        "keys of another length": LatentAndKeys(latent, key[:, :, :4], new, (table, table)),
        "a latent of another length": LatentAndKeys(latent[:, :, :4], key, new, (table, table)),
        "another dtype of the table": LatentAndKeys(latent, key, new, (table.double(), table)),
        "the first token alone": LatentAndKeys(latent[:, :, :1], key[:, :, :1], new, None),
    }
    for what, both in others.items():
        assert one_query_attention_to_both(query, key, both, None, 1.0) is None, what


def test_the_kernel_leaves_to_pytorch_what_it_is_not_made_for(needs_compiler):
    query, key, value = (torch.randn(2, 2, n, 8) for n in (1, 5, 5))
    assert one_query_attention(query, key, [value], None, 1.0) is not None
    others = {
        "several queries": (key, key, [value], None),
        "another dtype": (query.double(), key.double(), [value.double()], None),
        "a mask for every head": (query, key, [value], torch.zeros(2, 2, 1, 5)),
        "gradients": (query.clone().requires_grad_(), key, [value], None),
        "a mask of another length": (query, key, [value], torch.zeros(2, 1, 1, 4)),
        "values of another length": (query, key, [value[:, :, :4]], None),
        "values of fewer heads": (query, key, [value[:, :1]], None),
        "another width of keys": (query, key[..., :4], [value], None),
        "no keys": (query, key[:, :, :0], [value[:, :, :0]], None),
        "strided heads": (query, key, [torch.randn(2, 2, 8, 5).mT], None),
    }
    for what, given in others.items():
        assert one_query_attention(*given, 1.0) is None, what
    compiled = torch.compile(lambda *of: one_query_attention(*of, [value], None, 1.0), backend="eager", fullgraph=True)
    assert compiled(query, key) is None


def test_own_and_borrowed_values_take_one_call(monkeypatch):
    model, ids, calls = build("llama", "skipv1"), tokens(2, PROMPT), []
    decoder = Decoder(model)
    expected = decoder.prefill(ids, room=1)

    def kernel(query, key, values, mask, scaling):
        calls.append([value.shape[1] for value in values])
        return scaled_dot_product_attention(
            query, key, torch.cat(values, dim=1), attn_mask=mask, is_causal=mask is None, scale=scaling
        ).transpose(1, 2)

    monkeypatch.setattr("leanqkv.inference.attention.one_query_attention", kernel)
    assert torch.allclose(decoder.prefill(ids, room=1), expected, atol=1e-5)
    heads = model.config.num_attention_heads
    assert calls == [[heads]] + [[heads // 2, heads // 2]] * (model.config.num_hidden_layers - 1)


def test_without_a_compiler_attention_is_pytorchs(monkeypatch):
    from torch._inductor.codecache import CppCodeCache

    from leanqkv.inference import attention

    def failing(*args, **kwargs):
        raise RuntimeError("no compiler")

    model, ids = build("llama", "gqa", "skipv1").bfloat16(), tokens(2, PROMPT)
    expected = Decoder(model).prefill(ids, room=1)
    attention.compiled_kernels.cache_clear()
    monkeypatch.setattr(CppCodeCache, "load", failing)
    decoder = Decoder(model)
    assert torch.equal(decoder.prefill(ids, room=1), expected)
    with pytest.warns(RuntimeWarning, match="cannot be compiled: no compiler"):
        assert decoder.step(ids[:, 0]).isfinite().all()
    assert attention.compiled_kernels() is None
    attention.compiled_kernels.cache_clear()


def test_bfloat16_steps_are_the_models_own():
    """Logits of every step against the model on the whole sequence in float64, as near as bfloat16's own forward."""
    model, ids = build("llama", "gqa", "skipv1"), tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        exact = model.double()(ids, attention_mask=mask).logits[:, 11:]
        low = model.bfloat16()(ids, attention_mask=mask).logits[:, 11:].double()
    decoder = Decoder(model)
    steps = [decoder.prefill(ids[:, :12], mask[:, :12], room=8)]
    steps += [decoder.step(ids[:, place]) for place in range(12, 20)]
    logits = torch.stack(steps, dim=1).double()
    assert (logits - exact).abs().max() <= 2 * (low - exact).abs().max()


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_large_tensors_of_a_cache_are_to_lie_in_large_pages():
    maps = Path("/proc/self/smaps")
    if "AnonHugePages" not in maps.read_text():
        pytest.skip("this Linux has no large pages")
    layer = AllocatedLayer(2**14)
    keys, values = layer.update(*[torch.randn(1, 8, 3, 64)] * 2)
    assert keys.equal(values)
    for tensor in (keys, values):
        inside = tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes() // 2
        parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps.read_text(), flags=re.MULTILINE)[1:]
        bounds = [[int(bound, 16) for bound in part.split()[0].split("-")] for part in parts]
        (own,) = [part for part, (first, end) in zip(parts, bounds, strict=True) if first <= inside < end]
        assert " hg" in next(line for line in own.splitlines() if line.startswith("VmFlags:"))
