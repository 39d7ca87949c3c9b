"""Edge attention with additive scores: the compiled road, as `torch.library` ops.

P and p are never kept here: to compare sizes for it would be a guard on them, and a new
graph where it fails. Gradients that a call does not need have size 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_types import Operands, Options, State, Wanted
from pyg_tiga.ops import attention
from pyg_tiga.ops.library import Handle, define
from pyg_tiga.reference_attention import promoted
from pyg_tiga.relation.graph import Graph


def _call(
    index: Sequence[Tensor],
    relation: tuple[str, int, int],
    mask: Tensor | None,
    seed: Tensor | None,
    slope: float,
    num_loops: int,
    dropout: float,
    objective: str,
) -> attention.Call:
    graph = Graph.from_handle(index, *relation)
    options = Options(slope, num_loops, dropout)
    return attention.Call(graph, options, mask, seed, objective)


def _forward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    value: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    slope: float,
    num_loops: int,
    dropout: float,
    objective: str,
) -> tuple[Tensor, Tensor, Tensor]:
    relation = (layout, num_src, num_dst)
    call = _call(index, relation, mask, seed, slope, num_loops, dropout, objective)
    operands = Operands(value, alpha_dst, alpha_src, term, loop_term, mask, seed)
    plan = attention.attention_plan("edge_attention", call, value, _out_dtype(operands))
    state = plan.run(call.graph, operands, call.options, False)
    return state.out, state.m.float(), state.total.float()


def _backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    value: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    state: Sequence[Tensor],
    slope: float,
    num_loops: int,
    dropout: float,
    objective: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    relation = (layout, num_src, num_dst)
    call = _call(index, relation, mask, seed, slope, num_loops, dropout, objective)
    operands = Operands(value, alpha_dst, alpha_src, term, loop_term, mask, seed)
    plan = attention.attention_plan("edge_attention_backward", call, value, grad.dtype)
    found = plan.run(
        call.graph,
        grad,
        operands,
        call.options,
        State(*state, None, None),
        Wanted(term is not None, loop_term is not None, objective != "memory"),
    )
    return (
        found.value,
        found.col.to(alpha_src.dtype),
        found.row.to(alpha_dst.dtype),
        _like(found.term, term, value),
        _like(found.loop_term, loop_term, value),
    )


def _like(found: Tensor | None, given: Tensor | None, value: Tensor) -> Tensor:
    if found is None or given is None:
        return value.new_empty(0)
    return found.to(given.dtype)


def _out_dtype(operands: Operands) -> torch.dtype:
    scores = (operands.row, operands.col, operands.term, operands.loop_term)
    return promoted(operands.value, *scores)


forward_op = define("additive_attention", _forward)
backward_op = define("additive_attention_backward", _backward)


@forward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    operands = Operands(value, rest[1], rest[0], rest[2], rest[3])
    shape = (num_dst, value.size(1))
    out = value.new_empty(*shape, value.size(2), dtype=_out_dtype(operands))
    state = value.new_empty(shape, dtype=torch.float32)
    return out, state, torch.empty_like(state)


@backward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    given = (rest[0], rest[1], rest[2], rest[3])
    found = [
        value.new_empty(0)
        if x is None
        else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in given
    ]
    return (value.new_empty(value.shape), *found)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    index, *ctx.relation = inputs[:4]
    *tensors, ctx.slope, ctx.num_loops, ctx.dropout, ctx.objective = inputs[4:]
    ctx.num_index = len(index)
    ctx.save_for_backward(*index, *tensors, *output)


def _vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    index, tensors = list(saved[: ctx.num_index]), saved[ctx.num_index :]
    operands, state = tensors[:7], list(tensors[7:])
    numbers = (ctx.slope, ctx.num_loops, ctx.dropout, ctx.objective)
    value, src, dst, term, loop_term = backward_op(
        index, *ctx.relation, grad, *operands, state, *numbers
    )
    return (
        [None] * len(index),
        None,
        None,
        None,
        value,
        src,
        dst,
        None if operands[3] is None else term,
        None if operands[4] is None else loop_term,
        *([None] * 6),
    )


forward_op.register_autograd(_vjp, setup_context=_setup)


def additive(
    relation: Handle,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    objective: str,
) -> Tensor:
    """Additive edge attention as one node of a compiled graph."""
    numbers = (options.scale, options.num_loops, options.dropout, objective)
    return forward_op(*relation.args(), *inputs, mask, seed, *numbers)[0]
