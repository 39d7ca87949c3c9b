"""One kind of call of edge attention on a relation, run and differentiated as a node.

Found again at every call by all that launches depend on, so that the host has little
left to do; a node of compiled code has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    form_of,
    found,
    is_vector,
    laid_out,
    operand_of,
)
from pyg_tiga.impls.attention_types import Gradients, Operands, State, Wanted
from pyg_tiga.impls.launch import device_guard, is_current
from pyg_tiga.impls.replay import Recorded, Replay
from pyg_tiga.impls.triton_attention import AttentionForward
from pyg_tiga.impls.triton_attention_backward import AttentionBackward, Kind
from pyg_tiga.ops import attention
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.bodies import remember_plan
from pyg_tiga.ops.keeping import Reads
from pyg_tiga.ops.nodes import Absent, make_formula, run_as_node
from pyg_tiga.planner import Plan, pinned

# Gradients read all inputs, the mask and the seed, and all that the forward gives.
_NUM_INPUTS = len(Inputs._fields)
_NUM_GIVEN = _NUM_INPUTS + 2
_READS: Reads = (tuple(range(_NUM_GIVEN + 5)),) * _NUM_INPUTS


class _Owner(NamedTuple):
    call: Call
    run: Run


class Run:
    """A forward and its backwards.

    A node keeps the inputs, mask and seed, and then result, m, total, P and p.

    Args:
        call: The call.
        inputs: Its inputs, laid out.
        plans: Of forward and backward.
        out_dtype: Dtype of the result.
        positive: Keep P and p.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        plans: tuple[Plan, Plan],
        out_dtype: torch.dtype,
        positive: bool,
    ) -> None:
        self.plan, backward = plans
        self._chunk, self._schedule = self.plan.schedule.chunk, backward.schedule
        operands = laid_out(inputs.operands(call.mask, call.seed))
        self._form = form_of(operands, call.options)
        self._operands = _Operands(inputs, is_vector(call.options))
        made = (call.graph, self.plan.schedule, self._form, out_dtype, positive)
        self._forward = AttentionForward(*made)
        self.positive, self._replay = positive, Replay(self._run)
        self._backwards: dict[Any, _Backward] = {}
        self._formula: Any = None

    def state(self, call: Call, inputs: Inputs) -> State:
        """Run the forward."""
        remember_plan(self.plan)
        index = inputs.value.get_device()
        if not is_current(index):
            with device_guard(index):
                return self.state(call, inputs)
        self._refresh(call)
        return State(*self._replay(*_given(call, inputs))[1:])

    def as_node(self, call: Call, inputs: Inputs, gradients: Callable[..., Any]) -> Any:
        """The result as a node of compiled code; None where that cannot be.

        `gradients` gives those of a call whose owner has a `call`, from Python.
        """
        if self._formula is None:
            made = (_READS, gradients, _recorded, "EdgeAttentionBackward")
            self._formula = make_formula(self._replay, *made)
            if self._formula is None:
                return None
        remember_plan(self.plan)
        self._refresh(call)
        owner = _Owner(call, self)
        return run_as_node(self._formula, owner, *_given(call, inputs))

    def _refresh(self, call: Call) -> None:
        call.graph.rows().work_items(self._chunk)  # Safe to read on this stream.

    def _run(self, stream: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        state = self._forward.run(stream, self._operands.read(given))
        return state.out, *state[:5]

    def backward(
        self, graph: Any, grad: Tensor, needs: tuple[bool, ...], objective: str
    ) -> _Backward:
        """The backward for a gradient of this form."""
        cotangent = operand_of(grad)
        key = (cotangent, needs, objective)
        known = self._backwards.get(key)
        if known is None:
            wanted = Wanted(needs[4], needs[5], objective != "memory")
            made = (self._schedule, self._form, cotangent, Kind(wanted, self.positive))
            # The very one that forms gradients from Python.
            backward = found(graph, ("backward", *made), AttentionBackward)
            known = self._backwards[key] = _Backward(backward, self._operands, needs)
        return known


class _Backward:
    """Gradients in the dtypes of their inputs, and steps of them.

    Args:
        backward: Forms them.
        operands: What it reads.
        needs: Which are wanted.
    """

    def __init__(
        self, backward: AttentionBackward, operands: _Operands, needs: tuple[bool, ...]
    ) -> None:
        self._backward, self._operands, self._needs = backward, operands, needs
        self.whole = Recorded(self._run)

    def _run(
        self, stream: Any, grad: Tensor, *kept: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given, state = kept[:_NUM_GIVEN], State(*kept[_NUM_GIVEN:])
        made = self._backward.run(stream, grad, self._operands.read(given), state)
        return self._operands.gradients(made, self._needs)


class _Operands:
    """From what a run is called with to operands, and back to gradients.

    Args:
        inputs: Inputs as they will be.
        is_vector: Whether the score is one of vectors.
    """

    def __init__(self, inputs: Inputs, is_vector: bool) -> None:
        self._dtypes = [None if x is None else x.dtype for x in inputs]
        # Numbers are read, and their gradients formed, in float32.
        self._are_numbers = (False, *[not is_vector] * 2, True, True, True)

    def read(self, given: Sequence[Tensor | None]) -> Operands:
        """Operands, laid out."""
        value, row, col, param, term, loop_term, mask, seed = given
        if self._are_numbers[1]:
            row, col = _as_float(row, self._dtypes[1]), _as_float(col, self._dtypes[2])
        col = value if col is None else col
        return Operands(value, row, col, term, loop_term, mask, seed, param)

    def gradients(
        self, made: Gradients, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Those of the inputs that want one, in their dtypes."""
        parts = (made.value, made.row, made.col, made.param, made.term, made.loop_term)
        found: list[Tensor | None] = []
        every = zip(parts, needs, self._are_numbers, self._dtypes, strict=True)
        for part, needed, is_number, dtype in every:
            if part is None or not needed:
                found.append(None)
            else:
                is_cast = is_number and dtype is not torch.float32
                found.append(part.to(dtype) if is_cast else part)
        return tuple(found)


def _as_float(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is torch.float32 else x.to(torch.float32)


def _recorded(ctx: Any, grad: Tensor, absent: Absent) -> Recorded:
    """The work of a backward that has run."""
    (call, run), needs = ctx.owner, ctx.needs_input_grad
    return run.backward(call.graph, grad, tuple(needs), call.objective).whole


def _given(call: Call, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """What a run is called with."""
    mask = call.mask
    # Kernels read bytes.
    return (*inputs, None if mask is None else mask.view(torch.uint8), call.seed)


def find_run(call: Call, inputs: Inputs, out_dtype: torch.dtype) -> Run | None:
    """The run of such a call; None where its steps have to run one by one.

    That is also where only values have a gradient, which reads weights alone.
    """
    mask = call.mask
    kinds = [
        None if x is None else (x.dtype, x.shape, x.stride(), x.requires_grad)
        for x in inputs
    ]
    rest = (None if mask is None else mask.stride(), call.objective, out_dtype)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = ("attention", *kinds, call.options, *rest, deterministic, pinned())
    known = call.graph.scratch
    run = known.get(key)
    if run is None and key not in known:
        run = known[key] = _make_run(call, inputs, out_dtype)
    return run


def _make_run(call: Call, inputs: Inputs, out_dtype: torch.dtype) -> Run | None:
    needs = [x is not None and x.requires_grad for x in inputs]
    is_read = inputs.col is None or any(needs[1:])
    if not is_read or not inputs.value.numel() or not _lie_well(call, inputs):
        return None
    plans = [
        attention.attention_plan(op, call, inputs.value, out_dtype)
        for op in ("edge_attention", "edge_attention_backward")
    ]
    if call.graph.num_dst == 0 or any(
        plan.implementation.family != "triton" for plan in plans
    ):
        return None
    positive = not is_vector(call.options)
    positive = positive and attention.keeps_positive(call, any(needs[4:]))
    with device_guard(inputs.value.get_device()):
        return Run(call, inputs, tuple(plans), out_dtype, positive)


def _lie_well(call: Call, inputs: Inputs) -> bool:
    """Whether kernels read all of it where it lies."""
    nodes, rest = inputs[:3], (*inputs[3:], call.mask)
    return all(
        x is None or x.dim() < 3 or x.stride(2) == 1 or x.size(2) == 1 for x in nodes
    ) and all(x is None or x.is_contiguous() for x in rest)
