"""Launching the backward of the edge-attention template."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    MERGE_ITEMS,
    NODE_ELEMENTS,
    edge_flags,
    edge_pointers,
    laid_out,
    launcher_for,
    operand_width,
    score_functions,
    state_pointers,
    strides,
    tile_blocks,
    walk_programs,
    walk_sizes,
)
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.impls.base import Implementation
from pyg_tiga.impls.triton_attention import LIMITS
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule, power_of_2
from pyg_tiga.relation.csr import WorkItems
from pyg_tiga.relation.graph import Graph


def _backward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    grad: Tensor,  # [N_dst, H, C]
    operands: Operands,
    options: Options,
    state: State,
    wanted: Wanted,
    att: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:
    """Gradients of all operands.

    With `att`, the operands are <value, att> of the same nodes, and their gradients are
    passed on into that of the values (the first for sources, the second where sources
    and destinations are the same nodes).
    """
    operands = laid_out(operands)
    grad = grad if grad.stride(2) == 1 or grad.size(2) == 1 else grad.contiguous()
    packed, grad_row = _prepare(graph, grad, options, state)
    grad_param = None
    hands_over = wanted.hands_over and grad_row is None
    if grad_row is None and not hands_over:
        grad_row, grad_param = _rows_backward(
            graph, grad, operands, options, packed, schedule
        )
    # Where the row gradient is summed later, it cannot flow into that of the values.
    fused = att if grad_row is not None else (att[0], None)
    found = _columns(
        graph,
        grad,
        operands,
        options,
        packed,
        packed if grad_row is None else grad_row,
        schedule,
        wanted.term or hands_over,
        wanted.loop_term or (hands_over and options.num_loops > 0),
        fused,
    )
    if hands_over:
        grad_row = _edge_sums(graph, found, options, schedule)
        if att[1] is not None:
            _add_outer(found.value, grad_row, att[1])
    term = _to_caller(graph, found.term) if wanted.term else None
    loop_term = found.loop_term if wanted.loop_term else None
    return found._replace(
        row=grad_row, term=term, loop_term=loop_term, param=grad_param
    )


def _edge_sums(
    graph: Graph, found: Gradients, options: Options, schedule: Schedule
) -> Tensor:
    """Gradients of the terms summed by destination, those of loops included."""
    from pyg_tiga.kernels.edge_sums import edge_sums
    from pyg_tiga.kernels.spmm import spmm_merge

    rows = graph.rows()
    width = found.term.size(1)
    out = found.term.new_empty(rows.num_rows, width)
    if out.numel() == 0:
        return out
    items = rows.work_items(schedule.chunk)
    part = out.new_empty(items.num_items, width)
    block_w = min(power_of_2(width), 32)
    flags = {
        "SPLIT": items.num_items > 0,
        "HAS_START": options.num_loops > 0,
        "BLOCK_R": 4,
        "BLOCK_E": max(1, 128 // block_w),
        "BLOCK_W": block_w,
    }
    units = rows.num_rows + items.num_items
    grid = (-(-units // flags["BLOCK_R"]), -(-width // block_w))
    sizes = (rows.num_rows, items.num_items, schedule.chunk, options.num_loops)
    start = out if found.loop_term is None else found.loop_term
    tensors = (found.term, start, out, part, rows.ptr, items.row, items.start)
    launcher_for(graph, edge_sums, grid, sizes, flags, 1)(tensors, (width,))
    if items.num_hubs:
        flags = {"HAS_ROW_SCALE": False, "BLOCK_K": MERGE_ITEMS, "BLOCK_F": block_w}
        grid = (items.num_hubs, -(-width // block_w))
        tensors = (part, out, part, items.hub_row, items.hub_ptr)
        launcher_for(graph, spmm_merge, grid, (), flags, 1)(tensors, (width, width))
    return out


def _add_outer(value: Tensor, scale: Tensor, att: Tensor) -> None:
    """Add scale[n, h] att[h, c] to values [N, H, C] in place."""
    value.addcmul_(scale.unsqueeze(2).to(value.dtype), att.to(value.dtype))


def _to_caller(graph: Graph, term: Tensor) -> Tensor:
    """Edge values from the order of the grouping into the caller's."""
    perm = graph.rows().perm
    if perm is None:
        return term
    return torch.empty_like(term).index_copy_(0, perm.long(), term)


