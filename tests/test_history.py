"""What is read where it lies, quantized or in pages: the kernel against float64, and everything else by the tensor."""

import itertools
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from leanqkv.inference.attention import (
    one_query_attention,
    one_query_attention_to_both,
    one_query_attention_to_made,
    one_query_attention_to_pieces,
)
from leanqkv.inference.cache import QuantizedLayer
from leanqkv.inference.history import History, Places
from leanqkv.inference.step import key_maps
from leanqkv.model.cache_quantized import BLOCK
from leanqkv.model.latent_heads import LatentAndKeys
from leanqkv.model.layers import OffsetRMSNorm
from leanqkv.model.position import rotate

SCORE = 4.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, columns of different size and center."""
    generator = torch.Generator().manual_seed(seed)
    sizes, centers = torch.exp(torch.randn(2, shape[-1], generator=generator))
    return (torch.randn(shape, generator=generator) * sizes + centers).to(dtype)


def expected_of(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """Written out in float64; `seen`: [rows, 1, 1, positions]."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.double().repeat_interleave(group, dim=1) for states in (key, value))
    scores = query.double() @ key.mT * scaling
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


def assert_close(found: Tensor | None, expected: Tensor, terms: int = 64) -> None:
    """One rounding of the result; scores, of up to SCORE, and sums are of float32, or of factors of 15 bits if numbers
    have 16."""
    assert found is not None
    eps, factors = torch.finfo(found.dtype).eps, 2**-21 if found.dtype == torch.float32 else 2**-14
    bound = (eps + 2 * SCORE * factors * math.sqrt(terms)) * float(expected.abs().max())
    assert (found.double() - expected).abs().max() <= bound


def in_pages(store: Tensor, addresses: Tensor, lengths: Tensor, longest: int, make: Callable[[], Tensor]) -> History:
    """Return the history of rows whose every position is in a page, as it is.

    Args:
        store: [pages, heads, positions of a page, columns], of any strides but for the last dimension.
        addresses: of the pages of every row in `store`, [rows, most pages], int64.
        lengths: of the rows, int64. longest: the largest.
        make: returns the tensor, padded on the left.
    """
    _, heads, page, columns = store.shape
    places = Places(longest, lengths, None, lengths, page)
    _, head, position, _ = (stride * store.itemsize for stride in store.stride())
    shape, strides = (len(lengths), heads, columns), (0, head, position)
    return History(shape, places, addresses, lambda _: make(), store.dtype, strides=strides)


def scaling_of(query: Tensor, key: Tensor) -> float:
    """With which no score is above SCORE."""
    group = query.shape[1] // key.shape[1]
    return SCORE / float((query.float() @ key.float().repeat_interleave(group, dim=1).mT).abs().max())


class Filled:
    """A layer with rows of such lengths, the histories that it hands out with one new token, and what these stand for
    before it is rounded to `dtype`."""

    def __init__(self, make: Callable[[], QuantizedLayer], lengths: Sequence[int], shapes: Sequence[Any], dtype: Any):
        """shapes: heads and columns of both tensors."""
        self.layer, self.histories = self._fill(make, lengths, shapes, dtype, dtype)
        # The same numbers in float32 are the same pages.
        self.exact = [states.whole() for states in self._fill(make, lengths, shapes, dtype, torch.float32)[1]]

    @staticmethod
    def _fill(make: Any, lengths: Any, shapes: Any, drawn_as: torch.dtype, dtype: torch.dtype) -> Any:
        layers = [make() for _ in lengths]
        for row, (layer, length) in enumerate(zip(layers, lengths, strict=True)):
            layer.update(*(drawn(1, h, length, w, dtype=drawn_as, seed=row + h).to(dtype) for h, w in shapes))
        for other in layers[1:]:
            layers[0].join(other)
        new = [drawn(len(lengths), h, 1, w, dtype=drawn_as, seed=99).to(dtype) for h, w in shapes]
        return layers[0], layers[0].update(*new)


