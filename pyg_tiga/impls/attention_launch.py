"""What the launchers of the edge-attention template share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_types import Operands, Options, State
from pyg_tiga.impls.launch import Launcher
from pyg_tiga.problem import Schedule, power_of_2
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

MERGE_ITEMS = 8
NODE_ELEMENTS = 1024
_MOST_CHANNELS = 256


def laid_out(operands: Operands) -> Operands:
    """Operands with the strides that the kernels take; as they are, as a rule."""
    value = operands.value
    if value.stride(2) != 1 and value.size(2) > 1:
        value = value.contiguous()
    rest = [
        None if part is None else part.contiguous()
        for part in (operands.term, operands.loop_term, operands.mask, operands.seed)
    ]
    return Operands(value, operands.row, operands.col, *rest)


def new_state(
    value: Tensor, num_rows: int, dtype: torch.dtype, positive: bool
) -> State:
    """Room for a state of `num_rows` rows."""
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


def state_pointers(state: State, stand_in: Tensor) -> tuple[Tensor, ...]:
    """A state in the order of the kernels: out, m, l, P, p."""
    return tuple(stand_in if part is None else part for part in state)


def edge_pointers(
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


def edge_flags(
    operands: Operands, options: Options, rows: Grouping, items: WorkItems
) -> dict[str, bool]:
    """Flags of what a walk over edges meets."""
    return {
        "SPLIT": items.num_items > 0,
        "HAS_TERM": operands.term is not None,
        "HAS_LOOP_TERM": operands.loop_term is not None,
        "HAS_MASK": operands.mask is not None,
        "HAS_PERM": rows.perm is not None,
        "SELF_LOOPS": options.num_loops > 0,
        "DROPOUT": options.dropout > 0,
    }


def walk_sizes(
    graph: Graph,
    rows: Grouping,
    items: WorkItems,
    schedule: Schedule,
    options: Options,
) -> tuple[int, ...]:
    """Sizes of a walk over edges."""
    return (
        rows.num_rows,
        items.num_items,
        schedule.chunk,
        options.num_loops,
        graph.num_edges,
    )


def score_functions(options: Options, *names: str) -> dict[str, Any]:
    """Functions of the score, as constexprs by name."""
    from pyg_tiga.kernels.scores import SCORES

    functions = SCORES[options.score]
    return {name.upper(): getattr(functions, name) for name in names}


def tile_blocks(
    operands: Operands, schedule: Schedule, channels: int, *, whole: bool = False
) -> dict[str, int]:
    """Heads and channels of a tile; `slice` bounds what it holds of a row.

    With `whole`, a tile holds all channels of a head: products over them need it.
    """
    block_c = power_of_2(channels)
    if not whole:
        block_c = min(block_c, _MOST_CHANNELS)
    block_h = max(1, schedule.slice // block_c)
    block_h = min(block_h, power_of_2(operands.value.size(1)))
    block_k = power_of_2(operand_width(operands.row))
    return {"BLOCK_H": block_h, "BLOCK_C": block_c, "BLOCK_K": block_k}


def launcher_for(
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
        found = graph.scratch[key] = Launcher(
            kernel, grid, sizes, tuple(flags.values()), warps
        )
    return found


def walk_programs(rows: Grouping, items: WorkItems, schedule: Schedule) -> int:
    """Programs along the first axis of a walk."""
    return -(-(rows.num_rows + items.num_items) // schedule.rows)


def strides(x: Tensor) -> tuple[int, int]:
    """Strides of nodes and heads."""
    return x.stride(0), x.stride(1)


def operand_width(operand: Tensor) -> int:
    """K, the numbers per head of a score's operand."""
    return 1 if operand.dim() == 2 else operand.size(2)