def _prepare(
    graph: Graph, grad: Tensor, options: Options, state: State
) -> tuple[Tensor, Tensor | None]:
    """(m, 1 / l, delta) of each row, and the additive score's gradient by row."""
    from pyg_tiga.kernels.attention_state import attention_prepare

    num_rows, heads, channels = grad.shape
    packed = grad.new_empty(num_rows, heads, 4, dtype=torch.float32)
    has_positive = state.positive is not None
    grad_row = None
    if has_positive:
        grad_row = grad.new_empty(num_rows, heads, dtype=torch.float32)
    if packed.numel() == 0:
        return packed, grad_row
    block_c = min(power_of_2(channels), 128)
    block_h = min(power_of_2(heads), max(1, NODE_ELEMENTS // block_c))
    block_n = max(1, NODE_ELEMENTS // (block_c * block_h))
    flags = {
        "HAS_POSITIVE": has_positive,
        "BLOCK_N": block_n,
        "BLOCK_H": block_h,
        "BLOCK_C": block_c,
    }
    grid = (-(-num_rows // block_n), -(-heads // block_h))
    run = launcher_for(graph, attention_prepare, grid, (num_rows,), flags, 2)
    target = packed if grad_row is None else grad_row
    run(
        (grad, *state_pointers(state, grad), packed, target),
        (heads, channels, grad.stride(0), grad.stride(1), float(options.scale)),
    )
    return packed, grad_row


def _columns(
    graph: Graph,
    grad: Tensor,
    operands: Operands,
    options: Options,
    packed: Tensor,
    grad_row: Tensor,
    schedule: Schedule,
    wants_term: bool,
    wants_loop_term: bool,
    att: tuple[Tensor | None, Tensor | None],
) -> Gradients:
    from pyg_tiga.kernels.attention_columns import attention_columns

    value = operands.value
    columns = graph.columns()
    heads, channels = value.shape[1:]
    width = operand_width(operands.col)
    grad_value = value.new_empty(columns.num_rows, heads, channels)
    grad_col = value.new_empty(operands.col.shape, dtype=torch.float32)
    grad_term = grad_loop_term = None
    if wants_term:
        grad_term = value.new_empty(graph.num_edges, heads, dtype=torch.float32)
    if wants_loop_term:
        shape = (options.num_loops, heads)
        grad_loop_term = value.new_zeros(shape, dtype=torch.float32)
    found = Gradients(grad_value, None, grad_col, grad_term, grad_loop_term)
    if grad_value.numel() == 0:
        return found
    items = columns.work_items(schedule.chunk)
    shape = (items.num_items, heads, channels)
    part = value.new_empty(shape, dtype=torch.float32)
    part_col = value.new_empty(items.num_items, heads, width, dtype=torch.float32)
    blocks = tile_blocks(operands, schedule, channels, whole=True)
    att_flags = {"ATT_SRC": att[0] is not None, "ATT_DST": att[1] is not None}
    flags = {
        **score_functions(
            options, "load_row", "load_col", "score", "vjp_col", "vjp_term"
        ),
        **edge_flags(operands, options, columns, items),
        "GRAD_TERM": wants_term,
        "GRAD_LOOP_TERM": wants_loop_term,
        **att_flags,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (walk_programs(columns, items, schedule), -(-heads // blocks["BLOCK_H"]))
    sizes = walk_sizes(graph, columns, items, schedule, options)
    run = launcher_for(graph, attention_columns, grid, sizes, flags, schedule.warps)
    epilogue = (
        value if att[0] is None else att[0],
        value if att[1] is None else att[1],
        grad_row,
    )
    tensors = (
        value,
        grad,
        packed,
        grad_value,
        grad_col,
        packed if grad_term is None else grad_term,
        packed if grad_loop_term is None else grad_loop_term,
        part,
        part_col,
        operands.row,
        operands.col,
        *edge_pointers(operands, columns, items),
        graph.slots() if wants_term else columns.index,
        *epilogue,
    )
    run(
        tensors,
        (
            heads,
            channels,
            width,
            *strides(value),
            *strides(grad),
            *strides(operands.row),
            *strides(operands.col),
            float(options.scale),
            float(options.dropout),
            options.factor,
        ),
    )
    if items.num_hubs:
        _merge_columns(graph, found, part, part_col, items, blocks, att_flags, epilogue)
    return found


def _merge_columns(
    graph: Graph,
    found: Gradients,
    part: Tensor,
    part_col: Tensor,
    items: WorkItems,
    blocks: dict[str, int],
    att_flags: dict[str, bool],
    epilogue: tuple[Tensor, Tensor, Tensor],
) -> None:
    from pyg_tiga.kernels.attention_columns import columns_merge

    heads, channels = found.value.shape[1:]
    grid = (items.num_hubs, -(-heads // blocks["BLOCK_H"]))
    flags = {**att_flags, "BLOCK_P": MERGE_ITEMS, **blocks}
    run = launcher_for(graph, columns_merge, grid, (), flags, 1)
    tensors = (part, part_col, found.value, found.col, *epilogue)
    widths = (heads, channels, part_col.size(2))
    run((*tensors, items.hub_row, items.hub_ptr), widths)


def _rows_backward(
    graph: Graph,
    grad: Tensor,
    operands: Operands,
    options: Options,
    packed: Tensor,
    schedule: Schedule,
    has_param: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The destination operand's gradient, by a pass over its edges."""
    from pyg_tiga.kernels.attention_rows_backward import (
        attention_rows_backward,
    )
    from pyg_tiga.kernels.spmm import spmm_merge

    value = operands.value
    rows = graph.rows()
    heads, channels = value.shape[1:]
    width = operand_width(operands.row)
    grad_row = value.new_empty(operands.row.shape, dtype=torch.float32)
    if grad_row.numel() == 0:
        return grad_row, None
    items = rows.work_items(schedule.chunk)
    part = value.new_empty(items.num_items, heads * width, dtype=torch.float32)
    units = rows.num_rows + items.num_items if has_param else 0
    params = value.new_zeros(units, heads, width, dtype=torch.float32)
    blocks = tile_blocks(operands, schedule, channels, whole=True)
    flags = {
        **score_functions(
            options, "load_row", "load_col", "score", "vjp_row", "vjp_param"
        ),
        **edge_flags(operands, options, rows, items),
        "HAS_PARAM": has_param,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (walk_programs(rows, items, schedule), -(-heads // blocks["BLOCK_H"]))
    sizes = walk_sizes(graph, rows, items, schedule, options)
    run = launcher_for(
        graph, attention_rows_backward, grid, sizes, flags, schedule.warps
    )
    tensors = (
        value,
        grad,
        packed,
        grad_row,
        params if has_param else packed,
        part,
        operands.row,
        operands.col,
        *edge_pointers(operands, rows, items),
    )
    run(
        tensors,
        (
            heads,
            channels,
            width,
            *strides(value),
            *strides(grad),
            *strides(operands.row),
            *strides(operands.col),
            float(options.scale),
            float(options.dropout),
            options.factor,
        ),
    )
    if items.num_hubs:
        block_f = min(power_of_2(heads * width), 128)
        grid = (items.num_hubs, -(-heads * width // block_f))
        flags = {"HAS_ROW_SCALE": False, "BLOCK_K": MERGE_ITEMS, "BLOCK_F": block_f}
        run = launcher_for(graph, spmm_merge, grid, (), flags, 1)
        tensors = (part, grad_row, part, items.hub_row, items.hub_ptr)
        run(tensors, (heads * width, heads * width))
    return grad_row, params.sum(0) if has_param else None


ATTENTION_BACKWARD = Implementation(
    "triton",
    "triton",
    "edge_attention_backward",
    LIMITS,
    _backward,
    missing,
    scheduled=True,
)
