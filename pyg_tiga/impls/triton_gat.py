"""Launching GAT's layer: node scores, attention and bias of projected nodes.

Sources and destinations are the same nodes, there are no terms and no mask. A run is
made once for a relation and allocates and launches at every call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import Form, Operand
from pyg_tiga.impls.attention_passes import (
    ColumnsPass,
    PreparePass,
    Sums,
)
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.impls.launch import Room, current_stream, room_of
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

    def kept(self, num_nodes: int) -> Room:
        """What a forward keeps besides its output, if this is float32.

        That is scores of sources and destinations, m and l; for a backward also p and,
        where the layer itself is in float32, P.
        """
        scalar = num_nodes * self.heads
        sizes: dict[str | tuple[str, ...], int] = {
            ("first_ptr", "col_ptr"): scalar,
            ("second_ptr", "row_ptr"): scalar,
            "m_ptr": scalar,
            "l_ptr": scalar,
        }
        if self.positive:
            sizes["positive_sum_ptr"] = scalar
            if self.dtype is torch.float32:
                sizes["positive_ptr"] = scalar * self.channels
        return room_of(sizes)


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
        kept = layer.kept(graph.num_dst)
        self._kept = kept.size
        self._is_apart = layer.positive and "positive_ptr" not in kept.places
        dtypes = (dtype, dtype, dtype)
        self._scores = ScoresPass(graph, shape, dtypes, True, (kept,)).launch
        made = (layer.form(), dtype, layer.positive, dtype if layer.adds_bias else None)
        self._rows = RowsPass(graph, schedule, *made, (kept,))

    def __call__(
        self, values: Tensor, parameters: Parameters
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Launch; gives the output, what is kept besides, and P if it stands apart."""
        stream = current_stream(values.get_device())
        out = torch.empty_like(values)
        kept = values.new_empty(self._kept, dtype=torch.float32)
        positive = torch.empty_like(values) if self._is_apart else None
        state = (out,) if positive is None else (out, positive)
        att_src, att_dst, bias, seed = parameters
        self._scores(stream, values, att_src, att_dst, kept)
        self._rows(stream, (values, *seed), state, bias, kept)
        return out, kept, positive


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
        self._walks = needs.values or needs.vectors
        kinds = (2 if needs.vectors else 0) + needs.bias
        self._shape = (kinds, 1, heads, channels)
        size, programs = heads * channels, sum_programs(shape)
        made = _made(graph.num_dst * heads, programs * kinds * size)
        self._made = made.size
        rooms = (layer.kept(graph.num_dst), made)
        grad, form = Operand(dtype, stride, channels), layer.form()
        bias = dtype if layer.adds_bias else None
        sums = None
        if needs.bias:
            sums = Sums(programs, kinds * size, (kinds - 1) * size)
        rest = (form.row, layer.options.scale, True, bias, sums, rooms)
        self._prepare = PreparePass(graph, (heads, channels), grad, *rest).launch
        if self._walks:
            rest = ((False, False), (dtype, dtype), rooms)
            self._columns = ColumnsPass(graph, schedule, form, grad, *rest)
        if needs.vectors:
            rest = (True, programs, kinds * size, (made,))
            self._scores = ScoresBackwardPass(graph, shape, dtype, *rest).launch
        if kinds:
            total = PartialsPass(graph, programs, kinds * size, (made,))
            self._total = total.launch

    def __call__(
        self,
        grad: Tensor,  # [N, H * C]
        values: Tensor,  # [N, H * C]
        out: Tensor,  # [N, H * C]
        kept: Tensor,
        positive: Tensor | None,  # [N, H * C]
        parameters: Parameters,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Launch; gives the gradients of values, and of those parameters that need one.

        The latter are in one float32 tensor ``[kinds, 1, H, C]``: of both vectors, if
        these need any, then of the bias.
        """
        stream = current_stream(grad.get_device())
        made = grad.new_empty(self._made, dtype=torch.float32)
        rooms = (kept, made)
        att_src, att_dst, bias, seed = parameters
        state = (out,) if positive is None else (out, positive)
        self._prepare(stream, grad, *state, *bias, *rooms)
        grad_values = total = None
        if self._walks:
            grad_values = torch.empty_like(values)
            operands, vectors = (values, *seed), (att_src, att_dst)
            results = (grad_values,)
            self._columns(stream, operands, (grad,), results, (), vectors, *rooms)
        if self._needs.vectors:
            self._scores(stream, values, made)
        if self._shape[0]:
            total = made.new_empty(self._shape)
            self._total(stream, total, made)
        return grad_values, total


def _made(scalar: int, sums: int) -> Room:
    """Room for what a backward packs, gradients of scores, and partial sums."""
    return room_of(
        {
            "state_ptr": 4 * scalar,
            ("grad_row_ptr", "grad_second_ptr"): scalar,
            ("grad_col_ptr", "grad_first_ptr"): scalar,
            "sums_ptr": sums,
        }
    )
