"""Launching the forward of the edge-attention template."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    MERGE_WARPS,
    Blocks,
    Form,
    carve,
    form_of,
    found,
    given,
    laid_out,
    merge_items,
    new_state,
    operand_names,
    piece,
    score_functions,
    state_names,
    tile_blocks,
    walk_arguments,
    walk_programs,
)
from pyg_tiga.impls.attention_types import Operands, Options, State
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.launch import Prepared, current_stream, device_guard
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph


class RowsPass:
    """Softmax-weighted sums of values by destination, with what a backward needs.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        out_dtype: Dtype of the result.
        positive: Keep P and p.
        bias: Dtype of a bias ``[H, C]`` that is added to the result.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        form: Form,
        out_dtype: torch.dtype,
        positive: bool,
        bias: torch.dtype | None,
    ) -> None:
        from pyg_tiga.kernels.edge_attention import attention_rows

        rows = graph.rows()
        items = rows.work_items(schedule.chunk)
        blocks = tile_blocks(form, schedule)
        flags = {"SAVE_POSITIVE": positive, "HAS_BIAS": bias is not None}
        tiles = (
            -(-form.heads // blocks.row["BLOCK_H"]),
            -(-form.channels // blocks.row["BLOCK_C"]),
        )
        extra = () if bias is None else ("bias_ptr",)
        part = state_names(positive, "part") if items.num_items else ()
        self._parts = _part_sizes(items, form, positive)
        self._walk = Prepared(
            attention_rows,
            (walk_programs(rows, items, schedule), *tiles),
            {
                **walk_arguments(graph, rows, items, schedule, form),
                **score_functions(form.options, "load_row", "load_col", "score"),
                **flags,
                **blocks.all,
            },
            (*operand_names(form), *state_names(positive), *part, *extra),
            rows.index,
            schedule.warps,
            schedule.registers,
        )
        self._merge: Prepared | None = None
        if items.num_hubs:
            names = (*state_names(positive), *part, *extra)
            flags |= {"HEADS": form.heads, "CHANNELS": form.channels}
            self._merge = _merge(rows, items, tiles, names, flags, blocks)

    def __call__(
        self,
        stream: int,
        operands: tuple[Tensor, ...],
        state: tuple[Tensor, ...],
        bias: tuple[Tensor, ...],
    ) -> None:
        """Launch.

        Args:
            stream: The current stream.
            operands: Operands that are there, laid out.
            state: The parts of a state that are there: the result.
            bias: The bias, if there is one.
        """
        part = carve(operands[0], self._parts)
        self._walk(stream, *operands, *state, *part, *bias)
        if self._merge is not None:
            self._merge(stream, *state, *part, *bias)


def _part_sizes(items: WorkItems, form: Form, positive: bool) -> list[int]:
    if not items.num_items:
        return []
    scalar = items.num_items * form.heads
    sizes = [scalar * form.channels, scalar, scalar]
    sizes += [scalar * form.channels, scalar] if positive else []
    return list(map(piece, sizes))


def _merge(
    rows: Grouping,
    items: WorkItems,
    tiles: tuple[int, int],
    varying: tuple[str, ...],
    flags: dict[str, Any],
    blocks: Blocks,
) -> Prepared:
    from pyg_tiga.kernels.edge_attention import attention_merge

    arguments = {
        "hub_row_ptr": items.hub_row,
        "hub_ptr_ptr": items.hub_ptr,
        "BLOCK_P": merge_items(blocks),
        **blocks.row,
        **flags,
    }
    grid = (items.num_hubs, *tiles)
    kernel = attention_merge
    return Prepared(kernel, grid, arguments, varying, rows.index, MERGE_WARPS)


def _forward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    """Softmax-weighted sums of values, with what a backward needs."""
    operands = laid_out(operands)
    rows = graph.rows()
    state = new_state(operands.value, rows.num_rows, problem.out_dtype, positive)
    if state.out.numel() == 0:
        return state
    rows.work_items(schedule.chunk)  # Safe to read on this stream.
    index = operands.value.get_device()
    with device_guard(index):
        form = form_of(operands, options)
        key = ("rows", schedule, form, problem.out_dtype, positive, None)
        run = found(graph, key, RowsPass)
        run(current_stream(index), given(operands), given(state), ())
    return state


LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))

ATTENTION = Implementation(
    "triton", "triton", "edge_attention", LIMITS, _forward, missing, scheduled=True
)
