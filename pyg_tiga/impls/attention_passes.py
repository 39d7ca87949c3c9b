"""The passes of which backwards of the edge-attention template are made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    MERGE_WARPS,
    NODE_ELEMENTS,
    SUM_WARPS,
    Blocks,
    Form,
    Operand,
    grad_strides,
    has_slope,
    merge_blocks,
    operand_names,
    outside,
    score_functions,
    state_names,
    tile_blocks,
    walk_arguments,
    walk_programs,
)
from pyg_tiga.impls.prepared import Prepared, Room, room_of
from pyg_tiga.impls.triton_sum import new_room
from pyg_tiga.problem import Schedule, power_of_2
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

# So few registers, and so many programs, that all of these run at once.
_SUM_REGISTERS = 64
_SUM_PROGRAMS = 1056


class Sums(NamedTuple):
    """Where partial sums over all nodes go."""

    programs: int
    stride: int
    offset: int


def prepare_programs(num_rows: int) -> int:
    """Programs of a first pass that sums over all rows."""
    return min(_SUM_PROGRAMS, num_rows)


class PreparePass:
    """(m, 1 / l, delta) of each row, and the additive score's gradient by row.

    Args:
        graph: The relation.
        shape: Heads and channels.
        grad: Form of the result's gradient, and so dtype of the result.
        row: Form of the destinations' operand, if it is a number for each head.
        scale: The negative slope.
        positive: Whether the state has P and p, and so the gradient by row is formed.
        bias: Dtype of a bias in the result.
        sums: Where sums of the gradient go, for a bias behind or in the result.
        rooms: Buffers in which some of all this stands.
    """

    def __init__(
        self,
        graph: Graph,
        shape: tuple[int, int],
        grad: Operand,
        row: Operand | None,
        scale: float,
        positive: bool,
        bias: torch.dtype | None,
        sums: Sums | None,
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.attention_state import attention_prepare

        heads, channels = shape
        # A sum over rows holds all channels of a head.
        block_c = power_of_2(channels)
        block_c = min(block_c, 128) if sums is None else block_c
        block_h = min(power_of_2(heads), max(1, NODE_ELEMENTS // block_c))
        block_n = max(1, NODE_ELEMENTS // (block_c * block_h))
        rows = graph.rows()
        programs = -(-rows.num_rows // block_n) if sums is None else sums.programs
        names = ["grad_ptr", *state_names(positive), "state_ptr"]
        names += ["row_ptr"] if row is not None else []
        names += ["grad_row_ptr"] if positive else []
        names += ["bias_ptr"] if bias is not None else []
        names += ["sums_ptr"] if sums is not None else []
        arguments = {
            "num_rows": rows.num_rows,
            "HEADS": heads,
            "CHANNELS": channels,
            "stride_gn": grad.stride_n,
            "stride_gh": grad.stride_h,
            "stride_rn": 0 if row is None else row.stride_n,
            "stride_rh": 0 if row is None else row.stride_h,
            "stride_p": 0 if sums is None else sums.stride,
            "offset_p": 0 if sums is None else sums.offset,
            "scale": float(scale),
            "HAS_ROW": row is not None,
            "HAS_POSITIVE": positive,
            "HAS_BIAS": bias is not None,
            "GRAD_BIAS": sums is not None,
            "BLOCK_N": block_n,
            "BLOCK_H": block_h,
            "BLOCK_C": block_c,
        }
        grid = (programs, -(-heads // block_h))
        kernel = attention_prepare
        limits = (2, 0) if sums is None else (SUM_WARPS, _SUM_REGISTERS)
        # Called with what is in no room in the order of `names`, and with the rooms.
        varying = (*outside(names, rooms), *rooms)
        self.launch = Prepared(kernel, grid, arguments, varying, rows.index, *limits)


class ColumnsPass:
    """Gradients of values and of the sources' operand, and those of the terms.

    Of an operand that is the values, the gradient is in that of these.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        grad: Form of the result's gradient.
        terms: Whether gradients of the edges' terms, in the order of the columns, and
            of the loops' are formed.
        vectors: Dtypes of the vectors through which gradients of the sources' and the
            destinations' scores flow on into those of values; None where they do not.
        rooms: Buffers in which some of all this stands.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        form: Form,
        grad: Operand,
        terms: tuple[bool, bool],
        vectors: tuple[torch.dtype | None, torch.dtype | None],
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.attention_columns import attention_columns

        columns = graph.columns()
        items = columns.work_items(schedule.chunk)
        blocks = tile_blocks(form, schedule, whole=True)
        strides = grad_strides(graph, form)
        flags = {
            "STRIDE_OV": strides.value,
            "STRIDE_OC": strides.col,
            "ATT_SRC": vectors[0] is not None,
            "ATT_DST": vectors[1] is not None,
        }
        functions = ("load_row", "load_col", "score", "slope", "vjp_col", "vjp_term")
        slots = {"slot_ptr": graph.slots()} if form.options.by_row else {}
        heads = -(-form.heads // blocks.row["BLOCK_H"])
        scalar = items.num_items * form.heads
        sizes = {"part_ptr": form.channels}
        sizes |= {} if form.shared else {"part_col_ptr": form.width}
        self._part = room_of({name: scalar * n for name, n in sizes.items()})
        names = ("grad_value_ptr", *(() if form.shared else ("grad_col_ptr",)))
        results = outside(names, rooms)
        given_terms = [
            name
            for name, wanted in zip(("grad_term_ptr", "grad_loop_term_ptr"), terms)  # noqa: B905
            if wanted
        ]
        rest = (*outside(_vector_names(vectors), rooms), *rooms)
        rest += (self._part,) if items.num_items else ()
        self._walk = Prepared(
            attention_columns,
            (walk_programs(columns, items, schedule), heads),
            {
                **walk_arguments(graph, columns, items, schedule, form, grad),
                **score_functions(form.options, *functions),
                **slots,
                "FACTORED": has_slope(form.options) and not any(terms),
                "HAS_SHARE": form.has_share,
                "GRAD_TERM": terms[0],
                "GRAD_LOOP_TERM": terms[1],
                **flags,
                **blocks.all,
            },
            (
                *outside(operand_names(form), rooms),
                *outside(("grad_ptr", "state_ptr"), rooms),
                *results,
                *given_terms,
                *rest,
            ),
            columns.index,
            schedule.warps,
            schedule.registers,
        )
        self._merge = _merge_columns(
            columns, items, form, (*results, *rest), flags, blocks
        )

    def __call__(
        self,
        stream: int,
        operands: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        terms: tuple[Tensor, ...],
        vectors: tuple[Tensor, ...],
        *rooms: Tensor,
    ) -> None:
        """Launch; of everything, what is there and stands in no room.

        Args:
            stream: The current stream.
            operands: Operands, laid out.
            given: The result's gradient, and what the first pass packed.
            results: Gradients of values and, where it has its own, of the sources'
                operand.
            terms: Gradients of terms.
            vectors: The sources' vector, and the destinations' with the gradient of
                their scores.
            *rooms: The rooms.
        """
        rest = (*vectors, *rooms, *new_room(given[0], self._part))
        self._walk(stream, *operands, *given, *results, *terms, *rest)
        if self._merge is not None:
            self._merge(stream, *results, *rest)


def _vector_names(vectors: tuple[object, object]) -> tuple[str, ...]:
    names = ["att_src_ptr"] if vectors[0] is not None else []
    names += ["att_dst_ptr", "grad_row_ptr"] if vectors[1] is not None else []
    return tuple(names)


def _merge_columns(
    columns: Grouping,
    items: WorkItems,
    form: Form,
    varying: tuple[str | Room, ...],
    flags: dict[str, int],
    blocks: Blocks,
) -> Prepared | None:
    from pyg_tiga.kernels.attention_merge import columns_merge

    if not items.num_hubs:
        return None
    arguments = {
        **flags,
        **merge_blocks(blocks),
        **blocks.operand,
        "hub_row_ptr": items.hub_row,
        "hub_ptr_ptr": items.hub_ptr,
        "HEADS": form.heads,
        "CHANNELS": form.channels,
        "WIDTH": form.width,
    }
    if form.shared:
        # Pieces of values alone.
        arguments |= {"WIDTH": 0, "BLOCK_K": 1}
    grid = (items.num_hubs, form.heads)
    kernel = columns_merge
    return Prepared(kernel, grid, arguments, varying, columns.index, MERGE_WARPS)
