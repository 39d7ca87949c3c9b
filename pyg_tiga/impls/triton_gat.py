"""Launching GAT's layer: node scores, attention and bias of projected nodes.

Sources and destinations are the same nodes, there are no terms and no mask. A run is
made once for a relation and allocates and launches at every call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import Form, Operand, carve, piece
from pyg_tiga.impls.attention_passes import (
    ColumnsPass,
    PreparePass,
    Sums,
)
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.impls.launch import current_stream
from pyg_tiga.impls.triton_attention import RowsPass
from pyg_tiga.impls.triton_nodes import (
    PartialsPass,
    ScoresBackwardPass,
    ScoresPass,
    sum_programs,
)
from pyg_tiga.problem import Schedule
from pyg_tiga.relation.graph import Graph


class Layer(NamedTuple):
    """What the runs of a layer depend on besides its relation.

    Args:
        heads: H.
        channels: C.
        dtype: Of features and parameters.
        options: Of the attention.
        positive: Keep P and p for the backward.
        adds_bias: Whether the bias is added in the kernels. The gradients of scores are
            formed from the result without it, which half precision would lose.
    """

    heads: int
    channels: int
    dtype: torch.dtype
    options: Options
    positive: bool
    adds_bias: bool

    def form(self) -> Form:
        """The form of the attention's operands."""
        heads, channels = self.heads, self.channels
        value = Operand(self.dtype, heads * channels, channels)
        score = Operand(torch.float32, heads, 1)
        rest = (None, None, False, self.options)
        return Form(heads, channels, 1, value, score, score, *rest)


class Parameters(NamedTuple):
    """Parameters and dropout's seed, as the kernels take them."""

    att_src: Tensor  # [1, H, C]
    att_dst: Tensor  # [1, H, C]
    bias: tuple[Tensor, ...]  # [H * C], if it is added in the kernels
    seed: tuple[Tensor, ...]  # [1], if anything is dropped


class GatForward:
    """From projected nodes to the layer's output, as far as the kernels form it.

    Args:
        graph: The relation.
        schedule: Launch choices.
        layer: The layer.
    """

    def __init__(self, graph: Graph, schedule: Schedule, layer: Layer) -> None:
        heads, channels, dtype = layer.heads, layer.channels, layer.dtype
        shape = (graph.num_dst, heads, channels)
        self._shape = (graph.num_dst, heads * channels)
        self._scalars = (5 if layer.positive else 4, piece(graph.num_dst * heads))
        self._positive = layer.positive
        self._scores = ScoresPass(graph, shape, (dtype, dtype, dtype), True).launch
        bias = dtype if layer.adds_bias else None
        form = layer.form()
        self._rows = RowsPass(graph, schedule, form, dtype, layer.positive, bias)

    def __call__(
        self, values: Tensor, parameters: Parameters
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Launch; gives the output, scalars per node and head, and P.

        The scalars are, one after the other, scores of sources and of destinations, m
        and l, and p.
        """
        stream = current_stream(values.get_device())
        out = values.new_empty(self._shape)
        scalars = values.new_empty(self._scalars, dtype=torch.float32)
        alpha_src, alpha_dst, m, total, *rest = scalars.unbind(0)
        positive = None
        state: tuple[Tensor, ...] = (out, m, total)
        if self._positive:
            positive = values.new_empty(self._shape)
            state = (out, m, total, positive, rest[0])
        att_src, att_dst, bias, seed = parameters
        self._scores(stream, values, att_src, att_dst, alpha_src, alpha_dst)
        self._rows(stream, (values, alpha_dst, alpha_src, *seed), state, bias)
        return out, scalars, positive


class Needs(NamedTuple):
    """Which gradients a backward forms: of values, of attention vectors, of a bias."""

    values: bool
    vectors: bool
    bias: bool


class GatBackward:
    """Gradients of projected nodes and parameters.

    Args:
        graph: The relation.
        schedule: Launch choices.
        layer: The layer.
        stride: Stride of the rows of the output's gradient.
        needs: Which gradients.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        layer: Layer,
        stride: int,
        needs: Needs,
    ) -> None:
        heads, channels, dtype = layer.heads, layer.channels, layer.dtype
        shape = (graph.num_dst, heads, channels)
        self._needs = needs
        grad = Operand(dtype, stride, channels)
        self._walks = needs.values or needs.vectors
        kinds = (2 if needs.vectors else 0) + needs.bias
        programs = sum_programs(shape)
        self._sums = (programs, kinds, 1, heads, channels)
        size = heads * channels
        bias = dtype if layer.adds_bias else None
        sums = None
        if needs.bias:
            sums = Sums(programs, kinds * size, (kinds - 1) * size)
        form = layer.form()
        made = (graph, (heads, channels), grad, form.row, layer.options.scale, True)
        self._prepare = PreparePass(*made, bias, sums).launch
        scalar = graph.num_dst * heads
        self._sizes = [piece(4 * scalar), piece(scalar)]
        if kinds:
            self._total = PartialsPass(graph, programs, kinds * size).launch
        if self._walks:
            self._sizes.append(piece(scalar))
            rest = ((False, False), (dtype, dtype))
            self._columns = ColumnsPass(graph, schedule, form, grad, *rest)
        if needs.vectors:
            rest = (True, programs, kinds * size)
            self._scores = ScoresBackwardPass(graph, shape, dtype, *rest).launch

    def __call__(
        self,
        grad: Tensor,  # [N, H * C]
        values: Tensor,  # [N, H * C]
        out: Tensor,  # [N, H * C]
        scalars: Tensor,
        positive: Tensor,  # [N, H * C]
        parameters: Parameters,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Launch; gives the gradients of values, and of those parameters that need one.

        The latter are in one float32 tensor ``[kinds, 1, H, C]``: of both vectors, if
        these need any, then of the bias.
        """
        stream = current_stream(grad.get_device())
        sums = None
        if self._sums[1]:
            sums = grad.new_empty(self._sums, dtype=torch.float32)
        packed, grad_row, *rest = carve(grad, self._sizes)
        alpha_src, alpha_dst, m, total, positive_sum = scalars.unbind(0)
        att_src, att_dst, bias, seed = parameters
        state = (out, m, total, positive, positive_sum, packed, alpha_dst, grad_row)
        partial = (sums,) if self._needs.bias else ()
        self._prepare(stream, grad, *state, *bias, *partial)
        grad_values = None
        if self._walks:
            grad_values = torch.empty_like(values)
            operands = (values, alpha_dst, alpha_src, *seed)
            results = (grad_values, *rest)
            vectors = (att_src, att_dst, grad_row)
            self._columns(stream, operands, grad, packed, results, vectors)
        if self._needs.vectors:
            self._scores(stream, values, *rest, grad_row, sums)
        if sums is None:
            return grad_values, None
        total = sums.new_empty(self._sums[1:])
        self._total(stream, sums, total)
        return grad_values, total
