"""Attention over the edges of a relation in plain PyTorch: any device, any dtype.

This module defines what the kernels must compute; tests compare with it and double
backward runs through it. Half precision accumulates in float32 and is rounded once, at
the end. Edges that take no part (stored loops where loops are implicit, masked edges)
are left out before anything is computed, so that not even a NaN of theirs is seen.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from pyg_tiga.relation.graph import Graph

_HALF = (torch.float16, torch.bfloat16)


class _Edges(NamedTuple):
    """The edges that take part, the implicit loops after the stored edges."""

    src: Tensor  # [K], int64
    dst: Tensor  # [K], int64
    place: Tensor  # [K], place among the E stored edges and the loops after them
    num_dst: int
    num_stored: int  # E
    num_loops: int

    def sum_to_dst(self, value: Tensor) -> Tensor:
        """Add edge values ``[K, ...]`` to their destinations."""
        out = value.new_zeros(self.num_dst, *value.shape[1:])
        return out.index_add(0, self.dst, value)

    def pick(self, stored: Tensor | None, loops: Tensor | None) -> Tensor | None:
        """Values ``[K, H]`` of what is given for stored edges and for loops."""
        given = loops if stored is None else stored
        if given is None:
            return None
        if stored is None:
            stored = given.new_zeros(self.num_stored, given.size(1))
        if loops is None:
            loops = given.new_zeros(self.num_loops, given.size(1))
        return torch.cat([stored, loops]).index_select(0, self.place)


def additive_attention(
    graph: Graph,
    value: Tensor,  # [N_src, H, C]
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor | None,  # [N_dst, H]
    *,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [num_loops, H]
    negative_slope: float = 0.2,
    num_loops: int = 0,
    edge_mask: Tensor | None = None,  # [E]
    keep: Tensor | None = None,  # [E + num_loops, H]
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Average source values by a softmax of additive scores, as GAT does.

    .. math::
        \mathbf{y}_i = \sum_{e = (j \to i)} \frac{k_e}{1 - p} \,
        \mathrm{softmax}_i(s)_e \, \mathbf{v}_j, \qquad
        s_e = \mathrm{LeakyReLU}(\alpha^{src}_j + \alpha^{dst}_i + t_e)

    Where the argument of the LeakyReLU is 0, its derivative is the negative slope.

    Args:
        graph: The relation.
        value: Source values ``[N_src, H, C]``.
        alpha_src: Source part of the scores, ``[N_src, H]``.
        alpha_dst: Destination part of the scores, ``[N_dst, H]``; ``None`` is 0.
        edge_term: Edge part of the scores, ``[E, H]`` in the caller's edge order.
        loop_term: The same for the implicit loops, ``[num_loops, H]``.
        negative_slope: Slope of the LeakyReLU below 0, of any sign.
        num_loops: Where above 0, stored edges ``i -> i`` are left out and each of the
            first `num_loops` destinations gets one loop.
        edge_mask: Which stored edges take part, ``[E]`` bool.
        keep: Which weights dropout keeps, ``[E + num_loops, H]`` bool; loop i has row
            ``E + i``. ``None`` keeps all, unscaled.
        dropout: Probability p of dropping a weight; kept ones are scaled by its
            complement. 1 gives zeros.

    Returns:
        ``out`` ``[N_dst, H, C]``, 0 in rows without edges, in the dtype to which values
        and scores promote; and the state of the softmax, without gradients: ``m``
        ``[N_dst, H]``, the largest score, and ``l`` ``[N_dst, H]``, the sum of
        ``exp(s - m)`` (rows without edges have 0 and 1), float32 for half precision.
    """
    edges = edges_of(graph, num_loops, edge_mask)
    terms = edges.pick(edge_term, loop_term)
    scores = _scores(edges, alpha_src, alpha_dst, terms, negative_slope)  # [K, H]
    out, largest, total = _attend(edges, value, scores, keep, dropout)
    dtype = promoted(value, alpha_src, alpha_dst, edge_term, loop_term)
    return out.to(dtype), largest, total


