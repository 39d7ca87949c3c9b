"""Launchers of our SpMM family: they allocate, size the grid and launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga import _features
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.launch import launch
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

_SAVE = {"none": 0, "split": 1, "first": 2}
_SIGN = {"max": 1, "min": -1}
_MERGE = {"BLOCK_K": 8, "BLOCK_F": 128}
_SCATTER_ELEMENTS = 512


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
    row_scale = rows.degree_inv() if problem.normalize == "dst" else None
    col_scale = graph.columns().degree_inv() if problem.normalize == "src" else None
    if col_scale is not None and schedule.prescale:
        x, col_scale = _scaled(x, col_scale), None
    items = rows.work_items(schedule.chunk)
    partial = _partial(items, out)
    flags = {
        "SPLIT": items.num_items > 0,
        "HAS_WEIGHT": weight is not None,
        "HAS_ROW_SCALE": row_scale is not None,
        "HAS_COL_SCALE": col_scale is not None,
        **_blocks(schedule),
    }
    tensors = (
        x,
        out,
        partial,
        rows.ptr,
        rows.index,
        x if weight is None else _ordered(rows, weight),
        x if row_scale is None else row_scale,
        x if col_scale is None else col_scale,
        items.row,
        items.start,
    )
    widths = (problem.features, x.stride(0), out.stride(0))
    _walk(spmm_rows, schedule, rows, items, tensors, widths, flags)
    _merge_sums(items, partial, out, row_scale)
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
    items = rows.work_items(schedule.chunk)
    partial = _partial(items, out)
    partial_aux = torch.empty_like(partial, dtype=torch.int32) if save else aux
    kinds = {"SIGN": _SIGN[problem.reduce], "SAVE": save}
    flags = {"SPLIT": items.num_items > 0, **kinds, **_blocks(schedule)}
    results = (out, aux, partial, partial_aux)
    tensors = (x, *results, rows.ptr, rows.index, items.row, items.start)
    widths = (problem.features, x.stride(0))
    _walk(extremum_rows, schedule, rows, items, tensors, widths, flags)
    if items.num_hubs:
        launch(
            extremum_merge,
            (items.num_hubs, _slices(problem.features, _MERGE["BLOCK_F"])),
            (partial, partial_aux, out, aux, items.hub_row, items.hub_ptr),
            (),
            (problem.features,),
            {**kinds, **_MERGE},
            warps=1,
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

    shape = (problem.num_dst, problem.features)
    grad_x = grad.new_empty(shape, dtype=problem.out_dtype)
    if grad_x.numel() == 0:
        return grad_x
    split = problem.ties == "split"
    if split:
        # Shares keep the precision of the accumulator until they are added up.
        grad, x = grad.float() / aux, row_major(x)
    grad = row_major(grad)
    columns = graph.columns()
    items = columns.work_items(schedule.chunk)
    partial = _partial(items, grad_x)
    tensors = (
        grad,
        x,
        out,
        aux,
        grad_x,
        partial,
        columns.ptr,
        columns.index,
        columns.index if split else graph.slots(),
        graph.rows().ptr,
        items.row,
        items.start,
    )
    flags = {
        "SPLIT": items.num_items > 0,
        "SAVE": _SAVE[problem.ties],
        **_blocks(schedule),
    }
    widths = (problem.features, grad.stride(0), x.stride(0) if split else 0)
    _walk(extremum_columns, schedule, columns, items, tensors, widths, flags)
    _merge_sums(items, partial, grad_x, None)
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
    grad_x = grad.new_zeros(shape, dtype=torch.float32)
    if grad_x.numel() and grad.numel():
        grad = row_major(grad)
        block_f = min(_power_of_2(problem.features), _MERGE["BLOCK_F"])
        block_r = _SCATTER_ELEMENTS // block_f
        grid = (-(-rows.num_rows // block_r), _slices(problem.features, block_f))
        launch(
            extremum_scatter,
            grid,
            (grad, aux, grad_x, rows.ptr, rows.index),
            (rows.num_rows,),
            (problem.features, grad.stride(0)),
            {"BLOCK_R": block_r, "BLOCK_F": block_f},
            warps=2,
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
    out = a.new_empty(rows.num_edges, dtype=problem.out_dtype)
    if out.numel() == 0 or problem.features == 0:
        return out.zero_()
    a, b = row_major(a), row_major(b)
    items = rows.work_items(schedule.chunk)
    perm = rows.index if rows.perm is None else rows.perm
    flags = {
        "SPLIT": items.num_items > 0,
        "HAS_PERM": rows.perm is not None,
        **_blocks(schedule),
    }
    launch(
        sddmm_rows,
        (_programs(rows, items, schedule),),
        (a, b, out, rows.ptr, rows.index, perm, items.row, items.start),
        (rows.num_rows, items.num_items, schedule.chunk),
        (problem.features, a.stride(0), b.stride(0)),
        flags,
        schedule.warps,
    )
    return out


def _walk(
    kernel: Any,
    schedule: Schedule,
    rows: Grouping,
    items: WorkItems,
    tensors: tuple[Tensor, ...],
    widths: tuple[int, ...],
    flags: dict[str, int],
) -> None:
    """Launch a kernel over grouped edges, feature slice by feature slice.

    The first of `widths` is the number of features.
    """
    launch(
        kernel,
        (_programs(rows, items, schedule), _slices(widths[0], schedule.slice)),
        tensors,
        (rows.num_rows, items.num_items, schedule.chunk),
        widths,
        flags,
        schedule.warps,
    )


def _merge_sums(
    items: WorkItems, partial: Tensor, out: Tensor, row_scale: Tensor | None
) -> None:
    if not items.num_hubs:
        return
    from pyg_tiga.kernels.spmm import spmm_merge

    scale = partial if row_scale is None else row_scale
    launch(
        spmm_merge,
        (items.num_hubs, _slices(out.size(1), _MERGE["BLOCK_F"])),
        (partial, out, scale, items.hub_row, items.hub_ptr),
        (),
        (out.size(1), out.stride(0)),
        {"HAS_ROW_SCALE": row_scale is not None, **_MERGE},
        warps=1,
    )


def _partial(items: WorkItems, out: Tensor) -> Tensor:
    """Room for the results of pieces; `out` stands for it where there are none."""
    if items.num_items == 0:
        return out
    return out.new_empty(items.num_items, out.size(1), dtype=torch.float32)


def _ordered(rows: Grouping, weight: Tensor) -> Tensor:
    """Edge weights in the order of the grouping: gathered once, not in every slice."""
    if rows.perm is None:
        return weight.contiguous()
    return weight.index_select(0, rows.perm)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of x times `scale`, computed in float32 and stored in the dtype of x."""
    return torch.mul(x, scale.unsqueeze(1), out=torch.empty_like(x))


