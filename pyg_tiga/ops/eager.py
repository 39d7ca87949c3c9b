"""The eager road: autograd functions on a `Graph`, and nothing where no gradient is.

Public functions look for tangents of their operands before they come here; what is
looked for here are those that a gradient brings along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.ops import bodies, gradients
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.transformed import TRANSFORMED, has_tangent
from pyg_tiga.relation.graph import Graph


class _Spmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, graph: Graph, normalize: str
    ) -> Tensor:
        ctx.graph, ctx.normalize = graph, normalize
        wants_x, wants_weight = needs = ctx.needs_input_grad[:2]
        ctx.dtypes = gradients.dtypes_of(x, weight, needs)
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return bodies.spmm(graph, x, weight, normalize)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found = gradients.spmm(
            EAGER, ctx.graph, grad, x, weight, ctx.normalize, ctx.dtypes
        )
        return (*found, None, None)


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, graph: Graph, normalize: str) -> Tensor:
        ctx.graph, ctx.normalize = graph, normalize
        wants_a, wants_b = needs = ctx.needs_input_grad[:2]
        ctx.dtypes = gradients.dtypes_of(a, b, needs)
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None)
        return bodies.sddmm(graph, a, b, normalize)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        found = gradients.sddmm(EAGER, ctx.graph, grad, a, b, ctx.normalize, ctx.dtypes)
        return (*found, None, None)


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: Graph, reduce: str, ties: str) -> Tensor:
        out, aux = bodies.spmm_extremum(graph, x, reduce, ties)
        ctx.graph, ctx.ties = graph, ties
        # The first winner is known by its place: neither x nor out is needed again.
        nothing = x.new_empty(0)
        split = ties == "split"
        ctx.save_for_backward(x if split else nothing, out if split else nothing, aux)
        return out

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = EAGER.extremum_backward(ctx.graph, grad, *ctx.saved_tensors, ctx.ties)
        return grad_x, None, None, None


class _ExtremumBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        out: Tensor,
        aux: Tensor,
        graph: Graph,
        ties: str,
    ) -> Tensor:
        ctx.graph, ctx.ties = graph, ties
        ctx.save_for_backward(x, out, aux)
        return bodies.spmm_extremum_backward(graph, grad, x, out, aux, ties)

    @staticmethod
    @batchable
    def backward(ctx: Any, value: Tensor) -> tuple[Tensor | None, ...]:
        call = EAGER.extremum_select
        selected = call(ctx.graph, value, *ctx.saved_tensors, ctx.ties)
        return selected, None, None, None, None, None


class _ExtremumSelect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        x: Tensor,
        out: Tensor,
        aux: Tensor,
        graph: Graph,
        ties: str,
    ) -> Tensor:
        ctx.graph, ctx.ties = graph, ties
        ctx.save_for_backward(x, out, aux)
        return bodies.spmm_extremum_select(graph, value, x, out, aux, ties)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call = EAGER.extremum_backward
        grad_value = call(ctx.graph, grad, *ctx.saved_tensors, ctx.ties)
        return grad_value, None, None, None, None, None


class _Eager:
    """The road's differentiable functions; `relation` is a `Graph`."""

    @staticmethod
    def spmm(
        relation: Graph, x: Tensor, weight: Tensor | None, normalize: str
    ) -> Tensor:
        if has_tangent(x, weight):
            return TRANSFORMED.spmm(relation, x, weight, normalize)
        if wants_grad(x, weight):
            return apply_function(_Spmm, x, weight, relation, normalize)
        return bodies.spmm(relation, x, weight, normalize)

    @staticmethod
    def sddmm(relation: Graph, a: Tensor, b: Tensor, normalize: str) -> Tensor:
        if has_tangent(a, b):
            return TRANSFORMED.sddmm(relation, a, b, normalize)
        if wants_grad(a, b):
            return apply_function(_Sddmm, a, b, relation, normalize)
        return bodies.sddmm(relation, a, b, normalize)

    @staticmethod
    def extremum(relation: Graph, x: Tensor, reduce: str, ties: str) -> Tensor:
        if wants_grad(x):
            return apply_function(_Extremum, x, relation, reduce, ties)
        return bodies.spmm_extremum(relation, x, reduce, "none")[0]

    @staticmethod
    def weighted_extremum(
        relation: Graph, x: Tensor, weight: Tensor, reduce: str, ties: str
    ) -> Tensor:
        return bodies.weighted_extremum(relation, x, weight, reduce, ties)[0]

    @staticmethod
    def extremum_backward(
        relation: Graph, grad: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        if has_tangent(grad):
            return TRANSFORMED.extremum_backward(relation, grad, x, out, aux, ties)
        if wants_grad(grad):
            return apply_function(_ExtremumBackward, grad, x, out, aux, relation, ties)
        return bodies.spmm_extremum_backward(relation, grad, x, out, aux, ties)

    @staticmethod
    def extremum_select(
        relation: Graph, value: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        if has_tangent(value):
            return TRANSFORMED.extremum_select(relation, value, x, out, aux, ties)
        if wants_grad(value):
            return apply_function(_ExtremumSelect, value, x, out, aux, relation, ties)
        return bodies.spmm_extremum_select(relation, value, x, out, aux, ties)


EAGER = _Eager()


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without its preparations for functional transforms.

    Calls under `torch.func` do not come here: they run the reference (`functional`).
    """
    return super(torch.autograd.Function, function).apply(*args)


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to see a call on these tensors."""
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )
