"""Memory that tensors hold, by counting storages: the same on every device, and to the byte."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once and whole."""
    storages = {}
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is None:
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _storage(tensor: Tensor) -> Any:
    """None for an opaque layout, such as that of a packed weight, which has a size and no storage."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    return held_bytes((*model.parameters(), *model.buffers()))


class PeakMemory(TorchDispatchMode):
    """Inside it, `peak` is the most bytes that tensors made since its start held at one time.

    Counted by the storages that operators return, from when they appear to when they are freed; what a kernel takes for
    itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {self._key(tensor) for tensor in tree_leaves((args, kwargs or {})) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := self._key(tensor)) not in before and key not in self._seen:
                self._follow(tensor, key)
        self.peak = max(self.peak, self.now)
        return result

    @staticmethod
    def _key(tensor: Tensor) -> int:
        storage = _storage(tensor)
        return id(tensor) if storage is None else storage._cdata

    def _follow(self, tensor: Tensor, key: int) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        size = storage.nbytes()
        if not size:
            return
        self.now += size

        def freed() -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.finalize(storage, freed)
