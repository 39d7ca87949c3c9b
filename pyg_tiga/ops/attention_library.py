"""Edge attention with additive scores: the compiled road, as `torch.library` ops.

Whether P and p are kept is an argument, decided from gradients wanted when a call is
recorded and never from sizes: that would be a guard on them, and a new graph where it
fails. What a call does not need has size 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls import scatter_attention
from pyg_tiga.impls.attention_types import Operands, Options, State, Wanted
from pyg_tiga.ops import attention
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.eager import wants_grad
from pyg_tiga.ops.library import define
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
) -> Call:
    graph = Graph.from_handle(index, *relation)
    options = Options(slope, num_loops, dropout)
    return Call(graph, options, mask, seed, objective)


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
    positive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    relation = (layout, num_src, num_dst)
    call = _call(index, relation, mask, seed, slope, num_loops, dropout, objective)
    operands = Operands(value, alpha_dst, alpha_src, term, loop_term, mask, seed)
    out_dtype = _out_dtype(operands)
    plan = attention.attention_plan("edge_attention", call, value, out_dtype)
    state = plan.run(call.graph, operands, call.options, positive)
    real = state_dtype(out_dtype)
    m, total = state.m.to(real), state.total.to(real)
    if not positive:
        return state.out, m, total, state.out.new_empty(0), m.new_empty(0)
    plus, plus_sum = state.positive, state.positive_sum
    if plus is None or plus_sum is None:
        plus, plus_sum = _positive_sums(call, operands, m, total)
    return state.out, m, total, plus.to(out_dtype), plus_sum.to(real)


def _positive_sums(
    call: Call, operands: Operands, m: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """P and p of `State`, where the implementation that ran has no use for them.

    The op promised them before it was known who runs.
    """
    graph, options = call.graph, call.options
    edges = reference.edges_of(graph, options.num_loops, call.mask)
    terms = edges.pick(operands.term, operands.loop_term)
    pre = reference.pre_activations(edges, operands.col, operands.row, terms)  # [K, H]
    weight = (pre - m.index_select(0, edges.dst)).exp()
    weight = weight / total.index_select(0, edges.dst)
    weight = torch.where(pre > 0, weight, 0.0)
    plus_sum = edges.sum_to_dst(weight)  # [N_dst, H]
    keep = scatter_attention.kept(graph, operands.seed, operands.value.size(1), options)
    if keep is not None:
        weight = weight * keep.index_select(0, edges.place) * options.factor
    message = operands.value.to(weight.dtype).index_select(0, edges.src)  # [K, H, C]
    return edges.sum_to_dst(weight.unsqueeze(-1) * message), plus_sum


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
    wants_term: bool,
    wants_loop_term: bool,
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
        State(*state, *[None] * (5 - len(state))),
        Wanted(wants_term, wants_loop_term, objective != "memory"),
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
    return reference.promoted(operands.value, *scores)


def state_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """That of (m, l) for a result's."""
    return torch.float64 if out_dtype == torch.float64 else torch.float32


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
    positive = rest[-1]
    shape, dtype = (num_dst, value.size(1)), _out_dtype(operands)
    out = value.new_empty(*shape, value.size(2), dtype=dtype)
    m = value.new_empty(shape, dtype=state_dtype(dtype))
    if positive:
        kept = (torch.empty_like(out), torch.empty_like(m))
    else:
        kept = (out.new_empty(0), m.new_empty(0))
    return out, m, torch.empty_like(m), *kept


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
    given, wanted = rest[:4], (True, True, *rest[-2:])
    found = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x is not None and is_wanted
        else value.new_empty(0)
        for x, is_wanted in zip(given, wanted, strict=True)
    ]
    return (value.new_empty(value.shape), *found)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    index, *ctx.relation = inputs[:4]
    *tensors, slope, num_loops, dropout, objective, positive = inputs[4:]
    ctx.numbers = (slope, num_loops, dropout, objective)
    ctx.num_index = len(index)
    ctx.save_for_backward(*index, *tensors, *output[: 5 if positive else 3])


def _vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    index, tensors = list(saved[: ctx.num_index]), saved[ctx.num_index :]
    operands, state = tensors[:7], list(tensors[7:])
    # Terms come eighth and ninth among the arguments.
    wanted = ctx.needs_input_grad[7:9]
    value, src, dst, term, loop_term = backward_op(
        index, *ctx.relation, grad, *operands, state, *ctx.numbers, *wanted
    )
    return (
        [None] * len(index),
        None,
        None,
        None,
        value,
        src,
        dst,
        term if wanted[0] else None,
        loop_term if wanted[1] else None,
        *([None] * 7),
    )


forward_op.register_autograd(_vjp, setup_context=_setup)


def additive(call: Call, inputs: Inputs) -> Tensor:
    """Additive edge attention as one node of a compiled graph.

    Args:
        call: The call, of which the graph is a `Handle`.
        inputs: Its inputs.
    """
    value, row, col, _, term, loop_term = inputs
    terms, options = (term, loop_term), call.options
    positive = _may_differentiate(inputs) and attention.keeps_positive(
        call, wants_grad(*terms)
    )
    numbers = (options.scale, options.num_loops, options.dropout, call.objective)
    tensors = (value, col, row, *terms, call.mask, call.seed)
    return forward_op(*call.graph.args(), *tensors, *numbers, positive)[0]


def _may_differentiate(inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether the recorded call is one of training.

    An exported program is mostly for inference, though its parameters want gradients;
    trained, it hands over.
    """
    return wants_grad(*inputs) and not _is_exporting()


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """Asked outside of Dynamo: PyTorch 2.11's takes all it records for exports."""
    return torch.compiler.is_exporting()
