"""Launching weighted sums over edges, alone and with the linear maps behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.launch import device_guard, is_current
from pyg_tiga.impls.prepared import Prepared, Room, room_of
from pyg_tiga.impls.replay import Replay, free, linear, sum_rows
from pyg_tiga.problem import Problem, Schedule, power_of_2
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

_MERGE_ITEMS = 8
_MERGE_WIDTH = 128


class SumPass:
    """Sums of (weighted, scaled) source rows by destination.

    Args:
        graph: The relation.
        problem: What is summed.
        schedule: Launch choices.
        stride: Stride of the rows that are summed.
    """

    def __init__(
        self, graph: Graph, problem: Problem, schedule: Schedule, stride: int
    ) -> None:
        from pyg_tiga.kernels.spmm import spmm_rows

        self._graph, self._schedule = graph, schedule
        self._scales = (problem.normalize == "dst", problem.normalize == "src")
        self.prescales = self._scales[1] and schedule.prescale
        self._shape = (problem.num_dst, problem.features)
        self._dtype = problem.out_dtype
        rows, items = graph.rows(), graph.rows().work_items(schedule.chunk)
        row_scale, col_scale = self.refresh()
        col_scale = None if self.prescales else col_scale
        self._part = room_of({"partial_ptr": items.num_items * problem.features})
        part = (self._part,) if items.num_items else ()
        arguments = {
            **_scale("row_scale_ptr", row_scale),
            **_scale("col_scale_ptr", col_scale),
            "ptr_ptr": rows.ptr,
            "index_ptr": rows.index,
            "item_row_ptr": items.row,
            "item_start_ptr": items.start,
            "num_rows": rows.num_rows,
            "num_items": items.num_items,
            "chunk": schedule.chunk,
            "features": problem.features,
            "stride_x": stride,
            "stride_out": problem.features,
            "SPLIT": items.num_items > 0,
            "HAS_WEIGHT": problem.weighted,
            "HAS_ROW_SCALE": row_scale is not None,
            "HAS_COL_SCALE": col_scale is not None,
            "BLOCK_R": schedule.rows,
            "BLOCK_E": schedule.edges,
            "BLOCK_F": schedule.slice,
        }
        units = rows.num_rows + items.num_items
        grid = (-(-units // schedule.rows), -(-problem.features // schedule.slice))
        names = ("x_ptr", "out_ptr", *(("weight_ptr",) if problem.weighted else ()))
        made = (grid, arguments, (*names, *part), rows.index, schedule.warps)
        self._walk = Prepared(spmm_rows, *made)
        self._merge = merge_sums(rows, items, problem.features, row_scale)

    def refresh(self) -> tuple[Tensor | None, Tensor | None]:
        """Make all that is read of the relation safe to read on the current stream.

        Gives the scales of rows and of columns.
        """
        rows = self._graph.rows()
        rows.work_items(self._schedule.chunk)
        by_row, by_col = self._scales
        return (
            rows.degree_inv() if by_row else None,
            self._graph.columns().degree_inv() if by_col else None,
        )

    def __call__(self, stream: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Launch on rows `[N_src, F]` and weights `[E]` in the grouping's order."""
        out = x.new_empty(self._shape, dtype=self._dtype)
        part = new_room(x, self._part)
        self._walk(stream, x, out, *(() if weight is None else (weight,)), *part)
        if self._merge is not None:
            self._merge(stream, *part, out)
        return out


