"""Launchers of the edge-attention template."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.launch import Launcher, launch
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

_MOST_CHANNELS = 256
_MERGE_ITEMS = 8
_NODE_ELEMENTS = 1024
_SUM_PROGRAMS = 528


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

    value = operands.value
    rows = graph.rows()
    heads, channels = value.shape[1:]
    state = _new_state(value, rows.num_rows, problem.out_dtype, positive)
    if state.out.numel() == 0:
        return state
    items = rows.work_items(schedule.chunk)
    part = _new_state(value, items.num_items, torch.float32, positive)
    kept = _pointers(state, value) if items.num_items == 0 else _pointers(part, value)
    blocks = _blocks(operands, schedule, channels)
    flags = {
        **_score(options, "load_row", "load_col", "score"),
        **_edge_flags(operands, options, rows, items),
        "SAVE_POSITIVE": positive,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (
        _programs(rows, items, schedule),
        -(-heads // blocks["BLOCK_H"]),
        -(-channels // blocks["BLOCK_C"]),
    )
    sizes = _sizes(graph, rows, items, schedule, options)
    run = _launcher(graph, attention_rows, grid, sizes, flags, schedule.warps)
    tensors = (
        value,
        *_pointers(state, value),
        *kept,
        operands.row,
        operands.col,
        *_edge_pointers(operands, rows, items),
    )
    run(
        tensors,
        (
            heads,
            channels,
            _width(operands.row),
            *_strides(value),
            *_strides(operands.row),
            *_strides(operands.col),
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
        "BLOCK_P": _MERGE_ITEMS,
        "BLOCK_H": blocks["BLOCK_H"],
        "BLOCK_C": blocks["BLOCK_C"],
    }
    run = _launcher(graph, attention_merge, grid, (), flags, 1)
    pointers = (*_pointers(state, state.out), *_pointers(part, state.out))
    run((*pointers, items.hub_row, items.hub_ptr), (heads, channels))


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
    return found._replace(row=grad_row, term=term, loop_term=loop_term, param=grad_param)


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
    block_w = min(_power_of_2(width), 32)
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
    _launcher(graph, edge_sums, grid, sizes, flags, 1)(tensors, (width,))
    if items.num_hubs:
        flags = {"HAS_ROW_SCALE": False, "BLOCK_K": _MERGE_ITEMS, "BLOCK_F": block_w}
        grid = (items.num_hubs, -(-width // block_w))
        tensors = (part, out, part, items.hub_row, items.hub_ptr)
        _launcher(graph, spmm_merge, grid, (), flags, 1)(tensors, (width, width))
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
    block_c = min(_power_of_2(channels), 128)
    block_h = min(_power_of_2(heads), max(1, _NODE_ELEMENTS // block_c))
    block_n = max(1, _NODE_ELEMENTS // (block_c * block_h))
    flags = {
        "HAS_POSITIVE": has_positive,
        "BLOCK_N": block_n,
        "BLOCK_H": block_h,
        "BLOCK_C": block_c,
    }
    grid = (-(-num_rows // block_n), -(-heads // block_h))
    run = _launcher(graph, attention_prepare, grid, (num_rows,), flags, 2)
    target = packed if grad_row is None else grad_row
    run(
        (grad, *_pointers(state, grad), packed, target),
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
    width = _width(operands.col)
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
    blocks = _blocks(operands, schedule, channels, whole=True)
    att_flags = {"ATT_SRC": att[0] is not None, "ATT_DST": att[1] is not None}
    flags = {
        **_score(options, "load_row", "load_col", "score", "vjp_col", "vjp_term"),
        **_edge_flags(operands, options, columns, items),
        "GRAD_TERM": wants_term,
        "GRAD_LOOP_TERM": wants_loop_term,
        **att_flags,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (_programs(columns, items, schedule), -(-heads // blocks["BLOCK_H"]))
    sizes = _sizes(graph, columns, items, schedule, options)
    run = _launcher(graph, attention_columns, grid, sizes, flags, schedule.warps)
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
        *_edge_pointers(operands, columns, items),
        graph.slots() if wants_term else columns.index,
        *epilogue,
    )
    run(
        tensors,
        (
            heads,
            channels,
            width,
            *_strides(value),
            *_strides(grad),
            *_strides(operands.row),
            *_strides(operands.col),
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
    flags = {**att_flags, "BLOCK_P": _MERGE_ITEMS, **blocks}
    run = _launcher(graph, columns_merge, grid, (), flags, 1)
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
    width = _width(operands.row)
    grad_row = value.new_empty(operands.row.shape, dtype=torch.float32)
    if grad_row.numel() == 0:
        return grad_row, None
    items = rows.work_items(schedule.chunk)
    part = value.new_empty(items.num_items, heads * width, dtype=torch.float32)
    units = rows.num_rows + items.num_items if has_param else 0
    params = value.new_zeros(units, heads, width, dtype=torch.float32)
    blocks = _blocks(operands, schedule, channels, whole=True)
    flags = {
        **_score(options, "load_row", "load_col", "score", "vjp_row", "vjp_param"),
        **_edge_flags(operands, options, rows, items),
        "HAS_PARAM": has_param,
        "BLOCK_R": schedule.rows,
        "BLOCK_E": schedule.edges,
        **blocks,
    }
    grid = (_programs(rows, items, schedule), -(-heads // blocks["BLOCK_H"]))
    sizes = _sizes(graph, rows, items, schedule, options)
    run = _launcher(graph, attention_rows_backward, grid, sizes, flags, schedule.warps)
    tensors = (
        value,
        grad,
        packed,
        grad_row,
        params if has_param else packed,
        part,
        operands.row,
        operands.col,
        *_edge_pointers(operands, rows, items),
    )
    run(
        tensors,
        (
            heads,
            channels,
            width,
            *_strides(value),
            *_strides(grad),
            *_strides(operands.row),
            *_strides(operands.col),
            float(options.scale),
            float(options.dropout),
            options.factor,
        ),
    )
    if items.num_hubs:
        block_f = min(_power_of_2(heads * width), 128)
        grid = (items.num_hubs, -(-heads * width // block_f))
        flags = {"HAS_ROW_SCALE": False, "BLOCK_K": _MERGE_ITEMS, "BLOCK_F": block_f}
        run = _launcher(graph, spmm_merge, grid, (), flags, 1)
        tensors = (part, grad_row, part, items.hub_row, items.hub_ptr)
        run(tensors, (heads * width, heads * width))
    return grad_row, params.sum(0) if has_param else None


def node_scores(
    x: Tensor,  # [N, H, C]
    first: Tensor,  # [H, C]
    second: Tensor | None,  # [H, C]
) -> tuple[Tensor, Tensor | None]:
    """<x, first> and <x, second> per node and head, ``[N, H]`` float32 each."""
    from pyg_tiga.kernels.node_scores import node_scores as kernel

    num_nodes, heads, channels = x.shape
    a = x.new_empty(num_nodes, heads, dtype=torch.float32)
    b = None if second is None else torch.empty_like(a)
    if a.numel():
        block_c = min(_power_of_2(channels), 128)
        block_h = min(_power_of_2(heads), max(1, _NODE_ELEMENTS // block_c))
        block_n = max(1, _NODE_ELEMENTS // (block_c * block_h))
        flags = {
            "SECOND": second is not None,
            "BLOCK_N": block_n,
            "BLOCK_H": block_h,
            "BLOCK_C": block_c,
        }
        grid = (-(-num_nodes // block_n), -(-heads // block_h))
        tensors = (
            x,
            first,
            first if second is None else second,
            a,
            a if b is None else b,
        )
        widths = (heads, channels, *_strides(x))
        launch(kernel, grid, tensors, (num_nodes,), widths, tuple(flags.values()), 2)
    return a, b


def node_scores_backward(
    x: Tensor,  # [N, H, C]
    grad_first: Tensor,  # [N, H]
    grad_second: Tensor | None,  # [N, H]
) -> Tensor:
    """Gradients of the two vectors, ``[2, H, C]`` float32."""
    from pyg_tiga.kernels.node_scores import node_scores_backward as kernel

    num_nodes, heads, channels = x.shape
    block_c = min(_power_of_2(channels), 128)
    block_h = min(_power_of_2(heads), max(1, 256 // block_c))
    block_n = max(1, _NODE_ELEMENTS // (block_c * block_h))
    programs = min(_SUM_PROGRAMS, max(1, -(-num_nodes // block_n)))
    part = x.new_empty(programs, 2, heads, channels, dtype=torch.float32)
    if part.numel():
        flags = {
            "SECOND": grad_second is not None,
            "BLOCK_N": block_n,
            "BLOCK_H": block_h,
            "BLOCK_C": block_c,
        }
        grid = (programs, -(-heads // block_h), -(-channels // block_c))
        second = grad_first if grad_second is None else grad_second
        tensors = (x, grad_first, second, part)
        widths = (heads, channels, *_strides(x))
        launch(kernel, grid, tensors, (num_nodes,), widths, tuple(flags.values()), 2)
    return part.sum(0)


def _new_state(
    value: Tensor, num_rows: int, dtype: torch.dtype, positive: bool
) -> State:
    heads, channels = value.shape[1:]
    shape = (num_rows, heads, channels)
    scalars = [
        value.new_empty(num_rows, heads, dtype=torch.float32)
        for _ in range(3 if positive else 2)
    ]
    return State(
        value.new_empty(shape, dtype=dtype),
        scalars[0],
        scalars[1],
        value.new_empty(shape, dtype=dtype) if positive else None,
        scalars[2] if positive else None,
    )


def _pointers(state: State, stand_in: Tensor) -> tuple[Tensor, ...]:
    """A state in the order of the kernels: out, m, l, P, p."""
    return tuple(stand_in if part is None else part for part in state)


def _edge_pointers(
    operands: Operands, rows: Grouping, items: WorkItems
) -> tuple[Tensor, ...]:
    """Terms, mask, seed and the edges themselves, in the order of the kernels."""
    absent = rows.index
    return (
        absent if operands.term is None else operands.term,
        absent if operands.loop_term is None else operands.loop_term,
        absent if operands.mask is None else operands.mask.view(torch.uint8),
        absent if operands.seed is None else operands.seed,
        rows.ptr,
        rows.index,
        absent if rows.perm is None else rows.perm,
        items.row,
        items.start,
    )


def _edge_flags(
    operands: Operands, options: Options, rows: Grouping, items: WorkItems
) -> dict[str, bool]:
    return {
        "SPLIT": items.num_items > 0,
        "HAS_TERM": operands.term is not None,
        "HAS_LOOP_TERM": operands.loop_term is not None,
        "HAS_MASK": operands.mask is not None,
        "HAS_PERM": rows.perm is not None,
        "SELF_LOOPS": options.num_loops > 0,
        "DROPOUT": options.dropout > 0,
    }


def _sizes(
    graph: Graph,
    rows: Grouping,
    items: WorkItems,
    schedule: Schedule,
    options: Options,
) -> tuple[int, ...]:
    return (
        rows.num_rows,
        items.num_items,
        schedule.chunk,
        options.num_loops,
        graph.num_edges,
    )


def _score(options: Options, *names: str) -> dict[str, Any]:
    from pyg_tiga.kernels.scores import SCORES

    score = SCORES[options.score]
    return {name.upper(): getattr(score, name) for name in names}


def _blocks(
    operands: Operands, schedule: Schedule, channels: int, *, whole: bool = False
) -> dict[str, int]:
    """Heads and channels of a tile; `slice` bounds what it holds of a row.

    With `whole`, a tile holds all channels of a head: products over them need it.
    """
    block_c = _power_of_2(channels)
    if not whole:
        block_c = min(block_c, _MOST_CHANNELS)
    block_h = max(1, schedule.slice // block_c)
    block_h = min(block_h, _power_of_2(operands.value.size(1)))
    block_k = _power_of_2(_width(operands.row))
    return {"BLOCK_H": block_h, "BLOCK_C": block_c, "BLOCK_K": block_k}


def _launcher(
    graph: Graph,
    kernel: Any,
    grid: tuple[int, ...],
    sizes: tuple[int, ...],
    flags: dict[str, Any],
    warps: int,
) -> Launcher:
    """A launcher, found again on the graph."""
    key = (kernel, grid, sizes, tuple(flags.values()), warps)
    found = graph.scratch.get(key)
    if found is None:
        found = graph.scratch[key] = Launcher(kernel, grid, sizes, tuple(flags.values()), warps)
    return found


def _programs(rows: Grouping, items: WorkItems, schedule: Schedule) -> int:
    return -(-(rows.num_rows + items.num_items) // schedule.rows)


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def _width(operand: Tensor) -> int:
    return 1 if operand.dim() == 2 else operand.size(2)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))

ATTENTION = Implementation(
    "triton", "triton", "edge_attention", _LIMITS, _forward, missing, scheduled=True
)
ATTENTION_BACKWARD = Implementation(
    "triton",
    "triton",
    "edge_attention_backward",
    _LIMITS,
    _backward,
    missing,
    scheduled=True,
)