def seen_of(lengths: Sequence[int], longest: int, window: int | None = None) -> Tensor:
    """Which positions are, [rows, 1, 1, positions], of rows that are padded on the left."""
    own = torch.tensor(lengths).clamp_max(min(longest, window or longest))
    return (torch.arange(longest) >= longest - own[:, None])[:, None, None]


@every_dtype
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (2, 2), (8, 4), (2, 8)], ids=str)
@pytest.mark.parametrize("window", [None, 40, 64, 150])
@pytest.mark.parametrize("threads", [1, 3])
def test_quantized_heads_of_rows_of_different_lengths(dtype, bits, window, threads, monkeypatch, needs_compiler):
    monkeypatch.setattr("leanqkv.inference.attention.length_chunks", lambda heads, length, threads: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes = [(16, 16), (64, 64), (73, 20), (36, 131)]
    for (heads, group), widths in itertools.product([(1, 1), (2, 3), (1, 71)], sizes):
        shapes = [(heads, width) for width in widths]
        filled = Filled(lambda: QuantizedLayer(*bits, window=window), (5, 63, 64, 300), shapes, dtype)
        key, value = filled.histories
        assert isinstance(key, History) and isinstance(value, History)
        query = drawn(4, heads * group, 1, widths[0], dtype=dtype, seed=3)
        scaling = scaling_of(query, filled.exact[0])
        seen = seen_of((6, 64, 65, 301), key.shape[2], window)
        found = one_query_attention(query, key, [value], None, scaling)
        assert_close(found, expected_of(query, *filled.exact, seen, scaling), widths[0])
        # A mask has the places of the padded tensor.
        seen &= torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 0.7
        seen[..., -1] = True
        found = one_query_attention(query, key, [value], seen, scaling)
        assert_close(found, expected_of(query, *filled.exact, seen, scaling), widths[0])


@every_dtype
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (2, 2), (8, 4), (2, 8)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_several_queries_of_codes(dtype, bits, threads, monkeypatch, needs_compiler):
    """Those of a row are its last positions, some of which may be in pages; rows are of different lengths."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lengths, sizes = (21, 64, 65, 301), [(16, 16), (64, 64), (73, 20), (35, 131)]
    for (heads, group), widths, count in itertools.product([(1, 1), (2, 3)], sizes, [2, 21]):
        filled = Filled(
            lambda: QuantizedLayer(*bits), [length - 1 for length in lengths], [(heads, w) for w in widths], dtype
        )
        key, value = (states.at(replace(states.places, causal=True)) for states in filled.histories)
        # As they are projected: heads lie behind each other in a position.
        query = drawn(4, count, heads * group, widths[0], dtype=dtype, seed=3).transpose(1, 2)
        scaling, longest = scaling_of(query, filled.exact[0]), max(lengths)
        own = torch.arange(longest) <= torch.arange(longest - count, longest)[:, None]
        wanted = expected_of(query, *filled.exact, seen_of(lengths, longest) & own, scaling)
        assert_close(one_query_attention(query, key, [value], None, scaling), wanted, widths[0])
        parts = [value[:, :1], value[:, 1:]] if heads > 1 else [value]
        assert_close(one_query_attention(query, key, parts, None, scaling), wanted, widths[0])
    for states in (filled.histories, in_tails(key, 18, seed=0)):  # not said to be causal; numbers in pages
        assert one_query_attention(query, states[0], [states[0]], None, scaling) is None
    assert one_query_attention(query, key, [key], None, scaling) is None  # values by channel
    assert one_query_attention(query, key[..., :4], [value], None, scaling) is None
    assert one_query_attention(query, filled.exact[0].to(dtype), [value], None, scaling) is None
    short = value.at(replace(value.places, lengths=value.places.lengths + BLOCK, causal=True))
    with pytest.raises(ValueError, match="fewer positions than attention is to read"):
        one_query_attention(query, key.at(short.places), [short], None, scaling)


@every_dtype
def test_heads_of_several_histories_and_one_head_for_all(dtype, needs_compiler):
    """As own and borrowed values, and latents, are read."""
    key, value = Filled(lambda: QuantizedLayer(4, 8), (130, 7), [(3, 32), (3, 24)], dtype).histories
    query = drawn(2, 6, 1, 32, dtype=dtype, seed=3)
    parts = one_query_attention(query, key, [value[:, :1], value[:, 1:]], None, 0.2)
    assert torch.equal(parts, one_query_attention(query, key, [value], None, 0.2))
    few = one_query_attention(query[:, 2:], key[:, 1:], [value[:, 1:]], None, 0.2)
    assert torch.equal(few, parts[:, :, 2:])
    filled = Filled(lambda: QuantizedLayer(4, 4), (130, 70), [(1, 90), (1, 76)], dtype)
    query = drawn(2, 6, 1, 90, dtype=dtype, seed=3)
    key, value = (states.expand(-1, 3, -1, -1) for states in filled.histories)
    exact, scaling = [states.expand(-1, 3, -1, -1) for states in filled.exact], scaling_of(query, filled.exact[0])
    found = one_query_attention(query, key, [value], None, scaling)
    assert_close(found, expected_of(query, *exact, seen_of((131, 71), 131), scaling), 90)
    # One head of keys alone.
    filled = Filled(lambda: QuantizedLayer(4, 4), (130, 70), [(1, 40), (3, 16)], dtype)
    query, (key, value) = drawn(2, 6, 1, 40, dtype=dtype, seed=3), filled.histories
    scaling = scaling_of(query, filled.exact[0])
    found = one_query_attention(query, key.expand(-1, 3, -1, -1), [value], None, scaling)
    exact = [filled.exact[0].expand(-1, 3, -1, -1), filled.exact[1]]
    assert_close(found, expected_of(query, *exact, seen_of((131, 71), 131), scaling))


@every_dtype
def test_keys_in_the_place_of_values(dtype, needs_compiler):
    """They are scaled by channel, and may be the first columns of keys."""
    filled = Filled(lambda: QuantizedLayer(4, 4, ["keys"]), (130, 200), [(3, 32), (0, 32)], dtype)
    query, (key, _), (exact, _) = drawn(2, 6, 1, 32, dtype=dtype, seed=3), filled.histories, filled.exact
    scaling = scaling_of(query, exact)
    found = one_query_attention(query, key, [key[:, :3]], None, scaling)
    assert_close(found, expected_of(query, exact, exact, seen_of((131, 201), 201), scaling))
    for states, _ in ((key, None), in_tails(key, 18, seed=0)):  # and the memory of these pages
        both = states[..., :20].beside(states[..., 20:])
        assert both is not None
        found = one_query_attention(query, both, [states[..., :20]], None, scaling)
        assert_close(found, expected_of(query, exact, exact[..., :20], seen_of((131, 201), 201), scaling))
        found = one_query_attention(query, both, [states[..., 20:]], None, scaling)
        assert_close(found, expected_of(query, exact, exact[..., 20:], seen_of((131, 201), 201), scaling))


# Columns of a layer's latent and of the rotary key behind it; of a latent in another layer, the first and the number.
PIECES = {
    "MLA": (24, 8, 0, 0),
    "odd": (21, 6, 0, 0),
    "SkipV1-MLA": (16, 8, 16, 16),
    "odd and borrowed": (13, 6, 9, 11),
    "borrowed alone": (0, 8, 0, 24),
}


@every_dtype
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("pieces", PIECES)
def test_a_latent_and_a_rotary_key_in_pieces(pieces, dtype, bits, window, needs_compiler):
    """All heads read one key and one value, whose columns lie side by side and in another layer."""
    own, rope, start, borrowed = PIECES[pieces]
    make, before, lengths = lambda: QuantizedLayer(bits, bits, ["latent"], window=window), (5, 63, 300), (6, 64, 301)
    widths = [own + rope, start + borrowed] if borrowed else [own + rope]
    filled = [Filled(make, before, [(1, columns), (0, columns)], dtype) for columns in widths]

    def cut(layers: Sequence[Any]) -> list[Any]:
        """The latent's pieces, and the rotary key."""
        latent = [layers[0][..., :own]] * (own > 0) + [layer[..., start:] for layer in layers[1:]]
        return [*latent, layers[0][..., own:]]

    exact = cut([layer.exact[0] for layer in filled])
    queries = [drawn(3, 5, 1, piece.shape[-1], dtype=dtype, seed=place) for place, piece in enumerate(exact)]
    query, key, value = torch.cat(queries, -1), torch.cat(exact, -1), torch.cat(exact[:-1], -1)
    scaling, seen = scaling_of(query, key), seen_of(lengths, key.shape[2], window)
    few = seen & (torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 0.7)
    few[..., -1] = True
    histories = [layer.histories[0] for layer in filled]
    apart = [in_tails(states, 18, seed) for seed, states in enumerate(histories)]  # and the memory of these pages
    for lying in (histories, [states for states, _ in apart]):
        keys = cut(lying)
        for mask, shown in ((None, seen), (few, few)):
            found = one_query_attention_to_pieces(queries, keys, keys[:-1], mask, scaling)
            assert_close(found, expected_of(query, key, value, shown, scaling), query.shape[-1])


@every_dtype
def test_pieces_of_tensors(dtype, needs_compiler):
    """With room behind their positions, as they are allocated, and in two layers."""
    own, rope, borrowed = 12, 6, 10
    buffers = [drawn(2, 1, 90, columns, dtype=dtype, seed=columns)[:, :, :71] for columns in (own + rope, 4 + borrowed)]
    keys = [buffers[0][..., :own], buffers[1][..., 4:], buffers[0][..., own:]]
    queries = [drawn(2, 5, 1, key.shape[-1], dtype=dtype, seed=3) for key in keys]
    query, key = torch.cat(queries, -1), torch.cat(keys, -1)
    scaling, seen = scaling_of(query, key), seen_of((71, 30), 71)
    found = one_query_attention_to_pieces(queries, keys, keys[:2], seen, scaling)
    assert_close(found, expected_of(query, key, key[..., : own + borrowed], seen, scaling))
    history = Filled(lambda: QuantizedLayer(8, 8, ["latent"]), (70, 70), [(1, own), (0, own)], dtype).histories[0]
    others = {
        "a tensor and a history": ([queries[0]] * 2, [keys[0], history], keys[:1]),
        "several queries": ([query.expand(-1, -1, 2, -1) for query in queries], keys, keys[:2]),
        "another length": (queries, [keys[0], keys[1][:, :, :70], keys[2]], keys[:2]),
        "values of another length": (queries, keys, [keys[0], keys[1][:, :, :70]]),
        "another width of the query": ([*queries[:2], queries[0]], keys, keys[:2]),
        "four pieces": ([queries[0]] * 4, [keys[0].clone() for _ in range(4)], keys[:1]),
    }
    for what, given in others.items():
        assert one_query_attention_to_pieces(*given, None, 1.0) is None, what


@every_dtype
@pytest.mark.parametrize("latent_keys", [False, True])
def test_a_quantized_latent_and_keys_behind_it(dtype, latent_keys, needs_compiler):
    shapes = [(1 if latent_keys else 3, 12), (1, 20)]
    filled = Filled(lambda: QuantizedLayer(8, 4), (130, 200), shapes, dtype)
    tables = tuple(drawn(2, 201, 8, dtype=dtype, seed=seed) for seed in (5, 6))
    query, new = drawn(2, 6, 1, 12, dtype=dtype, seed=3), drawn(2, 1, 12 * shapes[0][0], dtype=dtype)
    read, both = [], []
    for key, latent, wide in ((*filled.histories, dtype), (*filled.exact, torch.float64)):
        given = [key, new, *tables] if wide == dtype else [states.double() for states in (key, new, *tables)]
        back = (given[2], given[3])
        latent = latent if wide == dtype else latent.double()
        both.append(LatentAndKeys(latent, given[0], given[1], back, (0, 1, 3, 2) if latent_keys else None))
        read.append(given[0].expand(-1, 3, -1, -1) if latent_keys else given[0])
    scaling = scaling_of(query, read[1])
    found = one_query_attention_to_both(query, read[0], both[0], None, scaling)
    joined = both[1].joined().expand(-1, 3, -1, -1)
    assert_close(found, expected_of(query, read[1], joined, seen_of((131, 201), 201), scaling))


@every_dtype
@pytest.mark.parametrize("bits", [None, (8, 8), (4, 4), (2, 2), (4, 8)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("values", ["latent", "heads", "latent and keys"])
def test_keys_that_are_made_of_a_latent_and_turned(dtype, bits, threads, values, monkeypatch, needs_compiler):
    """Of tensors, and of rows of different lengths in pages of codes and behind them, in pages again or not."""
    monkeypatch.setattr("leanqkv.inference.attention.length_chunks", lambda heads, length, threads: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lengths = (301,) * 4 if bits is None else (6, 64, 65, 301)
    for (heads, group), rank, head_dim, turned, norm in (
        ((3, 3), 20, 64, 64, None),
        ((1, 2), 9, 16, 8, torch.nn.RMSNorm(16, eps=3.0)),
        ((2, 5), 40, 12, 12, None),
        ((2, 1), 73, 66, 64, OffsetRMSNorm(66, 1.0, 1.0)),
    ):
        shapes = [(1, rank), (heads, 28) if values == "heads" else (1, 28)]
        if bits is None:
            histories = [drawn(4, h, 301, width, dtype=dtype, seed=h) for h, width in shapes]
            exact = [states.float() for states in histories]
        else:
            filled = Filled(lambda: QuantizedLayer(*bits), [length - 1 for length in lengths], shapes, dtype)
            histories, exact = filled.histories, filled.exact
        up = torch.nn.Linear(rank, heads * head_dim, bias=False)
        up.weight.data = drawn(heads * head_dim, rank, dtype=dtype, seed=7)
        tables = tuple(drawn(4, 301, turned, dtype=dtype, seed=seed) for seed in (5, 6))
        made = (exact[0][:, 0].double() @ up.weight.double().T).unflatten(-1, (heads, head_dim)).transpose(1, 2)
        if norm is not None:
            norm.weight.data = drawn(head_dim, dtype=dtype, seed=8)
            gain = norm.weight.double() + getattr(norm, "offset", 0.0)
            made = made * gain / (made.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        maps = key_maps(SimpleNamespace(k_up_proj=up, k_norm=norm, head_dim=head_dim, turns_keys=True))
        keys = rotate(made, tuple(table.double() for table in tables)).detach()
        query = drawn(4, heads * group, 1, head_dim, dtype=dtype, seed=3)
        scaling, seen = scaling_of(query, keys), seen_of(lengths, 301)
        hidden = torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 0.3
        hidden[..., -1] = False
        ways = [histories]
        if bits is not None:
            apart = [in_tails(states, 18, seed=seed) for seed, states in enumerate(histories)]  # and where they lie
            ways.append([states for states, _ in apart])
        for latent, own in ways:
            new = drawn(4, 1, rank, dtype=dtype)
            given = {
                "latent": [own.expand(-1, heads, -1, -1)],
                "heads": [own],
                "latent and keys": LatentAndKeys(own, latent, new, None),
            }[values]
            read = exact[1] if values != "latent and keys" else torch.cat((exact[1], exact[0]), -1)
            for mask in (None, ~hidden):
                found = one_query_attention_to_made(query, latent, maps, given, mask, scaling, tables)
                wanted = expected_of(
                    query, keys, read.expand(-1, heads, -1, -1), seen if mask is None else seen & mask, scaling
                )
                assert_close(found, wanted, head_dim)


@every_dtype
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_rows_in_pages(dtype, page, needs_compiler):
    """Pages of any size, anywhere in a store of many; a row's pages are in no order."""
    lengths, heads, columns = torch.tensor([5, page, 3 * page + 7]), 2, 24
    stores = [drawn(12, 3 * heads, page, columns, dtype=dtype, seed=seed)[:, heads : 2 * heads] for seed in (1, 2)]
    table = torch.tensor([[7, 0, 0, 0], [3, 0, 0, 0], [11, 2, 9, 4]])
    longest = int(lengths.max())

    def whole(store: Tensor) -> Tensor:
        rows = [store[table[row]].transpose(0, 1).flatten(1, 2)[:, :length] for row, length in enumerate(lengths)]
        return torch.stack([torch.nn.functional.pad(row, (0, 0, longest - row.shape[1], 0)) for row in rows])

    key, value = (
        in_pages(
            store,
            store.data_ptr() + table * store.stride(0) * store.itemsize,
            lengths,
            longest,
            lambda s=store: whole(s),
        )
        for store in stores
    )
    query, exact = drawn(3, 4, 1, columns, dtype=dtype, seed=3), [whole(store) for store in stores]
    seen, scaling = seen_of(lengths.tolist(), longest), scaling_of(query, exact[0])
    found = one_query_attention(query, key, [value], None, scaling)
    assert_close(found, expected_of(query, *exact, seen, scaling))
    latent = value[:, 1:2].expand(-1, 2, -1, -1)
    found = one_query_attention(query, key, [latent], None, scaling)
    assert_close(found, expected_of(query, exact[0], latent.whole(), seen, scaling))
    # Padded on the right, tables that turn keys back are those of all rows; on the left, every row has its own.
    right = [copy(states) for states in (key, value)]
    for states in right:
        states.places = replace(key.places, padded_right=True)
    tables = [drawn(1, longest, 16, dtype=dtype, seed=seed) for seed in (5, 6)]
    rows = [[table[0].roll(longest - length, 0) for length in lengths.tolist()] for table in tables]
    hidden = torch.rand(3, 1, 1, longest, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden_right = torch.stack([row.roll(int(n) - longest, -1) for row, n in zip(hidden, lengths, strict=True)])
    new, found = drawn(3, 1, 2 * columns, dtype=dtype), []
    for (k, v), back, mask in (((key, value), map(torch.stack, rows), hidden), (right, tables, hidden_right)):
        both = LatentAndKeys(v[:, :1], k, new, tuple(back))
        found.append(one_query_attention_to_both(query, k, both, ~mask, scaling))
    assert found[0] is not None and torch.equal(*found)
    # Keys and values that are columns of the same head.
    both = key[..., 1:9].beside(key[..., 9:19])
    assert both is not None and torch.equal(both.whole(), exact[0][..., 1:19]) and key.beside(key) is None
    found = one_query_attention(query[..., 1:19], both, [both[..., 3:]], None, scaling)
    assert_close(found, expected_of(query[..., 1:19], both.whole(), exact[0][..., 4:19], seen, scaling))


@every_dtype
@pytest.mark.parametrize("tail", [7, 18, 40])
def test_numbers_behind_codes_in_pages_too(dtype, tail, needs_compiler):
    """What lies behind the codes of a row is cut into pieces that lie anywhere, between those of other tensors."""
    before, lengths = (5, 62, 63 + 64, 300), (6, 63, 64 + 64, 301)
    for (heads, group), widths, bits in (
        ((2, 3), (24, 40), (4, 4)),
        ((1, 1), (73, 20), (8, 4)),
        ((3, 9), (16, 16), (2, 8)),
    ):
        filled = Filled(lambda b=bits: QuantizedLayer(*b), before, [(heads, width) for width in widths], dtype)
        apart = [in_tails(states, tail, seed=seed) for seed, states in enumerate(filled.histories)]
        query = drawn(4, heads * group, 1, widths[0], dtype=dtype, seed=3)
        seen, scaling = seen_of(lengths, max(lengths)), scaling_of(query, filled.exact[0])
        key, value = (states for states, _ in apart)
        found = one_query_attention(query, key, [value[:, :1], value[:, 1:]] if heads > 1 else [value], None, scaling)
        assert_close(found, expected_of(query, *filled.exact, seen, scaling), widths[0])
        if heads == 1:  # one head for all
            query, key, value = drawn(4, 6, 1, widths[0], dtype=dtype, seed=3), key.expand(-1, 2, -1, -1), value
            exact = [states.expand(-1, 2, -1, -1) for states in filled.exact]
            scaling = scaling_of(query, exact[0])
            found = one_query_attention(query, key, [value.expand(-1, 2, -1, -1)], None, scaling)
            assert_close(found, expected_of(query, *exact, seen, scaling), widths[0])


def in_tails(states: History, tail: int, seed: int) -> tuple[History, Tensor]:
    """The same history whose numbers lie in pages of `tail` positions in a store of many, and the store. Its pages of
    codes begin with something else."""
    newest, columns = states.newest, states.shape[3]
    assert newest is not None
    rows, heads, places, _ = newest.shape
    count = -(-places // tail)
    store = newest.new_full((3 * rows * count, 3 * heads, tail, columns), torch.nan)
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(seed))[: rows * count].view(rows, count)
    for place in range(places):
        store[order[:, place // tail], heads : 2 * heads, place % tail] = newest[:, :, place]
    page, head, position, _ = (stride * store.itemsize for stride in store.stride())
    apart = copy(states)
    apart.newest, apart.tails = None, (store.data_ptr() + order * page, (heads * head, head, position))
    apart.table, apart.strides = states.table - 64, (64, 0, 0)
    apart.places, apart.sources = replace(states.places, tail=tail), {}
    return apart, store


def test_nothing_is_read_beyond_a_table(needs_compiler):
    """Of pages as they are and of codes, and of what lies behind these: one position or page too few, or none there."""
    filled = Filled(lambda: QuantizedLayer(4, 4), (130, 7), [(2, 16), (2, 16)], torch.float32)
    tails, store = in_tails(filled.histories[0], 18, seed=0)
    plain, lengths = torch.zeros(9, 2, 16, 16), torch.tensor([33, 16])
    addresses = plain.data_ptr() + torch.tensor([[3, 1, 2], [4, 0, 0]]) * plain.stride(0) * 4
    pages = in_pages(plain, addresses, lengths, 33, lambda: torch.zeros(2, 2, 33, 16))
    query = drawn(2, 2, 1, 16, dtype=torch.float32)

    def changed(states: History, places: dict | None = None, **fields: Any) -> History:
        other = copy(states)
        other.places, other.sources = replace(states.places, **(places or {})), {}
        other.__dict__.update(fields)
        return other

    codes, longer = filled.histories[0], lambda states, by: states.places.lengths + torch.tensor(by)
    gone = codes.table.clone()
    gone[0, 1] = 0
    for right, wrong in {
        pages: [
            changed(pages, {"lengths": longer(pages, [16, 0]), "paged": longer(pages, [16, 0])}),
            changed(pages, {"lengths": longer(pages, [0, 1])}),
            changed(pages, {"paged": longer(pages, [1, 0])}),
            changed(pages, table=addresses[:, :2].contiguous()),
        ],
        codes: [
            changed(codes, table=gone),
            changed(codes, table=codes.table[:, :1].contiguous()),
            changed(codes, {"lengths": longer(codes, [0, 57])}),
            changed(codes, {"paged": codes.places.paged - 200}),
        ],
        tails: [
            changed(tails, tails=(tails.tails[0][:, :0], tails.tails[1])),
            changed(tails, {"lengths": longer(tails, [70, 0])}),
        ],
    }.items():
        assert one_query_attention(query, right, [right], None, 0.2) is not None
        for states in wrong:
            with pytest.raises(ValueError, match="2 sequences holds fewer positions"):
                one_query_attention(query, states, [states], None, 0.2)
    assert len(store)  # which the tails' addresses name


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["keys", "values", "query"])
def test_what_is_not_finite_is_seen(wrong, where, needs_compiler):
    layer = QuantizedLayer(8, 8)
    given = {name: drawn(1, 1, n, 8, dtype=torch.float32) for name, n in (("keys", 70), ("values", 70), ("query", 1))}
    given[where][0, 0, -1 if where == "query" else 3, 2] = wrong
    layer.update(given["keys"], given["values"])
    key, value = layer.update(*[drawn(1, 1, 1, 8, dtype=torch.float32, seed=4)] * 2)
    found = one_query_attention(given["query"], key, [value], None, 0.1)
    assert not found.isfinite().all()


def test_anything_else_is_done_with_the_tensor():
    key, _ = Filled(lambda: QuantizedLayer(8, 8), (70, 3), [(2, 8), (2, 8)], torch.float32).histories
    whole = key.whole()
    assert key.shape == whole.shape == (2, 2, 71, 8) and len(key) == 2
    for do in (
        lambda states: states[:, 0],
        lambda states: states[..., 4:],
        lambda states: states[:, :1],
        lambda states: states[:, :1].expand(-1, 5, -1, -1),
        lambda states: states.transpose(1, 2).flatten(2),
        lambda states: torch.cat((states, states), dim=1),
        lambda states: torch.einsum("bhtd,bhsd->bhts", states, states),
        lambda states: torch.ones(8) * states,
        lambda states: states.double(),
    ):
        found: Any = do(key)
        assert torch.equal(found.whole() if isinstance(found, History) else found, do(whole))


def test_one_tensor_and_one_history_are_left_to_pytorch(needs_compiler):
    key, value = Filled(lambda: QuantizedLayer(8, 8), (70,), [(2, 8), (2, 8)], torch.float32).histories
    query = torch.randn(1, 2, 1, 8)
    assert one_query_attention(query, key, [value.whole()], None, 1.0) is None
    assert one_query_attention(query, key.whole(), [value.whole()], None, 1.0) is not None


def test_rows_come_and_go():
    """Joined, selected and grown over the end of a block, each row is as it is alone."""
    shapes, lengths = [(2, 8), (1, 12)], (60, 130, 64)

    def layer(row: int) -> QuantizedLayer:
        made = QuantizedLayer(4, 2, window=100)
        made.update(*(drawn(1, h, lengths[row], w, dtype=torch.float32, seed=row) for h, w in shapes))
        return made

    together, alone = layer(0), [layer(row) for row in range(3)]
    together.join(layer(1))
    together.join(layer(2))
    rows = [0, 1, 2]
    for step in range(140):
        if step == 20:
            rows = [2, 0]
            together.batch_select_indices(torch.tensor(rows))
        new = [drawn(3, h, 1, w, dtype=torch.float32, seed=100 + step) for h, w in shapes]
        found = together.update(*(states[rows] for states in new))
        for place, row in enumerate(rows):
            expected = alone[row].update(*(states[row : row + 1] for states in new))
            for states, own in zip(found, expected, strict=True):
                length = min(own.shape[2], states.shape[2])
                assert torch.equal(states.whole()[place, :, -length:], own.whole()[0, :, -length:])
    assert max(len(pages) for pages in together.paged[0].pages) <= 2, "pages behind the window are dropped"
