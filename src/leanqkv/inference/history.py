"""What stands for a cached tensor that is read where it lies.

Attention of one query by the kernel (attention.cpp) takes it as it is; whatever else is done with it is done with the
tensor that it stands for, which is made then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..model.cache_quantized import PageLayout


@dataclass(frozen=True, eq=False)
class Places:
    """Which positions the rows of a batch hold, and where; for all tensors of a layer.

    Attributes:
        longest: positions that are seen of the longest row; shorter ones are padded.
        lengths, firsts, paged: of every row, int64: positions held, the first that is seen, and how many are in pages.
        page, tail: positions of a page, and of a page behind those of codes.
        padded_right: whether the tensor, a mask and what turns keys back are padded on the right, or on the left.
        causal: whether several queries are the rows' last positions, and each sees all up to its own.
    """

    longest: int
    lengths: Tensor
    firsts: Tensor | None
    paged: Tensor
    page: int
    padded_right: bool = False
    tail: int = 0
    causal: bool = False


class History:
    """Heads of a cached tensor, [rows, heads, positions, columns], in pages and behind them.

    Attributes:
        table: addresses of the pages, [rows, pages], int64.
        newest: what lies behind the pages, [rows, heads, places, columns]; None: nothing does.
        layout: of pages of codes; None: a page holds heads as they are.
        strides: bytes from an address to the first head, and from a head and a position to the next; of codes the first
            of these alone.
        tails: what lies behind pages of codes where that is in pages too: their addresses, [rows, pages], and strides.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        places: Places | None,
        table: Tensor,
        make: Callable[[Places], Tensor],
        dtype: torch.dtype,
        *,
        newest: Tensor | None = None,
        layout: PageLayout | None = None,
        strides: tuple[int, int, int] = (0, 0, 0),
        tails: tuple[Tensor, tuple[int, int, int]] | None = None,
    ):
        """shape: rows, heads, columns. places: None until `at`. make: returns the tensor, padded."""
        rows, heads, columns = shape
        self.shape = torch.Size((rows, heads, places.longest if places else 0, columns))
        self.places: Any = places
        self.table, self.newest, self.layout, self.strides, self.tails = table, newest, layout, strides, tails
        self.dtype, self.device, self.first_head, self.expanded = dtype, table.device, 0, False
        self.first_column = 0
        self.requires_grad, self.ndim = False, 4
        self._made: list[Any] = [make]  # shared by all heads of a tensor
        self.sources: dict[Any, Any] = {}  # what the kernel is told of codes, which places do not change

    def at(self, places: Places) -> "History":
        """Return the same pages, of which rows hold these places."""
        rows, heads, _, columns = self.shape
        there = self._with(rows, heads, places.longest, columns)
        there.places, there._made = places, list(self._made)
        return there

    def _with(self, *shape: int) -> "History":
        """Return a copy of another shape; `copy` takes several times as long, and every layer makes some in a step."""
        other = History.__new__(History)
        other.__dict__.update(self.__dict__, shape=torch.Size(shape))
        return other

    def whole(self) -> Tensor:
        """Return the tensor."""
        if not isinstance(self._made[0], Tensor):
            self._made[0] = self._made[0](self.places)
        heads, columns = self.shape[1], slice(self.first_column, self.first_column + self.shape[3])
        if self.expanded:
            return self._made[0][:, self.first_head : self.first_head + 1, :, columns].expand(-1, heads, -1, -1)
        return self._made[0][:, self.first_head : self.first_head + heads, :, columns]

    def __getitem__(self, index: Any) -> "History | Tensor":
        """Heads `[:, start:stop]` stay where they lie, and columns `[..., start:stop]` of pages as they are or of codes
        by channel."""
        if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], slice):
            start, stop, step = index[1].indices(self.shape[1])
            if step == 1:
                if start == 0 and stop == self.shape[1]:
                    return self
                heads = self._with(self.shape[0], max(stop - start, 0), *self.shape[2:])
                heads.first_head += 0 if self.expanded else start
                return heads
        by_column = self.newest is None if self.layout is None else not self.layout.per_token
        if by_column and isinstance(index, tuple) and index[:-1] == (...,) and isinstance(index[-1], slice):
            start, stop, step = index[-1].indices(self.shape[3])
            if step == 1:
                columns = self._with(*self.shape[:3], max(stop - start, 0))
                columns.first_column += start
                if self.layout is None:
                    columns.strides = (self.strides[0] + start * self.dtype.itemsize, *self.strides[1:])
                return columns
        return self.whole()[index]

    def beside(self, other: "History") -> "History | None":
        """Return these columns and, behind them, those of `other`, if they lie side by side; None: they do not."""
        end = self.first_column + self.shape[3]
        if self._made is not other._made or self.first_head != other.first_head or other.first_column != end:
            return None
        return self._with(*self.shape[:3], self.shape[3] + other.shape[3])

    def expand(self, *sizes: int) -> "History | Tensor":
        """One head for several stays where it lies."""
        if self.shape[1] == 1 and len(sizes) == 4 and set(sizes[:1] + sizes[2:]) == {-1}:
            heads = self._with(self.shape[0], sizes[1], *self.shape[2:])
            heads.expanded = sizes[1] > 1
            return heads
        return self.whole().expand(*sizes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = lambda value: value.whole() if isinstance(value, History) else value  # noqa: E731
        return function(*tree_map(whole, args), **tree_map(whole, kwargs or {}))
