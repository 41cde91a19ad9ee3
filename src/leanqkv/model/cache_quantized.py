"""Caches in 8, 4 or 2 bits. KIVI: keys per channel, values per token, in blocks of tokens that are quantized once.

KIVI (Liu et al. 2024, https://arxiv.org/abs/2402.02750, section 3): some channels of the keys are far larger than the
others, those of the values are not, so each is scaled along the dimension in which its sizes are alike. The newest
tokens, fewer than a block, stay in the model's precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache, QuantoQuantizedLayer

# The backend of a quantized cache that is made here, and what its `cache_config` may hold.
KIVI, KIVI_OPTIONS = "kivi", ("key_bits", "value_bits")

BITS = (2, 4, 8)
# Tokens of a block.
BLOCK = 64
# Columns of a value that share a scale, at most.
COLUMNS = 64
# Of scales and offsets: the range of float32 in two bytes.
SCALE_DTYPE = torch.bfloat16

# Codes, scales and offsets; nothing while no block is whole.
Quantized = tuple[Tensor, ...]


class LeanQuantizedCache(QuantizedCache):
    """A quantized cache for the tensors of the plan: `LeanQuantizedCache("kivi", config, key_bits=8, value_bits=4)`.

    `generate(cache_implementation="quantized", cache_config={"backend": "kivi", "key_bits": 8})` makes one.
    """

    def __init__(self, backend: str, config, **options: Any):
        """Make the layers.

        Args:
            backend, options: "kivi" with key_bits and value_bits (see `KiviLayer`), which needs no further package; or
                as transformers' QuantizedCache takes them, which names the package that a missing backend needs.

        Raises:
            ValueError: some layers keep a sliding window; or an unknown option.
        """
        refuse_windows(config.plan)
        # transformers' own take `self`, a backend and a configuration first.
        valid = KIVI_OPTIONS if backend == KIVI else tuple(signature(QuantizedCache.__init__).parameters)[3:]
        if unknown := [name for name in options if name not in valid]:
            raise ValueError(
                f"backend {backend!r} of the quantized cache has no option {unknown[0]!r}; it has {', '.join(valid)}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if backend == KIVI:
            Cache.__init__(self, layers=kivi_layers(config.plan, **given))  # type: ignore[arg-type]
            return
        whole: Any = PreTrainedConfig(num_hidden_layers=config.num_hidden_layers)  # type: ignore[call-arg]
        super().__init__(backend, whole, **options)
        self.layers = [_quantized_layer(type(layer), given) for layer in self.layers]


def _quantized_layer(kind: type, options: dict[str, Any]) -> Any:
    """A layer of transformers' class `kind` whose keys or values may be tensors without heads."""

    class Layer(kind):
        # The backends take no empty tensors.
        def _quantize(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super()._quantize(tensor, *args, **kwargs) if tensor.numel() else (tensor, None)

        def _dequantize(self, quantized: Any) -> Tensor:
            is_empty = isinstance(quantized, tuple) and not quantized[0].numel()
            return quantized[0] if is_empty else super()._dequantize(quantized)

    class WholeGroups(Layer):
        # Quanto refuses numbers that do not fill its groups: the last ones are repeated until they do.
        def _quantize(self, tensor: Tensor, axis: int) -> Any:
            if not tensor.numel():
                return super()._quantize(tensor, axis)
            rows = tensor.flatten(0, -2) if axis == -1 else tensor.flatten(1).T
            missing = -len(rows) % self.q_group_size
            rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
            return super()._quantize((rows if axis == -1 else rows.T).contiguous(), axis), tensor.shape, axis

        def _dequantize(self, quantized: Any) -> Tensor:
            if len(quantized) == 2:
                return super()._dequantize(quantized)
            whole, shape, axis = quantized
            rows = super()._dequantize(whole)
            if axis == -1:
                return rows[: shape[:-1].numel()].view(shape)
            return rows[:, : shape[1:].numel()].reshape(shape)

    return (WholeGroups if issubclass(kind, QuantoQuantizedLayer) else Layer)(**options)


@dataclass(frozen=True)
class PerChannel:
    """Codes [batch, heads, blocks, BLOCK * bits / 8, columns], scales and offsets of every block and column."""

    bits: int

    def quantize(self, states: Tensor) -> Quantized:
        """Quantize whole blocks of tokens [batch, heads, tokens, columns]."""
        return _quantize(states.unflatten(2, (-1, BLOCK)), self.bits, 3)

    def dequantize(self, quantized: Quantized, like: Tensor) -> Tensor:
        """Return the quantized tokens [batch, heads, tokens, columns] in the columns and the precision of `like`."""
        return _dequantize(quantized, self.bits, 3, like.dtype).flatten(2, 3)

    def bytes_per_token(self, heads: int, columns: int) -> float:
        """Return the bytes of a token in whole blocks."""
        return heads * columns * (self.bits / 8 + 2 * SCALE_DTYPE.itemsize / BLOCK)


@dataclass(frozen=True)
class PerToken:
    """Codes [batch, heads, tokens, groups, width * bits / 8], scales and offsets of every token and group."""

    bits: int

    def quantize(self, states: Tensor) -> Quantized:
        """Quantize tokens [batch, heads, tokens, columns]."""
        groups, width = self._groups(states.shape[-1])
        missing = groups * width - states.shape[-1]
        # Repeating a column leaves the range of its group as it is.
        padded = torch.cat((states, states[..., -1:].expand(*states.shape[:-1], missing)), -1)
        return _quantize(padded.unflatten(-1, (groups, width)), self.bits, 4)

    def dequantize(self, quantized: Quantized, like: Tensor) -> Tensor:
        """Return the quantized tokens [batch, heads, tokens, columns] in the columns and the precision of `like`."""
        return _dequantize(quantized, self.bits, 4, like.dtype).flatten(-2)[..., : like.shape[-1]]

    def bytes_per_token(self, heads: int, columns: int) -> float:
        """Return the bytes of a token in whole blocks."""
        groups, width = self._groups(columns)
        return heads * groups * (width * self.bits / 8 + 2 * SCALE_DTYPE.itemsize)

    @staticmethod
    def _groups(columns: int) -> tuple[int, int]:
        """How many groups of how many columns share a scale; their codes fill whole bytes."""
        groups = ceil(columns / COLUMNS)
        return groups, ceil(columns / groups / 4) * 4


def quantizer(name: str, key_bits: int, value_bits: int) -> PerChannel | PerToken:
    """Return the layout of a cached tensor by its name in the plan. MLA's latent, which holds keys too, is treated as
    keys are."""
    return PerToken(value_bits) if name == "values" else PerChannel(key_bits)


class KiviLayer(DynamicLayer):
    """One layer's keys and values. `update` returns them whole, dequantized in the model's precision.

    A block is quantized at the end of the call that fills it: the tokens of that call still see it unquantized.

    Args:
        key_bits, value_bits: 2, 4 or 8.
        cached: the names of the tensors that `update` is given, in their order. Where it is one name, the second
            tensor has no heads.

    Attributes:
        keys, values: the newest tokens, not quantized, [batch, heads, fewer than BLOCK, columns].

    Raises:
        ValueError: other bits.
    """

    is_croppable = False

    def __init__(self, key_bits: int = 8, value_bits: int = 4, cached: Sequence[str] = ("keys", "values")):
        super().__init__()
        check_bits(key_bits, value_bits)
        self.key_bits, self.value_bits, self.cached = key_bits, value_bits, tuple(cached)
        self.cumulative_length = 0
        self._quantized_keys: Quantized = ()
        self._quantized_values: Quantized = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, columns, precision and device of the first tokens."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens, and return all: [batch, heads, tokens, columns]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        first, *others = (quantizer(name, self.key_bits, self.value_bits) for name in self.cached)
        second = others[0] if others else first
        keys, self._quantized_keys, self.keys = _append(first, self._quantized_keys, self.keys, key_states)
        values, self._quantized_values, self.values = _append(second, self._quantized_values, self.values, value_states)
        self.cumulative_length += key_states.shape[2]
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take out quantized tokens, as speculative decoding does."""
        raise ValueError("a quantized cache cannot be cropped, as assisted decoding does; use the default cache")

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0
        self._quantized_keys = self._quantized_values = ()

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


def kivi_layers(plan, key_bits: int = 8, value_bits: int = 4) -> list[KiviLayer]:
    """Return a cache layer for every layer of the plan."""
    return [KiviLayer(key_bits, value_bits, [tensor.name for tensor in layer.cached]) for layer in plan.layers]


def quantized_bytes_per_token(plan, key_bits: int = 8, value_bits: int = 4) -> float:
    """Return the bytes of a KIVI cache for one token of one sequence, over all layers, in whole blocks of tokens.

    Scales and offsets are included. The newest tokens, up to BLOCK - 1, take the bytes of the model's precision.

    Raises:
        ValueError: other bits, or a layer that keeps a sliding window.
    """
    refuse_windows(plan)
    check_bits(key_bits, value_bits)
    return sum(
        quantizer(tensor.name, key_bits, value_bits).bytes_per_token(tensor.num_heads, tensor.head_dim)
        for layer in plan.layers
        for tensor in layer.cached
    )


def check_bits(key_bits: Any, value_bits: Any) -> None:
    """Refuse numbers of bits that whole bytes are not made of."""
    for name, bits in (("key_bits", key_bits), ("value_bits", value_bits)):
        if type(bits) is not int or bits not in BITS:
            raise ValueError(f"{name} must be 2, 4 or 8, found {bits!r}")


def refuse_windows(plan) -> None:
    """Refuse a sliding window: what leaves it cannot be taken out of quantized tensors."""
    windowed = next((layer for layer in plan.layers if layer.window is not None), None)
    if windowed is not None:
        raise ValueError(
            f"a quantized cache keeps all positions, but layer {windowed.layer} keeps a sliding window of "
            f"{windowed.window}; use the default cache"
        )


def _append(
    layout: PerChannel | PerToken, quantized: Quantized, kept: Tensor, new: Tensor
) -> tuple[Tensor, Quantized, Tensor]:
    """Append tokens: the whole history, and the quantized and the unquantized part to keep of it."""
    newest = torch.cat((kept, new), 2)
    history = torch.cat((layout.dequantize(quantized, newest), newest), 2) if quantized else newest
    # A tensor without heads takes no memory, and has no largest entry.
    whole = newest.shape[2] // BLOCK * BLOCK if newest.numel() else 0
    if whole:
        blocks = layout.quantize(newest[:, :, :whole])
        quantized = tuple(torch.cat(pair, 2) for pair in zip(quantized, blocks, strict=True)) if quantized else blocks
    # A view would keep the whole prompt.
    return history, quantized, newest[:, :, whole:].clone()


@torch.no_grad()
def _quantize(states: Tensor, bits: int, dim: int) -> Quantized:
    """Codes, packed along `dim`, the scale and the offset of all entries along it.

    The offset is rounded down and the scale up, so no entry lies outside the codes, and none is off by more than half
    a scale. Where an entry is not finite, no entry that shares its scale will be.
    """
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    low, high = _rounded(states.amin(dim, keepdim=True), -torch.inf), states.amax(dim, keepdim=True)
    scale = _rounded((high - low) / (2**bits - 1), torch.inf)
    codes = (states - low) / torch.where(scale > 0, scale, 1)
    # What a conversion to integers makes of NaN is undefined.
    codes = codes.round().nan_to_num(0).to(torch.uint8).unflatten(dim, (-1, 8 // bits))
    packed: Any = sum(codes.select(dim + 1, place) << (bits * place) for place in range(8 // bits))
    return packed, scale, low


def _rounded(exact: Tensor, direction: float) -> Tensor:
    """Round to SCALE_DTYPE, towards plus or minus infinity."""
    near = exact.to(SCALE_DTYPE)
    passed = near >= exact if direction > 0 else near <= exact
    return torch.where(passed | exact.isnan(), near, near.nextafter(near.new_tensor(direction)))


def _dequantize(quantized: Quantized, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    packed, scale, low = quantized
    parts = [packed >> (bits * place) & (2**bits - 1) for place in range(8 // bits)]
    codes = torch.stack(parts, dim + 1).flatten(dim, dim + 1)
    states = codes.to(torch.promote_types(dtype, torch.float32)).mul_(scale).add_(low)
    if dtype == torch.float16:  # of which the largest entries are less than half a scale from infinity
        limit = torch.finfo(dtype).max
        states = states.clamp_(-limit, limit)
    return states.to(dtype)
