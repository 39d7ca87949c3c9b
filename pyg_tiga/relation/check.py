"""The index check of a relation: what is wrong, and when the host hears of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_tiga.relation.stats import LENGTH, Readback, is_good

_MOST_OPEN = 64


@dataclass(frozen=True)
class Names:
    """How messages call the ends of an edge, and their limits.

    Args:
        sizes: Nodes at either end.
        dst_end: Which end is the destination.
    """

    sizes: tuple[int, int]
    dst_end: int

    def out_of_range(self, end: int, value: int, place: str) -> str:
        """Say that `value`, found at `place`, is no node of `end`."""
        what, size = ("source", "destination")[end == self.dst_end], self.sizes[end]
        argument = ("num_src", "num_dst")[end == self.dst_end]
        return (
            f"the {what} index {value} at {place}, but there are {size} {what} nodes "
            f"(valid: 0 to {size - 1}). Correct the index, or state more "
            f"nodes ('{argument}' of a graph, 'size' of a layer or function)"
        )


@dataclass(frozen=True)
class ListFaults:
    """Puts into words what a grouping of an edge list found.

    Attributes:
        sorted_end: The end that is said to be sorted, if one is.
    """

    sorted_end: int | None

    def describe(self, names: Names) -> Callable[[list[int]], str]:
        """Put position and ends of an edge into words, without holding tensors."""
        sorted_end = self.sorted_end

        def words(found: list[int]) -> str:
            place, *ends = found[:3]
            for end in (0, 1):
                if not 0 <= ends[end] < names.sizes[end]:
                    where = f"position {place} (edge_index[{end}, {place}])"
                    return "'edge_index' holds " + names.out_of_range(
                        end, ends[end], where
                    )
            return (
                f"'edge_index' is marked as sorted by "
                f"{'row' if sorted_end == 0 else 'col'}, but edge_index[{sorted_end}] "
                f"falls to {ends[sorted_end]} at position {place}. Call "
                f"'edge_index.sort_by(...)' instead of passing 'sort_order'"
            )

        return words


@dataclass(frozen=True)
class CooFaults(ListFaults):
    """What PyTorch's operations found in an edge list.

    Attributes:
        good: Number of edges without fault, `[1]`.
        bad: Which edges have a fault, `[E]`.
        edge_index: The edges, `[2, E]`.
    """

    good: Tensor
    bad: Tensor
    edge_index: Tensor

    def locate(self) -> Tensor:
        """Position and ends of the first edge with a fault, `[3]` int64."""
        if self.bad.numel() == 0:
            return torch.full((3,), -1, dtype=torch.int64, device=self.bad.device)
        place = self.bad.view(torch.uint8).argmax().view(1)
        ends = self.edge_index.index_select(1, place).view(2)
        return torch.cat([place, ends.to(torch.int64)])


@dataclass(frozen=True)
class CsrFaults:
    """What taking over a CSR structure found; `good` as in `CooFaults`."""

    good: Tensor
    bad_col: Tensor
    col: Tensor
    bad_ptr: Tensor
    rowptr: Tensor

    def locate(self) -> Tensor:
        """Position and value of the first faults in `rowptr` and `col`, `[4]` int64."""
        parts = [*_first(self.bad_ptr, self.rowptr), *_first(self.bad_col, self.col)]
        return torch.cat([part.to(torch.int64) for part in parts])

    def describe(self, names: Names) -> Callable[[list[int]], str]:
        """Put what `locate` found into words, without holding the tensors."""
        num_edges = self.col.numel()

        def words(found: list[int]) -> str:
            ptr_place, ptr_value, place, value = found
            if ptr_place >= 0:
                return (
                    f"'rowptr' must rise from 0 to the number of edges, {num_edges} "
                    f"(got {ptr_value} at position {ptr_place})"
                )
            return "'col' holds " + names.out_of_range(1, value, f"position {place}")

        return words


def _first(bad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Position and value of the first fault; position -1 if there is none."""
    if bad.numel() == 0:
        nothing = torch.full((1,), -1, dtype=torch.int64, device=bad.device)
        return nothing, nothing
    place = bad.view(torch.uint8).argmax().view(1)
    found = bad.index_select(0, place)
    return torch.where(found, place, -1), values.index_select(0, place)


class Check:
    """The verdict on a relation's indices, on its way to the host.

    Args:
        readback: A summary, followed by what `locate` returned.
        num_edges: E.
        words: Makes the message from what `locate` returned.
    """

    def __init__(
        self, readback: Readback, num_edges: int, words: Callable[[list[int]], str]
    ) -> None:
        self._readback = readback
        self._num_edges = num_edges
        self._words = words
        self.is_open = True
        self.error: str | None = None

    def is_due(self) -> bool:
        """Whether `settle` would not wait."""
        return not self.is_open or self._readback.landed()

    def poll(self) -> None:
        """Raise if the relation is known to be bad; do not wait.

        Raises:
            ValueError: An index is out of range.
        """
        if self.is_due():
            self.settle()

    def settle(self) -> None:
        """Wait for the verdict, and raise if the relation is bad.

        Raises:
            ValueError: An index is out of range.
        """
        if self.is_open:
            values = self._readback.values()
            if not is_good(values, self._num_edges):
                self.error = self._words(values[LENGTH:])
            self.is_open = False
        if self.error is not None:
            raise ValueError(self.error)


_open: deque[Check] = deque()
_open_lock = threading.Lock()


def remember(check: Check) -> None:
    """Have `poll_all` look at the check if nobody does before."""
    with _open_lock:
        _open.append(check)


def poll_all() -> None:
    """Report bad relations whose verdict came after their last use.

    Raises:
        ValueError: An index of an earlier relation is out of range.
    """
    with _open_lock:
        while _open and (len(_open) > _MOST_OPEN or _open[0].is_due()):
            check = _open.popleft()
            if check.is_open:
                check.settle()
