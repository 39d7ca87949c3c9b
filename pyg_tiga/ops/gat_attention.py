"""GAT's attention: scores of projected nodes and attention over edges, as one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls import triton_attention_backward, triton_nodes
from pyg_tiga.impls.attention_types import Operands, State, Wanted
from pyg_tiga.ops.attention import (
    Call,
    Inputs,
    aliased,
    attention_plan,
    by_reference,
    cast,
    differentiate,
    forward,
    gat_inputs,
    keeps_positive,
)
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.ops.edge_attention import attend
from pyg_tiga.ops.keeping import Reads, Watched, anchor_of, kept_of


class _Kept(NamedTuple):
    """What `_GatAttention` keeps; of nodes and vectors, what wanted gradients read."""

    x_src: Tensor
    x_dst: Tensor | None
    att_src: Tensor | None
    att_dst: Tensor | None
    alpha_src: Tensor
    alpha_dst: Tensor
    term: Tensor | None
    loop_term: Tensor | None


# What gradients of x_src, which is the values, and of x_dst, both vectors and both
# terms read of the first four; where destinations are the sources, and where not.
_READS: dict[bool, Reads] = {
    True: ((0, 2, 3), (), (0,), (0,), (0,), (0,)),
    False: ((0, 2), (0, 3), (0,), (0, 1), (0,), (0,)),
}
_Anchors = tuple[Tensor | None, Tensor | None, Tensor | None]


class _GatAttention(torch.autograd.Function):
    """Scores and attention in one: no pass over the nodes for the scores' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_src: Tensor,
        x_dst: Tensor | None,
        att_src: Tensor,
        att_dst: Tensor | None,
        term: Tensor | None,
        loop_term: Tensor | None,
        call: Call,
        out_dtype: torch.dtype,
        anchors: _Anchors,
    ) -> Tensor:
        same = x_dst is not None and x_dst is x_src
        alpha_src, alpha_dst = _node_scores(call, x_src, x_dst, att_src, att_dst, same)
        inputs = Inputs(x_src, alpha_dst, alpha_src, None, term, loop_term)
        needs = ctx.needs_input_grad
        positive = any(needs) and keeps_positive(call, needs[4] or needs[5])
        state = forward(call, inputs, out_dtype, positive)
        ctx.call, ctx.same, ctx.anchors = call.bare(), same, anchors
        ctx.watched = Watched(state.out)
        ctx.dtypes = [x if x is None else x.dtype for x in (x_dst, att_src, att_dst)]
        nodes = (x_src, x_dst, att_src, att_dst)
        nodes = kept_of(nodes, _READS[same], needs)
        rest = (alpha_src, alpha_dst, term, loop_term)
        kept = (*nodes, *rest, state.out.data, *state[1:])
        ctx.save_for_backward(*kept, *call.drawn())
        return state.out

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask, seed = ctx.saved_tensors
        call = ctx.call._replace(mask=mask, seed=seed)
        kept, state = _Kept(*saved[:8]), State(*saved[8:])
        if torch.is_grad_enabled():
            found = _gat_twice(ctx, call, kept, grad)
        else:
            if ctx.watched.is_edited():
                state = _formed_again(call, kept, state)
            found = _gat_gradients(ctx, call, kept, state, grad)
        return (*found, None, None, None)


def _formed_again(call: Call, kept: _Kept, state: State) -> State:
    """The state with its result as it was."""
    scores = (kept.alpha_dst, kept.alpha_src, None, kept.term, kept.loop_term)
    inputs, positive = Inputs(kept.x_src, *scores), state.positive is not None
    again = forward(call, inputs, state.out.dtype, positive)
    return state._replace(out=again.out)


def _gat_gradients(
    ctx: Any, call: Call, kept: _Kept, state: State, grad: Tensor
) -> tuple[Tensor | None, ...]:
    needs, same = ctx.needs_input_grad, ctx.same
    x_src, x_dst, att_src, att_dst, alpha_src, alpha_dst, term, loop_term = kept
    operands = Operands(
        x_src, alpha_dst, alpha_src, term, loop_term, call.mask, call.seed
    )
    plan = attention_plan("edge_attention_backward", call, x_src, grad.dtype)
    found = triton_attention_backward.ATTENTION_BACKWARD.run(
        plan.problem,
        plan.schedule,
        call.graph,
        grad,
        operands,
        call.options,
        state,
        Wanted(needs[4], needs[5], call.objective != "memory"),
        (att_src, att_dst if same else None) if needs[0] else (None, None),
    )
    grad_dst = None
    second = found.row if same else None
    grad_att = triton_nodes.node_scores_backward(call.graph, x_src, found.col, second)
    grad_att_dst = grad_att[1] if same else None
    _, src_dtype, dst_dtype = ctx.dtypes
    if x_dst is not None and not same:
        grad_att_dst = triton_nodes.node_scores_backward(
            call.graph, x_dst, found.row, None
        )[0]
    if att_dst is not None and not same and needs[1]:
        grad_dst = _of_nodes(found.row, att_dst, ctx.dtypes[0])
    return (
        found.value,
        grad_dst,
        grad_att[0].to(src_dtype),
        None if grad_att_dst is None else grad_att_dst.to(dst_dtype),
        cast(found.term, term),
        cast(found.loop_term, loop_term),
    )


