"""Edges grouped by one of their ends, and long groups cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from pyg_tiga.relation.check import CooFaults, CsrFaults
from pyg_tiga.relation.stats import Readback, Stats
from pyg_tiga.relation.streams import Stamp, lasting, refuse_capture

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class WorkItems:
    """Rows with more than `chunk` edges, cut into pieces of at most `chunk` edges.

    Piece k spans the positions from ``start[k]`` to
    ``min(start[k] + chunk, ptr[row[k] + 1])``. Where the host does not know how many
    pieces there are, the arrays have room for the most that are possible, and the rest
    is padding: ``row`` and ``hub_row`` are -1 and a padding hub owns no piece.

    Attributes:
        chunk: Most edges of a piece.
        row: Row of each piece, `[num_items]` int32; pieces of a row stand together.
        start: First position of each piece, `[num_items]`.
        hub_row: The rows that were cut, `[num_hubs]` int32.
        hub_ptr: Hub h owns the pieces ``hub_ptr[h]`` to ``hub_ptr[h + 1]``,
            `[num_hubs + 1]` int32.
    """

    chunk: int
    row: Tensor
    start: Tensor
    hub_row: Tensor
    hub_ptr: Tensor

    @property
    def num_items(self) -> int:
        """Pieces, with the padding."""
        return self.row.numel()

    @property
    def num_hubs(self) -> int:
        """Rows that were cut, with the padding."""
        return self.hub_row.numel()

    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays."""
        return self.row, self.start, self.hub_row, self.hub_ptr


