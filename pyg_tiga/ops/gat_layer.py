"""GAT's layer as one differentiable step: projection, attention over edges, bias.

The host makes one node of the graph, and no gradient is summed in a pass of its own.
What the layer returns is kept for its backward, but may be edited in place, as with
PyG: the backward then forms it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_types import Options
from pyg_tiga.impls.launch import device_guard, is_current
from pyg_tiga.impls.replay import Recorded
from pyg_tiga.impls.triton_gat import (
    GatBackward,
    GatForward,
    Layer,
    Needs,
)
from pyg_tiga.ops import attention
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.bodies import remember_plan
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.ops.keeping import Reads, Watched, anchor_of, kept_of
from pyg_tiga.ops.nodes import Absent, make_formula, run_as_node
from pyg_tiga.planner import Plan, pinned
from pyg_tiga.relation.graph import Graph

# A row's channels are summed for the bias in one block.
_MOST_CHANNELS = 1024
# Features and parameters may have gradients.
_NUM_WANTED = 5
# All that is kept besides features, projection and bias, and of it what is read where
# only the bias has a gradient: places among what may be kept (`_Kept`).
_ATTENTION = (2, 3, 5, 6, 7, 8, 9)
_RESULT = (6, 7, 8)


class Weights(NamedTuple):
    """Parameters of the layer, all of one dtype and device, contiguous."""

    lin: Tensor  # [H * C, F_in]
    att_src: Tensor  # [1, H, C]
    att_dst: Tensor  # [1, H, C]
    bias: Tensor | None  # [H * C]


class _Kept(NamedTuple):
    """What may be kept; that is, what wanted gradients read of it."""

    x: Tensor | None
    lin: Tensor | None
    att_src: Tensor | None
    att_dst: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    out: Tensor | None  # As the kernels formed it.
    rest: Tensor | None
    positive: Tensor | None
    values: Tensor | None


class _Run:
    """What one kind of call needs on a relation, found at its first call."""

    __slots__ = (
        "_backwards",
        "_formula",
        "_schedule",
        "chunks",
        "forward",
        "layer",
        "plan",
        "reads",
    )

    def __init__(self, graph: Graph, plan: Plan, backward: Plan, layer: Layer) -> None:
        self.plan, self.layer = plan, layer
        self.chunks = (plan.schedule.chunk, backward.schedule.chunk)
        self.forward = GatForward(graph, plan.schedule, layer)
        # The result is kept as it was before a bias that the kernels did not add.
        bias = (4,) if layer.adds_bias else ()
        every = (*bias, *_ATTENTION)
        self.reads: Reads = ((1, *every), (0, *every), every, every, (*bias, *_RESULT))
        self._schedule = backward.schedule
        self._backwards: dict[tuple[Any, ...], GatBackward] = {}
        self._formula: Any = None

    def formula(self) -> Any:
        """The layer as a node; None as long as its forward is not recorded."""
        if self._formula is None:
            args = (self.reads, _gradients, _recorded, "GATConvBackward")
            self._formula = make_formula(self.forward.run, *args)
        return self._formula

    def backward(
        self, graph: Graph, stride: int, needs: tuple[bool, ...], absent: Absent
    ) -> GatBackward:
        """The backward for a gradient of this stride, and for what is kept."""
        key = (stride, needs, absent)
        found = self._backwards.get(key)
        if found is None:
            made = (graph, self._schedule, self.layer, stride, Needs(*needs))
            found = self._backwards[key] = GatBackward(*made)
        return found


class _Owner(NamedTuple):
    graph: Graph
    run: _Run
    # They stand for features and a projection that are not kept.
    anchors: tuple[Tensor | None, Tensor | None] = (None, None)


def gat_layer(
    graph: Graph,
    x: Tensor,  # [N, F_in]
    weights: Weights,
    options: Options,
    seed: Tensor | None,
) -> Tensor | None:
    """The layer with its heads side by side, ``[N, H * C]``.

    Args:
        graph: The relation of the nodes with themselves.
        x: Node features of the parameters' dtype.
        weights: Parameters.
        options: Of the attention.
        seed: Of dropout, where anything is dropped.

    Returns:
        The output; None where the steps have to run one by one.
    """
    trains = wants_grad(x, *weights)
    run = _run_of(graph, x, weights, options, trains)
    if run is None:
        return None
    remember_plan(run.plan)
    if not trains:
        return _forward(graph, run, x, weights, seed)[0]
    graph.rows().work_items(run.chunks[0])  # Safe to read on this stream.
    owner = _Owner(graph, run)
    out = run_as_node(run.formula(), owner, x, *weights, seed)
    if out is not None:
        return out
    if x.requires_grad != weights.lin.requires_grad:
        # Each is read for the gradient of the other, and the other's own may be
        # differentiated again.
        anchors = (
            anchor_of(x) if x.requires_grad else None,
            anchor_of(weights.lin) if weights.lin.requires_grad else None,
        )
        owner = owner._replace(anchors=anchors)
    return apply_function(_GatLayer, x, *weights, seed, owner)


def _run_of(
    graph: Graph, x: Tensor, weights: Weights, options: Options, trains: bool
) -> _Run | None:
    _, heads, channels = weights.att_src.shape
    kind = (heads, channels, x.dtype, options, trains, weights.bias is not None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = ("gat_layer", kind, deterministic, pinned())
    known = graph.scratch
    run = known.get(key)
    if run is None and key not in known:
        run = known[key] = _make_run(graph, x, kind)
    return run


def _make_run(graph: Graph, x: Tensor, kind: tuple[Any, ...]) -> _Run | None:
    heads, channels, dtype, options, trains, has_bias = kind
    if 0 in (x.size(0), heads * channels) or channels > _MOST_CHANNELS:
        return None
    call = attention.Call(graph, options, None, None, "time")
    values = x.new_empty(0, heads, channels)
    plans = [
        attention.attention_plan(op, call, values, dtype)
        for op in ("edge_attention", "edge_attention_backward")
    ]
    if any(plan.implementation.family != "triton" for plan in plans):
        return None
    adds_bias = has_bias and dtype is torch.float32
    layer = Layer(heads, channels, dtype, options, trains, adds_bias)
    with device_guard(x.get_device()):
        return _Run(graph, *plans, layer)


def _forward(
    graph: Graph, run: _Run, x: Tensor, weights: Weights, seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The output, and what is kept of it and besides, see `GatForward`."""
    index = x.get_device()
    if not is_current(index):
        with device_guard(index):
            return _forward(graph, run, x, weights, seed)
    graph.rows().work_items(run.chunks[0])  # Safe to read on this stream.
    return run.forward.run(x, *weights, seed)