def _programs(rows: Grouping, items: WorkItems, schedule: Schedule) -> int:
    return -(-(rows.num_rows + items.num_items) // schedule.rows)


def _slices(features: int, width: int) -> int:
    return -(-features // width)


def _blocks(schedule: Schedule) -> dict[str, int]:
    return {
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        "BLOCK_F": schedule.slice,
    }


def row_major(x: Tensor) -> Tensor:
    """The tensor itself where its rows are contiguous, else a contiguous copy."""
    if x.stride(1) == 1 or x.size(1) == 1:
        return x
    return x.contiguous()


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _implementation(name: str, op: str, run: Any, **limits: Any) -> Implementation:
    supported = Limits(
        devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0), **limits
    )
    return Implementation(name, "triton", op, supported, run, missing, scheduled=True)


SPMM = _implementation("triton", "spmm", _spmm)
SPMM_EXTREMUM = _implementation(
    "triton", "spmm_extremum", _spmm_extremum, weighted=False
)
SPMM_EXTREMUM_WINNERS = _implementation(
    "triton_winners",
    "spmm_extremum_backward",
    _extremum_winners,
    ties=("first",),
    deterministic=False,
)
SPMM_EXTREMUM_COLUMNS = _implementation(
    "triton_columns", "spmm_extremum_backward", _extremum_columns
)
SDDMM = _implementation("triton", "sddmm", _sddmm)
