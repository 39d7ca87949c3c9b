"""Scores of the edge-attention template, each a small set of jit functions.

A score sees operands of the two ends of an edge, `row` (destination) and `col`
(source), an additive term (0 where there is none), a parameter if it has one
(`has_param`), and one number, `scale`. Operands are numbers per head, or with `vector`
K of them: [E, H] or [U, S, H, K], the leading axes 1 for the end that is held. The
parameter is [1, 1, H, K]. A score says

* `load_row`, `load_col`: how operands are read;
* `score`: the score, [E, H] or [U, S, H], and what its gradients need, `aux`, of the
  same shape;
* `vjp_row`, `vjp_col`, `vjp_param`, `vjp_term`: from the gradient of the score to those
  of the operands and of the parameter, shaped like operands, and of the term;
* `slope`: where operands are numbers that are added up, the score's derivative by their
  sum, of which only one question may decide: is `aux` above 0? From it gradients of the
  operands follow without those of each score.

With `vector` the term is added to the score, so that the gradients of terms are those
of scores, which are handed over from columns to rows. The vjps find no `aux` there.

Everything else (tile loops, long rows, softmax, dropout, self-loops) is the template's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import gather, table_of


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
    has_param: bool = False


@triton.jit
def load_operand(
    table, idx, m_x, EVEN: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr
):
    """Operands of nodes in float32, [X, H * K], 0 where masked."""
    return gather(table, idx, m_x, EVEN, MASKED, PTX)


@triton.jit
def load_param(
    ptr,
    i_h,
    EVEN: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
):
    """The parameter of a block of heads in float32, [1, 1, H, K]."""
    LAYOUT: tl.constexpr = (HEADS * WIDTH, HEADS, WIDTH, H, K)
    table = table_of(ptr, 0, 0, i_h, 0, LAYOUT)
    zero = tl.zeros([1], dtype=tl.int32)
    return tl.reshape(
        load_operand(table, zero, zero == 0, EVEN, False, False), [1, 1, H, K]
    )


@triton.jit
def no_vjp(grad, row, col, param, aux, scale):
    """For a parameter that a score does not have."""
    return grad * 0.0


@triton.jit
def same_vjp(grad, aux, scale):
    """A term that is added to the score itself."""
    return grad


@triton.jit
def additive_score(row, col, term, param, scale):
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
def additive_vjp(grad, row, col, param, aux, scale):
    """And so do both operands."""
    return additive_vjp_term(grad, aux, scale)


@triton.jit
def dot_score(row, col, term, param, scale):
    """A scaled dot product: scale <q_i, k_j> + term."""
    s = tl.sum(row * col, axis=3) * scale + term
    return s, s


@triton.jit
def dot_vjp_row(grad, row, col, param, aux, scale):
    """By the query."""
    return tl.expand_dims(grad * scale, 3) * col


@triton.jit
def dot_vjp_col(grad, row, col, param, aux, scale):
    """By the key."""
    return tl.expand_dims(grad * scale, 3) * row


@triton.jit
def dot_norm_parts(row, col, param, scale):
    """Reciprocals of both norms, and the product of what they divide: [U, S, H]."""
    r = tl.rsqrt(tl.sum(row * row, axis=3) + scale)
    c = tl.rsqrt(tl.sum(col * col, axis=3) + scale)
    return r, c, tl.sum(row * param * col, axis=3) * r * c


@triton.jit
def dot_norm_score(row, col, term, param, scale):
    """<param, q_i k_j> / (|q_i| |k_j|) + term, with |x|^2 = <x, x> + `scale`."""
    _, _, s = dot_norm_parts(row, col, param, scale)
    return s + term, s + term


@triton.jit
def dot_norm_vjp_row(grad, row, col, param, aux, scale):
    """By the query: (param k / |k| - s q / |q|) / |q|."""
    r, c, s = dot_norm_parts(row, col, param, scale)
    along = tl.expand_dims(grad * r * c, 3) * (param * col)
    return along - tl.expand_dims(grad * s * r * r, 3) * row


@triton.jit
def dot_norm_vjp_col(grad, row, col, param, aux, scale):
    """By the key: (param q / |q| - s k / |k|) / |k|."""
    r, c, s = dot_norm_parts(row, col, param, scale)
    along = tl.expand_dims(grad * r * c, 3) * (row * param)
    return along - tl.expand_dims(grad * s * c * c, 3) * col


@triton.jit
def dot_norm_vjp_param(grad, row, col, param, aux, scale):
    """By the parameter."""
    r, c, _ = dot_norm_parts(row, col, param, scale)
    return tl.expand_dims(grad * r * c, 3) * (row * col)


@triton.jit
def gatv2_factor(pre, param, scale):
    """The parameter times LeakyReLU's derivative, [U, S, H, K].

    The slope goes into the parameter, once for all edges; and score and gradients form
    it alike, so that it is formed once.
    """
    return tl.where(pre > 0, param, param * scale)


@triton.jit
def gatv2_score(row, col, term, param, scale):
    """GATv2: <param, LeakyReLU(x_i + x_j)> + term, with `scale` the negative slope."""
    pre = row + col
    s = tl.sum(pre * gatv2_factor(pre, param, scale), axis=3) + term
    return s, s


@triton.jit
def gatv2_vjp(grad, row, col, param, aux, scale):
    """By either operand."""
    return tl.expand_dims(grad, 3) * gatv2_factor(row + col, param, scale)


@triton.jit
def gatv2_vjp_param(grad, row, col, param, aux, scale):
    """By the attention vector: LeakyReLU(x) is x times its derivative."""
    pre = row + col
    return tl.expand_dims(grad, 3) * tl.where(pre > 0, pre, pre * scale)


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

DOT = Score(
    load_operand,
    load_operand,
    dot_score,
    dot_vjp_row,
    dot_vjp_col,
    no_vjp,
    same_vjp,
    vector=True,
)

DOT_NORM = Score(
    load_operand,
    load_operand,
    dot_norm_score,
    dot_norm_vjp_row,
    dot_norm_vjp_col,
    dot_norm_vjp_param,
    same_vjp,
    vector=True,
    has_param=True,
)

GATV2 = Score(
    load_operand,
    load_operand,
    gatv2_score,
    gatv2_vjp,
    gatv2_vjp,
    gatv2_vjp_param,
    same_vjp,
    vector=True,
    has_param=True,
)

SCORES = {"additive": ADDITIVE, "dot": DOT, "dot_norm": DOT_NORM, "gatv2": GATV2}
