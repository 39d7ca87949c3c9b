"""Every operation in plain PyTorch: any device, any dtype, differentiable twice.

This module defines what the kernels must compute; tests compare with it and double
backward runs through it. Half precision accumulates in float32 and is rounded once, at
the end, as the kernels do.

Rows of the extremum family also fix the gradient at ties, because users train with it:

* ``ties="split"`` is :func:`torch.scatter_reduce` as PyG calls it: the gradient of a
  result is shared evenly by the edges that reach it, **and, where the result is exactly
  0, by the zero-initialised output too**, which keeps its share. Three edges tied at 0
  (the common case after a ReLU) get a quarter each. A NaN result equals nothing, so its
  count is 0 and every edge of the row gets a NaN gradient in that column.
* ``ties="first"`` is the CSR path of :func:`torch.sparse.mm`: the first edge of the row
  that reaches the result takes all; NaN counts as reaching NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pyg_tiga.relation.graph import Graph

Normalize = Literal["none", "src", "dst"]
Extremum = Literal["max", "min"]
Ties = Literal["split", "first"]

_HALF = (torch.float16, torch.bfloat16)


class _Edges(NamedTuple):
    """The edges of a relation in its row order, checked to be in range."""

    row: Tensor  # [E], destination of each position
    place: Tensor  # [E], place of each position within its row
    col: Tensor  # [E], source of each position
    perm: Tensor | None  # [E], position to the caller's edge id; None is the identity
    num_rows: int
    num_cols: int

    def from_caller(self, value: Tensor) -> Tensor:
        """Bring edge values from the caller's order into row order."""
        return value if self.perm is None else value.index_select(0, self.perm)

    def to_caller(self, value: Tensor) -> Tensor:
        """Bring edge values from row order into the caller's order."""
        if self.perm is None:
            return value
        return torch.zeros_like(value).index_copy(0, self.perm.long(), value)

    def sum_to_rows(self, value: Tensor) -> Tensor:
        """Add edge values [E, F] to their destinations."""
        out = value.new_zeros(self.num_rows, *value.shape[1:])
        return out.index_add(0, self.row, value)

    def sum_to_cols(self, value: Tensor) -> Tensor:
        """Add edge values [E, F] to their sources."""
        out = value.new_zeros(self.num_cols, *value.shape[1:])
        return out.index_add(0, self.col, value)


def spmm(
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None = None,  # [E]
    normalize: Normalize = "none",
) -> Tensor:
    r"""Sum weighted source features over the edges of each destination.

    .. math::
        \mathbf{y}_i = r_i \sum_{e = (j \to i)} w_e \, c_j \, \mathbf{x}_j

    Args:
        graph: The relation.
        x: Source features, ``[N_src, F]``.
        weight: Edge weights ``[E]`` in the caller's edge order.
        normalize: ``"none"``: r = c = 1. ``"dst"``: r_i = 1 / max(degree of i, 1), the
            mean. ``"src"``: c_j = 1 / max(edges leaving j, 1), which is what the
            gradient of the mean needs on the reversed relation.

    Returns:
        ``[N_dst, F]`` in the dtype of ``x``, promoted with that of ``weight``; rows
        without edges are 0.
    """
    edges = _edges(graph)
    x, weight = _promoted(x, weight)
    features = x.to(_accumulator(x.dtype))
    if normalize == "src":
        features = features * _degree_inv(graph.columns().ptr, features.dtype)
    message = features.index_select(0, edges.col)  # [E, F]
    if weight is not None:
        message = message * edges.from_caller(weight).to(message.dtype).unsqueeze(1)
    out = edges.sum_to_rows(message)  # [N_dst, F]
    if normalize == "dst":
        out = out * _degree_inv(graph.rows().ptr, out.dtype)
    return out.to(x.dtype)


