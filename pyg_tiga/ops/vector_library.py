"""Edge attention with scores of two vectors: the compiled road, as `torch.library` ops.

What a call does not need has size 0. Sources whose vectors are their values, as those
of GATv2, cross an op's boundary once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls.attention_types import Options, State, Wanted
from pyg_tiga.ops import attention
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.attention_library import state_dtype
from pyg_tiga.ops.library import define
from pyg_tiga.ops.weights_library import gradients_of
from pyg_tiga.relation.graph import Graph


def _forward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    value: Tensor,
    row: Tensor,
    col: Tensor | None,
    param: Tensor | None,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    score: str,
    scale: float,
    num_loops: int,
    dropout: float,
    objective: str,
    gives_weights: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    options = Options(scale, num_loops, dropout, score, gives_weights)
    call = Call(graph, options, mask, seed, objective)
    operands = Inputs(value, row, col, param, term, loop_term).operands(mask, seed)
    plan = attention.attention_plan("edge_attention", call, value, out_dtype)
    state, real = plan.run(graph, operands, options, False), state_dtype(out_dtype)
    weights = value.new_empty(0) if state.weights is None else state.weights
    return state.out, state.m.to(real), state.total.to(real), weights.to(real)


def _backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    value: Tensor,
    row: Tensor,
    col: Tensor | None,
    param: Tensor | None,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    state: Sequence[Tensor],
    share: Tensor | None,
    score: str,
    scale: float,
    num_loops: int,
    dropout: float,
    objective: str,
    wants_term: bool,
    wants_loop_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    options = Options(scale, num_loops, dropout, score)
    call = Call(graph, options, mask, seed, objective)
    inputs = Inputs(value, row, col, param, term, loop_term)
    wanted = Wanted(wants_term, wants_loop_term, objective != "memory")
    kept = State(*state[:3], None, None, state[3])
    found = attention.gradients(call, inputs, grad, kept, wanted, share)
    if found[2] is None and col is not None:
        # One tensor came twice, and the values' gradient is that of both.
        found = (*found[:2], torch.zeros_like(col), *found[3:])
    return tuple(value.new_empty(0) if x is None else x for x in found)


forward_op = define("vector_attention", _forward)
backward_op = define("vector_attention_backward", _backward)


@forward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *_, gives_weights, dtype = rest
    shape = (num_dst, value.size(1))
    out = value.new_empty(*shape, value.size(2), dtype=dtype)
    m = value.new_empty(shape, dtype=state_dtype(dtype))
    size = (index[-1].size(-1), value.size(1)) if gives_weights else (0,)
    return out, m, torch.empty_like(m), m.new_empty(size)


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
    wanted = (True, True, True, True, *rest[-2:])
    return tuple(
        x.new_empty(x.shape) if x is not None and is_wanted else value.new_empty(0)
        for x, is_wanted in zip((value, *rest[:5]), wanted, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    index, *ctx.relation = inputs[:4]
    ctx.num_index, ctx.numbers = len(index), inputs[12:17]
    ctx.gives_weights = inputs[17]
    ctx.save_for_backward(*index, *inputs[4:12], *output)


def _vjp(ctx: Any, grad: Tensor, _: Any, __: Any, share: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    index, tensors = list(saved[: ctx.num_index]), saved[ctx.num_index :]
    # Terms come ninth and tenth among the arguments.
    wanted = ctx.needs_input_grad[8:10]
    found = backward_op(
        index,
        *ctx.relation,
        grad,
        *tensors[:8],
        list(tensors[8:]),
        share if ctx.gives_weights else None,
        *ctx.numbers,
        *wanted,
    )
    found = _given(found, tensors[:4], (True,) * 4) + _given(
        found[4:], tensors[4:6], wanted
    )
    return ([None] * len(index), None, None, None, *found, *[None] * 9)


def _given(
    found: Sequence[Tensor], given: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of what is there and asked for."""
    return tuple(
        x if of is not None and is_wanted else None
        for x, of, is_wanted in zip(found, given, wanted, strict=False)
    )


forward_op.register_autograd(_vjp, setup_context=_setup)


def attend(call: Call, inputs: Inputs, out_dtype: torch.dtype) -> Tensor:
    """:func:`edge_attention.attend` as one node of a compiled graph.

    Args:
        call: The call, of which the graph is a `Handle`.
        inputs: Its inputs.
        out_dtype: Dtype of the result.
    """
    return _attend(call, inputs, False, out_dtype)[0]


def attend_with_weights(
    call: Call, inputs: Inputs, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """:func:`edge_attention.with_weights`, likewise."""
    out, _, _, weights = _attend(call, inputs, True, out_dtype)
    return out, weights


def _attend(
    call: Call, inputs: Inputs, gives_weights: bool, out_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    given = (*call.graph.args(), *inputs, call.mask, call.seed, *_numbers(call))
    return forward_op(*given, call.objective, gives_weights, out_dtype)


def _numbers(call: Call) -> tuple[str, float, int, float]:
    score, scale = call.options.score, call.options.scale
    return score, scale, call.options.num_loops, call.options.dropout


def _weights(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    row: Tensor,
    col: Tensor,
    param: Tensor | None,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    score: str,
    scale: float,
    num_loops: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    options = Options(scale, num_loops, dropout, score)
    call = Call(graph, options, mask, seed, "time")
    inputs = Inputs(col, row, None, param, term, loop_term)
    weights, loops = attention.weights(call, inputs)
    return weights.clone(), loops.clone()


def _weights_backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    grad_loops: Tensor,
    row: Tensor,
    col: Tensor,
    param: Tensor | None,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    score: str,
    scale: float,
    num_loops: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    options = Options(scale, num_loops, dropout, score)
    operands = (row, col, param, term, loop_term)
    return gradients_of(graph, operands, mask, seed, options, (grad, grad_loops))


weights_op = define("vector_attention_weights", _weights)
weights_backward_op = define("vector_attention_weights_backward", _weights_backward)


@weights_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    row, num_loops = rest[0], rest[9]
    heads, dtype = row.size(1), reference.promoted(*rest[:5])
    shapes = ((index[-1].size(-1), heads), (num_loops, heads))
    return tuple(row.new_empty(shape, dtype=dtype) for shape in shapes)


@weights_backward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    grad_loops: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return tuple(
        rest[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in rest[:5]
    )


def _weights_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    index, *ctx.relation = inputs[:4]
    ctx.num_index, ctx.numbers = len(index), inputs[11:]
    ctx.save_for_backward(*index, *inputs[4:11])


def _weights_vjp(ctx: Any, grad: Tensor, grad_loops: Tensor) -> tuple[Any, ...]:
    # Read once: a checkpoint forms them again for it.
    saved = ctx.saved_tensors
    index, tensors = list(saved[: ctx.num_index]), saved[ctx.num_index :]
    found = weights_backward_op(
        index, *ctx.relation, grad, grad_loops, *tensors, *ctx.numbers
    )
    found = _given(found, tensors, (True,) * 5)
    return ([None] * ctx.num_index, None, None, None, *found, *[None] * 6)


weights_op.register_autograd(_weights_vjp, setup_context=_weights_setup)


def attention_weights(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """:func:`attention.weights`, likewise."""
    col = inputs.value if inputs.col is None else inputs.col
    given = (inputs.row, col, *inputs[3:], call.mask, call.seed)
    return weights_op(*call.graph.args(), *given, *_numbers(call))
