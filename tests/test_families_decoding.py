"""Families of transformers, decoded: with every cache, padded and past their windows, as transformers does it."""

import pytest
import torch
from decoding import LENGTHS, NEW, run
from shapes import randomize, tiny, tokens
from stock_models import CASES, ONE_OF_EACH, stock_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from leanqkv import LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.inference import Decoder
from leanqkv.inference.batch import Row, Scheduler
from leanqkv.inference.cache import token_bytes
from leanqkv.inference.decoder import last_position
from leanqkv.model.cache_quantized import kivi_layers

# Those with windows, positions, norms or experts of their own: one of each, and the variants.
NEWER = [
    case
    for case in CASES
    if case.startswith(("granite", "smollm3", "olmo2", "gemma3", "phi3", "mixtral", "qwen3-", "qwen2-"))
    and case != "phi3-longer"
]
PAD, LENGTH, MORE = 6, 14, 6  # longer than the windows, which are 5
ROUNDING = 1e-5  # relative to the largest logit; norms are in float32


@pytest.fixture
def pair(request, tmp_path) -> tuple[PreTrainedModel, LeanForCausalLM]:
    """A model of transformers and ours of its checkpoint."""
    stock_model(request.param).save_pretrained(tmp_path)
    reference = stock_model(request.param)
    reference.set_attn_implementation("eager")
    return reference, load_model(open_checkpoint(tmp_path))


