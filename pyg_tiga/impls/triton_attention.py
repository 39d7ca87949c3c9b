"""Launching the forward of the edge-attention template."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    MERGE_WARPS,
    Blocks,
    Form,
    form_of,
    found,
    given,
    is_vector,
    laid_out,
    merge_blocks,
    new_state,
    operand_names,
    outside,
    score_functions,
    state_names,
    tile_blocks,
    walk_arguments,
    walk_programs,
)
from pyg_tiga.impls.attention_types import Operands, Options, State
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.edge_weights import edge_weights
from pyg_tiga.impls.launch import (
    current_stream,
    device_guard,
)
from pyg_tiga.impls.prepared import Prepared, Room, room_of
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.impls.triton_sum import new_room
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

_FLOAT, _MIB = 4, 2**20  # bytes


class RowsPass:
    """Softmax-weighted sums of values by destination, with what a backward needs.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        out_dtype: Dtype of the result.
        positive: Keep P and p.
        bias: Dtype of a bias ``[H, C]`` that is added to the result.
        rooms: Buffers in which some of the operands and of the state stand.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        form: Form,
        out_dtype: torch.dtype,
        positive: bool,
        bias: torch.dtype | None,
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.edge_attention import attention_rows

        rows = graph.rows()
        items = rows.work_items(schedule.chunk)
        blocks = tile_blocks(form, schedule)
        flags: dict[str, Any] = {"SAVE_POSITIVE": positive}
        flags |= {"HAS_BIAS": bias is not None}
        tiles = (
            -(-form.heads // blocks.row["BLOCK_H"]),
            -(-form.channels // blocks.row["BLOCK_C"]),
        )
        state = outside(state_names(positive), rooms)
        rest = () if bias is None else ("bias_ptr",)
        self._part = _part_room(items, form, positive)
        rest += (*rooms, *((self._part,) if items.num_items else ()))
        scores = ("score_ptr",) if form.options.gives_weights else ()
        self._walk = Prepared(
            attention_rows,
            (walk_programs(rows, items, schedule), *tiles),
            {
                **walk_arguments(graph, rows, items, schedule, form),
                **score_functions(form.options, "load_row", "load_col", "score"),
                **flags,
                **blocks.all,
                # Slices of values are not the whole operand.
                "SHARED": form.shared and tiles[1] == 1,
                "SAVE_SCORES": form.options.gives_weights,
            },
            (*outside(operand_names(form), rooms), *state, *scores, *rest),
            rows.index,
            schedule.warps,
            schedule.registers,
        )
        self._merge: Prepared | None = None
        if items.num_hubs:
            flags |= {"HEADS": form.heads, "CHANNELS": form.channels}
            varying = (*state, *rest)
            made = (rows, items, form.heads, tiles[1], varying, flags, blocks)
            self._merge = _merge(*made)

    def __call__(
        self,
        stream: int,
        operands: tuple[Tensor, ...],
        state: tuple[Tensor, ...],
        bias: tuple[Tensor, ...],
        *rooms: Tensor,
        scores: tuple[Tensor, ...] = (),
    ) -> None:
        """Launch.

        Args:
            stream: The current stream.
            operands: Operands that are there and in no room, laid out.
            state: The parts of a state that are there and in no room: the result.
            bias: The bias, if there is one.
            *rooms: The rooms.
            scores: Room for the scores, ``[E, H]``, if weights are made of them.
        """
        rest = (*bias, *rooms, *new_room(operands[0], self._part))
        self._walk(stream, *operands, *state, *scores, *rest)
        if self._merge is not None:
            self._merge(stream, *state, *rest)


def _part_room(items: WorkItems, form: Form, positive: bool) -> Room:
    """Room for the states of pieces."""
    scalar = items.num_items * form.heads
    rows = ("part_ptr", "part_positive_ptr")
    names = state_names(positive, "part")
    return room_of({n: scalar * (form.channels if n in rows else 1) for n in names})


def _merge(
    rows: Grouping,
    items: WorkItems,
    heads: int,
    slices: int,
    varying: tuple[str | Room, ...],
    flags: dict[str, Any],
    blocks: Blocks,
) -> Prepared:
    from pyg_tiga.kernels.attention_merge import attention_merge

    arguments = {
        "hub_row_ptr": items.hub_row,
        "hub_ptr_ptr": items.hub_ptr,
        **merge_blocks(blocks),
        **flags,
    }
    grid = (items.num_hubs, heads, slices)
    kernel = attention_merge
    return Prepared(kernel, grid, arguments, varying, rows.index, MERGE_WARPS)


class AttentionForward:
    """Softmax-weighted sums of values, with what a backward needs.

    Made once for a relation, of which it keeps arrays alone; a run allocates and
    launches, and may be recorded.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        out_dtype: Dtype of the result.
        positive: Keep P and p.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        form: Form,
        out_dtype: torch.dtype,
        positive: bool,
    ) -> None:
        self._shape = (graph.num_dst, form.heads, form.channels)
        self._dtype, self._positive = out_dtype, positive
        key = (schedule, form, out_dtype, positive, None)
        self._rows = found(graph, ("rows", *key), RowsPass)

    def run(
        self, stream: Any, operands: Operands, scores: tuple[Tensor, ...] = ()
    ) -> State:
        """Run on the current device.

        Args:
            stream: The current stream.
            operands: Operands, laid out.
            scores: Room for the scores, ``[E, H]``, if weights are made of them.
        """
        state = new_state(operands.value, self._shape, self._dtype, self._positive)
        self._rows(stream, given(operands), given(state), (), scores=scores)
        return state


def _forward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    """Softmax-weighted sums of values, with what a backward needs.

    With `positive` that is also P and p, where operands are numbers.
    """
    operands = laid_out(operands)
    form, dtype = form_of(operands, options), problem.out_dtype
    positive = positive and not is_vector(options)
    shape = (graph.num_dst, form.heads, form.channels)
    if 0 in shape and not options.gives_weights:
        return new_state(operands.value, shape, dtype, positive)
    graph.rows().work_items(schedule.chunk)  # Safe to read on this stream.
    index = operands.value.get_device()
    with device_guard(index):
        key = ("forward", schedule, form, dtype, positive)
        run, stream = found(graph, key, AttentionForward), current_stream(index)
        if not options.gives_weights:
            return run.run(stream, operands)
        size = (graph.num_edges, form.heads)
        scores = operands.value.new_empty(size, dtype=torch.float32)
        state = run.run(stream, operands, (scores,))
        return state._replace(
            weights=edge_weights(graph, scores, state, operands.seed, options, stream)
        )


def memory_notes(problem: Problem) -> list[tuple[str, str]]:
    """What a backward finds in memory beside operands, result and their gradients."""
    if problem.objective == "memory":
        return [("backward", "forms scores again; nothing is kept for it")]
    if problem.form == "additive":
        kept = "keeps P and p, sums over edges with positive scores"
        size = problem.num_dst * problem.features * problem.out_dtype.itemsize
        size += problem.num_dst * problem.heads * _FLOAT
    else:
        kept = "hands over the scores' gradients, E H in float32"
        size = problem.num_edges * problem.heads * _FLOAT
    return [("backward", f"{kept}: {size / _MIB:.2f} MiB")]


LIMITS = Limits(
    devices=("cuda", "cpu"),
    dtypes=FLOATS,
    forms=("additive", "dot", "dot_norm", "gatv2"),
    min_capability=(8, 0),
)

ATTENTION = Implementation(
    "triton",
    "triton",
    "edge_attention",
    LIMITS,
    _forward,
    missing,
    scheduled=True,
    notes=memory_notes,
)
