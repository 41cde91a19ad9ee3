"""The cache of KIVI against a naive one, which quantizes number by number and attends by loops."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from product.mechanisms import CASES
from product.mechanisms import Case as Model
from shapes import randomize, tiny, tokens
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from leanqkv import LeanForCausalLM, LeanQuantizedCache, cache_bytes
from leanqkv.model.cache_quantized import KiviLayer, quantized_bytes_per_token

BLOCK = 64
EVERY_BITS = (2, 4, 8)
LONG = {"max_position_embeddings": 512}
KIVI = {"cache_implementation": "quantized", "cache_config": {"backend": "kivi", "key_bits": 8, "value_bits": 4}}
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
bits_of_both = pytest.mark.parametrize("bits", EVERY_BITS)


# --- the naive cache --------------------------------------------------------------------------------------------------


def bfloat16(number: float, rounding: Callable[[float], int]) -> float:
    """Eight significant bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(rounding(mantissa * 256), exponent - 8)


def quantized(numbers: list[float], bits: int) -> tuple[list[float], float]:
    """What is left of numbers that share a scale, and the scale."""
    offset = bfloat16(min(numbers), math.floor)
    scale = bfloat16((max(numbers) - offset) / (2**bits - 1), math.ceil)
    return [offset + scale * round((number - offset) / scale) if scale else offset for number in numbers], scale


