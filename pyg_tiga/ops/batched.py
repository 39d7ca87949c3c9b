"""Backwards of gradients that kernels cannot read.

Many gradients at once, as `is_grads_batched` has them, are one tensor that stands for
all: the backward runs for each in turn. A gradient with a tangent takes the formulas
that can be differentiated again, which carry it on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_legacy_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
)

from pyg_tiga.ops.transformed import has_tangent

_MOST_LEVELS = 8
Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def batchable(backward: Backward) -> Backward:
    """Let the backward of an autograd function be called on all kinds of gradients."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> Gradients:
        if any(map(_is_batched, grads)):
            return _in_turn(backward, ctx, grads)
        if has_tangent(*grads):
            with torch.enable_grad():
                return backward(ctx, *grads)
        return backward(ctx, *grads)

    return wrapped


class _Held:
    """A context whose saved tensors stay for the next gradient."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        """Not yet."""


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (
        is_legacy_batchedtensor(grad) or is_batchedtensor(grad)
    )


def _in_turn(
    backward: Backward, ctx: Any, grads: tuple[Tensor | None, ...]
) -> Gradients:
    is_batch = [_is_batched(grad) for grad in grads]
    apart, batch = list(grads), None
    for i, grad in enumerate(grads):
        if is_batch[i]:
            apart[i], batch = _taken_apart(grad)
    size = apart[is_batch.index(True)].size(0)
    # Of a result that is the same for all, so is the gradient.
    rows = [
        x.unbind(0) if b else (x,) * size for x, b in zip(apart, is_batch, strict=True)
    ]
    held = _Held(ctx)
    # Each may be a batch of an outer transform.
    found = [batchable(backward)(held, *one) for one in zip(*rows, strict=True)]
    return tuple(
        None if one[0] is None else batch(torch.stack(one))
        for one in zip(*found, strict=True)
    )


def _taken_apart(grad: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Gradients as one tensor ``[B, ...]``, and what makes a batch of such a one."""
    if is_batchedtensor(grad):
        level, dim = maybe_get_level(grad), maybe_get_bdim(grad)
        grads = get_unwrapped(grad).movedim(dim, 0)
        return grads, lambda x: _functorch._add_batch_dim(x, 0, level)
    # Of PyTorch's own batches only the tensor knows the level: a device's thread, where
    # backwards run, has not heard of it.
    for level in range(1, _MOST_LEVELS + 1):
        grads = torch._remove_batch_dim(grad, level, 1, 0)
        if not is_legacy_batchedtensor(grads):
            return grads, functools.partial(
                torch._add_batch_dim, batch_dim=0, level=level
            )
    raise RuntimeError("gradients that are batched twice cannot be taken apart")
