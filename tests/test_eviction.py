"""A cache that drops tokens, against one pass without a cache over all of them, with a mask that hides the dropped."""

import pytest
import torch
from shapes import tokens
from variants import ALL, Variant

from leanqkv import LeanError
from leanqkv.inference import EvictingCache
from leanqkv.model.cache import cache_bytes

SINKS, WINDOW, PROMPT, STEPS = 2, 4, 9, 6
# Sums of some hundred terms in another order, through a few layers.
ROUNDING = 1e-10


def refusal(config) -> str | None:
    """Words of the refusal of a model that cannot drop tokens."""
    if config.mask_type == "prefix":
        return "prefix"
    if any(layer.window is not None for layer in config.plan.layers):
        return "sliding window"
    rotary = config.position_embedding_type == "rope"
    return "by their positions" if rotary and config.plan.turns_keys_in is not None else None


KEPT = [variant for variant in ALL if refusal(variant.config()) is None and not variant.config().bidirectional]
REFUSED = [variant for variant in ALL if refusal(variant.config()) is not None]


def mask(length: int, prompt: int, sinks: int = SINKS, window: int = WINDOW) -> torch.Tensor:
    """Additive, [1, 1, length, length]: the loop that drops the same tokens before each new one."""
    shown = torch.full((length, length), torch.finfo(torch.float64).min, dtype=torch.float64)
    held = []
    for query in range(length):
        if query >= prompt:
            while len(held) > sinks + window:
                del held[sinks]
        held.append(query)
        shown[query, held] = 0
    return shown[None, None]


def uncached(model, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask(ids.shape[1], prompt), use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("variant", KEPT, ids=str)
def test_decoding_is_one_pass_that_hides_the_dropped_tokens(variant: Variant):
    model = variant.trained().double()
    ids = tokens(2, PROMPT + STEPS, vocab_size=model.config.vocab_size)
    expected = uncached(model, ids, PROMPT)
    cache = EvictingCache(model.config, SINKS, WINDOW)
    found = [model(input_ids=ids[:, :PROMPT], past_key_values=cache).logits]
    found += [model(input_ids=ids[:, [at]], past_key_values=cache).logits for at in range(PROMPT, PROMPT + STEPS)]
    largest = expected.abs().max()
    assert (torch.cat(found, 1) - expected).abs().max() <= ROUNDING * largest
    whole = model(input_ids=ids).logits
    assert (whole - expected)[:, PROMPT + 1 :].abs().max() > 1e-6 * largest, "nothing was dropped"
    held = SINKS + WINDOW
    assert cache_bytes(cache) == 2 * held * model.config.plan.kv_bytes_per_token(torch.float64)


@torch.no_grad()
def test_generate_gives_the_tokens_of_a_loop_that_drops():
    model = Variant("llama", ("skipv1", "gqa"), {}).trained().double()
    ids = tokens(1, PROMPT, vocab_size=model.config.vocab_size)
    wanted = ids
    for _ in range(STEPS):
        wanted = torch.cat((wanted, uncached(model, wanted, PROMPT)[:, -1:].argmax(-1)), 1)
    cache = EvictingCache(model.config, SINKS, WINDOW)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
        assert cache.get_seq_length() == PROMPT + STEPS - 1
        cache.reset()


@torch.no_grad()
def test_later_tokens_may_come_several_at_a_time():
    model = Variant("gpt", ("skipv1",), {}).trained().double()
    ids = tokens(1, PROMPT + 3, vocab_size=model.config.vocab_size)
    cache = EvictingCache(model.config, SINKS, WINDOW)
    model(input_ids=ids[:, :PROMPT], past_key_values=cache)
    found = model(input_ids=ids[:, PROMPT:], past_key_values=cache).logits
    shown = mask(PROMPT + 3, PROMPT)
    shown[0, 0, PROMPT:] = shown[0, 0, PROMPT]  # all of them see what was held before the first
    for later in range(3):
        shown[0, 0, PROMPT + later, PROMPT : PROMPT + later + 1] = 0
    expected = model(input_ids=ids, attention_mask=shown, use_cache=False).logits[:, PROMPT:]
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("variant", REFUSED, ids=str)
def test_models_that_cannot_drop_tokens_are_refused(variant: Variant):
    config = variant.config()
    with pytest.raises(LeanError, match=f"EvictingCache .*{refusal(config)}"):
        EvictingCache(config)


def test_what_is_refused_of_a_call():
    model = Variant("gpt", (), {}).trained()
    with pytest.raises(LeanError, match="`sinks` is 0 or more and `window` 1 or more, found 4 and 0"):
        EvictingCache(model.config, 4, 0)
    cache = EvictingCache(model.config, SINKS, WINDOW)
    padded = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="which of the rest are padding"):
        model(input_ids=tokens(2, 3, vocab_size=model.config.vocab_size), attention_mask=padded, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(-1)
