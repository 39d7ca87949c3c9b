"""Launchers of our SpMM family: they allocate, size the grid and launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import _features
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph

if TYPE_CHECKING:
    from pyg_tiga.relation.csr import Grouping

_SAVE = {"none": 0, "split": 1, "first": 2}
_SIGN = {"max": 1, "min": -1}
_MERGE_ITEMS = 8
_MERGE_SLICE = 128


class _Walk(NamedTuple):
    """Arguments that every kernel over grouped edges takes."""

    ptr: Tensor
    index: Tensor
    item_row: Tensor
    item_start: Tensor
    num_rows: int
    num_items: int
    chunk: int
    hub_row: Tensor
    hub_ptr: Tensor
    num_hubs: int


def missing(problem: Problem) -> list[str]:
    """Why no Triton kernel can run here."""
    if not _features.has_triton():
        return ["Triton is not installed"]
    if problem.device == "cpu" and not _features.triton_interpreted():
        return ["device is cpu, required cuda (or TRITON_INTERPRET=1)"]
    return []


def _spmm(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None,  # [E]
) -> Tensor:
    from pyg_tiga.kernels.spmm import spmm_rows

    rows = graph.rows()
    out = x.new_empty(rows.num_rows, problem.features, dtype=problem.out_dtype)
    if out.numel() == 0:
        return out
    x = row_major(x)
    walk = _walk(rows, schedule.chunk)
    partial = _partial(walk, out)
    weight = None if weight is None else _ordered(rows, weight)
    row_scale = rows.degree_inv() if problem.normalize == "dst" else None
    col_scale = graph.columns().degree_inv() if problem.normalize == "src" else None
    with on_device(x):
        spmm_rows[_grid(walk, problem, schedule)](
            x,
            out,
            partial,
            walk.ptr,
            walk.index,
            x if weight is None else weight,
            x if row_scale is None else row_scale,
            x if col_scale is None else col_scale,
            walk.item_row,
            walk.item_start,
            walk.num_rows,
            walk.num_items,
            walk.chunk,
            problem.features,
            x.stride(0),
            out.stride(0),
            SPLIT=walk.num_items > 0,
            HAS_WEIGHT=weight is not None,
            HAS_ROW_SCALE=row_scale is not None,
            HAS_COL_SCALE=col_scale is not None,
            **_blocks(schedule),
        )
        _merge_sums(walk, partial, out, row_scale)
    return out


def _spmm_extremum(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    x: Tensor,  # [N_src, F]
) -> tuple[Tensor, Tensor]:
    from pyg_tiga.kernels.extremum import extremum_merge, extremum_rows

    rows = graph.rows()
    save = _SAVE[problem.ties]
    out = x.new_empty(rows.num_rows, problem.features)
    aux = x.new_empty(out.shape if save else 0, dtype=torch.int32)
    if out.numel() == 0:
        return out, aux
    x = row_major(x)
    walk = _walk(rows, schedule.chunk)
    partial = _partial(walk, out)
    partial_aux = torch.empty_like(partial, dtype=torch.int32) if save else aux
    flags = {"SIGN": _SIGN[problem.reduce], "SAVE": save}
    with on_device(x):
        extremum_rows[_grid(walk, problem, schedule)](
            x,
            out,
            aux,
            partial,
            partial_aux,
            walk.ptr,
            walk.index,
            walk.item_row,
            walk.item_start,
            walk.num_rows,
            walk.num_items,
            walk.chunk,
            problem.features,
            x.stride(0),
            SPLIT=walk.num_items > 0,
            **flags,
            **_blocks(schedule),
        )
        if walk.num_hubs:
            grid, blocks = _merge_launch(walk, problem.features)
            extremum_merge[grid](
                partial,
                partial_aux,
                out,
                aux,
                walk.hub_row,
                walk.hub_ptr,
                problem.features,
                **flags,
                **blocks,
            )
    return out, aux


def _extremum_columns(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]
    out: Tensor,  # [N_dst, F]
    aux: Tensor,  # [N_dst, F]
) -> Tensor:
    from pyg_tiga.kernels.extremum import extremum_columns

    grad_x = grad.new_empty(problem.num_dst, problem.features, dtype=problem.out_dtype)
    if grad_x.numel() == 0:
        return grad_x
    split = problem.ties == "split"
    columns = graph.columns()
    walk = _walk(columns, schedule.chunk)
    partial = _partial(walk, grad_x)
    if split:
        # Shares keep the precision of the accumulator until they are added up.
        grad, x = grad.float() / aux, row_major(x)
    grad = row_major(grad)
    with on_device(grad):
        extremum_columns[_grid(walk, problem, schedule)](
            grad,
            x,
            out,
            aux,
            grad_x,
            partial,
            walk.ptr,
            walk.index,
            walk.index if split else graph.slots(),
            graph.rows().ptr,
            walk.item_row,
            walk.item_start,
            walk.num_rows,
            walk.num_items,
            walk.chunk,
            problem.features,
            grad.stride(0),
            x.stride(0) if split else 0,
            SPLIT=walk.num_items > 0,
            SAVE=_SAVE[problem.ties],
            **_blocks(schedule),
        )
        _merge_sums(walk, partial, grad_x, None)
    return grad_x


def _extremum_winners(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]
    out: Tensor,  # [N_dst, F]
    aux: Tensor,  # [N_dst, F]
) -> Tensor:
    from pyg_tiga.kernels.extremum import extremum_scatter

    rows = graph.rows()
    shape = (problem.num_dst, problem.features)
    grad_x = torch.zeros(shape, dtype=torch.float32, device=grad.device)
    if grad_x.numel() and grad.numel():
        grad = row_major(grad)
        block_f = min(_power_of_2(problem.features), _MERGE_SLICE)
        block_r = max(1, 512 // block_f)
        grid = (-(-rows.num_rows // block_r), -(-problem.features // block_f))
        with on_device(grad):
            extremum_scatter[grid](
                grad,
                aux,
                grad_x,
                rows.ptr,
                rows.index,
                rows.num_rows,
                problem.features,
                grad.stride(0),
                BLOCK_R=block_r,
                BLOCK_F=block_f,
                num_warps=2,
            )
    return grad_x.to(problem.out_dtype)


def _sddmm(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    a: Tensor,  # [N_dst, F]
    b: Tensor,  # [N_src, F]
) -> Tensor:
    from pyg_tiga.kernels.sddmm import sddmm_rows

    rows = graph.rows()
    if problem.features == 0:
        return a.new_zeros(rows.num_edges, dtype=problem.out_dtype)
    out = a.new_empty(rows.num_edges, dtype=problem.out_dtype)
    if out.numel() == 0:
        return out
    a, b = row_major(a), row_major(b)
    walk = _walk(rows, schedule.chunk)
    with on_device(a):
        sddmm_rows[(-(-(walk.num_rows + walk.num_items) // schedule.rows),)](
            a,
            b,
            out,
            walk.ptr,
            walk.index,
            walk.index if rows.perm is None else rows.perm,
            walk.item_row,
            walk.item_start,
            walk.num_rows,
            walk.num_items,
            walk.chunk,
            problem.features,
            a.stride(0),
            b.stride(0),
            SPLIT=walk.num_items > 0,
            HAS_PERM=rows.perm is not None,
            **_blocks(schedule),
        )
    return out


def _merge_sums(
    walk: _Walk, partial: Tensor, out: Tensor, row_scale: Tensor | None
) -> None:
    if not walk.num_hubs:
        return
    from pyg_tiga.kernels.spmm import spmm_merge

    grid, blocks = _merge_launch(walk, out.size(1))
    spmm_merge[grid](
        partial,
        out,
        partial if row_scale is None else row_scale,
        walk.hub_row,
        walk.hub_ptr,
        out.size(1),
        out.stride(0),
        HAS_ROW_SCALE=row_scale is not None,
        **blocks,
    )


def _merge_launch(
    walk: _Walk, features: int
) -> tuple[tuple[int, int], dict[str, int]]:
    block_f = min(_power_of_2(features), _MERGE_SLICE)
    blocks = {"BLOCK_K": _MERGE_ITEMS, "BLOCK_F": block_f, "num_warps": 1}
    return (walk.num_hubs, -(-features // block_f)), blocks


def _walk(rows: Grouping, chunk: int) -> _Walk:
    items = rows.work_items(chunk)
    return _Walk(
        rows.ptr,
        rows.index,
        items.row,
        items.start,
        rows.num_rows,
        items.num_items,
        chunk,
        items.hub_row,
        items.hub_ptr,
        items.num_hubs,
    )


def _partial(walk: _Walk, out: Tensor) -> Tensor:
    return out.new_empty(walk.num_items, out.size(1), dtype=torch.float32)


def _ordered(rows: Grouping, weight: Tensor) -> Tensor:
    """Edge weights in the order of the grouping, read once per slice without gathers."""
    if rows.perm is None:
        return weight.contiguous()
    return weight.index_select(0, rows.perm)


def _grid(walk: _Walk, problem: Problem, schedule: Schedule) -> tuple[int, int]:
    units = walk.num_rows + walk.num_items
    return -(-units // schedule.rows), -(-problem.features // schedule.slice)


def _blocks(schedule: Schedule) -> dict[str, int]:
    return {
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        "BLOCK_F": schedule.slice,
        "num_warps": schedule.warps,
    }


def row_major(x: Tensor) -> Tensor:
    """The tensor itself where its rows are contiguous, else a contiguous copy."""
    if x.stride(1) == 1 or x.size(1) == 1:
        return x
    return x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: Triton launches on the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))


def _implementation(
    name: str, op: str, run: object, limits: Limits = _LIMITS
) -> Implementation:
    return Implementation(name, "triton", op, limits, run, missing, scheduled=True)  # type: ignore[arg-type]


_UNWEIGHTED = Limits(
    devices=("cuda", "cpu"), dtypes=FLOATS, weighted=False, min_capability=(8, 0)
)
_WINNERS = Limits(
    devices=("cuda", "cpu"),
    dtypes=FLOATS,
    ties=("first",),
    weighted=False,
    deterministic=False,
    min_capability=(8, 0),
)

SPMM = _implementation("triton", "spmm", _spmm)
SPMM_EXTREMUM = _implementation(
    "triton", "spmm_extremum", _spmm_extremum, _UNWEIGHTED
)
SPMM_EXTREMUM_WINNERS = _implementation(
    "triton_winners", "spmm_extremum_backward", _extremum_winners, _WINNERS
)
SPMM_EXTREMUM_COLUMNS = _implementation(
    "triton_columns", "spmm_extremum_backward", _extremum_columns, _UNWEIGHTED
)
SDDMM = _implementation("triton", "sddmm", _sddmm)
