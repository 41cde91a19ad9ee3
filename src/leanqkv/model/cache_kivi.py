"""A cache layer in 8, 4 or 2 bits: keys per channel, values per token, in blocks of tokens that are quantized once.

KIVI (Liu et al. 2024, https://arxiv.org/abs/2402.02750, section 3): keys have channels that are far larger than the
others, values have not, so each is scaled along the dimension in which its sizes are alike. The newest tokens, fewer
than a block, stay in the model's precision.
"""

from math import ceil

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

BITS = (2, 4, 8)
# Of tokens a block; of columns that share a scale in a value, at most.
BLOCK = COLUMNS = 64
# Of scales and offsets: the range of float32, and codes are made for the rounded ones.
SCALE_DTYPE = torch.bfloat16


class KiviLayer(DynamicLayer):
    """One layer's keys and values. `update` returns them whole, dequantized in the model's precision.

    Args:
        key_bits, value_bits: 2, 4 or 8.

    Attributes:
        keys, values: the newest tokens, not quantized, [batch, heads, fewer than BLOCK, columns].

    Raises:
        ValueError: other bits.
    """

    def __init__(self, key_bits: int = 8, value_bits: int = 4):
        super().__init__()
        for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
            if bits not in BITS:
                raise ValueError(f"{name} must be one of {BITS}, found {bits}")
        self.key_bits, self.value_bits = key_bits, value_bits
        self.cumulative_length = 0
        self._quantized_keys: tuple[Tensor, ...] = ()
        self._quantized_values: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens, and return all: [batch, heads, tokens, columns]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        assert self.keys is not None and self.values is not None
        newest = torch.cat((self.keys, key_states), 2), torch.cat((self.values, value_states), 2)
        quantized = self.cumulative_length - self.keys.shape[2]
        old_keys = _all_keys(self._quantized_keys, newest[0], quantized)
        old_values = _all_values(self._quantized_values, newest[1], quantized)
        histories = torch.cat((old_keys, newest[0]), 2), torch.cat((old_values, newest[1]), 2)
        self.cumulative_length += key_states.shape[2]
        whole = newest[0].shape[2] // BLOCK * BLOCK
        if whole:
            keys, values = (states[:, :, :whole] for states in newest)
            self._quantized_keys = _append(self._quantized_keys, _quantize_keys(keys, self.key_bits))
            self._quantized_values = _append(self._quantized_values, _quantize_values(values, self.value_bits))
        # A view would keep the whole prompt.
        self.keys, self.values = (states[:, :, whole:].clone() for states in newest)
        return histories

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take out quantized tokens, as speculative decoding does."""
        raise ValueError("a quantized cache cannot be cropped, as assisted decoding does; use the default cache")

    def reset(self) -> None:
        """Forget all tokens."""
        self.__init__(self.key_bits, self.value_bits)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of the batch in this order, as beam search does."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def _map(self, change) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self._quantized_keys = tuple(map(change, self._quantized_keys))
            self._quantized_values = tuple(map(change, self._quantized_values))


def _append(quantized: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Codes, scales and offsets with those of further tokens."""
    return tuple(torch.cat(pair, 2) for pair in zip(quantized, new, strict=True)) if quantized else new


def _quantize_keys(keys: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Codes [batch, heads, blocks, BLOCK * bits / 8, columns], scales and offsets [batch, heads, blocks, 1, columns].

    Nothing of a tensor without entries, which is what a layer has that borrows its keys or its values.
    """
    if not keys.numel():
        return ()
    return _quantize(keys.unflatten(2, (-1, BLOCK)), bits, 3)


def _all_keys(quantized: tuple[Tensor, ...], like: Tensor, tokens: int) -> Tensor:
    if not quantized:
        return like.new_empty(*like.shape[:2], tokens, like.shape[3])
    return _dequantize(quantized, BLOCK, 3).flatten(2, 3).to(like.dtype)


def _quantize_values(values: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Codes [batch, heads, tokens, groups, width * bits / 8], scales and offsets [batch, heads, tokens, groups, 1]."""
    if not values.numel():
        return ()
    groups, width = _groups(values.shape[-1])
    missing = groups * width - values.shape[-1]
    padded = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], missing)), -1)
    return _quantize(padded.unflatten(-1, (groups, width)), bits, 4)


def _all_values(quantized: tuple[Tensor, ...], like: Tensor, tokens: int) -> Tensor:
    if not quantized:
        return like.new_empty(*like.shape[:2], tokens, like.shape[3])
    _, width = _groups(like.shape[-1])
    return _dequantize(quantized, width, 4).flatten(-2)[..., : like.shape[-1]].to(like.dtype)


def _groups(columns: int) -> tuple[int, int]:
    """How many groups of how many columns share a scale; their codes fill whole bytes."""
    groups = ceil(columns / COLUMNS)
    return groups, ceil(columns / groups / 4) * 4


def _quantize(states: Tensor, bits: int, dim: int) -> tuple[Tensor, ...]:
    """Codes, packed along `dim`, the scale and the offset of all entries along it."""
    low, high = states.amin(dim, keepdim=True), states.amax(dim, keepdim=True)
    low = low.to(SCALE_DTYPE)
    scale = ((high - low) / (2**bits - 1)).to(SCALE_DTYPE)
    codes = (states - low) / torch.where(scale > 0, scale, 1).to(states.dtype)
    codes = codes.round().clamp(0, 2**bits - 1).to(torch.uint8).unflatten(dim, (-1, 8 // bits))
    packed = sum(codes.select(dim + 1, place) << (bits * place) for place in range(8 // bits))
    return packed, scale, low


def _dequantize(quantized: tuple[Tensor, ...], length: int, dim: int) -> Tensor:
    packed, scale, low = quantized
    bits = 8 * packed.shape[dim] // length
    parts = [packed >> (bits * place) & (2**bits - 1) for place in range(8 // bits)]
    codes = torch.stack(parts, dim + 1).flatten(dim, dim + 1)
    return codes.float() * scale.float() + low.float()