def groups_of(columns: int) -> list[range]:
    """Columns of a value that share a scale: as few groups as possible of at most 64, all alike in width and that a
    multiple of 4, but for the last."""
    count = -(-columns // 64)
    width = next(width for width in range(4, 65, 4) if width * count >= columns)
    return [range(start, min(start + width, columns)) for start in range(0, columns, width)]


def naive(states: Tensor, bits: int, per_token: bool) -> tuple[Tensor, Tensor]:
    """What is left of whole blocks [batch, heads, tokens, columns], and every entry's scale."""
    left, scales = states.clone(), torch.zeros_like(states)
    batch, heads, length, columns = states.shape
    for b in range(batch):
        for h in range(heads):
            if per_token:
                shared = [(slice(t, t + 1), list(group)) for t in range(length) for group in groups_of(columns)]
            else:
                blocks = [slice(start, start + BLOCK) for start in range(0, length, BLOCK)]
                shared = [(block, [column]) for block in blocks for column in range(columns)]
            for rows, which in shared:
                entries = states[b, h, rows][:, which]
                numbers, scale = quantized(entries.double().flatten().tolist(), bits)
                left[b, h, rows, which[0] : which[-1] + 1] = torch.tensor(numbers).view_as(entries).to(left)
                scales[b, h, rows, which[0] : which[-1] + 1] = scale
    return left, scales


class NaiveLayer(DynamicLayer):
    """Keeps everything, and hands out the blocks that were whole before the call as quantizing leaves them; of a window
    no more than its first query sees."""

    def __init__(self, names: Sequence[str], key_bits: int, value_bits: int, window: int | None = None) -> None:
        super().__init__()
        self.window, self.is_sliding = window, window is not None
        self.rules = [(value_bits, True) if name == "values" else (key_bits, False) for name in names]
        self.rules += [(key_bits, False)] * (2 - len(self.rules))
        self.done: list[tuple[Tensor, Tensor] | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past = self.get_seq_length()
        seen, first = self.get_mask_sizes(key_states.shape[2])
        old, histories = past // BLOCK * BLOCK, super().update(key_states, value_states)
        return tuple(
            torch.cat((self.left(place, states[:, :, :old]), states[:, :, old:]), 2)[:, :, first : first + seen]
            for place, states in enumerate(histories)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = 0 if self.window is None else max(0, self.get_seq_length() - self.window + 1)
        return self.get_seq_length() + query_length - first, first

    def left(self, place: int, states: Tensor) -> Tensor:
        """What is left of the blocks; it is known of those that were there in the call before."""
        before = self.done[place]
        if not states.numel():
            return states
        if before is None or before[0].shape != states.shape or not torch.equal(before[0], states):
            self.done[place] = before = states, naive(states, *self.rules[place])[0]
        return before[1]


def naive_cache(model: LeanForCausalLM, key_bits: int, value_bits: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [
        NaiveLayer([tensor.name for tensor in layer.cached], key_bits, value_bits, layer.window)
        for layer in model.config.plan.layers
    ]
    return cache


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers, columns of very different size and center."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64))
    centers = torch.randn(shape[-1], generator=generator, dtype=torch.float64) * sizes
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * sizes + centers).to(dtype)


def fill(layer: DynamicLayer, keys: Tensor, values: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What the layer hands out with the last piece."""
    histories = keys, values
    for key, value in zip(keys.split(list(pieces), 2), values.split(list(pieces), 2), strict=True):
        histories = layer.update(key, value)
    return histories


def stored(layer: KiviLayer) -> list[Tensor]:
    return [tensor for paged in layer.paged for tensor in paged.tensors]


def held(layer: KiviLayer) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in stored(layer) if tensor.numel())


# --- numbers ----------------------------------------------------------------------------------------------------------


@bits_of_both
@pytest.mark.parametrize("columns", [6, 64, 131, 200])
def test_history_is_the_naive_one(columns, bits):
    keys, values = random(2, 3, 150, columns), random(2, 1, 150, columns, seed=1)
    found = fill(KiviLayer(bits, bits), keys, values, (149, 1))
    expected = fill(NaiveLayer(("keys", "values"), bits, bits), keys, values, (149, 1))
    for one, other, given in zip(found, expected, (keys, values), strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        assert torch.equal(one[:, :, 128:], given[:, :, 128:]), "the newest are in the model's precision"
        assert not torch.equal(one[:, :, 64:128], given[:, :, 64:128])


@bits_of_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_entry_is_off_by_more_than_half_a_scale(dtype, bits):
    """Nor by more than the model's own rounding, for which the dequantized number is not one of its own."""
    keys, values = random(2, 2, 128, 131, dtype=dtype), random(2, 2, 128, 131, dtype=dtype, seed=1)
    layer = KiviLayer(bits, bits)
    fill(layer, keys, values, (128,))
    histories = layer.update(keys[:, :, :1], values[:, :, :1])
    for found, given, per_token in zip(histories, (keys, values), (False, True), strict=True):
        assert found.dtype == dtype
        found, given = found[:, :, :128].double(), given.double()
        _, scales = naive(given, bits, per_token)
        rounding = torch.finfo(dtype).eps * (given.abs() + scales)
        assert ((found - given).abs() <= scales * (0.5 + 1e-4) + rounding).all()
        assert (found - given).abs().sum() > 0.1 * scales.sum(), "nothing was rounded"


def test_a_large_channel_of_the_keys_costs_the_others_nothing():
    """Of values it is the large token."""
    keys, values = torch.randn(1, 1, 64, 8) * 1e-3, torch.randn(1, 1, 64, 8) * 1e-3
    keys[..., 3], values[:, :, 5] = 1e4 * torch.randn(64), 1e4 * torch.randn(8)
    layer = KiviLayer(8, 8)
    fill(layer, keys, values, (64,))
    found_keys, found_values = layer.update(keys[:, :, :1], values[:, :, :1])
    key_errors, value_errors = (found_keys[:, :, :64] - keys).abs(), (found_values[:, :, :64] - values).abs()
    assert key_errors[..., [0, 1, 2, 4, 5, 6, 7]].max() < 2e-5
    assert value_errors[:, :, [0, 1, 2, 3, 4, 6, 7]].max() < 2e-5
    assert 1 < key_errors.max() < 500 and 1 < value_errors.max() < 500


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.1, 1234.567, 1e-30, -6e4])
def test_constants_are_kept(constant):
    states = torch.full((1, 2, 64, 6), constant)
    layer = KiviLayer(2, 2)
    fill(layer, states, states, (64,))
    for found in layer.update(states[:, :, :1], states[:, :, :1]):
        # Offset and scale of eight bits each: together some sixteen.
        torch.testing.assert_close(found[:, :, :64], states, rtol=2**-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_numbers_stay_finite(dtype):
    """A range may be twice as large as the largest number of float16, half a scale beyond it infinite."""
    largest = torch.finfo(torch.float16).max
    states = torch.tensor([-largest, largest, 0.0, 5e4]).to(dtype).repeat(16).view(1, 1, 64, 1).repeat(1, 1, 1, 8)
    states[..., 0] = -states[..., 0]
    layer = KiviLayer(2, 2)
    fill(layer, states, states, (64,))
    assert all(found.isfinite().all() for found in layer.update(states[:, :, :1], states[:, :, :1]))


@bits_of_both
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible(wrong, bits):
    """In its channel's block, or its token's group; everything else is as without it."""
    states = random(1, 1, 128, 70, dtype=torch.float32)
    broken = states.clone()
    broken[0, 0, 70, 40] = wrong
    layers = [KiviLayer(bits, bits) for _ in range(2)]
    histories = []
    for layer, given in zip(layers, (states, broken), strict=True):
        fill(layer, given, given, (128,))
        histories.append([found[0, 0, :128] for found in layer.update(states[:, :, :1], states[:, :, :1])])
    (keys, values), (broken_keys, broken_values) = histories
    key_hit, value_hit = torch.zeros(128, 70, dtype=torch.bool), torch.zeros(128, 70, dtype=torch.bool)
    key_hit[64:, 40], value_hit[70, 36:] = True, True
    for found, expected, hit in ((broken_keys, keys, key_hit), (broken_values, values, value_hit)):
        assert not found[hit].isfinite().any()
        assert torch.equal(found[~hit], expected[~hit])


def test_gradients_are_not_kept():
    """A graph would hold every activation."""
    states = random(1, 1, 70, 8, dtype=torch.float32).requires_grad_()
    layer = KiviLayer()
    layer.update(states, states)
    assert not any(page.requires_grad for paged in layer.paged for page in paged.pages[0])


# --- which tokens are quantized ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 130, 192])
def test_one_call_stores_what_single_tokens_do(length):
    keys, values = random(2, 2, length, 8), random(2, 1, length, 6, seed=1)
    at_once, by_tokens, in_chunks = KiviLayer(4, 2), KiviLayer(4, 2), KiviLayer(4, 2)
    fill(at_once, keys, values, (length,))
    fill(by_tokens, keys, values, (1,) * length)
    chunks = [min(50, length - start) for start in range(0, length, 50)]
    fill(in_chunks, keys, values, chunks)
    for layer in (at_once, by_tokens, in_chunks):
        assert layer.get_seq_length() == length
        assert [paged.newest.shape[2] for paged in layer.paged] == [length % BLOCK] * 2
        assert layer.get_mask_sizes(3) == (length + 3, 0)
        assert all(torch.equal(*pair) for pair in zip(stored(layer), stored(at_once), strict=True))


@pytest.mark.parametrize("pieces", [(64, 1), (65, 1), (10, 70, 1), (128, 3), (1,) * 66, (63, 1, 1)])
def test_a_call_sees_its_own_tokens_and_the_incomplete_block_exactly(pieces):
    length = sum(pieces)
    keys, values = random(1, 2, length, 8), random(1, 2, length, 8, seed=1)
    found = fill(KiviLayer(2, 2), keys, values, pieces)
    quantized_tokens = (length - pieces[-1]) // BLOCK * BLOCK
    for history, given in zip(found, (keys, values), strict=True):
        same = (history == given).all(-1).all(1)[0]
        assert history.shape == given.shape
        assert not same[:quantized_tokens].any() and same[quantized_tokens:].all()


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("bits", [(8, 4), (2, 8)])
def test_bytes_of_every_mechanism(case: Model, bits):
    """A window keeps the pages of which it sees a token."""
    config = case.config(**LONG)
    model = LeanForCausalLM(config).eval()
    cache = LeanQuantizedCache("kivi", config, key_bits=bits[0], value_bits=bits[1])
    ids, expected = tokens(2, 128), quantized_bytes_per_token(config.plan, *bits)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    pages = [sum(map(len, paged.pages)) for layer in cache.layers for paged in layer.paged if paged.newest.shape[1]]
    windows = [layer.window for layer in config.plan.layers for _ in layer.cached]
    assert pages == [2 * 2 if window is None else 2 for window in windows]
    if not any(windows):
        assert cache_bytes(cache) == 2 * 128 * expected
    before = cache_bytes(cache)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    if not any(windows):
        assert cache_bytes(cache) - before == 2 * config.plan.kv_bytes(5, torch.float32)
    assert (
        {layer.get_seq_length() for layer in cache.layers if layer.is_initialized} == {cache.get_seq_length()} == {133}
    )


def test_bytes_per_token_by_hand():
    """Of four heads of 8 columns in each of 3 layers."""
    config = tiny("gpt")
    keys, values = 32 * (1 + 4 / 64), 4 * (8 * 4 / 8 + 4)
    assert quantized_bytes_per_token(config.plan, 8, 4) == 3 * (keys + values)
    latent = tiny("gpt", "mla:rank=12,rope_dim=0")
    # 12 columns of 2 bits fill no four bytes; 16 do.
    assert quantized_bytes_per_token(latent.plan, 2, 8) == 3 * (16 * 0.25 + 12 * 4 / 64)


# --- models -----------------------------------------------------------------------------------------------------------


@every
def test_every_mechanism_attends_to_the_naive_history(case: Model):
    """Prefill, a chunk to the end of a block, single tokens and a chunk; in float64, in which codes leave no choice."""
    model = case.model(**LONG)
    ids, pieces = tokens(2, 135), (70, 58, 1, 1, 5)
    logits = []
    for cache in (LeanQuantizedCache("kivi", model.config, key_bits=4, value_bits=2), naive_cache(model, 4, 2)):
        logits.append(in_pieces(model, ids, cache, pieces))
    exact = in_pieces(model, ids, DynamicCache(config=model.config), pieces)
    found, expected = logits
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    assert torch.equal(found[:, :70], exact[:, :70])
    assert (found[:, 70:] - exact[:, 70:]).abs().max() > 1e-6 * exact.abs().max(), "nothing was rounded"


def in_pieces(model: LeanForCausalLM, ids: Tensor, cache: Any, pieces: Sequence[int]) -> Tensor:
    """Logits of all positions; the first piece is a prefix model's prefix."""
    prefix = {"prefix_mask": torch.ones(len(ids), pieces[0])} if model.config.mask_type == "prefix" else {}
    with torch.no_grad():
        parts = [model(piece, past_key_values=cache, **prefix).logits for piece in ids.split(list(pieces), 1)]
    return torch.cat(parts, 1)


def test_more_bits_more_of_the_same_tokens():
    model = randomize(LeanForCausalLM(tiny("llama", "skipv1", **LONG)), std=0.15).eval()
    ids, errors = tokens(4, 200), []
    exact = in_pieces(model, ids, DynamicCache(config=model.config), (150, *(1,) * 50))
    for bits in EVERY_BITS:
        cache = LeanQuantizedCache("kivi", model.config, key_bits=bits, value_bits=bits)
        errors.append(float((in_pieces(model, ids, cache, (150, *(1,) * 50)) - exact).norm() / exact.norm()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    plain = model.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=None)[:, 200:]
    config = {"backend": "kivi", "key_bits": 8, "value_bits": 8}
    found = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
        cache_implementation="quantized",
        cache_config=config,
    )[:, 200:]
    assert (plain == found).double().mean() > 0.9


# --- batches and `generate` -------------------------------------------------------------------------------------------


@every
def test_beams_returned_sequences_and_padding(case: Model):
    """`generate` reorders, repeats and pads; the naive cache does so with what is not quantized."""
    model = case.model(**LONG)
    ids = tokens(2, 60)
    ids[0, :30] = 0
    given: dict[str, Any] = {"attention_mask": (ids > 0).long(), "max_new_tokens": 9, "eos_token_id": None}
    for search in ({"num_beams": 2, "do_sample": False}, {"num_return_sequences": 2, "do_sample": True}):
        texts = []
        for cache in (LeanQuantizedCache("kivi", model.config, key_bits=8, value_bits=4), naive_cache(model, 8, 4)):
            torch.manual_seed(0)
            texts.append(model.generate(ids, **given, **search, past_key_values=cache))
        assert torch.equal(*texts), search


def test_the_batch_can_be_changed():
    keys, values = random(3, 2, 150, 8), random(3, 1, 150, 6, seed=1)
    rows = torch.tensor([2, 0, 0, 1])
    changes: list[tuple[Callable[[KiviLayer], None], Tensor]] = [
        (lambda layer: layer.reorder_cache(rows[:3]), rows[:3]),
        (lambda layer: layer.batch_select_indices(rows), rows),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), torch.tensor([0, 2])),
        (lambda layer: layer.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
    ]
    for change, chosen in changes:
        changed, expected = KiviLayer(4, 2), KiviLayer(4, 2)
        fill(changed, keys, values, (100, 50))
        change(changed)
        fill(expected, keys[chosen], values[chosen], (150,))
        assert all(torch.equal(*pair) for pair in zip(stored(changed), stored(expected), strict=True))
        assert held(changed) == held(expected)
        change(KiviLayer())  # which has no tokens yet


def test_speculative_decoding_is_refused():
    model = LeanForCausalLM(tiny("gpt", **LONG)).eval()
    ids = tokens(1, 5).repeat(1, 20)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        with pytest.raises(ValueError, match=r"^a quantized cache cannot be cropped[^\n]*; use the default cache$"):
            model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **KIVI, **options)
    cache = LeanQuantizedCache("kivi", model.config)
    assert not cache.is_croppable and not cache.is_compileable


def test_generate_makes_the_cache_that_was_asked_for():
    model = LeanForCausalLM(tiny("gpt", "gqa", **LONG)).eval()
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
    ids = tokens(2, 99)
    asked = model.generate(ids, **options, **KIVI)
    given = LeanQuantizedCache("kivi", model.config, key_bits=8, value_bits=4)
    assert torch.equal(model.generate(ids, **options, past_key_values=given).sequences, asked.sequences)
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = {"backend": "kivi", "key_bits": 2}
    by_default = model.generate(ids, **options)
    for cache, bits in ((asked.past_key_values, (8, 4)), (given, (8, 4)), (by_default.past_key_values, (2, 4))):
        assert isinstance(cache, LeanQuantizedCache)
        assert {(layer.key_bits, layer.value_bits) for layer in cache.layers} == {bits}
        assert cache_bytes(cache) == 2 * 128 * quantized_bytes_per_token(model.config.plan, *bits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 4}, "backend 'kivi' of the quantized cache has no option 'nbits'; it has key_bits, value_bits"),
        ({"key_bits": 3}, "key_bits must be 2, 4 or 8, found 3"),
        ({"value_bits": 8.0}, "value_bits must be 2, 4 or 8, found 8.0"),
        ({"value_bits": "4"}, "value_bits must be 2, 4 or 8, found '4'"),
        (
            {"backend": "quanto", "key_bits": 4},
            "backend 'quanto' of the quantized cache has no option 'key_bits'; it has nbits",
        ),
        ({"backend": "KIVI"}, "Unknown quantization backend `KIVI`"),
    ],
)
def test_wrong_options_are_refused(options, message):
    model = LeanForCausalLM(tiny("gpt")).eval()
    with pytest.raises(ValueError) as error:
        model.generate(tokens(1, 3), cache_implementation="quantized", cache_config={"backend": "kivi", **options})
    assert str(error.value).startswith(message)
    if "backend" not in options and "nbits" not in options:
        with pytest.raises(ValueError, match="must be 2, 4 or 8"):
            quantized_bytes_per_token(model.config.plan, **options)


def test_an_option_that_is_none_is_the_default():
    layer = LeanQuantizedCache("kivi", tiny("gpt"), key_bits=None, value_bits=2).layers[0]
    assert (layer.key_bits, layer.value_bits) == (8, 2)
