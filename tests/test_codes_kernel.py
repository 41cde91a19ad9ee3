"""Codes by the kernel: those of `PageLayout.quantize`, bit by bit, whatever the shape and wherever the states lie."""

import pytest
import torch

from leanqkv.inference import codes
from leanqkv.inference.codes import quantize
from leanqkv.model.cache_quantized import BITS, BLOCK, PageLayout

pytestmark = pytest.mark.skipif(codes._library() is None, reason="there is no compiler")

# Columns of a head; up to 576, of which codes by token have several groups, the last one smaller than the others.
COLUMNS = (1, 3, 13, 16, 64, 100, 128, 162, 576)


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch):
    """The layout's own code is called by the test alone."""
    plain = PageLayout.quantize
    monkeypatch.setattr(PageLayout, "quantize", None)
    return plain


def drawn(dtype: torch.dtype, batch: int, heads: int, blocks: int, columns: int) -> torch.Tensor:
    """States [batch, heads, tokens, columns] that lie token by token, of columns of very different sizes, some of one
    number alone, or of zeros, and with the numbers that are rounded to the largest scales."""
    torch.manual_seed(0)
    states = torch.randn(batch, blocks * BLOCK, heads, columns) * 10 ** torch.linspace(-6, 4, columns)
    states[0, 3] = 0.0
    states[:, :, 0, 0] = -0.3
    states[-1, 7, -1, -1] = torch.finfo(dtype).max
    return states.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_layout(dtype, bits, per_token, columns, by_kernel):
    for batch, heads, blocks in ((1, 1, 1), (2, 3, 2)):
        layout = PageLayout(bits, heads, columns, per_token)
        states = drawn(dtype, batch, heads, blocks, columns)
        assert quantize(layout, states).equal(by_kernel(layout, states))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_nothing_of_its_scale_finite(wrong, per_token, by_kernel):
    layout, states = PageLayout(4, 2, 24, per_token), drawn(torch.float32, 1, 2, 1, 24)
    states[0, 1, 9, 5] = wrong
    found = layout.dequantize(quantize(layout, states), torch.float32)
    expected = layout.dequantize(by_kernel(layout, states), torch.float32)
    assert found.isfinite().equal(expected.isfinite()) and not found.isfinite().all()
    assert found[expected.isfinite()].equal(expected[expected.isfinite()])


def test_what_the_kernel_does_not_take_is_left_to_the_layout(by_kernel, monkeypatch):
    monkeypatch.setattr(PageLayout, "quantize", by_kernel)
    layout, states = PageLayout(4, 2, 24, per_token=True), drawn(torch.float32, 1, 2, 1, 24)
    columns_apart = states.transpose(2, 3).contiguous().transpose(2, 3)
    for given in (states.double(), columns_apart, states[:0]):
        assert quantize(layout, given).equal(by_kernel(layout, given))


def test_threads_make_the_same_codes():
    layout, states = PageLayout(4, 3, 64, per_token=False), drawn(torch.bfloat16, 5, 3, 4, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(quantize(layout, states))
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1]) and found[0].equal(found[2])
