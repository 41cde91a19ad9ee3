"""Where the tensors that a plan caches lie in vLLM's pages.

A page holds what all layers of a group keep of `block_size` tokens, one tensor after another; so its size is that of
the plan to the byte, unless vLLM fills it up to that of another group. Layers that borrow from each other share a block
table. Layers with the same sliding window are a group, since vLLM gives back their pages behind the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from leanqkv.model.layout import LayerPlan
from leanqkv.model.plan import Plan


@dataclass(frozen=True)
class Slot:
    """A tensor that a layer caches: `heads * columns` numbers of a token, behind `offset` others."""

    layer: int
    name: str
    heads: int
    columns: int
    offset: int

    def view(self, pages: Tensor, block_size: int, start: int | None = None) -> Tensor:
        """Return this tensor in all pages, [pages, heads, block_size, columns], of pages [pages, numbers].

        start: numbers of a page before it, by default those of the tensors before it."""
        size = (len(pages), self.heads, block_size, self.columns)
        strides = (pages.stride(0), block_size * self.columns, self.columns, 1)
        start = self.offset * block_size if start is None else start
        return pages.as_strided(size, strides, pages.storage_offset() + start)


@dataclass(frozen=True)
class Group:
    """Layers whose tensors share pages.

    Attributes:
        window: positions that all of them attend to; None: all.
        slots: in the order of a page.
    """

    window: int | None
    layers: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def numbers_per_token(self) -> int:
        """Numbers, not bytes, that a token takes."""
        return sum(slot.heads * slot.columns for slot in self.slots)


def make_groups(plan: Plan, together: bool = False) -> list[Group]:
    """Return the groups of a plan's layers that cache something.

    All layers are one group that keeps every token if `together`, or where one borrows from one with another window.
    """
    windows = [layer.window for layer in plan.layers]
    together |= any(windows[lender] != layer.window for layer in plan.layers for lender in layer.lenders)
    kept = {layer.layer: None if together else layer.window for layer in plan.layers if layer.cached}
    return [
        _group(window, [plan.layers[number] for number in kept if kept[number] == window])
        for window in dict.fromkeys(kept.values())
    ]


def _group(window: int | None, layers: Sequence[LayerPlan]) -> Group:
    slots, offset = [], 0
    for layer in layers:
        for tensor in layer.cached:
            slots.append(Slot(layer.layer, tensor.name, tensor.num_heads, tensor.head_dim, offset))
            offset += tensor.elements
    return Group(window, tuple(layer.layer for layer in layers), tuple(slots))
