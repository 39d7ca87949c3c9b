"""SuperGAT's score, the example of docs/adding_a_score.md."""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.scores import Score, load_operand, no_vjp, same_vjp


# begin
@triton.jit
def supergat_parts(row, col):
    """The sum of the first channels, and the gate, of <x_i, x_j> over the others."""
    first = (tl.arange(0, row.shape[3]) == 0)[None, None, None, :]
    number = tl.sum(tl.where(first, row + col, 0.0), axis=3)
    gate = tl.sigmoid(tl.sum(tl.where(first, 0.0, row * col), axis=3))
    return number, gate, first


@triton.jit
def supergat_score(row, col, term, param, scale):
    """LeakyReLU((a_i + a_j) sigmoid(<x_i, x_j>)) + term; `scale` is the slope."""
    number, gate, _ = supergat_parts(row, col)
    s = number * gate * tl.where(number > 0, 1.0, scale) + term
    return s, s


@triton.jit
def supergat_vjp_row(grad, row, col, param, aux, scale):
    """By [a_i, x_i]."""
    number, gate, first = supergat_parts(row, col)
    grad = grad * gate * tl.where(number > 0, 1.0, scale)
    inner = tl.expand_dims(grad * number * (1.0 - gate), 3) * col
    return tl.where(first, tl.expand_dims(grad, 3), inner)


@triton.jit
def supergat_vjp_col(grad, row, col, param, aux, scale):
    """By [a_j, x_j]: the score is symmetric."""
    return supergat_vjp_row(grad, col, row, param, aux, scale)


SUPERGAT = Score(
    load_operand,
    load_operand,
    supergat_score,
    supergat_vjp_row,
    supergat_vjp_col,
    no_vjp,
    same_vjp,
    vector=True,
)
# end
