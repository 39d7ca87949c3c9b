"""Launching GAT's layer: node scores, attention and bias of projected nodes.

Sources and destinations are the same nodes, there are no terms and no mask. A run is
made once for a relation and allocates and launches at every call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import Form, Operand
from pyg_tiga.impls.attention_passes import (
    ColumnsPass,
    PreparePass,
    Sums,
    prepare_programs,
)
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.impls.launch import current_stream
from pyg_tiga.impls.prepared import Room, room_of
from pyg_tiga.impls.replay import Recorded, Replay, empty_like, free, linear, part
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


class GatForward:
    """From features to the layer's output.

    Called with features, the projection, both attention vectors, the bias or None, and
    dropout's seed if anything is dropped, or None. Gives the output; the output as the
    kernels formed it, which is the same tensor if they added the bias or there is none;
    what is kept besides; P if it stands apart; and projected nodes.

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
        self._adds_bias = layer.adds_bias
        dtypes = (dtype, dtype, dtype)
        self._scores = ScoresPass(graph, shape, dtypes, True, (kept,)).launch
        made = (layer.form(), dtype, layer.positive, dtype if layer.adds_bias else None)
        self._rows = RowsPass(graph, schedule, *made, (kept,))
        self.run = Replay(self._run)

    def _run(
        self,
        stream: Any,
        x: Tensor,  # [N, F_in]
        lin: Tensor,  # [H * C, F_in]
        att_src: Tensor,  # [1, H, C]
        att_dst: Tensor,  # [1, H, C]
        bias: Tensor | None,  # [H * C]
        seed: Tensor | None,  # [1]
    ) -> tuple[Tensor | None, ...]:
        values = linear(x, lin)  # [N, H * C]
        return self._attend(stream, values, att_src, att_dst, bias, seed)

    def again(self, values: Tensor, *rest: Tensor | None) -> Tensor:
        """The output as the kernels form it, of projected nodes and all behind them."""
        return self._attend(current_stream(values.get_device()), values, *rest)[1]

    def _attend(
        self,
        stream: Any,
        values: Tensor,  # [N, H * C]
        att_src: Tensor,
        att_dst: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        out = empty_like(values)
        kept = values.new_empty(self._kept, dtype=torch.float32)
        positive = empty_like(values) if self._is_apart else None
        state = (out,) if positive is None else (out, positive)
        added = _present(bias) if self._adds_bias else ()
        self._scores(stream, values, att_src, att_dst, kept)
        self._rows(stream, (values, *_present(seed)), state, added, kept)
        shown = out if bias is None or added else out + bias
        return shown, out, kept, positive, values


class Needs(NamedTuple):
    """Which gradients a backward forms."""

    x: bool
    lin: bool
    att_src: bool
    att_dst: bool
    bias: bool


class GatBackward:
    """Gradients of projected nodes and parameters, and of what they were made of.

    `run` is called with the output's gradient ``[N, H * C]``, both vectors, bias, seed,
    and what a forward gave but its first result; it gives the gradients of projected
    nodes, of both vectors and of the bias. `products` makes of the first, features and
    projection the gradients of these two. They are apart so that all that a forward
    kept can be freed between them. `whole` is both, with the gradient, what the forward
    was called with and what it gave.

    Args:
        graph: The relation.
        schedule: Launch choices.
        layer: The layer.
        stride: Stride of the rows of the output's gradient.
        needs: Which gradients; the others are None.
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
        self._needs, self._layer = needs, layer
        vectors = needs.att_src or needs.att_dst
        kinds = (2 if vectors else 0) + needs.bias
        self._shape = (kinds, heads, channels)
        size, stride_p = heads * channels, kinds * heads * channels
        programs = (sum_programs(shape), prepare_programs(graph.num_dst))
        made = _made(graph.num_dst * heads, max(programs) * stride_p)
        self._made = made.size
        rooms = (layer.kept(graph.num_dst), made)
        grad, form = Operand(dtype, stride, channels), layer.form()
        bias = dtype if layer.adds_bias else None
        sums = None
        if needs.bias:
            sums = Sums(programs[1], stride_p, stride_p - size)
        rest = (form.row, layer.options.scale, True, bias, sums, rooms)
        self._prepare = PreparePass(graph, (heads, channels), grad, *rest).launch
        self._columns = self._scores = self._total = None
        if vectors or needs.x or needs.lin:
            rest = ((False, False), (dtype, dtype), rooms)
            self._columns = ColumnsPass(graph, schedule, form, grad, *rest)
        if vectors:
            rest = (True, programs[0], stride_p, (made,))
            self._scores = ScoresBackwardPass(graph, shape, dtype, *rest).launch
        if kinds:
            split = 2 * size if vectors else 0
            total = PartialsPass(graph, programs, split, stride_p, (made,))
            self._total = total.launch
        self.run = Replay(self._run)
        self.products = Replay(self._multiply)
        self.whole = Recorded(self._whole)

    def _run(
        self,
        stream: Any,
        grad: Tensor,
        att_src: Tensor,
        att_dst: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        out: Tensor,
        kept: Tensor,
        positive: Tensor | None,
        values: Tensor,
    ) -> tuple[Tensor | None, ...]:
        made = grad.new_empty(self._made, dtype=torch.float32)
        rooms = (kept, made)
        added = _present(bias) if self._layer.adds_bias else ()
        self._prepare(stream, grad, out, *_present(positive), *added, *rooms)
        grad_values = None
        if self._columns is not None:
            grad_values = empty_like(values)
            operands, vectors = (values, *_present(seed)), (att_src, att_dst)
            results = (grad_values,)
            self._columns(stream, operands, (grad,), results, (), vectors, *rooms)
        if self._scores is not None:
            self._scores(stream, values, made)
        return grad_values, *self._parameters(stream, made)

    def _parameters(self, stream: Any, made: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of both vectors and of the bias, from their partial sums."""
        if self._total is None:
            return None, None, None
        total = made.new_empty(self._shape)
        self._total(stream, total, made)
        dtype = self._layer.dtype
        total = total if dtype is torch.float32 else total.to(dtype)
        needs, (kinds, heads, channels) = self._needs, self._shape
        shape, flat = (1, heads, channels), (heads * channels,)
        return (
            part(total, 0, shape) if needs.att_src else None,
            part(total, 1, shape) if needs.att_dst else None,
            part(total, kinds - 1, flat) if needs.bias else None,
        )

    def _multiply(
        self,
        stream: Any,
        grad: Tensor,  # [N, H * C]
        x: Tensor,  # [N, F_in]
        lin: Tensor,  # [H * C, F_in]
    ) -> tuple[Tensor | None, ...]:
        return (
            grad.mm(lin) if self._needs.x else None,
            grad.t().mm(x) if self._needs.lin else None,
        )

    def _whole(
        self, stream: Any, grad: Tensor, x: Tensor, lin: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of all that the forward was called with but the seed."""
        grad_values, *sums = self._run(stream, grad, *rest)
        # Not the vectors, which are the layer's.
        free(grad, *rest[-4:])
        if grad_values is None:
            return None, None, *sums
        return (*self._multiply(stream, grad_values, x, lin), *sums)


def _present(value: Tensor | None) -> tuple[Tensor, ...]:
    """What there is, as an argument."""
    return () if value is None else (value,)


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
