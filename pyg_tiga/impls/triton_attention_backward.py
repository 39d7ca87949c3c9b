"""Launching the backward of the edge-attention template."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.attention_destinations import DestinationsPass, EdgeSumsPass
from pyg_tiga.impls.attention_launch import (
    Form,
    Operand,
    form_of,
    found,
    given,
    is_vector,
    laid_out,
)
from pyg_tiga.impls.attention_passes import ColumnsPass, PreparePass
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.impls.base import Implementation
from pyg_tiga.impls.edge_order import take_edges
from pyg_tiga.impls.launch import current_stream, device_guard
from pyg_tiga.impls.triton_attention import LIMITS
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph

# Place of delta among the numbers that are packed for each row.
_DELTA = 2


def _backward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    grad: Tensor,  # [N_dst, H, C]
    operands: Operands,
    options: Options,
    state: State,
    wanted: Wanted,
    att: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:
    """Gradients of all operands.

    With `att`, the operands are <value, att> of the same nodes, and their gradients are
    passed on into that of the values (the first for sources, the second where sources
    and destinations are the same nodes).
    """
    operands = laid_out(operands)
    grad = grad if grad.stride(2) == 1 or grad.size(2) == 1 else grad.contiguous()
    index = grad.get_device()
    with device_guard(index):
        call = _Call(graph, schedule, grad, operands, options, current_stream(index))
        return call.run(state, wanted, att)


class _Call:
    """One backward: what its passes have in common."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        grad: Tensor,
        operands: Operands,
        options: Options,
        stream: int,
    ) -> None:
        self._graph, self._schedule, self._grad = graph, schedule, grad
        self._operands, self._given = operands, given(operands)
        self._form: Form = form_of(operands, options)
        self._cotangent = Operand(grad.dtype, grad.stride(0), grad.stride(1))
        self._stream = stream
        # Safe to read on this stream, whatever the passes found there already.
        graph.rows().work_items(schedule.chunk)
        graph.columns().work_items(schedule.chunk)

    def run(
        self,
        state: State,
        wanted: Wanted,
        att: tuple[Tensor | None, Tensor | None],
    ) -> Gradients:
        if self._grad.numel() == 0 or self._operands.value.numel() == 0:
            return self._zeros(wanted)
        if is_vector(self._form.options):
            return self._run_vector(state, wanted)
        packed, grad_row = self._prepare(state)
        hands_over = wanted.hands_over and grad_row is None
        if grad_row is None and not hands_over:
            grad_row, _ = self._destinations(self._given, (self._grad, packed))
        # Where the row gradient is summed later, it cannot flow into that of values.
        passed = att if grad_row is not None else (att[0], None)
        has_loops = self._form.options.num_loops > 0
        terms = (
            wanted.term or hands_over,
            wanted.loop_term or (hands_over and has_loops),
        )
        found = self._columns(packed, grad_row, terms, passed)
        if hands_over:
            grad_row = self._edge_sums(found)
            if att[1] is not None:
                _add_outer(found.value, grad_row, att[1])
        return found._replace(
            row=grad_row,
            term=_to_caller(self._graph, found.term) if wanted.term else None,
            loop_term=found.loop_term if wanted.loop_term else None,
        )

    def _run_vector(self, state: State, wanted: Wanted) -> Gradients:
        """Columns first: they leave the gradients of the scores for the rows."""
        packed, _ = self._prepare(state._replace(weights=None))
        share = self._operands.share
        if share is not None and state.weights is not None:
            packed[..., _DELTA] += self._shares(state.weights, share)
        # Where the terms want theirs, or weights are there, they are there anyway.
        hands_over = wanted.hands_over or wanted.term or share is not None
        has_loops = self._form.options.num_loops > 0
        terms = (hands_over, wanted.loop_term or (hands_over and has_loops))
        made = self._columns(packed, None, terms, (None, None))
        if self._form.options.by_row:
            # They are read more than once.
            made = made._replace(term=take_edges(made.term, self._graph.places()))
        if hands_over:
            operands = self._operands._replace(
                term=made.term,
                loop_term=made.loop_term if has_loops else None,
                mask=None,
                seed=None,
                share=None,
            )
            row, param = self._destinations(given(operands), ())
        else:
            row, param = self._destinations(self._given, (self._grad, packed))
        return made._replace(
            row=row,
            term=self._terms(made.term) if wanted.term else None,
            loop_term=made.loop_term if wanted.loop_term else None,
            param=param,
        )

    def _terms(self, term: Tensor) -> Tensor:
        """Gradients of terms where the terms stand."""
        return term if self._form.options.by_row else _to_caller(self._graph, term)

    def _zeros(self, wanted: Wanted) -> Gradients:
        """Gradients where nothing depends on any operand."""
        made = self._new_gradients((wanted.term, wanted.loop_term))
        param = self._operands.param
        made = made._replace(
            row=self._new_like(self._operands.row),
            param=None if param is None else param.new_empty(param.shape).float(),
        )
        return Gradients(*[None if x is None else x.zero_() for x in made])

    def _new_like(self, operand: Tensor) -> Tensor:
        """Room for the gradient of a node operand."""
        dtype = operand.dtype if operand.dim() == 3 else torch.float32
        return operand.new_empty(operand.shape, dtype=dtype)

    def _new_gradients(self, terms: tuple[bool, bool]) -> Gradients:
        """Room for the gradients of sources and of terms."""
        form, operands = self._form, self._operands
        value, size = operands.value, (self._graph.num_edges, form.heads)
        return Gradients(
            value.new_empty(value.shape),
            None,
            None if form.shared else self._new_like(operands.col),
            value.new_empty(size, dtype=torch.float32) if terms[0] else None,
            # Loops of columns that have no channels are not written.
            value.new_zeros(form.options.num_loops, form.heads, dtype=torch.float32)
            if terms[1]
            else None,
        )

    def _prepare(self, state: State) -> tuple[Tensor, Tensor | None]:
        grad, form, positive = self._grad, self._form, state.positive is not None
        shape = (grad.size(0), form.heads)
        packed = grad.new_empty(*shape, 4, dtype=torch.float32)
        grad_row = grad.new_empty(shape, dtype=torch.float32) if positive else None
        if packed.numel():
            dims = (form.heads, form.channels)
            row = None if is_vector(form.options) else form.row
            slope = form.options.scale
            key = (dims, self._cotangent, row, slope, positive, None, None)
            run = found(self._graph, ("prepare", *key), PreparePass)
            rest = given((packed, row and self._operands.row, grad_row))
            run.launch(self._stream, grad, *given(state), *rest)
        return packed, grad_row

    def _columns(
        self,
        packed: Tensor,
        grad_row: Tensor | None,
        terms: tuple[bool, bool],
        att: tuple[Tensor | None, Tensor | None],
    ) -> Gradients:
        graph, form = self._graph, self._form
        made = self._new_gradients(terms)
        att = tuple(None if v is None else v.contiguous() for v in att)
        vectors = tuple(None if v is None else v.dtype for v in att)
        key = (self._schedule, form, self._cotangent, terms, vectors)
        run = found(graph, ("columns", *key), ColumnsPass)
        if form.options.by_row:
            graph.slots()  # Safe to read on this stream.
        used = att if att[1] is None else (*att, grad_row)
        run(
            self._stream,
            self._given,
            (self._grad, packed),
            given((made.value, made.col)),
            given((made.term, made.loop_term)),
            given(used),
        )
        return made

    def _shares(self, weights: Tensor, share: Tensor) -> Tensor:
        """What the weights' own gradients add to delta, ``[N_dst, H]``."""
        graph, shape = self._graph, (self._graph.num_dst, self._form.heads)
        out = weights.new_empty(shape)
        if out.numel():
            key = (self._schedule, shape[1], 0, "caller")
            run = found(graph, ("edge_sums", *key), EdgeSumsPass)
            run(self._stream, (weights * share,), out)
        return out

    def _edge_sums(self, made: Gradients) -> Tensor:
        num_rows, heads = self._graph.num_dst, self._form.heads
        out = made.term.new_empty(num_rows, heads)
        if out.numel():
            loops = self._form.options.num_loops
            self._graph.places()  # Safe to read on this stream.
            key = (self._schedule, heads, loops, "columns")
            run = found(self._graph, ("edge_sums", *key), EdgeSumsPass)
            terms = (made.term, made.loop_term) if loops > 0 else (made.term,)
            run(self._stream, terms, out)
        return out

    def _destinations(
        self, operands: tuple[Tensor, ...], read: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the destinations' operand and of the score's parameter.

        Reads the result's gradient and what was packed or, without these, gradients of
        scores in place of the terms.
        """
        form, out = self._form, self._new_like(self._operands.row)
        if not read:
            if not form.options.by_row:
                self._graph.places()  # Safe to read on this stream.
            loop_term = torch.float32 if form.options.num_loops > 0 else None
            options = form.options._replace(dropout=0.0)
            form = form._replace(
                term=torch.float32,
                loop_term=loop_term,
                is_masked=False,
                options=options,
                has_share=False,
            )
        key = (self._schedule, form, self._cotangent if read else None)
        run = found(self._graph, ("destinations", *key), DestinationsPass)
        return out, run(self._stream, operands, read, out)


def _add_outer(value: Tensor, scale: Tensor, att: Tensor) -> None:
    """Add scale[n, h] att[h, c] to values [N, H, C] in place."""
    value.addcmul_(scale.unsqueeze(2).to(value.dtype), att.to(value.dtype))


def _to_caller(graph: Graph, term: Tensor) -> Tensor:
    """Edge values from the order of the columns into the caller's."""
    return take_edges(term, graph.reverse().ranks())


ATTENTION_BACKWARD = Implementation(
    "triton",
    "triton",
    "edge_attention_backward",
    LIMITS,
    _backward,
    missing,
    scheduled=True,
)
