"""Edge attention with scores of two vectors, dot products and GATv2's: the eager road.

The forward keeps (m, l) of each softmax. Weights may be a result, too, and come in the
order of the caller's edges, after dropout, in the accumulator. Gradients that are to be
differentiated again, and transforms of `torch.func`, take the plain formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls import scatter_attention
from pyg_tiga.impls.attention_types import Operands, State, Wanted
from pyg_tiga.ops import attention
from pyg_tiga.ops.attention import Call
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function, wants_grad


class Inputs(NamedTuple):
    """What a call can be differentiated by.

    Args:
        value: Values of the sources, ``[N_src, H, C]``.
        row: Vectors of the destinations, ``[N_dst, H, K]``.
        col: Vectors of the sources, ``[N_src, H, K]``; None where they are the values.
        param: GATv2's ``att``, ``[H, K]``.
        term: Added to the scores of edges, ``[E, H]``.
        loop_term: Added to those of loops, ``[num_loops, H]``.
    """

    value: Tensor
    row: Tensor
    col: Tensor | None
    param: Tensor | None
    term: Tensor | None
    loop_term: Tensor | None

    def operands(self, mask: Tensor | None, seed: Tensor | None) -> Operands:
        """As implementations take them."""
        col = self.value if self.col is None else self.col
        terms = (self.term, self.loop_term)
        return Operands(self.value, self.row, col, *terms, mask, seed, self.param)

    def out_dtype(self) -> torch.dtype:
        """That of the result."""
        return reference.promoted(*self)


class _VectorAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        row: Tensor,
        col: Tensor | None,
        param: Tensor | None,
        term: Tensor | None,
        loop_term: Tensor | None,
        call: Call,
        out_dtype: torch.dtype,
    ) -> Tensor | tuple[Tensor, Tensor]:
        inputs = Inputs(value, row, col, param, term, loop_term)
        state = forward(call, inputs, out_dtype)
        ctx.call, ctx.value_like = call, attention.like(value)
        # The gradient of values that are no vectors of scores reads weights alone.
        if col is None or any(ctx.needs_input_grad[1:6]):
            ctx.save_for_backward(*inputs, *state[:3], state.weights)
        else:
            ctx.save_for_backward(None, *inputs[1:], None, *state[1:3], None)
        return state.out if state.weights is None else (state.out, state.weights)

    @staticmethod
    @batchable
    def backward(
        ctx: Any, grad: Tensor, share: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        call, needs = ctx.call, ctx.needs_input_grad
        value, *inputs, out, m, total, weight = ctx.saved_tensors
        inputs = Inputs(attention.present(value, ctx.value_like), *inputs)
        if torch.is_grad_enabled():
            inputs = Inputs(*attention.aliased(inputs))
            again = by_reference(call, inputs)
            if share is not None:
                again = torch.cat([again.flatten(), weights(call, inputs)[0].flatten()])
                grad = torch.cat([grad.flatten(), share.flatten()])
            return (*attention.differentiate(again, inputs, grad, needs), None, None)
        out = attention.present(out, attention.like(grad))
        state = State(out, m, total, None, None, weight)
        share = None if weight is None else share
        wanted = Wanted(needs[4], needs[5], call.objective != "memory")
        return (*gradients(call, inputs, grad, state, wanted, share), None, None)


def forward(call: Call, inputs: Inputs, out_dtype: torch.dtype) -> State:
    """Run the forward."""
    operands = inputs.operands(call.mask, call.seed)
    return attention.forward(call, operands, out_dtype, positive=False)


def gradients(
    call: Call,
    inputs: Inputs,
    grad: Tensor,
    state: State,
    wanted: Wanted,
    share: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, each in its dtype; None where there is none.

    `share` is the gradient of the weights, where these are a result. A state without
    weights then has a result in which they are used already.
    """
    if share is not None:
        share = share.contiguous()
    operands = inputs.operands(call.mask, call.seed)._replace(share=share)
    plan = attention.attention_plan(
        "edge_attention_backward", call, inputs.value, grad.dtype
    )
    found = plan.run(call.graph, grad, operands, call.options, state, wanted)
    parts = (found.row, found.col, found.param, found.term, found.loop_term)
    return (
        found.value,
        *(attention.cast(x, of) for x, of in zip(parts, inputs[1:], strict=True)),
    )


def vector_attention(call: Call, inputs: Inputs) -> Tensor:
    """Edge attention with scores of two vectors, differentiable."""
    dtype = inputs.out_dtype()
    if wants_grad(*inputs):
        return apply_function(_VectorAttention, *inputs, call, dtype)
    return forward(call, inputs, dtype).out


def with_weights(
    call: Call, inputs: Inputs, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same and the weights of the edges ``[E, H]``, both differentiable."""
    call = call._replace(options=call.options._replace(gives_weights=True))
    if wants_grad(*inputs):
        return apply_function(_VectorAttention, *inputs, call, out_dtype)
    state = forward(call, inputs, out_dtype)
    return state.out, state.weights


def by_reference(call: Call, inputs: Inputs) -> Tensor:
    """The plain formula, which can be differentiated and transformed at will."""
    operands = inputs.operands(call.mask, call.seed)
    return scatter_attention.by_reference(call.graph, operands, call.options)[0]


def weights(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Weights of edges ``[E, H]`` and loops ``[L, H]``, by the plain formula.

    They take part in no sum over features: what they cost is what they return.

    Args:
        call: The call.
        inputs: Its inputs; of the values only GATv2's, its vectors, are read.
    """
    operands = inputs.operands(call.mask, call.seed)
    return scatter_attention.weights(call.graph, operands, call.options)
