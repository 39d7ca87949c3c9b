"""Edge attention with additive scores: the eager road.

The forward keeps (m, l) of each softmax and, depending on the objective and on which
gradients are wanted, also P and p (`State`): decided here, before anything runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls import scatter_attention
from pyg_tiga.impls.attention_types import Operands, Options, State, Wanted
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.bodies import find_plan, remember_plan
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph

_NAMES = ("form", "heads", "objective")


class Call(NamedTuple):
    """What a call of edge attention is, beside its differentiable operands."""

    graph: Graph
    options: Options
    mask: Tensor | None
    seed: Tensor | None
    objective: str


def attention_plan(op: str, call: Call, value: Tensor, out_dtype: torch.dtype) -> Plan:
    """The plan of a forward or a backward."""
    heads, channels = value.size(1), value.size(2)
    options = (call.options.score, heads, call.objective)
    # The gradient of values is gathered by source: columns are its rows.
    graph = call.graph if op == "edge_attention" else call.graph.reverse()
    return find_plan(_NAMES, op, graph, value, heads * channels, out_dtype, options)


def forward(
    call: Call,
    operands: Operands,
    out_dtype: torch.dtype,
    positive: bool,
) -> State:
    """Run the forward; with `positive` it keeps P and p for the backward."""
    plan = attention_plan("edge_attention", call, operands.value, out_dtype)
    remember_plan(plan)
    return plan.run(call.graph, operands, call.options, positive)


def keeps_positive(call: Call, wants_terms: bool) -> bool:
    """Whether a forward that may be followed by a backward keeps P and p.

    They cost a tensor of the output's size, and save a walk over the edges or a tensor
    of E H values. The latter is there anyway where gradients of terms are wanted.
    """
    return call.objective != "memory" and not wants_terms


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        alpha_src: Tensor,
        alpha_dst: Tensor,
        term: Tensor | None,
        loop_term: Tensor | None,
        call: Call,
        out_dtype: torch.dtype,
    ) -> Tensor:
        operands = Operands(
            value, alpha_dst, alpha_src, term, loop_term, call.mask, call.seed
        )
        needs = ctx.needs_input_grad
        # The gradient of the values reads weights alone.
        reads_value = any(needs[1:5])
        positive = reads_value and keeps_positive(call, needs[3] or needs[4])
        state = forward(call, operands, out_dtype, positive)
        ctx.call, ctx.value_like = call, like(value)
        scores = (alpha_src, alpha_dst, term, loop_term)
        kept = (value, *scores, *state)
        if not reads_value:
            kept = (None, *scores, None, *state[1:])
        ctx.save_for_backward(*kept)
        return state.out

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad
        value = present(saved[0], ctx.value_like)
        inputs = (value, *saved[1:5])
        state = State(present(saved[5], like(grad)), *saved[6:])
        if torch.is_grad_enabled():
            return (*_twice(call, inputs, grad, needs), None, None)
        _, alpha_src, alpha_dst, term, loop_term = inputs
        operands = Operands(
            value, alpha_dst, alpha_src, term, loop_term, call.mask, call.seed
        )
        plan = attention_plan("edge_attention_backward", call, value, grad.dtype)
        wanted = Wanted(needs[3], needs[4], call.objective != "memory")
        found = plan.run(call.graph, grad, operands, call.options, state, wanted)
        return (
            found.value,
            cast(found.col, alpha_src),
            cast(found.row, alpha_dst),
            cast(found.term, term),
            cast(found.loop_term, loop_term),
            None,
            None,
        )


Like = tuple[torch.Size, torch.dtype, torch.device]


def like(x: Tensor) -> Like:
    """What a tensor is, without its data."""
    return x.shape, x.dtype, x.device


def present(x: Tensor | None, of: Like) -> Tensor:
    """What was kept; zeros in place of what no wanted gradient reads."""
    if x is not None:
        return x
    shape, dtype, device = of
    # Where gradients are to be differentiated again, these start at it.
    again = torch.is_grad_enabled()
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=again)


def cast(grad: Tensor | None, operand: Tensor) -> Tensor | None:
    """A gradient in the dtype of its operand; asked first, as PyTorch is slower."""
    if grad is None or grad.dtype is operand.dtype:
        return grad
    return grad.to(operand.dtype)


def additive(
    call: Call,
    value: Tensor,  # [N_src, H, C]
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor,  # [N_dst, H]
    term: Tensor | None,
    loop_term: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Additive edge attention, differentiable."""
    inputs = (value, alpha_src, alpha_dst, term, loop_term)
    if wants_grad(*inputs):
        return apply_function(_Attention, *inputs, call, out_dtype)
    operands = Operands(
        value, alpha_dst, alpha_src, term, loop_term, call.mask, call.seed
    )
    return forward(call, operands, out_dtype, positive=False).out


def gat_scores(
    num_dst: int,
    x_src: Tensor,
    x_dst: Tensor | None,
    att_src: Tensor,
    att_dst: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """<x, att> of sources and destinations, as PyG computes them."""
    alpha_src = (x_src * att_src).sum(-1)
    if x_dst is None or att_dst is None:
        return alpha_src, alpha_src.new_zeros(num_dst, alpha_src.size(1))
    return alpha_src, (x_dst * att_dst).sum(-1)


def by_reference(call: Call, inputs: tuple[Any, ...]) -> Tensor:
    """The plain formula, which can be differentiated and transformed at will.

    Args:
        call: The call.
        inputs: Values, source and destination scores, edge and loop terms.
    """
    value, alpha_src, alpha_dst, term, loop_term = inputs
    operands = Operands(
        value, alpha_dst, alpha_src, term, loop_term, call.mask, call.seed
    )
    return scatter_attention.by_reference(call.graph, operands, call.options)[0]


def _twice(
    call: Call, inputs: tuple[Any, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by the reference."""
    inputs = aliased(inputs)
    return differentiate(by_reference(call, inputs), inputs, grad, needs)


def aliased(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs whose gradients stop there, though one was computed from another."""
    return tuple(None if x is None else x.view_as(x) for x in inputs)


def differentiate(
    out: Tensor, inputs: tuple[Any, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of the inputs that need one, which can be differentiated again."""
    wanted = [
        x if need and x is not None else None
        for x, need in zip(inputs, needs, strict=False)
    ]
    found = iter(
        torch.autograd.grad(
            out,
            [x for x in wanted if x is not None],
            grad.to(out.dtype),
            create_graph=True,
            allow_unused=True,
        )
    )
    return [None if x is None else next(found) for x in wanted]
