"""What a step keeps for its backward: what a wanted gradient reads, and nothing else.

Whatever is kept cannot be freed, nor edited in place unless it is a result (`Watched`).
What gradients of gradients need besides are places in autograd's graph, and these have
no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function

_NO_DATA: dict[torch.device, Tensor] = {}
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


class Watched:
    """Edits in place of a result that is kept, and that its owner may edit.

    What is kept then is an alias, of which autograd does not ask that it stays as it
    is; a backward asks here, and forms the result again. The memory is not kept.
    """

    __slots__ = ("_version", "_witness")

    def __init__(self, out: Tensor) -> None:
        self._version = out._version
        # It counts the edits of `out`, whose data it gives up.
        self._witness = out.detach()
        empty = _NO_DATA.get(out.device)
        if empty is None:
            empty = _NO_DATA[out.device] = torch.empty(0, device=out.device)
        self._witness.data = empty

    def is_edited(self) -> bool:
        """Whether the result is not as it was."""
        return self._witness._version != self._version


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
