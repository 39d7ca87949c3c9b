"""Passes over the rows of a backward of the edge-attention template."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    Form,
    Operand,
    grad_strides,
    has_slope,
    operand_names,
    place_arguments,
    score_functions,
    tile_blocks,
    unit_arguments,
    walk_arguments,
    walk_programs,
)
from pyg_tiga.impls.edge_order import places_of
from pyg_tiga.impls.prepared import Prepared, room_of
from pyg_tiga.impls.triton_nodes import PartialsPass
from pyg_tiga.impls.triton_sum import merge_sums, new_room
from pyg_tiga.problem import Schedule, power_of_2
from pyg_tiga.relation.graph import Graph

# Programs that share all rows where each leaves its part of a parameter's gradient, and
# units of work for each of them.
_PARAM_PROGRAMS = 4096
_PARAM_UNITS = 4


class EdgeSumsPass:
    """Numbers of edges summed by destination, those of loops included.

    Args:
        graph: The relation.
        schedule: Launch choices.
        heads: Heads.
        num_loops: Implicit self-loops.
        order: Order of the edges' numbers, ``"columns"`` or ``"caller"``.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        heads: int,
        num_loops: int,
        order: str,
    ) -> None:
        from pyg_tiga.kernels.edge_sums import edge_sums

        rows = graph.rows()
        items = rows.work_items(schedule.chunk)
        block_w = min(power_of_2(heads), 32)
        arguments = {
            **unit_arguments(rows, items, schedule.chunk),
            "num_start": num_loops,
            "width": heads,
            "HAS_START": num_loops > 0,
            **place_arguments(places_of(graph, order, "rows")),
            "BLOCK_R": 4,
            "BLOCK_E": max(1, 128 // block_w),
            "BLOCK_W": block_w,
        }
        units = rows.num_rows + items.num_items
        grid = (-(-units // arguments["BLOCK_R"]), -(-heads // block_w))
        names = ["value_ptr", *(["start_ptr"] if num_loops > 0 else []), "out_ptr"]
        self._part = room_of({"part_ptr": items.num_items * heads})
        names += [self._part] if items.num_items else []
        self._walk = Prepared(edge_sums, grid, arguments, tuple(names), rows.index)
        self._merge = merge_sums(rows, items, heads)

    def __call__(self, stream: int, terms: tuple[Tensor, ...], out: Tensor) -> None:
        """Launch on numbers of the edges and, with loops, of these."""
        part = new_room(out, self._part)
        self._walk(stream, *terms, out, *part)
        if self._merge is not None:
            self._merge(stream, *part, out)


class DestinationsPass:
    """Gradients of the destinations' operand and of the score's parameter.

    They take a walk over the destinations' edges, which reads the gradients of the
    scores or forms them again.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        grad: Form of the result's gradient; None where the gradients of the scores are
            read in place of edge and loop terms: in the order of the columns, or of the
            rows if all terms are.
    """

    def __init__(
        self, graph: Graph, schedule: Schedule, form: Form, grad: Operand | None
    ) -> None:
        from pyg_tiga.kernels.attention_rows_backward import attention_rows_backward

        rows = graph.rows()
        items = rows.work_items(schedule.chunk)
        blocks = tile_blocks(form, schedule, whole=True)
        functions = ("load_row", "load_col", "score", "slope", "vjp_row", "vjp_param")
        is_handed, width = grad is None, form.heads * form.width
        self._params = _ParamSums(graph, schedule, form)
        self._part = room_of({"part_ptr": items.num_items * width})
        names = [
            *operand_names(form),
            *(() if is_handed else ("grad_ptr", "state_ptr")),
        ]
        names += ["grad_row_ptr", *self._params.names]
        arguments = {
            **walk_arguments(graph, rows, items, schedule, form, grad),
            **score_functions(form.options, *functions),
            "FACTORED": has_slope(form.options),
            "HANDED": is_handed,
            "STRIDE_OR": grad_strides(graph, form).row,
            **blocks.all,
        }
        if is_handed:
            by_row = form.options.by_row
            place = None if by_row else places_of(graph, "columns", "rows")
            arguments |= place_arguments(place)
            arguments |= {"stride_gn": 0, "stride_gh": 0, "PITCH_G": 0}
        programs = self._params.programs or walk_programs(rows, items, schedule)
        self._walk = Prepared(
            attention_rows_backward,
            (programs, -(-form.heads // blocks.row["BLOCK_H"])),
            arguments,
            (*names, *((self._part,) if items.num_items else ())),
            rows.index,
            schedule.warps,
            schedule.registers,
        )
        stride = arguments["STRIDE_OR"]
        self._merge = merge_sums(rows, items, width, stride=stride)

    def __call__(
        self,
        stream: int,
        operands: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        out: Tensor,
    ) -> Tensor | None:
        """Launch; gives the gradient ``[H, K]`` of the parameter, if there is one.

        Args:
            stream: The current stream.
            operands: Operands, laid out.
            given: The result's gradient and what the first pass packed, if they are
                read.
            out: The gradient of the destinations' operand.
        """
        part, shares = new_room(out, self._part), self._params.room(out)
        self._walk(stream, *operands, *given, out, *shares, *part)
        if self._merge is not None:
            self._merge(stream, *part, out)
        return self._params.total(stream, *shares)


class _ParamSums:
    """The gradient of a parameter, of which each program of a walk leaves a share.

    There are far fewer programs than rows, and the units of each are fixed.
    """

    def __init__(self, graph: Graph, schedule: Schedule, form: Form) -> None:
        self.programs, self.names = 0, ()
        if form.param is None:
            return
        rows = graph.rows()
        units = rows.num_rows + rows.work_items(schedule.chunk).num_items
        self.programs = min(_PARAM_PROGRAMS, -(-units // _PARAM_UNITS))
        self.names = ("grad_param_ptr",)
        self._shape, width = (form.heads, form.width), form.heads * form.width
        programs = (self.programs, self.programs)
        self._sum = PartialsPass(graph, programs, width, width).launch

    def room(self, like: Tensor) -> tuple[Tensor, ...]:
        """Room for the shares, if there is a parameter."""
        if not self.programs:
            return ()
        size = (self.programs, *self._shape)
        return (like.new_empty(size, dtype=torch.float32),)

    def total(self, stream: int, *shares: Tensor) -> Tensor | None:
        """The sum of the shares, in fixed order."""
        if not shares:
            return None
        out = shares[0].new_empty(self._shape)
        self._sum(stream, *shares, out)
        return out
