"""Launching what brings edges into another order."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.impls.launch import device_guard, launch
from pyg_tiga.problem import power_of_2

# Numbers of a tile: 8 in each thread.
_TILE = 1024
_MOST_HEADS = 32
_WARPS = 4


def take_edges(
    values: Tensor,  # [X, H]
    index: Tensor | None,  # [E]
) -> Tensor:
    """``values[index]``, with many rows to a program. Not differentiable.

    Args:
        values: Contiguous.
        index: int32 or int64, contiguous, and in range, which nobody checks. None: the
            values have that order already.
    """
    if index is None:
        return values
    from pyg_tiga.kernels import edge_order

    num_edges, heads = index.numel(), values.size(1)
    out = values.new_empty(num_edges, heads)
    if out.numel() == 0:
        return out
    block_h = min(power_of_2(heads), _MOST_HEADS)
    block_e = _TILE // block_h
    grid = (-(-num_edges // block_e), -(-heads // block_h))
    constants = (heads, block_e, block_h)
    with device_guard(values.get_device()):
        operands = (values, index, out)
        launch(
            edge_order.take_edges, grid, operands, (num_edges,), (), constants, _WARPS
        )
    return out
