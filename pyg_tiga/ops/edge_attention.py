"""Edge attention with any score: the eager road.

Weights may be a result, too, and come in the order of the caller's edges, after
dropout, in the accumulator. Gradients that are to be differentiated again, and
transforms of `torch.func`, take the plain formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls.attention_types import State, Wanted
from pyg_tiga.ops import attention
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.attention_run import Run, find_run
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.ops.keeping import Watched


class _Attention(torch.autograd.Function):
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
        run: Run | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        inputs, needs = Inputs(value, row, col, param, term, loop_term), _needs(ctx)
        # The gradient of values that are in no score reads weights alone.
        reads_value = col is None or any(needs[1:])
        if run is not None:
            state = run.state(call, inputs)
        else:
            positive = reads_value and attention.keeps_positive(call, any(needs[4:]))
            state = attention.forward(call, inputs, out_dtype, positive)
        ctx.call, ctx.value_like = call.bare(), attention.like(value)
        ctx.watched = Watched(state.out)
        kept = (*inputs, state.out.data, *state[1:])
        if not reads_value:
            kept = (None, *inputs[1:], None, *state[1:5], None)
        ctx.save_for_backward(*kept, *call.drawn())
        return state.out if state.weights is None else (state.out, state.weights)

    @staticmethod
    @batchable
    def backward(
        ctx: Any, grad: Tensor, share: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        # Read once: a checkpoint forms them again for it.
        value, *inputs, mask, seed = ctx.saved_tensors
        *inputs, out, m, total, positive, plus, weight = inputs
        call = ctx.call._replace(mask=mask, seed=seed)
        inputs = Inputs(attention.present(value, ctx.value_like), *inputs)
        share = None if weight is None else share
        if torch.is_grad_enabled():
            found = _twice(call, inputs, grad, _needs(ctx), share)
        else:
            if out is not None and ctx.watched.is_edited():
                again = attention.forward(call, inputs, out.dtype, plus is not None)
                out = again.out
            out = attention.present(out, attention.like(grad))
            state = State(out, m, total, positive, plus, weight)
            found = _gradients(call, inputs, grad, state, _needs(ctx), share)
        return (*found, None, None, None)


def _needs(ctx: Any) -> tuple[bool, ...]:
    """Which of the inputs want gradients."""
    return ctx.needs_input_grad[: len(Inputs._fields)]


def _gradients(
    call: Call,
    inputs: Inputs,
    grad: Tensor,
    state: State,
    needs: tuple[bool, ...],
    share: Tensor | None,
) -> tuple[Tensor | None, ...]:
    wanted = Wanted(needs[4], needs[5], call.objective != "memory")
    return attention.gradients(call, inputs, grad, state, wanted, share)


def _twice(
    call: Call,
    inputs: Inputs,
    grad: Tensor,
    needs: tuple[bool, ...],
    share: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by the plain formula."""
    inputs = Inputs(*attention.aliased(inputs))
    again = attention.by_reference(call, inputs)
    if share is not None:
        weights, _ = attention.weights(call, inputs)
        again = torch.cat([again.flatten(), weights.flatten()])
        grad = torch.cat([grad.flatten(), share.flatten()])
    return attention.differentiate(again, inputs, grad, needs)


@batchable
def _of_node(ctx: Any, grad: Tensor) -> Any:
    """Gradients for a node; of what it keeps, see :class:`Run`."""
    call, needs = ctx.owner.call, _needs(ctx)
    # Read once: a checkpoint forms them again for it.
    *inputs, _, _, out, m, total, positive, plus = ctx.saved_tensors
    inputs = Inputs(*inputs)
    if torch.is_grad_enabled():
        return _twice(call, inputs, grad, needs)
    state = State(out, m, total, positive, plus)
    if ctx.edited:
        state = attention.forward(call, inputs, out.dtype, positive is not None)
    return _gradients(call, inputs, grad, state, needs, None)


def attend(call: Call, inputs: Inputs, out_dtype: torch.dtype) -> Tensor:
    """Edge attention, differentiable."""
    if inputs.col is inputs.value:
        inputs = inputs._replace(col=None)
    if not wants_grad(*inputs):
        return attention.forward(call, inputs, out_dtype).out
    run = find_run(call, inputs, out_dtype)
    if run is not None:
        out = run.as_node(call, inputs, _of_node)
        if out is not None:
            return out
    return apply_function(_Attention, *inputs, call, out_dtype, run)


def with_weights(
    call: Call, inputs: Inputs, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same and the weights of the edges ``[E, H]``, both differentiable."""
    call = call._replace(options=call.options._replace(gives_weights=True))
    if wants_grad(*inputs):
        return apply_function(_Attention, *inputs, call, out_dtype, None)
    state = attention.forward(call, inputs, out_dtype)
    return state.out, state.weights
