"""Scores of the edge-attention template, each a small set of jit functions.

A score sees operands of the two ends of an edge, `row` (destination) and `col`
(source), an additive term (0 where there is none) and one number, `scale`. Operands are
numbers per head, or with `vector` K of them: [..., H] or [..., H, K], the leading axes
1 for the end that is held, and those of a tile of edges for the other. It says

* `load_row`, `load_col`: how operands are read;
* `score`: the score [..., H] and what its gradients need, `aux`, of the same shape;
* `vjp_row`, `vjp_col`, `vjp_param`, `vjp_term`: from the gradient of the score to those
  of the operands and of a parameter, shaped like operands, and of the term;
* `slope`: where operands are numbers that are added up, the score's derivative by their
  sum, from which gradients of the operands follow without those of each score.

Everything else (tile loops, long rows, softmax, dropout, self-loops) is the template's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import gather


class Score(NamedTuple):
    """A score's functions, in the order in which the kernels take them."""

    load_row: Any
    load_col: Any
    score: Any
    vjp_row: Any
    vjp_col: Any
    vjp_param: Any
    vjp_term: Any
    slope: Any = None
    vector: bool = False


@triton.jit
def load_operand(table, idx, m_x, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """Operands of nodes in float32, [X, H * K], 0 where masked."""
    return gather(table, idx, m_x, EVEN, MASKED).to(tl.float32)


@triton.jit
def no_vjp(grad, row, col, aux, scale):
    """For a parameter that a score does not have."""
    return grad * 0.0


@triton.jit
def same_vjp(grad, aux, scale):
    """A term that is added to the score itself."""
    return grad


@triton.jit
def additive_score(row, col, term, scale):
    """GAT: LeakyReLU(a_j + b_i + term), with `scale` the negative slope."""
    pre = row + col + term
    return tl.where(pre > 0, pre, pre * scale), pre


@triton.jit
def additive_slope(aux, scale):
    """The derivative; at 0 PyTorch's LeakyReLU has its negative slope."""
    return tl.where(aux > 0, 1.0, scale)


@triton.jit
def additive_vjp_term(grad, aux, scale):
    """The term enters the pre-activation with weight 1."""
    return tl.where(aux > 0, grad, grad * scale)


@triton.jit
def additive_vjp(grad, row, col, aux, scale):
    """And so do both operands."""
    return additive_vjp_term(grad, aux, scale)


ADDITIVE = Score(
    load_operand,
    load_operand,
    additive_score,
    additive_vjp,
    additive_vjp,
    no_vjp,
    additive_vjp_term,
    additive_slope,
)

SCORES = {"additive": ADDITIVE}
