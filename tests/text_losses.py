"""Losses over every token of a text."""

from typing import Any

from torch import Tensor, nn

from leanqkv.data.token_files import Tokens
from leanqkv.evaluate.strided import strided_windows, window_losses


def strided_losses(model: nn.Module, tokens: Tokens, *, context_length: int, stride: int, **how: Any) -> Tensor:
    """Return the losses of every token but the first."""
    windows = strided_windows(len(tokens), context_length, stride)
    return window_losses(model, tokens, windows, min(context_length, len(tokens) - 1), **how)[0]
