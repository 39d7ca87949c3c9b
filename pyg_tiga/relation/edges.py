"""What a `Graph` and its reverse share: the tensors that define the edges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga._settings import settings
from pyg_tiga.relation import check as checks
from pyg_tiga.relation.cache import CACHE, Key, has_no_other_holder, key_of
from pyg_tiga.relation.check import Check, CsrFaults, ListFaults, Names
from pyg_tiga.relation.csr import (
    Grouping,
    group_coo,
    group_csr,
    index_dtype,
    ranks,
    slots,
    transpose,
)
from pyg_tiga.relation.fused import FusedBuild, builder_for
from pyg_tiga.relation.stats import FOUND, Readback, is_good, summarise
from pyg_tiga.relation.streams import Stamp, is_capturing, lasting, refuse_capture

COO, COO_BY_ROW, COO_BY_COL, CSR = "coo", "coo_by_row", "coo_by_col", "csr"
_SORTED_END = {COO: None, COO_BY_ROW: 0, COO_BY_COL: 1}
Faults = ListFaults | CsrFaults


class _Built(NamedTuple):
    """A grouping, what can describe its faults (if it may have some), its summary."""

    grouping: Grouping
    faults: Faults | None
    summary: Tensor


class Edges:
    """Edges, and the groupings by either end, each built when first asked for.

    Args:
        tensors: ``(edge_index,)``, or ``(rowptr, col)``.
        layout: One of `COO`, `COO_BY_ROW`, `COO_BY_COL` and `CSR`.
        sizes: Nodes at end 0 (``edge_index[0]``, the rows of a CSR structure) and at
            end 1.
        dst_end: Which end messages call the destination.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        layout: str,
        sizes: tuple[int, int],
        dst_end: int,
    ) -> None:
        # An alias keeps its shape whatever happens to the caller's tensor object, and
        # shares its storage and version counter.
        self.tensors = tuple(_own(tensor) for tensor in tensors)
        self.layout = layout
        self.sizes = sizes
        self.names = Names(sizes, dst_end)
        self.num_edges = tensors[-1].size(-1)
        self.device = tensors[0].device
        self.index_dtype = index_dtype(self.num_edges, *sizes)
        self.key: Key = key_of(self.tensors, layout, sizes)
        # How many of the tensors lie in each storage.
        self.storages: dict[int, int] = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()._cdata
            self.storages[storage] = self.storages.get(storage, 0) + 1
        self.outdated = False
        self._versions = tuple((tensor, tensor._version) for tensor in self.tensors)
        self._on_cuda = self.device.type == "cuda"
        self._groupings: list[Grouping | None] = [None, None]
        # By name and end.
        self._maps: dict[tuple[str, int], tuple[Tensor, Stamp]] = {}
        # By end that is the destination: plans and launches, found again at each call.
        self.scratch: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        self._checks: tuple[Check, ...] = ()
        self._lock = threading.RLock()

    def is_fresh(self) -> bool:
        """Whether the tensors still hold what they held at construction."""
        if self.outdated:
            return False
        # A generator would cost as much again, several times a step.
        for tensor, version in self._versions:  # noqa: SIM110
            if tensor._version != version:
                return False
        return True

    def preserved(self) -> Edges:
        """The edges as they were when built, apart from their edited tensors."""
        if self._groupings == [None, None]:
            return Edges(self.tensors, self.layout, self.sizes, self.names.dst_end)
        refuse_capture(self.device, "A copy of an edited relation")
        self.validate()
        end = 0 if self._groupings[0] is not None else 1
        grouping = self.grouping(end)
        with lasting():
            if self.layout == CSR:
                tensors, layout = (grouping.ptr, grouping.index), CSR
            else:
                tensors, layout = (_edge_index(grouping, end),), COO
        edges = Edges(tensors, layout, self.sizes, self.names.dst_end)
        edges._groupings = list(self._groupings)
        edges._maps = dict(self._maps)
        return edges

    def grouping(self, end: int) -> Grouping:
        """The edges grouped by an end, safe to read on the current stream.

        Raises:
            ValueError: An index is out of range. Under `PYG_TIGA_VALIDATE=deferred`,
                this may be raised by a later call.
            RuntimeError: It is not there yet, and a CUDA graph is being captured.
        """
        on_cuda = self._on_cuda
        # A captured stream may not query the verdict.
        captured = on_cuda and is_capturing(self.device)
        if self._checks and not captured:
            # Before building: what a call builds is reported by a later one, whether
            # or not the device is quick.
            self.poll()
        grouping = self._groupings[end] or self._build(end)
        if captured:
            CACHE.pin(self)
        elif on_cuda:
            grouping.stamp.use()
        return grouping

    def slots(self, end: int) -> Tensor:
        """Position by `end` of each position by the other end, `[E]`."""
        return self._map("slot map", end, self._make_slots)

    def ranks(self, end: int) -> Tensor | None:
        """Position by `end` of each of the caller's edges, `[E]`; None: the same."""
        if self.grouping(end).perm is None:
            return None
        return self._map("rank map", end, self._make_ranks)

    def ends_at(self, end: int) -> Tensor:
        """One end of each edge, `[E]`, in the caller's order and the derived dtype.

        It is a copy, for kernels: contiguous, and of one state of the tensors whatever
        is written to them later. Of a relation whose fault is not reported yet, ends
        may be out of range.
        """
        self.grouping(end)  # Checks the indices.
        if self.layout == CSR and end == 1:
            return self.grouping(0).index
        return self._map("list of ends", end, self._make_ends)

    def row_ids(self, end: int) -> Tensor:
        """The end by which edges are grouped of each position by it, `[E]`."""
        if self.grouping(end).perm is None:
            return self.ends_at(end)
        return self._map("row list", end, self._make_row_ids)

    def _map(self, what: str, end: int, make: Callable[[int], Tensor]) -> Tensor:
        """A tensor derived from groupings: cached, and safe on the current stream."""
        cached = self._maps.get((what, end))
        if cached is None:
            refuse_capture(self.device, f"The {what} of a relation")
            with lasting():
                value = make(end)
            cached = self._maps[what, end] = value, Stamp([value])
            CACHE.grown(self)
        cached[1].use()
        return cached[0]

    def _make_slots(self, end: int) -> Tensor:
        return slots(self.grouping(end), self.grouping(1 - end))

    def _make_ranks(self, end: int) -> Tensor:
        return ranks(self.grouping(end))

    def _make_row_ids(self, end: int) -> Tensor:
        return self.grouping(end).row_index()

    def _make_ends(self, end: int) -> Tensor:
        if self.layout == CSR:
            return self.grouping(0).row_index()
        self._record_reads()
        return self.tensors[0][end].to(self.index_dtype, copy=True)

    def built(self, end: int) -> Grouping | None:
        """The grouping by an end, if it is there already."""
        return self._groupings[end]

    def poll(self) -> None:
        """Raise if the edges are known to be bad; do not wait.

        Raises:
            ValueError: An index is out of range.
        """
        for check in self._checks:
            check.poll()
        self._drop_settled()

    def validate(self) -> None:
        """Raise if the edges are bad; wait for a verdict that is still on its way.

        Raises:
            ValueError: An index is out of range.
        """
        if self._groupings == [None, None]:
            self._build(self.names.dst_end)
        self.settle()

    def settle(self) -> None:
        """Raise if what was built is bad; wait for a verdict on its way.

        Raises:
            ValueError: An index is out of range.
        """
        for check in self._checks:
            check.settle()
        self._drop_settled()

    def is_validated(self) -> bool:
        """Whether the host knows that all indices are in range."""
        return self._groupings != [None, None] and not self._checks

    def nbytes(self) -> int:
        """Bytes of all that was built."""
        maps = sum(value.nbytes for value, _ in list(self._maps.values()))
        return maps + sum(g.nbytes for g in self._groupings if g is not None)

    def held_bytes(self) -> int:
        """Bytes that an entry of the memo keeps from being freed."""
        return self.nbytes() + sum(tensor.nbytes for tensor in self.tensors)

    def is_unreachable(self) -> bool:
        """Whether nobody but the edges themselves holds the storages."""
        return all(
            map(has_no_other_holder, self.storages.keys(), self.storages.values())
        )

    def _drop_settled(self) -> None:
        self._checks = tuple(check for check in self._checks if check.is_open)

    def _build(self, end: int) -> Grouping:
        with self._lock:
            found = self._groupings[end]
            if found is not None:
                return found
            refuse_capture(self.device, "A relation")
            self._require_nodes()
            checks.poll_all()
            with lasting():
                try:
                    built = self._group(end)
                finally:
                    self._record_reads()
                self._read(*built)
            grouping = self._groupings[end] = built.grouping
        CACHE.grown(self)
        return grouping

    def _group(self, end: int) -> _Built:
        builder = builder_for(self.device)
        if self.layout != CSR:
            return self._group_coo(end, builder)
        if end == 0:
            grouping, faults = group_csr(*self.tensors, self.sizes[1])
            good = faults.good
        else:
            grouping, faults = transpose(self.grouping(0)), None
            good = grouping.ptr[-1:]
        summarised = summarise if builder is None else builder.summarise
        return _Built(grouping, faults, summarised(grouping.ptr, grouping.index, good))

    def _group_coo(self, end: int, builder: FusedBuild | None) -> _Built:
        (edge_index,) = self.tensors
        is_sorted = _SORTED_END[self.layout] == end
        trusted = self.is_validated()
        if builder is not None:
            grouping, summary = builder.group_coo(
                edge_index, end, self.sizes, is_sorted
            )
            faults = None if trusted else ListFaults(end if is_sorted else None)
            return _Built(grouping, faults, summary)
        grouping, faults = group_coo(
            edge_index, end, self.sizes, is_sorted=is_sorted, trusted=trusted
        )
        good = grouping.ptr[-1:] if faults is None else faults.good
        return _Built(grouping, faults, summarise(grouping.ptr, grouping.index, good))

    def _record_reads(self) -> None:
        """Note that the current stream reads the tensors.

        The memo may hold the last reference while it still does.
        """
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for tensor in self.tensors:
                tensor.record_stream(stream)

    def _read(self, grouping: Grouping, faults: Faults | None, summary: Tensor) -> None:
        """Bring statistics and verdict to the host, in one copy."""
        deferred = settings().validate == "deferred"
        if deferred and faults is not None and summary.numel() == FOUND:
            summary = torch.cat([summary, faults.locate()])
        grouping.readback = readback = Readback(summary, deferred)
        arrays = [grouping.ptr, grouping.index]
        arrays += [] if grouping.perm is None else [grouping.perm]
        grouping.stamp = Stamp(arrays, complete=not deferred, event=readback.event)
        if faults is None:
            return
        words = faults.describe(self.names)
        if deferred:
            self._check_later(Check(readback, self.num_edges, words))
        elif not is_good(readback.values(), self.num_edges):
            found = readback.values()[FOUND:] or faults.locate().tolist()
            raise ValueError(words(found))

    def _check_later(self, check: Check) -> None:
        if self.device.type != "cuda":
            check.poll()  # The host need not wait for itself.
        self._checks += (check,)
        checks.remember(check)

    def _require_nodes(self) -> None:
        """Raise if there are edges but no nodes, which needs no look at the device."""
        if self.num_edges == 0 or min(self.sizes) > 0:
            return
        end = 0 if self.sizes[0] == 0 else 1
        if self.layout == CSR:
            if end == 0:
                raise ValueError(
                    f"'rowptr' must rise from 0 to the number of edges, "
                    f"{self.num_edges} (got no rows)"
                )
            value, place = int(self.tensors[1][0]), "position 0 of 'col'"
        else:
            value = int(self.tensors[0][end, 0])
            place = f"position 0 (edge_index[{end}, 0])"
        raise ValueError("The edges hold " + self.names.out_of_range(end, value, place))


def _edge_index(grouping: Grouping, end: int) -> Tensor:
    """The edge list of a grouping by an end, `[2, E]` in the caller's order."""
    both = torch.stack((grouping.row_index(), grouping.index))  # [2, E]
    if end == 1:
        both = both.flip(0)
    if grouping.perm is None:
        return both
    return torch.empty_like(both).index_copy_(1, grouping.perm.long(), both)


def _own(tensor: Tensor) -> Tensor:
    """An alias, or a copy of a tensor that has no version counter."""
    with lasting():
        return tensor.clone() if tensor.is_inference() else tensor.detach()
