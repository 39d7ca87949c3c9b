"""Launchers of our SpMM family: they allocate, size the grid and launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import _features
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.launch import Launcher, current_stream, device_guard, launch
from pyg_tiga.impls.triton_sum import merge_sums, row_major, run_sum
from pyg_tiga.problem import Problem, Schedule, power_of_2
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


class _Launches(NamedTuple):
    """What a problem launches on one graph: the walk over its rows, and the merge."""

    walk: Launcher
    merge: Any  # A `Launcher`, of sums a `Prepared` kernel, or None.


def _spmm_extremum(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    x: Tensor,  # [N_src, F]
) -> tuple[Tensor, Tensor]:
    rows = graph.rows()
    save = problem.ties != "none"
    out = x.new_empty(rows.num_rows, problem.features)
    aux = x.new_empty(out.shape if save else 0, dtype=torch.int32)
    if out.numel() == 0:
        return out, aux
    x = row_major(x)
    items = rows.work_items(schedule.chunk)
    partial = _partial(items, out)
    partial_aux = torch.empty_like(partial, dtype=torch.int32) if save else aux
    launches = graph.scratch.get(problem)
    if launches is None:
        launches = _extremum_launches(problem, schedule, rows, items)
        graph.scratch[problem] = launches
    results = (out, aux, partial, partial_aux)
    tensors = (x, *results, rows.ptr, rows.index, items.row, items.start)
    launches.walk(tensors, (problem.features, x.stride(0)))
    if launches.merge is not None:
        tensors = (partial, partial_aux, out, aux, items.hub_row, items.hub_ptr)
        launches.merge(tensors, (problem.features,))
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
    launches = graph.scratch.get(problem)
    if launches is None:
        launches = _columns_launches(problem, schedule, columns, items)
        graph.scratch[problem] = launches
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
    strides = (grad.stride(0), x.stride(0) if split else 0)
    launches.walk(tensors, (problem.features, *strides))
    if launches.merge is not None:
        index = grad_x.get_device()
        with device_guard(index):
            launches.merge(current_stream(index), partial, grad_x)
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
        block_f = min(power_of_2(problem.features), _MERGE["BLOCK_F"])
        block_r = _SCATTER_ELEMENTS // block_f
        grid = (-(-rows.num_rows // block_r), _slices(problem.features, block_f))
        tensors = (grad, aux, grad_x, rows.ptr, rows.index)
        widths = (problem.features, grad.stride(0))
        sizes = (rows.num_rows,)
        launch(extremum_scatter, grid, tensors, sizes, widths, (block_r, block_f), 2)
    return grad_x.to(problem.out_dtype)


def _sddmm(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    a: Tensor,  # [N_dst, F]
    b: Tensor,  # [N_src, F]
) -> Tensor:
    rows = graph.rows()
    out = a.new_empty(rows.num_edges, dtype=problem.out_dtype)
    if out.numel() == 0 or problem.features == 0:
        return out.zero_()
    a, b = row_major(a), row_major(b)
    items = rows.work_items(schedule.chunk)
    run = graph.scratch.get(problem)
    if run is None:
        run = graph.scratch[problem] = _sddmm_launcher(schedule, rows, items)
    perm = rows.index if rows.perm is None else rows.perm
    tensors = (a, b, out, rows.ptr, rows.index, perm, items.row, items.start)
    run(tensors, (problem.features, a.stride(0), b.stride(0)))
    return out


def _extremum_launches(
    problem: Problem, schedule: Schedule, rows: Grouping, items: WorkItems
) -> _Launches:
    from pyg_tiga.kernels.extremum import extremum_merge, extremum_rows

    flags = {"SIGN": _SIGN[problem.reduce], "SAVE": _SAVE[problem.ties]}
    walk = _walk(extremum_rows, problem, schedule, rows, items, flags)
    if not items.num_hubs:
        return _Launches(walk, None)
    grid = (items.num_hubs, _slices(problem.features, _MERGE["BLOCK_F"]))
    return _Launches(
        walk, Launcher(extremum_merge, grid, (), (*flags.values(), *_MERGE.values()))
    )


def _columns_launches(
    problem: Problem, schedule: Schedule, columns: Grouping, items: WorkItems
) -> _Launches:
    from pyg_tiga.kernels.extremum import extremum_columns

    flags = {"SAVE": _SAVE[problem.ties]}
    walk = _walk(extremum_columns, problem, schedule, columns, items, flags)
    return _Launches(walk, merge_sums(columns, items, problem.features))


def _sddmm_launcher(schedule: Schedule, rows: Grouping, items: WorkItems) -> Launcher:
    from pyg_tiga.kernels.sddmm import sddmm_rows

    blocks = _blocks(schedule).values()
    constants = (items.num_items > 0, rows.perm is not None, *blocks)
    sizes = (rows.num_rows, items.num_items, schedule.chunk)
    grid = (_programs(rows, items, schedule),)
    return Launcher(sddmm_rows, grid, sizes, constants, schedule.warps)


def _walk(
    kernel: Any,
    problem: Problem,
    schedule: Schedule,
    rows: Grouping,
    items: WorkItems,
    flags: dict[str, Any],
) -> Launcher:
    """A launcher over grouped edges, feature slice by feature slice."""
    slices = _slices(problem.features, schedule.slice)
    return Launcher(
        kernel,
        (_programs(rows, items, schedule), slices),
        (rows.num_rows, items.num_items, schedule.chunk),
        tuple({"SPLIT": items.num_items > 0, **flags, **_blocks(schedule)}.values()),
        schedule.warps,
    )


def _partial(items: WorkItems, out: Tensor) -> Tensor:
    """Room for the results of pieces; `out` stands for it where there are none."""
    if items.num_items == 0:
        return out
    return out.new_empty(items.num_items, out.size(1), dtype=torch.float32)


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


def _implementation(name: str, op: str, run: Any, **limits: Any) -> Implementation:
    supported = Limits(
        devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0), **limits
    )
    return Implementation(name, "triton", op, supported, run, missing, scheduled=True)


SPMM = _implementation("triton", "spmm", run_sum)
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
