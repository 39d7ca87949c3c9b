"""Launching the forward of the edge-attention template."""

from __future__ import annotations

import torch

from pyg_tiga.impls.attention_launch import (
    MERGE_ITEMS,
    edge_flags,
    edge_pointers,
    laid_out,
    launcher_for,
    new_state,
    operand_width,
    score_functions,
    state_pointers,
    strides,
    tile_blocks,
    walk_programs,
    walk_sizes,
)
from pyg_tiga.impls.attention_types import Operands, Options, State
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.csr import WorkItems
from pyg_tiga.relation.graph import Graph


def _forward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    """Softmax-weighted sums of values, with what a backward needs."""
    from pyg_tiga.kernels.edge_attention import attention_rows

    operands = laid_out(operands)
    value = operands.value
    rows = graph.rows()
    heads, channels = value.shape[1:]
    state = new_state(value, rows.num_rows, problem.out_dtype, positive)
    if state.out.numel() == 0:
        return state
    items = rows.work_items(schedule.chunk)
    part = new_state(value, items.num_items, torch.float32, positive)
    kept = (
        state_pointers(state, value)
        if items.num_items == 0
        else state_pointers(part, value)
    )
    blocks = tile_blocks(operands, schedule, channels)
    flags = {
        **score_functions(options, "load_row", "load_col", "score"),
        **edge_flags(operands, options, rows, items),
        "SAVE_POSITIVE": positive,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (
        walk_programs(rows, items, schedule),
        -(-heads // blocks["BLOCK_H"]),
        -(-channels // blocks["BLOCK_C"]),
    )
    sizes = walk_sizes(graph, rows, items, schedule, options)
    run = launcher_for(graph, attention_rows, grid, sizes, flags, schedule.warps)
    tensors = (
        value,
        *state_pointers(state, value),
        *kept,
        operands.row,
        operands.col,
        *edge_pointers(operands, rows, items),
    )
    run(
        tensors,
        (
            heads,
            channels,
            operand_width(operands.row),
            *strides(value),
            *strides(operands.row),
            *strides(operands.col),
            float(options.scale),
            float(options.dropout),
            options.factor,
        ),
    )
    if items.num_hubs:
        _merge_rows(graph, state, part, items, blocks, positive)
    return state


def _merge_rows(
    graph: Graph,
    state: State,
    part: State,
    items: WorkItems,
    blocks: dict[str, int],
    positive: bool,
) -> None:
    from pyg_tiga.kernels.edge_attention import attention_merge

    heads, channels = state.out.shape[1:]
    grid = (
        items.num_hubs,
        -(-heads // blocks["BLOCK_H"]),
        -(-channels // blocks["BLOCK_C"]),
    )
    flags = {
        "SAVE_POSITIVE": positive,
        "BLOCK_P": MERGE_ITEMS,
        "BLOCK_H": blocks["BLOCK_H"],
        "BLOCK_C": blocks["BLOCK_C"],
    }
    run = launcher_for(graph, attention_merge, grid, (), flags, 1)
    pointers = (*state_pointers(state, state.out), *state_pointers(part, state.out))
    run((*pointers, items.hub_row, items.hub_ptr), (heads, channels))


LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))

ATTENTION = Implementation(
    "triton", "triton", "edge_attention", LIMITS, _forward, missing, scheduled=True
)
