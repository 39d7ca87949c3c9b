"""Building groupings with our kernels: two launches around PyTorch's sort."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import _features
from pyg_tiga.impls.launch import on_device
from pyg_tiga.relation import stats
from pyg_tiga.relation.csr import Grouping, index_dtype

_ALIGNMENT = 16
_INT32 = 1 << 31
_MIN_CAPABILITY = (8, 0)
_NARROW = {"BLOCK": 1024}
_ROWS = {"BLOCK_R": 128, "BLOCK_S": 1024}
_EDGES = {"BLOCK_E": 1024}
# More would not run side by side on any device.
_MOST_ROW_PROGRAMS = 2048


@dataclass(frozen=True)
class TritonBuild:
    """The builder that `pyg_tiga.relation.fused` is given.

    Args:
        devices: Types of the devices that it serves. On `"cpu"` Triton must interpret.
    """

    devices: tuple[str, ...] = ("cuda",)

    def serves(self, device: torch.device) -> bool:
        """Whether the kernels run on a device."""
        if device.type not in self.devices:
            return False
        if device.type == "cpu":
            return _features.triton_interpreted()
        return _runs_on(device.index)

    def group_coo(
        self,
        edge_index: Tensor,  # [2, E]
        end: int,
        sizes: tuple[int, int],
        is_sorted: bool,
    ) -> tuple[Grouping, Tensor]:
        """Group edges by an end; see :class:`pyg_tiga.relation.fused.FusedBuild`."""
        num_edges, num_rows, num_cols = edge_index.size(1), sizes[end], sizes[1 - end]
        dtype = index_dtype(num_edges, *sizes)
        summary = stats.blank_summary(edge_index.device)
        narrowed = torch.empty(num_edges, dtype=dtype, device=edge_index.device)
        _narrow(edge_index, end, sizes, is_sorted, narrowed, summary)
        if is_sorted:
            key, order, index, perm = edge_index[end], narrowed, narrowed, None
        else:
            key, order = torch.sort(narrowed, stable=True)
            del narrowed
            index, perm = torch.empty_like(key), torch.empty_like(key)
        ptr = index.new_empty(num_rows + 1)
        grouping = Grouping(ptr, index, perm, num_rows, num_cols, num_edges)
        _finish(edge_index, end, key, order, grouping, summary)
        return grouping, summary

    def summarise(
        self,
        ptr: Tensor,  # [num_rows + 1]
        index: Tensor,  # [E]
        good: Tensor,  # [1]
    ) -> Tensor:
        """Summarise a grouping; see :class:`pyg_tiga.relation.fused.FusedBuild`."""
        num_edges, num_rows = index.numel(), ptr.numel() - 1
        summary = stats.blank_summary(ptr.device)
        rows, samples = _row_programs(num_rows), _sample_programs(num_edges)
        lengths = (num_edges, num_rows, stats.sample_step(num_edges), *rows)
        tensors = (ptr, index, good, summary, stats.table(ptr.device))
        _launch("summarise", *_ROWS.values())(rows[1] + samples, tensors, lengths)
        return summary[: stats.LENGTH]


def _narrow(
    edge_index: Tensor,
    end: int,
    sizes: tuple[int, int],
    is_sorted: bool,
    out: Tensor,
    summary: Tensor,
) -> None:
    """Write the row ids to sort, or, of sorted edges, their other ends."""
    num_edges, strides = edge_index.size(1), edge_index.stride()
    if num_edges == 0:
        return
    run = _launch("narrow", end, is_sorted, strides[1] == 1, *_NARROW.values())
    lengths = (num_edges, sizes[end], sizes[1 - end], *strides)
    run(_blocks(num_edges, _NARROW["BLOCK"]), (edge_index, out, summary), lengths)


def _finish(
    edge_index: Tensor,
    end: int,
    key: Tensor,
    order: Tensor,
    grouping: Grouping,
    summary: Tensor,
) -> None:
    """Fill a grouping and its summary."""
    num_edges, num_rows, perm = grouping.num_edges, grouping.num_rows, grouping.perm
    is_sorted = perm is None
    arrays = (order if is_sorted else perm, grouping.index, grouping.ptr)
    table = stats.table(grouping.ptr.device)
    tensors = (edge_index, key, order, *arrays, summary, table)
    rows, samples = _row_programs(num_rows + 1), _sample_programs(num_edges)
    lengths = (
        num_edges,
        num_rows,
        grouping.num_cols,
        *edge_index.stride(),
        key.stride(0),
        num_edges.bit_length(),
        stats.sample_step(num_edges),
        *rows,
        samples,
    )
    gathers = 0 if is_sorted else _blocks(num_edges, _EDGES["BLOCK_E"])
    run = _launch("finish", end, is_sorted, *_ROWS.values(), *_EDGES.values())
    run(rows[1] + samples + gathers, tensors, lengths)


class _Launch:
    """A kernel whose sizes are new at each launch, at little host cost.

    A `Launcher` is bound to a grid and sizes, which here are those of a graph that is
    built once.

    Args:
        name: Kernel in `pyg_tiga.kernels.build_csr`, all of whose integers are sizes.
        flags: Constexprs, in order.
    """

    __slots__ = ("_compiled", "_flags", "_kernel")

    def __init__(self, name: str, flags: tuple[Any, ...]) -> None:
        from pyg_tiga.kernels import build_csr

        self._kernel = getattr(build_csr, name)
        self._flags = flags
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]
    ) -> None:
        """Launch on the current stream of the tensors' device."""
        device, grid = tensors[0].device, (programs, 1, 1)
        arguments = (*tensors, *sizes, *self._flags)
        if device.type != "cuda" or max(sizes) >= _INT32:
            with on_device(device):
                self._kernel[grid](*arguments)
            return
        index = device.index
        # What Triton looks for in a pointer.
        types = [(t.dtype, t.data_ptr() % _ALIGNMENT == 0) for t in tensors]
        key = (index, tuple(types))
        compiled = self._compiled.get(key)
        with on_device(device):
            if compiled is None:
                self._compiled[key] = self._kernel[grid](*arguments)
            else:
                stream = torch._C._cuda_getCurrentRawStream(index)
                compiled[grid](*arguments, stream=stream)


@cache
def _launch(name: str, *flags: Any) -> _Launch:
    return _Launch(name, flags)


@cache
def _runs_on(device_index: int) -> bool:
    if not _features.has_triton() or _features.triton_interpreted():
        return False
    return _features.cuda_capability(device_index) >= _MIN_CAPABILITY


def _row_programs(num_rows: int) -> tuple[int, int]:
    """Blocks of rows, and programs that share them."""
    blocks = max(1, _blocks(num_rows, _ROWS["BLOCK_R"]))
    return blocks, min(blocks, _MOST_ROW_PROGRAMS)


def _sample_programs(num_edges: int) -> int:
    taken = _blocks(num_edges, stats.sample_step(num_edges))
    return _blocks(taken - 1, _ROWS["BLOCK_S"])


def _blocks(count: int, size: int) -> int:
    return -(-count // size)
