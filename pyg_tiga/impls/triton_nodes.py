"""Scores of nodes for additive attention, and the gradients of their vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    NODE_ELEMENTS,
    strides,
)
from pyg_tiga.impls.launch import launch
from pyg_tiga.problem import power_of_2

_SUM_PROGRAMS = 528


def node_scores(
    x: Tensor,  # [N, H, C]
    first: Tensor,  # [H, C]
    second: Tensor | None,  # [H, C]
) -> tuple[Tensor, Tensor | None]:
    """<x, first> and <x, second> per node and head, ``[N, H]`` float32 each."""
    from pyg_tiga.kernels.node_scores import node_scores as kernel

    num_nodes, heads, channels = x.shape
    x, first = x.contiguous(), first.contiguous()
    second = None if second is None else second.contiguous()
    a = x.new_empty(num_nodes, heads, dtype=torch.float32)
    b = None if second is None else torch.empty_like(a)
    if a.numel():
        block_c = min(power_of_2(channels), 128)
        block_h = min(power_of_2(heads), max(1, NODE_ELEMENTS // block_c))
        block_n = max(1, NODE_ELEMENTS // (block_c * block_h))
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
        widths = (heads, channels, *strides(x))
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
    block_c = min(power_of_2(channels), 128)
    block_h = min(power_of_2(heads), max(1, 256 // block_c))
    block_n = max(1, NODE_ELEMENTS // (block_c * block_h))
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
        widths = (heads, channels, *strides(x))
        launch(kernel, grid, tensors, (num_nodes,), widths, tuple(flags.values()), 2)
    return part.sum(0)
