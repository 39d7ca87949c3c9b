"""Scores of the edge-attention template, each a small set of jit functions.

A score sees operands of the two ends of an edge, `row` (destination) and `col`
(source), of shape [X, H, K] with X = 1 for the end that is held and X = E for the
other, an additive term [E, H] (0 where there is none) and one number, `scale`. It says

* `load_row`, `load_col`: how operands are read;
* `score`: the score [E, H] and what its gradients need, `aux` [E, H];
* `vjp_row`, `vjp_col`, `vjp_param`, `vjp_term`: from the gradient of the score [E, H]
  to those of the operands and of a parameter, [E, H, K], and of the term, [E, H].

Everything else (tile loops, long rows, softmax, dropout, self-loops) is the template's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Score(NamedTuple):
    """A score's functions, in the order in which the kernels take them."""

    load_row: Any
    load_col: Any
    score: Any
    vjp_row: Any
    vjp_col: Any
    vjp_param: Any
    vjp_term: Any


@triton.jit
def load_operand(ptr, idx, m_x, o_h, m_h, o_k, m_k, stride_n, stride_h):
    """An operand [X, H, K] in float32, 0 where masked."""
    p = ptr + (idx * stride_n)[:, None, None] + (o_h * stride_h)[None, :, None]
    m = m_x[:, None, None] & m_h[None, :, None] & m_k[None, None, :]
    return tl.load(p + o_k[None, None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def no_vjp(grad, row, col, aux, scale):
    """For a parameter that a score does not have."""
    return tl.expand_dims(grad, 2) * 0.0


@triton.jit
def same_vjp(grad, aux, scale):
    """A term that is added to the score itself."""
    return grad


@triton.jit
def additive_score(row, col, term, scale):
    """GAT: LeakyReLU(a_j + b_i + term), with `scale` the negative slope."""
    pre = tl.sum(row + col, axis=2) + term
    return tl.where(pre > 0, pre, pre * scale), pre


@triton.jit
def _additive_pre(grad, aux, scale):
    # At 0 PyTorch's LeakyReLU has its negative slope.
    return tl.where(aux > 0, grad, grad * scale)


@triton.jit
def additive_vjp(grad, row, col, aux, scale):
    """Both operands enter the pre-activation with weight 1."""
    return tl.expand_dims(_additive_pre(grad, aux, scale), 2)


ADDITIVE = Score(
    load_operand,
    load_operand,
    additive_score,
    additive_vjp,
    additive_vjp,
    no_vjp,
    _additive_pre,
)

SCORES = {"additive": ADDITIVE}