class _GatLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lin: Tensor,
        att_src: Tensor,
        att_dst: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        owner: _Owner,
    ) -> Tensor:
        weights = Weights(lin, att_src, att_dst, bias)
        graph, run, _ = owner
        out, formed, *kept = _forward(graph, run, x, weights, seed)
        ctx.owner = owner
        ctx.watched = None
        if formed is out:
            ctx.watched, formed = Watched(out), out.data
        tensors, needs = (x, *weights, seed, formed, *kept), ctx.needs_input_grad
        ctx.save_for_backward(*kept_of(tensors, run.reads, needs))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.edited = ctx.watched is not None and ctx.watched.is_edited()
        return (*_gradients(ctx, grad), None, None)


@batchable
def _gradients(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    """Gradients of features and parameters."""
    # Read once: a checkpoint forms them again for it.
    kept = _Kept(*ctx.saved_tensors)
    if torch.is_grad_enabled():
        return _twice(ctx, kept, grad)
    x, lin, *vectors, bias, seed = kept[:6]
    out, rest, positive, values = kept[6:]
    # For the bias alone only the gradient itself is summed.
    if ctx.edited and values is not None:
        out = _formed_again(ctx, kept)
    absent = tuple([value is None for value in kept])
    state = [out, rest, positive, values]
    del kept, out, rest, positive, values
    given = (*vectors, bias, seed)
    backward, found = _backward(ctx, grad, given, state, absent)
    # Before anything else is allocated; a no-op where the graph is kept.
    ctx.maybe_clear_saved_tensors()
    grad_values, *sums = found
    del found
    grad_x = grad_lin = None
    if grad_values is not None:
        grad_x, grad_lin = backward.products(grad_values, x, lin)
    return grad_x, grad_lin, *sums


def _recorded(ctx: Any, grad: Tensor, absent: Absent) -> Recorded:
    """The work of a backward that has run."""
    graph, run, _ = ctx.owner
    return run.backward(graph, grad.stride(0), ctx.needs_input_grad, absent).whole


def _backward(
    ctx: Any, grad: Tensor, rest: tuple[Any, ...], state: list[Any], absent: Absent
) -> tuple[GatBackward, tuple[Tensor | None, ...]]:
    """Gradients of projected nodes and of parameters, and what formed them.

    It empties the state, which is large.
    """
    index = grad.get_device()
    if not is_current(index):
        with device_guard(index):
            return _backward(ctx, grad, rest, state, absent)
    graph, run, _ = ctx.owner
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    needs = ctx.needs_input_grad[:_NUM_WANTED]
    backward = run.backward(graph, grad.stride(0), needs, absent)
    # Safe to read on this stream.
    graph.rows().work_items(run.chunks[1])
    graph.columns().work_items(run.chunks[1])
    found = backward.run(grad, *rest, *state)
    state.clear()
    return backward, found


def _formed_again(ctx: Any, kept: _Kept) -> Tensor:
    """The result as the kernels formed it, where it was edited since."""
    graph, run, _ = ctx.owner
    index = kept.out.get_device()
    if not is_current(index):
        with device_guard(index):
            return _formed_again(ctx, kept)
    graph.rows().work_items(run.chunks[0])  # Safe to read on this stream.
    return run.forward.again(kept.values, *kept[2:6])


def _attended(
    graph: Graph,
    layer: Layer,
    values: Tensor,  # [N, H * C]
    att_src: Tensor,
    att_dst: Tensor,
    seed: Tensor | None,
) -> Tensor:
    """The layer behind its projection and before its bias, by the plain formula."""
    values = values.view(-1, layer.heads, layer.channels)
    call = attention.Call(graph, layer.options, None, seed, "time")
    inputs = attention.gat_inputs(call, (values, values, att_src, att_dst))
    out = attention.by_reference(call, inputs)
    return out.reshape(-1, layer.heads * layer.channels)


def _twice(ctx: Any, kept: _Kept, grad: Tensor) -> list[Tensor | None]:
    """Gradients that can be differentiated again: those of the steps one by one."""
    graph, run, anchors = ctx.owner
    needs = ctx.needs_input_grad[:_NUM_WANTED]
    found: list[Tensor | None] = [None] * _NUM_WANTED
    if needs[4]:
        found[4] = grad.sum(0)
    if not any(needs[:4]):
        return found
    x, lin = (
        anchor if value is None else value
        for value, anchor in zip(kept[:2], anchors, strict=True)
    )
    values = kept.values
    if needs[0] or needs[1]:
        values = apply_function(_Projected, x, lin, values)
    # Gradients stop there, though one was computed from another.
    inputs = attention.aliased((values, kept.att_src, kept.att_dst))
    out = _attended(graph, run.layer, *inputs, kept.seed)
    wanted = (needs[0] or needs[1], *needs[2:4])
    of_values, *vectors = attention.differentiate(out, inputs, grad, wanted)
    found[2:4] = vectors
    if of_values is not None:
        found[0] = of_values @ lin if needs[0] else None
        found[1] = of_values.t() @ x if needs[1] else None
    return found


class _Projected(torch.autograd.Function):
    """A projection of which the value is known already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, lin: Tensor | None, values: Tensor
    ) -> Tensor:
        wants_x, wants_lin = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_lin else None, lin if wants_x else None)
        return values.view_as(values)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, lin = ctx.saved_tensors
        return (
            None if lin is None else grad @ lin,
            None if x is None else grad.t() @ x,
            None,
        )