class Sum:
    """A sum over edges as an implementation runs it.

    Args:
        graph: The relation.
        problem: What is summed.
        schedule: Launch choices.
        stride: Stride of the rows that are summed.
    """

    def __init__(self, graph: Graph, *made: Any) -> None:
        self._graph = graph
        self._pass = SumPass(graph, *made)
        self._replay = Replay(self._run)

    def _run(self, stream: Any, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
        return (self._pass(stream, x, weight),)

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Launch on rows `[N_src, F]` and weights `[E]` in the caller's order."""
        _, col_scale = self._pass.refresh()
        if self._pass.prescales:
            x = _scaled(x, col_scale)
        perm = self._graph.rows().perm
        if weight is not None:
            # Gathered once, not in every slice of features.
            weight = (
                weight.contiguous() if perm is None else weight.index_select(0, perm)
            )
        return self._replay(x, weight)[0]


class LinearSum:
    """A sum over edges and the linear maps behind it.

    `run` is called with source features; destination features, or None if there are
    none or they are the same; the sum's map, its bias or None, and the destinations'
    map or None. It gives the result and the sum.

    Args:
        same: Whether sources and destinations are one tensor.
        graph: The relation.
        problem: What is summed.
        schedule: Launch choices.
        stride: Stride of the source features.
    """

    def __init__(self, same: bool, graph: Graph, *made: Any) -> None:
        self.same = same
        self.sum = SumPass(graph, *made)
        self.run = Replay(self._run)

    def _run(
        self,
        stream: Any,
        x: Tensor,  # [N_src, F_in]
        x_dst: Tensor | None,  # [N_dst, F_dst]
        left: Tensor,  # [F_out, F_in]
        bias: Tensor | None,  # [F_out]
        right: Tensor | None,  # [F_out, F_dst]
    ) -> tuple[Tensor, ...]:
        aggregate = self.sum(stream, x)
        out = linear(aggregate, left, bias)
        if right is not None:
            out.addmm_(x if self.same else x_dst, right.t())
        return out, aggregate


class Needs(NamedTuple):
    """Which gradients a backward forms; those of features, apart or in one."""

    x: bool
    x_dst: bool
    left: bool
    bias: bool
    right: bool


class LinearSumBackward:
    """Gradients of `LinearSum`.

    `run` is called with the result's gradient, what the forward was called with, and
    the sum, each of these None where no gradient reads it; it gives gradients in the
    order of `Needs`.

    Args:
        needs: Which gradients; the others are None.
        same: Whether sources and destinations are one tensor, with one gradient.
        made: What the sum of gradients is made of, where that of the sources is wanted:
            the reversed relation, the problem, launch choices, and the rows' stride.
    """

    def __init__(self, needs: Needs, same: bool, *made: Any) -> None:
        self._needs, self._same = needs, same
        self.sum = SumPass(*made) if needs.x else None
        self.run = Replay(self._run)

    def _run(
        self,
        stream: Any,
        grad: Tensor,  # [N_dst, F_out]
        x: Tensor | None,  # [N_src, F_in]
        x_dst: Tensor | None,  # [N_dst, F_dst]
        left: Tensor | None,  # [F_out, F_in]
        bias: Tensor | None,  # [F_out]
        right: Tensor | None,  # [F_out, F_dst]
        aggregate: Tensor | None,  # [N_dst, F_in]
    ) -> tuple[Tensor | None, ...]:
        needs, turned = self._needs, grad.t()
        grad_left = turned.mm(aggregate) if needs.left else None
        free(aggregate)
        grad_x = None
        if self.sum is not None:
            grad_x = self.sum(stream, grad.mm(left))
            if self._same:
                grad_x.addmm_(grad, right)
        return (
            grad_x,
            grad.mm(right) if needs.x_dst else None,
            grad_left,
            sum_rows(grad) if needs.bias else None,
            turned.mm(x if self._same else x_dst) if needs.right else None,
        )


def run_sum(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None,  # [E]
) -> Tensor:
    """Run a sum over edges."""
    index = x.get_device()
    if not is_current(index):
        with device_guard(index):
            return run_sum(problem, schedule, graph, x, weight)
    if problem.num_dst == 0 or problem.features == 0:
        shape = (problem.num_dst, problem.features)
        return x.new_empty(shape, dtype=problem.out_dtype)
    x = row_major(x)
    stride = x.stride(0)
    key = (problem, stride, None if weight is None else weight.dtype)
    found = graph.scratch.get(key)
    if found is None:
        found = graph.scratch[key] = Sum(graph, problem, schedule, stride)
    return found(x, weight)


def merge_sums(
    rows: Grouping,
    items: WorkItems,
    width: int,
    scale: Tensor | None = None,
    stride: int | None = None,
) -> Prepared | None:
    """Add up pieces [num_items, width] of long rows; called with them and the rows.

    These are dense, or have a stride.
    """
    from pyg_tiga.kernels.spmm import spmm_merge

    if not items.num_hubs:
        return None
    block = min(power_of_2(width), _MERGE_WIDTH)
    arguments = {
        **_scale("row_scale_ptr", scale),
        "hub_row_ptr": items.hub_row,
        "hub_ptr_ptr": items.hub_ptr,
        "features": width,
        "stride_out": width if stride is None else stride,
        "HAS_ROW_SCALE": scale is not None,
        "BLOCK_K": _MERGE_ITEMS,
        "BLOCK_F": block,
    }
    grid = (items.num_hubs, -(-width // block))
    varying = ("partial_ptr", "out_ptr")
    return Prepared(spmm_merge, grid, arguments, varying, rows.index)


def new_room(like: Tensor, room: Room) -> tuple[Tensor, ...]:
    """The buffer of a room, or none for an empty one."""
    return (like.new_empty(room.size, dtype=torch.float32),) if room.size else ()


def row_major(x: Tensor) -> Tensor:
    """The tensor itself where its rows are contiguous, else a contiguous copy."""
    if x.stride(1) == 1 or x.size(1) == 1:
        return x
    return x.contiguous()


def _scale(name: str, scale: Tensor | None) -> dict[str, Tensor]:
    return {} if scale is None else {name: scale}


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of x times `scale`, computed in float32 and stored in the dtype of x."""
    return torch.mul(x, scale.unsqueeze(1), out=torch.empty_like(x))