@dataclass(eq=False)
class Grouping:
    """Edges grouped by row (CSR). `Graph` makes them and decides what is a row.

    `ptr`, `index` and `perm` are int32 where the sizes and the number of edges fit.

    Attributes:
        ptr: Row i spans the positions from ``ptr[i]`` to ``ptr[i + 1]``,
            `[num_rows + 1]`.
        index: The other end of each edge, `[E]`.
        perm: Position to the caller's edge id, `[E]`; None is the identity.
        num_rows: Rows.
        num_cols: Nodes at the other end.
        num_edges: E. Edges with an index out of range, before they are reported, are
            counted but reached by no row.
    """

    ptr: Tensor
    index: Tensor
    perm: Tensor | None
    num_rows: int
    num_cols: int
    num_edges: int
    readback: Readback | None = field(default=None, repr=False)
    stamp: Stamp | None = field(default=None, repr=False)
    _stats: Stats | None = field(default=None, init=False, repr=False)
    _degree_inv: dict[torch.dtype, tuple[Tensor, Stamp]] = field(
        default_factory=dict, init=False, repr=False
    )
    _work_items: dict[int, tuple[WorkItems, Stamp]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def index_dtype(self) -> torch.dtype:
        """Dtype of the arrays."""
        return self.ptr.dtype

    @property
    def stats(self) -> Stats | None:
        """Statistics of the rows; None while their copy to the host is on its way."""
        if self._stats is None and self.readback is not None and self.readback.landed():
            self._stats = Stats.from_summary(
                self.readback.values(), self.num_rows, self.num_edges
            )
        return self._stats

    @property
    def max_degree(self) -> int | None:
        """Edges of the longest row; None until the host knows it."""
        stats = self.stats
        return None if stats is None else stats.max_degree

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the grouping keeps."""
        held = [self.ptr, self.index]
        held += [] if self.perm is None else [self.perm]
        held += [value for value, _ in list(self._degree_inv.values())]
        for items, _ in list(self._work_items.values()):
            held += items.tensors()
        return sum(tensor.nbytes for tensor in held)

    def degree(self) -> Tensor:
        """Edges of each row, `[num_rows]`."""
        return self.ptr[1:] - self.ptr[:-1]

    def degree_inv(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """1 / max(degree, 1) of each row, `[num_rows]`; cached for each `dtype`."""
        cached = self._degree_inv.get(dtype)
        if cached is None:
            refuse_capture(self.ptr.device, "The inverse degrees of a relation")
            with lasting():
                value = self.degree().clamp_(min=1).to(dtype).reciprocal_()
            cached = self._degree_inv[dtype] = value, Stamp([value])
        cached[1].use()
        return cached[0]

    def row_index(self) -> Tensor:
        """Row of each position, `[E]`; made anew by each call."""
        degree = self.degree()
        if degree.numel():
            # Positions that no row reaches join the last one: reading them is safe.
            degree[-1:].add_(self.num_edges - self.ptr[-1:])
        rows = torch.arange(self.num_rows, dtype=self.ptr.dtype, device=self.ptr.device)
        return torch.repeat_interleave(rows, degree, output_size=self.num_edges)

    def work_items(self, chunk: int) -> WorkItems:
        """The rows with more than `chunk` edges in pieces; cached for each `chunk`."""
        cached = self._work_items.get(chunk)
        if cached is None:
            if chunk < 1:
                raise ValueError(f"'chunk' must be positive (got {chunk})")
            refuse_capture(self.ptr.device, "The work items of a relation")
            with lasting():
                items = cut_rows(self.ptr, chunk, *self._count_items(chunk))
            cached = self._work_items[chunk] = items, Stamp(items.tensors())
        cached[1].use()
        return cached[0]

    def _count_items(self, chunk: int) -> tuple[int, int]:
        """Pieces and hubs, exactly or, where that would take a sync, at most."""
        stats = self.stats
        if stats is not None and chunk in stats.items:
            return stats.items[chunk], stats.hubs[chunk]
        if chunk >= (self.num_edges if stats is None else stats.max_degree):
            return 0, 0
        if self.ptr.device.type == "cpu":
            long = self.degree()
            long = long[long > chunk]
            return int(_ceil_div(long, chunk).sum()), long.numel()
        return 2 * self.num_edges // chunk, self.num_edges // chunk


def cut_rows(ptr: Tensor, chunk: int, num_items: int, num_hubs: int) -> WorkItems:
    """Cut rows into pieces without reading anything from the device.

    Args:
        ptr: Start of each row, `[num_rows + 1]`.
        chunk: Most edges of a piece; rows with more are cut.
        num_items: Pieces, or more: the rest is padding.
        num_hubs: Rows that are cut, or more.
    """
    num_rows = ptr.numel() - 1
    if num_items == 0 or num_rows == 0:
        empty = ptr.new_empty(0, dtype=torch.int32)
        return WorkItems(
            chunk, empty, ptr.new_empty(0), empty, ptr.new_zeros(1, dtype=torch.int32)
        )
    degree = ptr[1:] - ptr[:-1]
    is_hub = degree > chunk
    # [num_rows + 1], pieces and hubs before each row
    pieces = _running_count(_ceil_div(degree, chunk) * is_hub, ptr.dtype)
    hubs = _running_count(is_hub, ptr.dtype)

    item = torch.arange(num_items, dtype=ptr.dtype, device=ptr.device)
    row = torch.searchsorted(pieces[1:], item, right=True)  # num_rows at the padding
    start = ptr[row] + (item - pieces[row]) * chunk
    hub = torch.arange(num_hubs + 1, dtype=ptr.dtype, device=ptr.device)
    hub_row = torch.searchsorted(hubs[1:], hub, right=True)
    return WorkItems(
        chunk,
        _pad(row, num_rows),
        start.masked_fill_(row == num_rows, 0),
        _pad(hub_row[:-1], num_rows),
        pieces[hub_row].to(torch.int32),
    )


def group_coo(
    edge_index: Tensor,  # [2, E]
    end: int,
    sizes: tuple[int, int],
    *,
    is_sorted: bool = False,
    trusted: bool = False,
) -> tuple[Grouping, CooFaults | None]:
    """Group edges by ``edge_index[end]``, in the caller's order within each row.

    It takes one stable sort of 32-bit keys, and none if `is_sorted`. An edge with an
    end out of range sorts behind the last row; if `is_sorted`, where no sort can move
    it, one such edge empties all rows. Nothing is read by the host.

    Args:
        edge_index: Both ends of each edge, of any integer dtype and strides.
        end: Which end is the row.
        sizes: Nodes at either end.
        is_sorted: ``edge_index[end]`` is said to rise; this is checked.
        trusted: The host knows that all indices are in range.

    Returns:
        The grouping, and what is needed to report faults unless there can be none.
    """
    num_edges = edge_index.size(1)
    dtype = index_dtype(num_edges, *sizes)
    if is_sorted:
        return _group_sorted(edge_index, end, sizes, dtype)
    if trusted:
        ends, bad = edge_index.to(dtype), None
        key = ends[end]
    else:
        ends, bad = _clamp(edge_index, sizes, dtype)
        key = ends[end].masked_fill_(bad, sizes[end])
    key, perm = torch.sort(key, stable=True)
    ptr = _pointers(key, sizes[end])
    del key
    perm = perm.to(dtype)
    index = ends[1 - end].index_select(0, perm)
    grouping = Grouping(ptr, index, perm, sizes[end], sizes[1 - end], num_edges)
    if bad is None:
        return grouping, None
    return grouping, CooFaults(None, ptr[-1:], bad, edge_index)


def _group_sorted(
    edge_index: Tensor, end: int, sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[Grouping, CooFaults]:
    ends, bad = _clamp(edge_index, sizes, dtype)
    key, num_edges = ends[end], edge_index.size(1)
    bad[1:].logical_or_(key[1:] < key[:-1])
    is_good = ~bad.any()
    ptr = _pointers(key, sizes[end]).mul_(is_good)
    index = ends[1 - end].clone()
    grouping = Grouping(ptr, index, None, sizes[end], sizes[1 - end], num_edges)
    return grouping, CooFaults(end, _count(is_good, num_edges), bad, edge_index)


def group_csr(
    rowptr: Tensor,  # [num_rows + 1]
    col: Tensor,  # [E]
    num_cols: int,
) -> tuple[Grouping, CsrFaults]:
    """Take over edges that are grouped already, with their indices checked.

    An index out of range, or a `rowptr` that does not rise from 0 to E, empties all
    rows.
    """
    num_rows, num_edges = rowptr.numel() - 1, col.numel()
    dtype = index_dtype(num_edges, num_rows, num_cols)
    index, bad_col = _clamp(col.unsqueeze(0), (num_cols,), dtype)
    ptr, bad_ptr = _clamp(rowptr.unsqueeze(0), (num_edges + 1,), dtype)
    ptr = ptr[0]
    bad_ptr[1:].logical_or_(ptr[1:] < ptr[:-1])
    bad_ptr[0].logical_or_(ptr[0] != 0)
    bad_ptr[-1].logical_or_(ptr[-1] != num_edges)
    is_good = ~(bad_col.any() | bad_ptr.any())
    grouping = Grouping(
        ptr.mul_(is_good), index[0], None, num_rows, num_cols, num_edges
    )
    good = _count(is_good, num_edges)
    return grouping, CsrFaults(good, bad_col, col, bad_ptr, rowptr)


def transpose(rows: Grouping) -> Grouping:
    """Group the edges of `rows`, which must have no `perm`, by their other end."""
    key, perm = torch.sort(rows.index, stable=True)
    ptr = _pointers(key, rows.num_cols)
    del key
    # Where a fault emptied the rows, it empties the columns.
    ptr *= rows.ptr[-1:] == rows.num_edges
    perm = perm.to(rows.index_dtype)
    index = rows.row_index().index_select(0, perm)
    return Grouping(ptr, index, perm, rows.num_cols, rows.num_rows, rows.num_edges)


def slots(rows: Grouping, columns: Grouping) -> Tensor:
    """Position in `rows` of each position of `columns`, `[E]`.

    It ties the two groupings of the same edges together without the caller's ids.
    """
    positions = ranks(rows)
    if columns.perm is None:
        return positions
    return positions.index_select(0, columns.perm)


def ranks(grouping: Grouping) -> Tensor:
    """Position in a grouping of each of the caller's edges, `[E]`.

    It is a permutation even where a fault keeps edges out of every row.
    """
    positions = torch.arange(
        grouping.num_edges, dtype=grouping.ptr.dtype, device=grouping.ptr.device
    )
    if grouping.perm is None:
        return positions
    return torch.empty_like(positions).index_copy_(0, grouping.perm.long(), positions)


def index_dtype(num_edges: int, *sizes: int) -> torch.dtype:
    """Int32 where edge positions and node ids, with one to spare, fit."""
    return torch.int32 if max(num_edges, *sizes) < _INT32_MAX else torch.int64


def _clamp(
    index: Tensor,  # [k, E]
    sizes: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Bring indices into range, narrow them, and say which edges were out of it.

    Returns:
        Indices `[k, E]` in `dtype`, and a mask `[E]`.
    """
    if index.dtype.itemsize < dtype.itemsize:
        index = index.to(dtype)
    ends = torch.empty(index.shape, dtype=dtype, device=index.device)
    # A limit for each end without a copy from the host, which would sync.
    limit = torch.full(
        (len(sizes), 1), sizes[0] - 1, dtype=index.dtype, device=index.device
    )
    if sizes[-1] != sizes[0]:
        limit[-1].fill_(sizes[-1] - 1)
    # With tensors for bounds, clamping and narrowing are one pass.
    torch.clamp(index, _zero(index.device, index.dtype), limit, out=ends)
    moved = index != ends
    return ends, moved[0] | moved[1] if len(sizes) == 2 else moved[0]


@lru_cache(maxsize=64)
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


def _pointers(key: Tensor, num_rows: int) -> Tensor:
    """Start of each row among sorted keys, `[num_rows + 1]`."""
    rows = torch.arange(num_rows + 1, dtype=key.dtype, device=key.device)
    return torch.searchsorted(key, rows, out_int32=key.dtype == torch.int32)


def _count(is_good: Tensor, num_edges: int) -> Tensor:
    """`num_edges` if all is good, else -1, `[1]`."""
    return (is_good.view(1) * (num_edges + 1)) - 1


def _running_count(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of the values before each place, and of all, `[N + 1]`."""
    out = torch.zeros(value.numel() + 1, dtype=dtype, device=value.device)
    torch.cumsum(value, 0, dtype=dtype, out=out[1:])
    return out


def _ceil_div(value: Tensor, divisor: int) -> Tensor:
    return (value + (divisor - 1)) // divisor


def _pad(row: Tensor, num_rows: int) -> Tensor:
    return torch.where(row == num_rows, -1, row).to(torch.int32)
