"""Building groupings with our kernels: two launches around PyTorch's sort."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import _features
from pyg_tiga.impls.launch import launch
from pyg_tiga.relation import stats
from pyg_tiga.relation.csr import Grouping, index_dtype

_WARPS = 4
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
        _run("summarise", rows[1] + samples, tensors, lengths, *_ROWS.values())
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
    lengths = (num_edges, sizes[end], sizes[1 - end], *strides)
    constants = (end, is_sorted, strides[1] == 1, *_NARROW.values())
    programs = _blocks(num_edges, _NARROW["BLOCK"])
    _run("narrow", programs, (edge_index, out, summary), lengths, *constants)


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
    constants = (end, is_sorted, *_ROWS.values(), *_EDGES.values())
    _run("finish", rows[1] + samples + gathers, tensors, lengths, *constants)


def _run(
    name: str,
    programs: int,
    tensors: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    *constants: Any,
) -> None:
    """Launch a kernel of `build_csr`, all of whose integers are sizes."""
    from pyg_tiga.kernels import build_csr

    kernel = getattr(build_csr, name)
    launch(kernel, (programs,), tensors, lengths, (), constants, warps=_WARPS)


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
