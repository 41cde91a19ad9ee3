"""Memory that tensors hold, by counting storages: the same on every device, and to the byte."""

import weakref
from typing import Any

import torch
from torch import Tensor

# Documented in PyTorch's notes on extending it, whatever the name of the module says.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .cache_bits import PLAIN, CacheBits
from .environment import free_memory
from .errors import LeanError


def check_cache(model: Any, batch_size: int, tokens: int, options: str, bits: CacheBits = PLAIN) -> None:
    """Check that a KV cache for a batch of sequences of `tokens` fits in the free memory of the model's device.

    bits: of the cache.

    Raises:
        LeanError: it does not; `options` are those of the command line that can be smaller.
    """
    parameter = next(model.parameters())
    needed = batch_size * bits.kv_bytes(model.config.plan, tokens, parameter.dtype)
    if needed > (free := free_memory(parameter.device.type)):
        raise LeanError(
            f"a KV cache for {tokens:,} tokens of {batch_size:,} sequence{'s' * (batch_size > 1)} takes "
            f"{needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free; choose smaller {options}"
        )


class PeakMemory(TorchDispatchMode):
    """Inside it, `peak` is the most bytes that tensors made since its start held at one time.

    Counted by the storages that operators return, from when they appear to when they are freed; what a kernel takes for
    itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _storages((args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            if key not in before and key not in self._live:
                self._live.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


def _storages(values: Any) -> dict[int, Any]:
    """Return the storages behind the tensors in nested sequences and dictionaries, by their identity."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    # Tensors of another layout have no storage that could be seen.
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {id(storage): storage for storage in storages}