def spmm_extremum(
    graph: Graph,
    x: Tensor,  # [N_src, F]
    reduce: Extremum = "max",
    weight: Tensor | None = None,  # [E]
    ties: Ties = "split",
) -> tuple[Tensor, Tensor]:
    r"""Take the elementwise maximum or minimum over the edges of each destination.

    .. math::
        \mathbf{y}_i = \max_{e = (j \to i)} w_e \, \mathbf{x}_j

    Weighted messages are rounded to the dtype to which ``x`` and ``weight`` promote
    before they are compared, as PyTorch rounds them.

    Args:
        graph: The relation.
        x: Source features, ``[N_src, F]``.
        reduce: ``"max"`` or ``"min"``.
        weight: Edge weights ``[E]`` in the caller's edge order.
        ties: Who gets the gradient at ties; see the module's text.

    Returns:
        ``out`` ``[N_dst, F]``, 0 in rows without edges, and ``aux`` ``[N_dst, F]``
        int32. For ``"split"``, ``aux`` is the number of equal shares: the edges that
        reach ``out``, plus one where ``out`` is 0. For ``"first"`` it is the winner's
        place within its row of ``graph.rows()``, -1 in rows without edges.
    """
    edges = _edges(graph)
    x, weight = _promoted(x, weight)
    message = _messages(edges, x, weight)  # [E, F]
    if ties == "split":
        out = _extremum(edges, message, reduce)
        return out.to(x.dtype), _shares(edges, message.detach(), out.detach())
    with torch.no_grad():
        best = _extremum(edges, message, reduce)
        winner = _first_winner(edges, message, best)  # [N_dst, F]
    # Exactly one term of each sum is not a zero, so the sum is exact.
    out = edges.sum_to_rows(_keep(_is_winner(edges, winner), message))
    return out.to(x.dtype), winner


def spmm_extremum_backward(
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]
    out: Tensor,  # [N_dst, F]
    aux: Tensor,  # [N_dst, F]
    ties: Ties,
) -> Tensor:
    """Gradient of :func:`spmm_extremum` without weights, ``[N_src, F]``."""
    edges = _edges(graph)
    share = _edge_gradients(edges, grad, x, out, aux, ties)  # [E, F]
    return edges.sum_to_cols(share).to(x.dtype)


