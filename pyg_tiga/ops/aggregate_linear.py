"""A sum or mean over edges and the linear maps behind it, as one differentiable step.

y = (A x) W_l^T + b + x_dst W_r^T. As one step, the gradient of x is summed where it is
formed, instead of in a pass of its own, and the host makes one node of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga.impls.launch import device_guard, is_current
from pyg_tiga.impls.replay import Recorded
from pyg_tiga.impls.triton_sum import LinearSum, LinearSumBackward, Needs
from pyg_tiga.ops import bodies
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import EAGER, apply_function, wants_grad
from pyg_tiga.ops.gradients import FLIPPED
from pyg_tiga.ops.keeping import Reads, anchor_of, kept_of
from pyg_tiga.ops.nodes import Absent, make_formula, run_as_node
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph

# What gradients of x, x_dst, and the three maps read: places among these and the sum;
# where destinations are the sources, and where they are not.
_READS: dict[bool, Reads] = {
    True: ((2, 4), (), (5,), (), (0,)),
    False: ((2,), (4,), (5,), (), (1,)),
}


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
    same = x_dst is x and maps.right is not None
    x_dst = None if same or maps.right is None else x_dst
    call = _Call(graph, normalize, same)
    if not wants_grad(x, x_dst, *maps):
        return _forward(call, x, x_dst, maps)[0]
    # A node keeps the sum, which is for the gradient of its map. There is none on CPUs.
    if x.is_cuda and maps.left.requires_grad and is_current(x.get_device()):
        _, run = _find_forward(call, x, x_dst, maps)
        if run is not None:
            run.sum.refresh()
            out = run_as_node(_formula(graph, run), call, x, x_dst, *maps)
            if out is not None:
                return out
    x_is_kept = same and maps.right.requires_grad
    if x.requires_grad and maps.left.requires_grad and not x_is_kept:
        # The gradient of its map can be differentiated by x, which it does not read.
        call = call._replace(anchor=anchor_of(x))
    return apply_function(_AggregateLinear, x, x_dst, *maps, call)


class _Call(NamedTuple):
    """What a call is besides its tensors."""

    graph: Graph
    normalize: str
    same: bool  # Destinations are the sources.
    anchor: Tensor | None = None  # Stands for sources that are not kept.


def _find_forward(
    call: _Call, x: Tensor, x_dst: Tensor | None, maps: Maps
) -> tuple[Plan, LinearSum | None]:
    """The plan, and what launches the forward if the fused kernels do."""
    graph = call.graph
    plan = bodies.remember_plan(bodies.spmm_plan(graph, x, None, call.normalize))
    key = (maps.bias is None, x_dst is None, maps.right is None)
    return plan, _found(graph, plan, x.stride(), key, LinearSum, call.same)


def _forward(
    call: _Call, x: Tensor, x_dst: Tensor | None, maps: Maps
) -> tuple[Tensor, Tensor]:
    """The result, and the sum."""
    index = x.get_device()
    if not is_current(index):
        with device_guard(index):
            return _forward(call, x, x_dst, maps)
    plan, run = _find_forward(call, x, x_dst, maps)
    if run is not None:
        run.sum.refresh()
        return run.run(x, x_dst, *maps)
    aggregate = plan.run(call.graph, x, None)
    out = F.linear(aggregate, maps.left, maps.bias)
    if maps.right is not None:
        out.addmm_(x if call.same else x_dst, maps.right.t())
    return out, aggregate


def _found(
    graph: Graph,
    plan: Plan,
    strides: tuple[int, ...],
    absent: Absent,
    make: Any,
    *first: Any,
) -> Any:
    """What launches a sum of rows and all around it, found again; None if nothing does.

    `absent` says which operands are None: each replay is for those that are there.
    """
    stride, step = strides
    key = (make, plan.problem, stride, absent, *first)
    known = graph.scratch
    run = known.get(key)
    if run is None and key not in known:
        if (
            plan.implementation.family == "triton"
            and step == 1
            and 0 not in (plan.problem.num_dst, plan.problem.features)
        ):
            run = make(*first, graph, plan.problem, plan.schedule, stride)
            # Rows that are scaled beforehand are no step.
            run = None if run.sum.prescales else run
        known[key] = run
    return run


def _formula(graph: Graph, run: LinearSum) -> Any:
    """The layer as a node; None as long as its forward is not recorded."""
    key = ("formula", id(run))
    found = graph.scratch.get(key)
    if found is None:
        reads = _READS[run.same]
        found = make_formula(run.run, reads, _gradients, _recorded, "SAGEConvBackward")
        if found is not None:
            graph.scratch[key] = found
    return found


class _AggregateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_dst: Tensor | None,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor | None,
        call: _Call,
    ) -> Tensor:
        ctx.owner = call
        maps = Maps(left, bias, right)
        out, aggregate = _forward(call, x, x_dst, maps)
        tensors, needs = (x, x_dst, *maps, aggregate), ctx.needs_input_grad
        ctx.save_for_backward(*kept_of(tensors, _READS[call.same], needs))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, grad), None)


@batchable
def _gradients(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    """Gradients of features and parameters."""
    index = grad.get_device()
    if not is_current(index):
        with device_guard(index):
            return _gradients(ctx, grad)
    # Read once: a checkpoint forms them again for it.
    saved = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _plain_gradients(ctx, _connected(ctx, saved), grad)
    run = _find_backward(ctx, saved)
    if run is None:
        return _plain_gradients(ctx, saved, grad)
    if run.sum is not None:
        run.sum.refresh()
    return run.run(grad, *saved)


def _recorded(ctx: Any, grad: Tensor, absent: Absent) -> Recorded | None:
    """The work of a backward that has run."""
    run = _find_backward(ctx, ctx.saved_tensors)
    return None if run is None else run.run


def _find_backward(
    ctx: Any, saved: Sequence[Tensor | None]
) -> LinearSumBackward | None:
    """What launches the backward, if the fused kernels do."""
    graph, normalize, same, _ = ctx.owner
    needs = Needs(*ctx.needs_input_grad[:5])
    absent = tuple([value is None for value in saved])
    if not needs.x:
        key = (LinearSumBackward, absent, needs, same)
        found = graph.scratch.get(key)
        if found is None:
            found = graph.scratch[key] = LinearSumBackward(needs, same)
        return found
    # The product of the gradient and the map has the columns and the dtype of the map.
    left = saved[2]
    reverse, flipped = graph.reverse(), FLIPPED[normalize]
    plan = bodies.spmm_plan(reverse, left, None, flipped)
    strides = (left.size(1), 1)
    return _found(reverse, plan, strides, absent, LinearSumBackward, needs, same)


def _plain_gradients(
    ctx: Any, saved: Sequence[Tensor | None], grad: Tensor
) -> Sequence[Tensor | None]:
    """Gradients by whatever the planner chooses for the sum of those of the sources.

    They can be differentiated again, by what is connected to the inputs.
    """
    graph, normalize, same, _ = ctx.owner
    x, x_dst, left, _, right, aggregate = saved
    needs = Needs(*ctx.needs_input_grad[:5])
    grad_x = None
    if needs.x:
        grad_x = EAGER.spmm(graph.reverse(), grad @ left, None, FLIPPED[normalize])
        if same:
            grad_x = grad_x.addmm_(grad, right)
    turned = grad.t()
    return (
        grad_x,
        grad @ right if needs.x_dst else None,
        turned @ aggregate if needs.left else None,
        grad.sum(0) if needs.bias else None,
        turned @ (x if same else x_dst) if needs.right else None,
    )


def _connected(ctx: Any, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What is kept, with the sum as one of the sources again."""
    graph, normalize, _, anchor = ctx.owner
    x, *maps, aggregate = saved
    needs = Needs(*ctx.needs_input_grad[:5])
    if needs.x and needs.left:
        source = anchor if x is None else x
        aggregate = apply_function(_Summed, source, aggregate, graph, normalize)
    return x, *maps, aggregate


class _Summed(torch.autograd.Function):
    """A sum of which the value is known already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, aggregate: Tensor, graph: Graph, normalize: str
    ) -> Tensor:
        ctx.graph, ctx.normalize = graph, normalize
        return aggregate.view_as(aggregate)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reverse, flipped = ctx.graph.reverse(), FLIPPED[ctx.normalize]
        return EAGER.spmm(reverse, grad, None, flipped), None, None, None
