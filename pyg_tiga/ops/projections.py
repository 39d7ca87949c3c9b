"""Several linear maps of the same rows, as one differentiable step.

y_i = x W_i^T + b_i. The forward is one product, which reads x once; the y_i are columns
of its result. In the backward, dx is summed where its terms are formed, instead of in
passes of their own; and on CUDA db_i is a product, which reads dy_i faster than
PyTorch's reduction of columns does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
_ALIGNMENT = 16  # bytes
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
        ctx.sizes = [weight.size(0) for weight in weights]
        ctx.save_for_backward(
            x if any(needs_weight) else None, *(weights if needs_x else ())
        )
        found = _joint(x, weights, biases)
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
        if torch.is_grad_enabled():
            blocks = [_Block((i,), grad) for i, grad in enumerate(grads)]
        else:
            blocks = _blocks(grads)
        return (
            _grad_of_x(blocks, weights) if weights else None,
            *_grads_of_weights(blocks, x, needs[:count], ctx.sizes),
            *_grads_of_biases(blocks, needs[count:], ctx.sizes),
        )


def _joint(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """All maps by one product, if each result then begins where kernels load well."""
    sizes = [weight.size(0) for weight in weights]
    if any(size * x.element_size() % _ALIGNMENT for size in sizes):
        return tuple(F.linear(x, *one) for one in zip(weights, biases, strict=True))
    bias = None
    if any(one is not None for one in biases):
        every = zip(weights, biases, strict=True)
        bias = _joined([w.new_zeros(w.size(0)) if b is None else b for w, b in every])
    found = F.linear(x, _joined(weights), bias)
    # To autograd they are no views, which results of one function may not be.
    return torch.unsafe_split_with_sizes(found, sizes, dim=1)


class _Block(NamedTuple):
    """Gradients of some results, side by side in one matrix.

    Args:
        places: Which results.
        grad: The matrix, ``[N, sum of F_out]``; None where there is no gradient.
    """

    places: tuple[int, ...]
    grad: Tensor | None


def _blocks(grads: Sequence[Tensor | None]) -> list[_Block]:
    """The gradients, those that are columns of one matrix as one."""
    found: list[_Block] = []
    for i, grad in enumerate(grads):
        last = found[-1] if found else None
        if last is not None and _follows(last.grad, grad):
            size = (grad.size(0), last.grad.size(1) + grad.size(1))
            both = last.grad.as_strided(size, grad.stride())
            found[-1] = _Block((*last.places, i), both)
        else:
            found.append(_Block((i,), grad))
    return found


def _follows(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether columns of one matrix are followed by those of the other."""
    return (
        one is not None
        and other is not None
        and one.stride() == other.stride()
        and one.stride(1) == 1
        and one.size(0) == other.size(0)
        and one.storage_offset() + one.size(1) == other.storage_offset()
        and one.size(1) + other.size(1) <= one.stride(0)
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _grad_of_x(blocks: Sequence[_Block], weights: Sequence[Tensor]) -> Tensor | None:
    """The sum of dy_i W_i over the results that have a gradient, ``[N, F_in]``."""
    found = None
    for places, grad in blocks:
        if grad is None:
            continue
        weight = _joined([weights[i] for i in places])
        if found is None:
            found = grad @ weight
        elif _is_final(grad):
            found.addmm_(grad, weight)
        else:
            found = torch.addmm(found, grad, weight)
    return found


def _grads_of_weights(
    blocks: Sequence[_Block],
    x: Tensor | None,
    needs: Sequence[bool],
    sizes: Sequence[int],
) -> Found:
    """dy_i^T x where it is wanted, ``[F_out, F_in]``."""
    found: Found = [None] * len(needs)
    for places, grad in blocks:
        if grad is None or not any(needs[i] for i in places):
            continue
        _put(found, places, grad.t() @ x, needs, sizes)
    return found


def _grads_of_biases(
    blocks: Sequence[_Block], needs: Sequence[bool], sizes: Sequence[int]
) -> Found:
    """Sums of dy_i over the rows where they are wanted, ``[F_out]``."""
    found: Found = [None] * len(needs)
    ones = None
    for places, grad in blocks:
        if grad is None or not any(needs[i] for i in places):
            continue
        if not (_is_final(grad) and _sums_by_product(grad)):
            total = grad.sum(0)
        else:
            if ones is None:
                ones = grad.new_ones(1, grad.size(0))
            total = _product_with_ones(ones, grad)
        _put(found, places, total, needs, sizes)
    return found


def _put(
    found: Found,
    places: tuple[int, ...],
    total: Tensor,
    needs: Sequence[bool],
    sizes: Sequence[int],
) -> None:
    """Give the results their rows of a gradient."""
    parts = (total,)
    if len(places) > 1:
        # A gradient that is a view is kept with its base.
        parts = torch.unsafe_split_with_sizes(total, [sizes[i] for i in places])
    for i, part in zip(places, parts, strict=True):
        if needs[i]:
            found[i] = part


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
