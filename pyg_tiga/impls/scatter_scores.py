"""Scores of edges with a row for every edge, and how gradients go back through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls.attention_types import Options


class Parts(NamedTuple):
    """What scores are made of: as `Operands`, terms picked for K edges."""

    row: Tensor
    col: Tensor
    param: Tensor | None
    terms: Tensor | None  # [K, H]


class ScoreGradients(NamedTuple):
    """Gradients of the parts, in the accumulator."""

    terms: Tensor  # [K, H]
    row: Tensor
    col: Tensor
    param: Tensor | None = None


Pullback = Callable[[Tensor], ScoreGradients]


def scores_of(edges: Any, parts: Parts, options: Options) -> tuple[Tensor, Pullback]:
    """Scores ``[K, H]``, and what takes their gradients to those of the parts.

    Args:
        edges: The edges that take part, of `reference_attention.edges_of`.
        parts: What scores are made of.
        options: Which score, and its number.
    """
    return _SCORES[options.score](edges, parts, options.scale)


def _additive(edges: Any, parts: Parts, slope: float) -> tuple[Tensor, Pullback]:
    pre = reference.pre_activations(edges, parts.col, parts.row, parts.terms)  # [K, H]

    def pullback(grad: Tensor) -> ScoreGradients:
        grad = torch.where(pre > 0, grad, grad * slope)
        return ScoreGradients(grad, *_to_ends(edges, parts, grad, grad))

    return torch.where(pre > 0, pre, pre * slope), pullback


def _dot(edges: Any, parts: Parts, factor: float) -> tuple[Tensor, Pullback]:
    first, second = reference.vectors_of(edges, parts.row, parts.col)  # [K, H, D]

    def pullback(grad: Tensor) -> ScoreGradients:
        scaled = (grad * factor).unsqueeze(-1)
        ends = _to_ends(edges, parts, scaled * second, scaled * first)
        return ScoreGradients(grad, *ends)

    return _with(parts.terms, (first * second).sum(-1) * factor), pullback


def _dot_norm(edges: Any, parts: Parts, added: float) -> tuple[Tensor, Pullback]:
    row, to_row = _normalised(parts.row, added)
    col, to_col = _normalised(parts.col, added)
    first, second = reference.vectors_of(edges, row, col)  # [K, H, D]
    factors = parts.param.to(reference.widened(parts.param.dtype))  # [H, D]

    def pullback(grad: Tensor) -> ScoreGradients:
        grads = grad.unsqueeze(-1)  # [K, H, 1]
        scaled = grads * factors
        grad_row, grad_col = _to_ends(edges, parts, scaled * second, scaled * first)
        grad_factors = (grads * first * second).sum(0)
        return ScoreGradients(grad, to_row(grad_row), to_col(grad_col), grad_factors)

    return _with(parts.terms, (first * second * factors).sum(-1)), pullback


def _normalised(x: Tensor, added: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Vectors over their norms, and what takes gradients back to the vectors."""
    unit, inverse = reference.normalised(x, added)  # [N, H, D], [N, H, 1]

    def pullback(grad: Tensor) -> Tensor:
        return (grad - unit * (unit * grad).sum(-1, keepdim=True)) * inverse

    return unit, pullback


def _gatv2(edges: Any, parts: Parts, slope: float) -> tuple[Tensor, Pullback]:
    first, second = reference.vectors_of(edges, parts.row, parts.col)
    pre = first.add_(second)  # [K, H, D]
    # At 0 the derivative is that below.
    steep = torch.ones_like(pre).masked_fill_(pre <= 0, slope)
    rectified = pre.mul_(steep)
    att = parts.param.to(reference.widened(parts.param.dtype))  # [H, D]

    def pullback(grad: Tensor) -> ScoreGradients:
        grads = grad.unsqueeze(-1)  # [K, H, 1]
        grad_att = (grads * rectified).sum(0)
        both = grads * att * steep  # [K, H, D]
        return ScoreGradients(grad, *_to_ends(edges, parts, both, both), grad_att)

    return _with(parts.terms, (rectified * att).sum(-1)), pullback


_SCORES = {
    "additive": _additive,
    "dot": _dot,
    "dot_norm": _dot_norm,
    "gatv2": _gatv2,
}


def sum_to(value: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums of values at each index."""
    return value.new_zeros(size, *value.shape[1:]).index_add_(0, index, value)


def _to_ends(
    edges: Any, parts: Parts, to_row: Tensor, to_col: Tensor
) -> tuple[Tensor, Tensor]:
    row = sum_to(to_row, edges.dst, edges.num_dst)
    return row, sum_to(to_col, edges.src, parts.col.size(0))


def _with(terms: Tensor | None, scores: Tensor) -> Tensor:
    if terms is None:
        return scores
    return scores + terms.to(reference.widened(terms.dtype))