def attention_weights(
    graph: Graph,
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor | None,  # [N_dst, H]
    *,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [num_loops, H]
    negative_slope: float = 0.2,
    num_loops: int = 0,
    edge_mask: Tensor | None = None,  # [E]
    keep: Tensor | None = None,  # [E + num_loops, H]
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`additive_attention`, after dropout.

    Arguments are those of :func:`additive_attention`.

    Returns:
        Weights ``[E, H]`` of the stored edges in the caller's order, 0 for those that
        take no part, and ``[num_loops, H]`` of the implicit loops.
    """
    edges = edges_of(graph, num_loops, edge_mask)
    terms = edges.pick(edge_term, loop_term)
    scores = _scores(edges, alpha_src, alpha_dst, terms, negative_slope)  # [K, H]
    dtype = promoted(alpha_src, alpha_dst, edge_term, loop_term)
    return _every_weight(edges, scores, keep, dropout, dtype)


def vector_attention(
    graph: Graph,
    value: Tensor,  # [N_src, H, C]
    row: Tensor,  # [N_dst, H, K]
    col: Tensor,  # [N_src, H, K]
    att: Tensor | None = None,  # [H, K]
    *,
    scale: float,
    normed: bool = False,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [num_loops, H]
    num_loops: int = 0,
    edge_mask: Tensor | None = None,  # [E]
    keep: Tensor | None = None,  # [E + num_loops, H]
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Average source values by a softmax of scores of two vectors.

    .. math::
        s_e = \alpha \langle \mathbf{r}_i, \mathbf{c}_j \rangle + t_e
        \quad\text{or, with } \mathbf{a}: \quad
        s_e = \langle \mathbf{a}, \mathrm{LeakyReLU}_\alpha(\mathbf{r}_i + \mathbf{c}_j)
        \rangle + t_e

    With `normed`, scores are

    .. math::
        s_e = \langle \mathbf{a}, \frac{\mathbf{r}_i}{|\mathbf{r}_i|} \odot
        \frac{\mathbf{c}_j}{|\mathbf{c}_j|} \rangle + t_e, \qquad
        |\mathbf{x}|^2 = \langle \mathbf{x}, \mathbf{x} \rangle + \alpha

    Args:
        graph: The relation.
        value: Source values ``[N_src, H, C]``.
        row: Vectors of the destinations ``[N_dst, H, K]``: queries.
        col: Vectors of the sources ``[N_src, H, K]``: keys.
        att: GATv2's vectors ``[H, K]``, or the factors of normalised products; without
            them, scores are dot products.
        scale: Factor of the dot product, slope of the LeakyReLU up to 0, or what is
            added to the squares of norms.
        normed: Whether vectors are divided by their norms.
        edge_term: Added to the scores, ``[E, H]`` in the caller's edge order.
        loop_term: As in :func:`additive_attention`, and so are all that follow.
        num_loops: Likewise.
        edge_mask: Likewise.
        keep: Likewise.
        dropout: Likewise.

    Returns:
        As :func:`additive_attention`.
    """
    edges = edges_of(graph, num_loops, edge_mask)
    terms = edges.pick(edge_term, loop_term)
    vectors = (row, col, att)
    scores = _vector_scores(edges, vectors, terms, scale, normed)  # [K, H]
    out, largest, total = _attend(edges, value, scores, keep, dropout)
    dtype = promoted(value, row, col, att, edge_term, loop_term)
    return out.to(dtype), largest, total


def vector_attention_weights(
    graph: Graph,
    row: Tensor,  # [N_dst, H, K]
    col: Tensor,  # [N_src, H, K]
    att: Tensor | None = None,  # [H, K]
    *,
    scale: float,
    normed: bool = False,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [num_loops, H]
    num_loops: int = 0,
    edge_mask: Tensor | None = None,  # [E]
    keep: Tensor | None = None,  # [E + num_loops, H]
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`vector_attention`, after dropout.

    Arguments are those of :func:`vector_attention`.

    Returns:
        As :func:`attention_weights`.
    """
    edges = edges_of(graph, num_loops, edge_mask)
    terms = edges.pick(edge_term, loop_term)
    vectors = (row, col, att)
    scores = _vector_scores(edges, vectors, terms, scale, normed)  # [K, H]
    dtype = promoted(row, col, att, edge_term, loop_term)
    return _every_weight(edges, scores, keep, dropout, dtype)


def edges_of(graph: Graph, num_loops: int, edge_mask: Tensor | None) -> _Edges:
    """The edges that take part: stored ones, then implicit loops."""
    src, dst = (end.long() for end in graph.ends())
    num_stored = src.numel()
    loop = torch.arange(num_loops, device=src.device)
    live = torch.ones(num_stored + num_loops, dtype=torch.bool, device=src.device)
    if num_loops > 0:
        live[:num_stored] = src != dst
    if edge_mask is not None:
        live[:num_stored] &= edge_mask
    place = live.nonzero().view(-1)
    src = torch.cat([src, loop]).index_select(0, place)
    dst = torch.cat([dst, loop]).index_select(0, place)
    return _Edges(src, dst, place, graph.num_dst, num_stored, num_loops)


def pre_activations(
    edges: _Edges,
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor | None,  # [N_dst, H]
    terms: Tensor | None,  # [K, H]
) -> Tensor:
    """Arguments of the LeakyReLU [K, H], in the accumulator of what goes into them."""
    pre = _widen(alpha_src).index_select(0, edges.src)
    if alpha_dst is not None:
        pre = pre + _widen(alpha_dst).index_select(0, edges.dst)
    return pre if terms is None else pre + _widen(terms)


def _scores(
    edges: _Edges,
    alpha_src: Tensor,
    alpha_dst: Tensor | None,
    terms: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Scores [K, H]."""
    pre = pre_activations(edges, alpha_src, alpha_dst, terms)
    return F.leaky_relu(pre, negative_slope)


def vectors_of(edges: _Edges, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [K, H, D] of both ends of each edge, in the accumulator of both."""
    real = torch.promote_types(widened(row.dtype), widened(col.dtype))
    first = row.to(real).index_select(0, edges.dst)
    return first, col.to(real).index_select(0, edges.src)


def normalised(x: Tensor, added: float) -> tuple[Tensor, Tensor]:
    """Vectors over sqrt(<x, x> + added), and 1 over that, in the accumulator."""
    x = _widen(x)
    inverse = (x.square().sum(-1, keepdim=True) + added).rsqrt()
    return x * inverse, inverse


def _vector_scores(
    edges: _Edges,
    vectors: tuple[Tensor, Tensor, Tensor | None],
    terms: Tensor | None,
    scale: float,
    normed: bool,
) -> Tensor:
    """Scores [K, H]."""
    row, col, att = vectors
    if normed:
        row, col = (normalised(x, scale)[0] for x in (row, col))
    first, second = vectors_of(edges, row, col)
    if normed:
        scores = (first * second * _widen(att)).sum(-1)
    elif att is None:
        scores = (first * second).sum(-1) * scale
    else:
        scores = (F.leaky_relu(first + second, scale) * _widen(att)).sum(-1)
    return scores if terms is None else scores + _widen(terms)


def _attend(
    edges: _Edges, value: Tensor, scores: Tensor, keep: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of values [N_dst, H, C], largest scores and sums of rows."""
    weight, largest, total = softmax(edges, scores)
    weight = _drop(edges, weight, keep, dropout)
    message = _widen(value).index_select(0, edges.src)  # [K, H, C]
    out = edges.sum_to_dst(weight.unsqueeze(-1) * message)  # [N_dst, H, C]
    return out, largest, total.detach()


def _every_weight(
    edges: _Edges,
    scores: Tensor,
    keep: Tensor | None,
    dropout: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weights of stored edges and of loops, 0 for edges that take no part."""
    weight = _drop(edges, softmax(edges, scores)[0], keep, dropout).to(dtype)
    every = weight.new_zeros(edges.num_stored + edges.num_loops, weight.size(1))
    every = every.index_copy(0, edges.place, weight)
    return every[: edges.num_stored], every[edges.num_stored :]


def softmax(edges: _Edges, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [K, H], largest score and sum of each row [N_dst, H]."""
    index = edges.dst.unsqueeze(1).expand_as(scores)
    # Rows that nothing reaches keep the 0.
    largest = scores.new_zeros(edges.num_dst, scores.size(1)).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    power = (scores - largest.index_select(0, edges.dst)).exp()
    total = edges.sum_to_dst(power)
    # The largest score alone gives 1, so that 0 means a row without edges.
    total = total.masked_fill(total == 0, 1.0)
    return power / total.index_select(0, edges.dst), largest, total


def _drop(edges: _Edges, weight: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    if keep is None:
        return weight
    scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
    return weight * keep.index_select(0, edges.place) * scale


def _widen(value: Tensor) -> Tensor:
    return value.to(widened(value.dtype))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of a dtype are formed."""
    return torch.float32 if dtype in _HALF else dtype


def promoted(*parts: Tensor | None) -> torch.dtype:
    """The dtype to which those that are given promote."""
    dtypes = [part.dtype for part in parts if part is not None]
    return functools.reduce(torch.promote_types, dtypes)
