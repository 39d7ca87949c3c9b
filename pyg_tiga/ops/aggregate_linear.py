"""A sum or mean over edges and the linear maps behind it, as one differentiable step.

y = (A x) W_l^T + b + x_dst W_r^T. As one step, the gradient of x is summed where it is
formed, instead of in a pass of its own, and the host makes one node of the graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga.impls.launch import device_guard, is_current
from pyg_tiga.impls.triton_sum import LinearSum, LinearSumBackward, Needs
from pyg_tiga.ops import bodies
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import EAGER, apply_function, wants_grad
from pyg_tiga.ops.gradients import FLIPPED
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph


class Maps(NamedTuple):
    """Parameters: of the aggregate, its bias, and of the destinations."""

    left: Tensor  # [F_out, F_in]
    bias: Tensor | None  # [F_out]
    right: Tensor | None  # [F_out, F_dst]


def aggregate_linear(
    graph: Graph,
    x: Tensor,  # [N_src, F_in]
    x_dst: Tensor | None,  # [N_dst, F_dst]
    maps: Maps,
    normalize: str,
) -> Tensor:
    """Aggregate, transform, and add the transformed destinations, ``[N_dst, F_out]``.

    Args:
        graph: The relation.
        x: Source features.
        x_dst: Destination features; may be the same tensor.
        maps: Parameters, all of one dtype with the features.
        normalize: As for `spmm`.
    """
    x_dst = x_dst if maps.right is not None else None
    if wants_grad(x, x_dst, *maps):
        same = x_dst is x
        inputs = (x, None if same else x_dst, *maps)
        return apply_function(_AggregateLinear, *inputs, graph, normalize, same)
    return _forward(graph, x, x_dst, maps, normalize)[1]


def _forward(
    graph: Graph, x: Tensor, x_dst: Tensor | None, maps: Maps, normalize: str
) -> tuple[Tensor, Tensor]:
    index = x.get_device()
    if not is_current(index):
        with device_guard(index):
            return _forward(graph, x, x_dst, maps, normalize)
    plan = bodies.remember_plan(bodies.spmm_plan(graph, x, None, normalize))
    run = _found(graph, plan, x, (maps.bias is None, x_dst is None), LinearSum)
    if run is not None:
        run.sum.refresh()
        return run.run(x, maps.left, maps.bias, x_dst, maps.right)
    aggregate = plan.run(graph, x, None)
    out = F.linear(aggregate, maps.left, maps.bias)
    if x_dst is not None:
        out.addmm_(x_dst, maps.right.t())
    return aggregate, out


def _found(
    graph: Graph, plan: Plan, x: Tensor, absent: Any, make: Any, *first: Any
) -> Any:
    """What launches a sum of x and all around it, found again; None if nothing does.

    `absent` says which operands are None: each replay is for those that are there.
    """
    stride = x.stride(0)
    key = (make, plan.problem, stride, absent, *first)
    known = graph.scratch
    run = known.get(key)
    if run is None and key not in known:
        if (
            plan.implementation.family == "triton"
            and x.stride(1) == 1
            and 0 not in (plan.problem.num_dst, plan.problem.features)
        ):
            run = make(*first, graph, plan.problem, plan.schedule, stride)
            # Rows that are scaled beforehand are no step.
            run = None if run.sum.prescales else run
        known[key] = run
    return run


class _AggregateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_dst: Tensor | None,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor | None,
        graph: Graph,
        normalize: str,
        same: bool,
    ) -> Tensor:
        ctx.graph, ctx.normalize, ctx.same = graph, normalize, same
        maps = Maps(left, bias, right)
        dst = x if same else x_dst
        aggregate, out = _forward(graph, x, dst, maps, normalize)
        # Features are for the gradient of `right`, the aggregate for that of `left`.
        kept = aggregate if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(x, x_dst, left, bias, right, kept)
        return out

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, aggregate = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_twice(ctx, inputs, grad), None, None, None)
        return (*_backward(ctx, inputs, aggregate, grad), None, None, None)


def _backward(
    ctx: Any, inputs: list[Any], aggregate: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    x, x_dst, left, _, right = inputs
    needs, same, graph = ctx.needs_input_grad[:5], ctx.same, ctx.graph
    grad_x = None
    if needs[0]:
        index = grad.get_device()
        if not is_current(index):
            with device_guard(index):
                return _backward(ctx, inputs, aggregate, grad)
        reverse, flipped = graph.reverse(), FLIPPED[ctx.normalize]
        # Of a product of the shape and dtype of x, but rows that follow one another.
        like = x if x.is_contiguous() else x.new_empty(1, x.size(1))
        plan = bodies.spmm_plan(reverse, like, None, flipped)
        made = (right is None, LinearSumBackward, Needs(*needs), same)
        run = _found(reverse, plan, like, *made)
        if run is not None:
            run.sum.refresh()
            return run.run(grad, x, left, aggregate, x_dst, right)
        grad_x = bodies.spmm(reverse, grad @ left, None, flipped)
        if same:
            grad_x.addmm_(grad, right)
    turned = grad.t()
    return (
        grad_x,
        grad @ right if needs[1] else None,
        turned @ aggregate if needs[2] else None,
        grad.sum(0) if needs[3] else None,
        turned @ (x if same else x_dst) if needs[4] else None,
    )


def _twice(ctx: Any, inputs: list[Any], grad: Tensor) -> list[Tensor | None]:
    """Gradients that can be differentiated again: those of the steps one by one."""
    x, x_dst, left, bias, right = (
        None if value is None else value.view_as(value) for value in inputs
    )
    out = F.linear(EAGER.spmm(ctx.graph, x, None, ctx.normalize), left, bias)
    if right is not None:
        out = out + F.linear(x if ctx.same else x_dst, right)
    given = (x, x_dst, left, bias, right)
    wanted = [v for v, n in zip(given, ctx.needs_input_grad, strict=False) if n]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if n else None for n in ctx.needs_input_grad[:5]]