def of(*cases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", cases, indirect=True)


def padded() -> tuple[Tensor, Tensor]:
    """Two prompts, one of them half as long, padded on the left."""
    ids = tokens(2, LENGTH, vocab_size=61)
    ids[1, : LENGTH // 2] = PAD
    mask = torch.ones_like(ids)
    mask[1, : LENGTH // 2] = 0
    return ids, mask


@torch.no_grad()
def decoded(model: PreTrainedModel, forced: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their logits, [batch, MORE] and [batch, MORE, vocab_size]."""
    ids, mask = padded()
    given = {"do_sample": False, "max_new_tokens": MORE, "eos_token_id": None, "pad_token_id": PAD} | options
    given |= {"return_dict_in_generate": True, "output_logits": True}
    result = model.generate(ids, attention_mask=mask, **given)
    return result.sequences[:, LENGTH:], torch.stack(result.logits, dim=1)


def near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@of(*NEWER)
def test_decoding_is_that_of_transformers(pair):
    """The default cache, none and a static one; left padding; past the window and back from it."""
    reference, model = pair
    expected_tokens, expected = decoded(reference)
    static = {"cache_implementation": "static", "disable_compile": True}
    for options in ({}, {"use_cache": False}, static):
        found_tokens, found = decoded(model, **options)
        assert torch.equal(found_tokens, expected_tokens), options
        near(found, expected)


@of(*(case for case in NEWER if case in ONE_OF_EACH or "window" in case))
def test_the_cache_holds_what_the_plan_says(pair):
    _, model = pair
    result = model.generate(*padded()[:1], max_new_tokens=MORE, do_sample=False, return_dict_in_generate=True)
    length = result.past_key_values.get_seq_length()
    assert length >= LENGTH
    assert token_bytes(result.past_key_values) == 2 * model.config.plan.kv_bytes(length, torch.float32)


@of(*(case for case in ONE_OF_EACH if case in NEWER))
def test_gradients_are_those_of_transformers(pair):
    """Of the embedding and of the last layer's output projection, through all that lies between."""
    reference, model = pair
    gradients = []
    for one in (reference, model):
        logits = one(input_ids=tokens(2, LENGTH, vocab_size=61)).logits
        logits.square().mean().backward()
        gradients.append([one.model.embed_tokens.weight.grad, one.model.layers[-1].self_attn.o_proj.weight.grad])
    for expected, found in zip(*gradients, strict=True):
        near(found, expected)


@of(*NEWER)
def test_decoder_and_batch(pair):
    """Prefill in chunks, the kernel, joined projections; rows of several lengths that come and go."""
    reference, model = pair
    expected_tokens, expected = decoded(reference)
    decoder = Decoder(model, chunk=4)
    logits = [decoder.prefill(*padded(), room=MORE)]
    for place in range(MORE - 1):
        logits.append(decoder.step(expected_tokens[:, place]))
    near(torch.stack(logits, dim=1), expected)

    limit = model.config.cached_positions or max(LENGTHS) + max(NEW)
    given = [Row(tokens(1, n, vocab_size=61, seed=n)[0], new) for n, new in zip(LENGTHS, NEW, strict=True)]
    given = [row for row in given if len(row.prompt) + row.max_new_tokens <= limit]
    model.generation_config.eos_token_id = None
    decoder.generation_config.eos_token_id = None
    found = run(Scheduler(decoder, 10**6), given, every=2)
    for row in given:
        alone = model.generate(row.prompt[None], max_new_tokens=row.max_new_tokens, do_sample=False)
        assert found[row] == alone[0, len(row.prompt) :].tolist()


@of("phi3-longer")
def test_longrope_is_refused_where_cached_keys_would_be_wrong(pair):
    """Its frequencies change at 8 positions: a prompt beyond them is right, a cache that comes to them is not."""
    reference, model = pair
    expected_tokens, expected = decoded(reference)
    for options in ({}, {"use_cache": False}):
        found_tokens, found = decoded(model, **options)
        assert torch.equal(found_tokens, expected_tokens)
        near(found, expected)
    short = tokens(1, 6, vocab_size=61)
    assert model.generate(short, max_new_tokens=3, do_sample=False).shape == (1, 9)
    with pytest.raises(ValueError, match="longrope has other frequencies beyond 8 positions, and 8 are cached"):
        model.generate(short, max_new_tokens=4, do_sample=False)
    # transformers 5.17 reads cached keys of the other frequencies.
    uncached = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "use_cache": False}
    assert torch.equal(model.generate(short, **uncached), reference.generate(short, **uncached))
    with pytest.raises(ValueError, match="6 and 3 tokens more do not fit the 8 positions behind which rotary freq"):
        Decoder(model).generate(short, max_new_tokens=4)
    static = StaticCache(model.config, max_cache_len=16)
    model(short, past_key_values=static)
    with pytest.raises(ValueError, match="longrope has other frequencies"):
        model(short, past_key_values=static)


@of("phi3-longer")
def test_prompts_longer_than_the_original_length_are_decoded(pair):
    """In chunks and in batches, beside prompts that stay within it: the tokens of each one alone."""
    reference, model = pair
    for one in pair:
        one.generation_config.eos_token_id = None
    assert [last_position(model.config, length) for length in (1, 8, 9)] == [8, 8, None]
    decoder = Decoder(model, chunk=4)
    expected, _ = decoded(reference)
    found = decoder.generate(*padded(), max_new_tokens=MORE, pad_token_id=PAD)
    assert torch.equal(found[:, LENGTH:], expected)
    given = [Row(tokens(1, n, vocab_size=61, seed=n)[0], new) for n, new in ((12, 9), (3, 5), (9, 6), (5, 3), (20, 4))]
    rows = run(Scheduler(decoder, 10**6), given, every=1)
    for row in given:
        alone = reference.generate(row.prompt[None], max_new_tokens=row.max_new_tokens, do_sample=False)
        assert rows[row] == alone[0, len(row.prompt) :].tolist()


@torch.no_grad()
def test_dynamic_positions_depend_on_the_sequence_alone():
    """Their frequencies change with every token beyond 8: keys in a cache would keep those of a shorter sequence."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    config = tiny("llama", rope_parameters=rope, max_position_embeddings=8)
    model = randomize(LeanForCausalLM(config)).eval()
    long, middle = tokens(1, 30, vocab_size=config.vocab_size), tokens(1, 12, vocab_size=config.vocab_size)
    before = model(middle, use_cache=False).logits
    model(long, use_cache=False)
    assert torch.equal(model(middle, use_cache=False).logits, before)
    for start in (6, 10):
        cache = model(middle[:, :start]).past_key_values
        with pytest.raises(ValueError, match=f"dynamic has other frequencies beyond 8 positions, and {start} are"):
            model(middle[:, start:], past_key_values=cache)
    cache = model(middle[:, :5]).past_key_values
    whole = model(middle[:, :8], use_cache=False).logits
    near(model(middle[:, 5:8], past_key_values=cache).logits, whole[:, 5:])
    with pytest.raises(ValueError, match="do not fit the 8 positions behind which"):
        Decoder(model).generate(middle[:, :6], max_new_tokens=4)


WIDE = {"sliding_window": 100, "max_position_embeddings": 400}  # more than a block of 64, which is quantized together


@pytest.mark.parametrize("bits", [(2, 4), (4, 4)])
@pytest.mark.parametrize("case", ["gemma3", "qwen3-some-windows"])
@torch.no_grad()
def test_a_quantized_cache_behind_a_window_is_that_of_transformers(case, bits, tmp_path, monkeypatch):
    """Its own model over our pages, in float64, where hardly a number lies between two codes; a step at a time behind
    where pages have gone. Its bytes are what the plan says after every step."""
    monkeypatch.setitem(CASES, case, (CASES[case][0], CASES[case][1] | WIDE))
    reference = stock_model(case, torch.float64)
    reference.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), torch.float64)
    ids, plan, cache = tokens(1, 270, vocab_size=61), model.config.plan, DynamicCache()
    assert {layer.window for layer in plan.layers} >= {100}
    cache.layers = kivi_layers(plan, *bits)
    decoder = Decoder(model, chunk=200, cache_bits=bits)
    expected = reference(ids[:, :200], past_key_values=cache).logits[:, -1]
    near(decoder.prefill(ids[:, :200], room=70), expected)
    for length, token in enumerate(ids[0, 200:], start=201):
        expected = reference(token[None, None], past_key_values=cache).logits[:, -1]
        near(decoder.step(token[None]), expected)
        assert token_bytes(decoder.cache) == CacheBits(*bits).kv_bytes(plan, length, torch.float64), length
