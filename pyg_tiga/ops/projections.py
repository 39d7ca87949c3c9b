"""Several linear maps of the same rows, as one differentiable step.

y_i = x W_i^T + b_i. The forward is that of the maps one by one. In the backward, dx is
summed where its terms are formed, instead of in passes of their own; and on CUDA db_i
is a product, which reads dy_i faster than PyTorch's reduction of columns does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_tiga.ops import transformed
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function, wants_grad

Map = tuple[Tensor, Tensor | None]  # [F_out, F_in] and [F_out]
Found = list[Tensor | None]

_HALF = (torch.float16, torch.bfloat16)
_PLAIN_TENSORS = (Tensor, Parameter)
# Elsewhere PyTorch's own nodes are as good.
_DEVICES = frozenset(("cuda",))


def project(
    x: Tensor,  # [N, F_in]
    maps: Sequence[Map],
) -> tuple[Tensor, ...]:
    """`F.linear` of all maps, each ``[N, F_out]``.

    Args:
        x: Features.
        maps: Weight and bias of each.
    """
    weights, biases = zip(*maps, strict=True)
    if _in_one_step(x, weights, biases):
        return apply_function(_Project, x, *weights, *biases)
    return tuple(F.linear(x, *one) for one in maps)


def _in_one_step(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> bool:
    """Whether the gradients of the maps gain by being formed together, and can be."""
    tensors = [one for one in (x, *weights, *biases) if one is not None]
    return (
        len(weights) > 1
        and not torch.compiler.is_compiling()
        and all(type(one) in _PLAIN_TENSORS for one in tensors)
        and wants_grad(*tensors)
        and x.device.type in _DEVICES
        and x.is_floating_point()
        and all(_goes_with(x, one) for one in tensors)
        and x.dim() == 2
        and all(_is_map(*one) for one in zip(weights, biases, strict=True))
        and not torch.is_autocast_enabled(x.device.type)
        and not transformed.is_active(*tensors)
        and not is_in_torch_dispatch_mode()
    )


def _goes_with(x: Tensor, other: Tensor) -> bool:
    return (
        other.layout is torch.strided
        and other.dtype is x.dtype
        and other.device == x.device
    )


def _is_map(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a map has the usual shapes; others are `F.linear`'s to judge."""
    return weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        needs_x, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[:count], needs[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x if any(needs_weight) else None, *(weights if needs_x else ())
        )
        found = tuple(F.linear(x, *one) for one in zip(weights, biases, strict=True))
        if not needs_x:
            wanted = map(any, zip(needs_weight, needs_bias, strict=True))
            frozen = [y for y, any_of in zip(found, wanted, strict=True) if not any_of]
            ctx.mark_non_differentiable(*frozen)
        return found

    @staticmethod
    @batchable
    def backward(ctx: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
        # Read once: a checkpoint forms them again for it.
        x, *weights = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        count = len(grads)
        return (
            _grad_of_x(grads, weights) if weights else None,
            *_grads_of_weights(grads, x, needs[:count]),
            *_grads_of_biases(grads, needs[count:]),
        )


def _grad_of_x(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> Tensor | None:
    """The sum of dy_i W_i over the results that have a gradient, ``[N, F_in]``."""
    found = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is None:
            continue
        if found is None:
            found = grad @ weight
        elif _is_final(grad):
            found.addmm_(grad, weight)
        else:
            found = torch.addmm(found, grad, weight)
    return found


def _grads_of_weights(
    grads: Sequence[Tensor | None], x: Tensor | None, needs: Sequence[bool]
) -> Found:
    """dy_i^T x where it is wanted, ``[F_out, F_in]``."""
    return [
        grad.t() @ x if needed and grad is not None else None
        for grad, needed in zip(grads, needs, strict=True)
    ]


def _grads_of_biases(grads: Sequence[Tensor | None], needs: Sequence[bool]) -> Found:
    """Sums of dy_i over the rows where they are wanted, ``[F_out]``."""
    found: Found = [None] * len(grads)
    ones = None
    for i, (grad, needed) in enumerate(zip(grads, needs, strict=True)):
        if not needed or grad is None:
            continue
        if not (_is_final(grad) and _sums_by_product(grad)):
            found[i] = grad.sum(0)
            continue
        if ones is None:
            ones = grad.new_ones(1, grad.size(0))
        found[i] = _product_with_ones(ones, grad)
    return found


def _product_with_ones(ones: Tensor, grad: Tensor) -> Tensor:
    """The sum of the rows; like a reduction, in half precision it rounds once.

    Products are split along the rows, and the parts would be added in the result's
    dtype.
    """
    if grad.is_cuda and grad.dtype in _HALF:
        found = torch.mm(ones, grad, out_dtype=torch.float32).to(grad.dtype)
    else:
        found = ones @ grad
    # In place, because a gradient that is a view is kept with its base.
    return found.squeeze_(0)


def _is_final(grad: Tensor) -> bool:
    """Whether a backward is neither differentiated nor under autocast.

    Products under autocast have another dtype than what they would be added to.
    """
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled(grad.device.type))


def _sums_by_product(grad: Tensor) -> bool:
    """Whether a product with ones sums as precisely as a reduction, and faster."""
    if not grad.is_cuda or torch.version.hip is not None:
        return False
    if grad.dtype is torch.float32:
        # A reduction never rounds its terms to TF32.
        return torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
    if grad.dtype is torch.float16:
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return True