def _gat_twice(
    ctx: Any, call: Call, kept: _Kept, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again: those of the steps one by one."""
    needs, same, dtypes = ctx.needs_input_grad, ctx.same, ctx.dtypes
    stand_ins = (None, *ctx.anchors)
    x_src, x_dst, att_src, att_dst = (
        anchor if x is None else x for x, anchor in zip(kept, stand_ins, strict=False)
    )
    x_dst = x_src if same else x_dst
    alpha_src = apply_function(_Scored, x_src, att_src, kept.alpha_src)
    alpha_dst = apply_function(_Scored, x_dst, att_dst, kept.alpha_dst)
    # Gradients stop there, though one was computed from another.
    terms = (kept.term, kept.loop_term)
    inputs = Inputs(*aliased((x_src, alpha_dst, alpha_src, None, *terms)))
    wanted = tuple(x is not None and x.requires_grad for x in inputs)
    out = by_reference(call, inputs)
    of_value, of_dst, of_src, _, *terms = differentiate(out, inputs, grad, wanted)
    grad_src = of_value
    if needs[0]:
        grad_src = of_value + _of_nodes(of_src, att_src, x_src.dtype)
        if same:
            grad_src = grad_src + _of_nodes(of_dst, att_dst, x_src.dtype)
    wants_x_dst = needs[1] and not same and att_dst is not None
    wants_att_dst = needs[3] and x_dst is not None
    return (
        grad_src,
        _of_nodes(of_dst, att_dst, dtypes[0]) if wants_x_dst else None,
        _of_vector(of_src, x_src, dtypes[1]) if needs[2] else None,
        _of_vector(of_dst, x_dst, dtypes[2]) if wants_att_dst else None,
        *terms,
    )


def _of_nodes(grad: Tensor, att: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of nodes ``[N, H, C]`` by that of their scores ``[N, H]``."""
    return (grad.unsqueeze(2) * att).to(dtype)


def _of_vector(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a vector ``[H, C]`` by that of scores ``[N, H]``."""
    return (grad.unsqueeze(2) * x).sum(0).to(dtype)


class _Scored(torch.autograd.Function):
    """Scores of nodes of which the values are known already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, att: Tensor | None, alpha: Tensor
    ) -> Tensor:
        wants_x, wants_att = ctx.needs_input_grad[:2]
        ctx.dtypes = [None if v is None else v.dtype for v in (x, att)]
        ctx.save_for_backward(x if wants_att else None, att if wants_x else None)
        return alpha.view_as(alpha)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, att = ctx.saved_tensors
        x_dtype, att_dtype = ctx.dtypes
        return (
            None if att is None else _of_nodes(grad, att, x_dtype),
            None if x is None else _of_vector(grad, x, att_dtype),
            None,
        )


def gat(
    call: Call,
    x_src: Tensor,  # [N_src, H, C]
    x_dst: Tensor | None,  # [N_dst, H, C]
    att_src: Tensor,  # [H, C]
    att_dst: Tensor | None,  # [H, C]
    term: Tensor | None,
    loop_term: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """GAT's attention: scores of nodes, then additive attention; differentiable."""
    plan = attention_plan("edge_attention", call, x_src, out_dtype)
    if plan.implementation.family == "triton":
        nodes = (x_src, x_dst, att_src, att_dst)
        made = (call, out_dtype, _anchors_of(*nodes))
        return apply_function(_GatAttention, *nodes, term, loop_term, *made)
    nodes = (x_src, x_dst, att_src, att_dst)
    inputs = gat_inputs(call, nodes, (term, loop_term))
    return attend(call, inputs, out_dtype)


def _anchors_of(
    x_src: Tensor, x_dst: Tensor | None, att_src: Tensor, att_dst: Tensor | None
) -> _Anchors:
    """Stand-ins of what has a gradient but is read for that of its factor alone."""
    if not wants_grad(x_src, x_dst, att_src, att_dst):
        return None, None, None

    def apart(one: Tensor, other: Tensor) -> Tensor | None:
        needed = one.requires_grad and not other.requires_grad
        return anchor_of(one) if needed else None

    of_src = apart(att_src, x_src)
    if x_dst is None or att_dst is None:
        return None, of_src, None
    of_x = None if x_dst is x_src else apart(x_dst, att_dst)
    return of_x, of_src, apart(att_dst, x_dst)


def _node_scores(
    call: Call,
    x_src: Tensor,
    x_dst: Tensor | None,
    att_src: Tensor,
    att_dst: Tensor | None,
    same: bool,
) -> tuple[Tensor, Tensor]:
    graph, both = call.graph, att_dst if same else None
    first, second = triton_nodes.node_scores(graph, x_src, att_src, both)
    if x_dst is None or att_dst is None:
        second = first.new_zeros(graph.num_dst, first.size(1))
    elif not same:
        second, _ = triton_nodes.node_scores(graph, x_dst, att_dst, None)
    return first, second
