"""Launching the backward of the edge-attention template."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_destinations import DestinationsPass, EdgeSumsPass
from pyg_tiga.impls.attention_launch import (
    Form,
    Operand,
    form_of,
    found,
    given,
    is_joint,
    is_vector,
    laid_out,
    operand_of,
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
from pyg_tiga.impls.edge_order import EdgeOrderPass
from pyg_tiga.impls.launch import current_stream, device_guard
from pyg_tiga.impls.replay import column, free
from pyg_tiga.impls.triton_attention import LIMITS, memory_notes
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph

# Place of delta among the numbers that are packed for each row.
_DELTA = 2


class Kind(NamedTuple):
    """What passes a backward makes, besides the form of its operands.

    Args:
        wanted: Which gradients, and how.
        positive: Whether the state has P and p.
        att: Dtypes of vectors: the operands are <value, att> of the same nodes, and
            their gradients are passed on into that of the values (the first for
            sources, the second where sources and destinations are the same nodes).
    """

    wanted: Wanted
    positive: bool = False
    att: tuple[torch.dtype | None, torch.dtype | None] = (None, None)


_Vectors = tuple[Tensor | None, Tensor | None]


class AttentionBackward:
    """Gradients of all operands.

    Made once for a relation, of which it keeps arrays alone; a run allocates and
    launches, and may be recorded where nothing comes of weights or vectors.

    Args:
        graph: The relation.
        schedule: Launch choices.
        form: Form of the operands.
        grad: Form of the result's gradient.
        kind: What is formed.
    """

    def __init__(
        self, graph: Graph, schedule: Schedule, form: Form, grad: Operand, kind: Kind
    ) -> None:
        self._form, self._kind, self._chunk = form, kind, schedule.chunk
        self._sizes = (graph.num_dst, graph.num_src, graph.num_edges)
        self._is_joint = is_joint(graph, form)
        wanted, is_additive = kind.wanted, not is_vector(form.options)
        hands_over = wanted.hands_over and not kind.positive
        if not is_additive:
            # Where the terms want theirs, or weights are there, they are there anyway.
            hands_over = wanted.hands_over or wanted.term or form.has_share
        self._hands_over = hands_over
        has_loops = form.options.num_loops > 0
        self._terms = (
            wanted.term or hands_over,
            wanted.loop_term or (hands_over and has_loops),
        )
        # Where the row gradient is summed later, it cannot flow into that of values.
        late = is_additive and hands_over
        self._att = (kind.att[0], None if late else kind.att[1])
        self._make_passes(graph, schedule, grad, late)

    def _make_passes(
        self, graph: Graph, schedule: Schedule, grad: Operand, late: bool
    ) -> None:
        form, kind, heads = self._form, self._kind, self._form.heads
        options, row = form.options, None if is_vector(form.options) else form.row
        key = ((heads, form.channels), grad, row, options.scale, kind.positive)
        self._prepare = found(graph, ("prepare", *key, None, None), PreparePass)
        key = (schedule, form, grad, self._terms, self._att)
        self._columns = found(graph, ("columns", *key), ColumnsPass)
        self._destinations = self._sums = self._shares = None
        if late:
            key = (schedule, heads, options.num_loops, "columns")
            self._sums = found(graph, ("edge_sums", *key), EdgeSumsPass)
        elif not kind.positive:
            key = (schedule, form, grad)
            if self._hands_over:
                key = (schedule, _handed(form), None)
            self._destinations = found(graph, ("destinations", *key), DestinationsPass)
        if form.has_share:
            key = (schedule, heads, 0, "caller")
            self._shares = found(graph, ("edge_sums", *key), EdgeSumsPass)
        order = ("edge_order", heads, "columns")
        self._to_rows = self._to_caller = None
        if options.by_row:
            self._to_rows = found(graph, (*order, "rows"), EdgeOrderPass)
        elif kind.wanted.term:
            self._to_caller = found(graph, (*order, "caller"), EdgeOrderPass)

    def refresh(self, graph: Graph) -> None:
        """Make all that is read of the relation safe to read on this stream."""
        graph.rows().work_items(self._chunk)
        graph.columns().work_items(self._chunk)
        if self._hands_over:
            graph.places()
        if self._to_rows is not None:
            graph.slots()
        if self._to_caller is not None:
            graph.reverse().ranks()

    def run(
        self,
        stream: Any,
        grad: Tensor,  # [N_dst, H, C]
        operands: Operands,
        state: State,
        att: _Vectors = (None, None),
    ) -> Gradients:
        """Run on the current device.

        Args:
            stream: The current stream.
            grad: The result's gradient.
            operands: Operands, laid out.
            state: What the forward gave.
            att: The vectors.
        """
        if is_vector(self._form.options):
            return self._run_vector(stream, grad, operands, state)
        packed, grad_row = self._packed(stream, grad, operands, state)
        if self._destinations is not None:
            grad_row = packed.new_empty((self._sizes[0], self._form.heads))
            self._destinations(stream, given(operands), (grad, packed), grad_row)
        passed = att if self._sums is None else (att[0], None)
        made = self._of_columns(stream, grad, operands, packed, grad_row, passed)
        if self._sums is not None:
            grad_row = packed.new_empty((self._sizes[0], self._form.heads))
            self._sums(stream, given((made.term, made.loop_term)), grad_row)
            if att[1] is not None:
                _add_outer(made.value, grad_row, att[1])
        return self._wanted(stream, made._replace(row=grad_row))

    def _run_vector(
        self, stream: Any, grad: Tensor, operands: Operands, state: State
    ) -> Gradients:
        """Columns first: they leave the gradients of the scores for the rows."""
        bare = state._replace(weights=None)
        packed, _ = self._packed(stream, grad, operands, bare)
        if operands.share is not None and state.weights is not None:
            shares = packed.new_empty((self._sizes[0], self._form.heads))
            self._shares(stream, (state.weights * operands.share,), shares)
            packed[..., _DELTA] += shares
        made = self._of_columns(stream, grad, operands, packed, None, (None, None))
        if self._to_rows is not None:
            # They are read more than once.
            made = made._replace(term=self._to_rows(stream, made.term))
        handed, read = operands, (grad, packed)
        if self._hands_over:
            handed, read = _with_handed(operands, made, self._form.options), ()
        row = made.row
        if row is None:
            # Not before, as the columns' pieces are gone by now.
            form, num_dst = self._form, self._sizes[0]
            row = _new_like(operands.row, form, form.row, num_dst)
        param = self._destinations(stream, given(handed), read, row)
        return self._wanted(stream, made._replace(row=row, param=param))

    def _wanted(self, stream: Any, made: Gradients) -> Gradients:
        """Without gradients of terms that nobody wants, and where the terms stand."""
        wanted = self._kind.wanted
        term = made.term if wanted.term else None
        if self._to_caller is not None:
            term = self._to_caller(stream, term)
        loop_term = made.loop_term if wanted.loop_term else None
        return made._replace(term=term, loop_term=loop_term)

    def _packed(
        self, stream: Any, grad: Tensor, operands: Operands, state: State
    ) -> tuple[Tensor, Tensor | None]:
        """What passes read of each row and, with P and p, the gradient by row."""
        shape = (self._sizes[0], self._form.heads)
        packed = grad.new_empty((*shape, 4), dtype=torch.float32)
        grad_row = None
        if self._kind.positive:
            grad_row = grad.new_empty(shape, dtype=torch.float32)
        row = None if is_vector(self._form.options) else operands.row
        self._prepare.launch(
            stream, grad, *given(state), *given((packed, row, grad_row))
        )
        free(*given(state))
        return packed, grad_row

    def _of_columns(
        self,
        stream: Any,
        grad: Tensor,
        operands: Operands,
        packed: Tensor,
        grad_row: Tensor | None,
        att: _Vectors,
    ) -> Gradients:
        made = self._room(operands)
        used = att if att[1] is None else (*att, grad_row)
        self._columns(
            stream,
            given(operands),
            (grad, packed),
            given((made.value, made.col)),
            given((made.term, made.loop_term)),
            given(used),
        )
        return made

    def _room(self, operands: Operands) -> Gradients:
        """Room for the gradients of sources and of terms, and what comes with it."""
        form, (num_dst, num_src, num_edges) = self._form, self._sizes
        value, col = operands.value, None
        term = loop_term = row = None
        if self._is_joint:
            shape = (num_dst, 3, form.heads, form.channels)
            joint = value.new_empty(shape)
            row, col, of_value = [column(joint, i) for i in range(3)]
        else:
            of_value = value.new_empty((num_src, form.heads, form.channels))
            if not form.shared:
                col = _new_like(operands.col, form, form.col, num_src)
        if self._terms[0]:
            term = value.new_empty((num_edges, form.heads), dtype=torch.float32)
        if self._terms[1]:
            shape = (form.options.num_loops, form.heads)
            loop_term = value.new_empty(shape, dtype=torch.float32)
        return Gradients(of_value, row, col, term, loop_term)


def _handed(form: Form) -> Form:
    """Operands with gradients of scores in place of the terms."""
    return form._replace(
        term=torch.float32,
        loop_term=torch.float32 if form.options.num_loops > 0 else None,
        is_masked=False,
        options=form.options._replace(dropout=0.0),
        has_share=False,
    )


def _with_handed(operands: Operands, made: Gradients, options: Options) -> Operands:
    return operands._replace(
        term=made.term,
        loop_term=made.loop_term if options.num_loops > 0 else None,
        mask=None,
        seed=None,
        share=None,
    )


def _new_like(x: Tensor, form: Form, operand: Operand, num_nodes: int) -> Tensor:
    """Room for the gradient of a node operand."""
    if is_vector(form.options):
        shape = (num_nodes, form.heads, form.width)
        return x.new_empty(shape, dtype=operand.dtype)
    return x.new_empty((num_nodes, form.heads), dtype=torch.float32)


def _backward(
    problem: Problem,
    schedule: Schedule,
    graph: Graph,
    grad: Tensor,  # [N_dst, H, C]
    operands: Operands,
    options: Options,
    state: State,
    wanted: Wanted,
    att: _Vectors = (None, None),
) -> Gradients:
    """Gradients of all operands, by vectors of :class:`Kind` if there are any."""
    operands = laid_out(operands)
    form, wants = form_of(operands, options), (wanted.term, wanted.loop_term)
    if 0 in (grad.numel(), operands.value.numel()):
        return _zeros(graph, operands, form, wants)
    grad = grad if grad.stride(2) == 1 or grad.size(2) == 1 else grad.contiguous()
    att = tuple([None if v is None else v.contiguous() for v in att])
    kind = Kind(
        wanted,
        state.positive is not None,
        tuple([None if v is None else v.dtype for v in att]),
    )
    cotangent, index = operand_of(grad), grad.get_device()
    with device_guard(index):
        key = ("backward", schedule, form, cotangent, kind)
        run = found(graph, key, AttentionBackward)
        run.refresh(graph)
        return run.run(current_stream(index), grad, operands, state, att)


def _zeros(
    graph: Graph, operands: Operands, form: Form, terms: tuple[bool, bool]
) -> Gradients:
    """Gradients where nothing depends on any operand."""
    nodes = [_zeros_like(x) for x in (operands.value, operands.row, operands.col)]
    value, size = operands.value, (graph.num_edges, form.heads)
    shapes = (size, (form.options.num_loops, form.heads))
    rest = [
        value.new_zeros(shape, dtype=torch.float32) if wanted else None
        for shape, wanted in zip(shapes, terms, strict=True)
    ]
    param = operands.param
    rest.append(None if param is None else torch.zeros_like(param).float())
    if form.shared:
        nodes[2] = None
    return Gradients(*nodes, *rest)


def _zeros_like(x: Tensor) -> Tensor:
    """The gradient of a node operand."""
    return x.new_zeros(x.shape, dtype=x.dtype if x.dim() == 3 else torch.float32)


def _add_outer(value: Tensor, scale: Tensor, att: Tensor) -> None:
    """Add scale[n, h] att[h, c] to values [N, H, C] in place."""
    value.addcmul_(scale.unsqueeze(2).to(value.dtype), att.to(value.dtype))


ATTENTION_BACKWARD = Implementation(
    "triton",
    "triton",
    "edge_attention_backward",
    LIMITS,
    _backward,
    missing,
    scheduled=True,
    notes=memory_notes,
)