def weighted_extremum_backward(
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]
    weight: Tensor,  # [E], of the dtype of x
    out: Tensor,  # [N_dst, F]
    aux: Tensor,  # [N_dst, F]
    ties: Ties,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`spmm_extremum` for x ``[N_src, F]`` and weights ``[E]``."""
    edges = _edges(graph)
    share = _edge_gradients(edges, grad, x, out, aux, ties, weight)  # [E, F]
    factor = edges.from_caller(weight).to(share.dtype).unsqueeze(1)
    held = x.to(share.dtype).index_select(0, edges.col)  # [E, F]
    grad_x = edges.sum_to_cols(share * factor).to(x.dtype)
    return grad_x, edges.to_caller((share * held).sum(1)).to(weight.dtype)


def spmm_extremum_select(
    graph: Graph,
    value: Tensor,  # [N_src, F]
    x: Tensor,  # [N_src, F]
    out: Tensor,  # [N_dst, F]
    aux: Tensor,  # [N_dst, F]
    ties: Ties,
) -> Tensor:
    """Transpose of :func:`spmm_extremum_backward`, linear in `value`: ``[N_dst, F]``.

    Each destination takes from `value` what its winners hold there, by their shares.
    """
    edges = _edges(graph)
    held = value.to(_accumulator(x.dtype)).index_select(0, edges.col)  # [E, F]
    if ties == "first":
        return edges.sum_to_rows(_keep(_is_winner(edges, aux), held)).to(x.dtype)
    message = _messages(edges, x.detach(), None)
    best = out.detach().to(message.dtype).index_select(0, edges.row)
    return (edges.sum_to_rows((message == best) * held) / aux).to(x.dtype)


def sddmm(
    graph: Graph,
    a: Tensor,  # [N_dst, F]
    b: Tensor,  # [N_src, F]
) -> Tensor:
    r"""Dot product of the two ends of every edge.

    .. math::
        s_e = \sum_f a_{if} \, b_{jf} \quad \text{for } e = (j \to i)

    Returns:
        ``[E]`` in the caller's edge order and the dtype to which both promote.
    """
    edges = _edges(graph)
    a, b = _promoted(a, b)
    dtype = _accumulator(a.dtype)
    left = a.to(dtype).index_select(0, edges.row)  # [E, F]
    right = b.to(dtype).index_select(0, edges.col)  # [E, F]
    return edges.to_caller((left * right).sum(1)).to(a.dtype)


def _edges(graph: Graph) -> _Edges:
    # A deferred index check may still be open, and indexing needs ids in range.
    graph.validate()
    rows = graph.rows()
    row = rows.row_index()
    position = torch.arange(row.numel(), device=row.device, dtype=rows.ptr.dtype)
    place = (position - rows.ptr.index_select(0, row)).int()
    return _Edges(row, place, rows.index, rows.perm, rows.num_rows, rows.num_cols)


def _promoted(x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both in the dtype to which they promote."""
    if other is None or x.dtype == other.dtype:
        return x, other
    dtype = torch.promote_types(x.dtype, other.dtype)
    return x.to(dtype), other.to(dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _degree_inv(ptr: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse degrees [N, 1] in full precision; an integer dtype gives float32."""
    degree = ptr.diff().clamp(min=1)
    real = dtype if dtype.is_floating_point else torch.float32
    return degree.to(real).reciprocal().unsqueeze(1)


def _messages(edges: _Edges, x: Tensor, weight: Tensor | None) -> Tensor:
    """Messages [E, F], rounded to the dtype of x and held in its accumulator."""
    message = x.to(_accumulator(x.dtype)).index_select(0, edges.col)
    if weight is None:
        return message
    message = message * edges.from_caller(weight).to(message.dtype).unsqueeze(1)
    return _round_through(message, x.dtype)


def _round_through(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to what `dtype` can hold; gradients pass unrounded."""
    if value.dtype == dtype:
        return value
    rounded = value.detach().to(dtype).to(value.dtype)
    moved = value + (rounded - value.detach())
    # Infinities would become NaN in the difference.
    return torch.where(rounded == value, value, moved)


def _extremum(edges: _Edges, message: Tensor, reduce: Extremum) -> Tensor:
    out = message.new_zeros(edges.num_rows, message.size(1))
    index = edges.row.long().unsqueeze(1).expand_as(message)
    return out.scatter_reduce(0, index, message, f"a{reduce}", include_self=False)


def _shares(edges: _Edges, message: Tensor, out: Tensor) -> Tensor:
    reached = message == out.index_select(0, edges.row)  # [E, F]
    return edges.sum_to_rows(reached.int()) + (out == 0)


def _first_winner(edges: _Edges, message: Tensor, out: Tensor) -> Tensor:
    best = out.index_select(0, edges.row)  # [E, F]
    reached = (message == best) | (message.isnan() & best.isnan())
    nowhere = torch.iinfo(torch.int32).max
    place = torch.where(reached, edges.place.unsqueeze(1), nowhere)  # [E, F]
    winner = torch.full_like(out, nowhere, dtype=torch.int32)
    index = edges.row.long().unsqueeze(1).expand_as(message)
    winner.scatter_reduce_(0, index, place, "amin")
    return winner.masked_fill_(winner == nowhere, -1)


def _is_winner(edges: _Edges, winner: Tensor) -> Tensor:
    return winner.index_select(0, edges.row) == edges.place.unsqueeze(1)  # [E, F]


def _keep(mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value, value.new_zeros(()))


def _edge_gradients(
    edges: _Edges,
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: Ties,
    weight: Tensor | None = None,
) -> Tensor:
    """Gradient of every message, [E, F]."""
    grad = grad.to(_accumulator(x.dtype))
    if ties == "first":
        return _keep(_is_winner(edges, aux), grad.index_select(0, edges.row))
    message = _messages(edges, x.detach(), weight)
    best = out.detach().to(message.dtype).index_select(0, edges.row)
    # The product, not a selection: a NaN row has count 0, and 0 * inf is its NaN.
    share = (grad / aux).index_select(0, edges.row)
    return (message == best) * share
