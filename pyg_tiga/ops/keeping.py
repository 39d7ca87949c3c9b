"""What a step keeps for its backward: what a wanted gradient reads, and nothing else.

Whatever is kept cannot be edited in place, nor freed. What gradients of gradients need
besides are places in autograd's graph, and these have no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function

# For each input that may have a gradient, places of the tensors that this one reads.
Reads = tuple[tuple[int, ...], ...]


def kept_of(
    tensors: Sequence[Tensor | None], reads: Reads, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The tensors that wanted gradients read; None in place of the others."""
    places = {
        place
        for read, need in zip(reads, needs, strict=False)
        if need
        for place in read
    }
    return [x if place in places else None for place, x in enumerate(tensors)]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (grad,)


def anchor_of(x: Tensor) -> Tensor:
    """A place in autograd's graph: gradients of it are those of x, without its data."""
    return apply_function(_Anchor, x)
