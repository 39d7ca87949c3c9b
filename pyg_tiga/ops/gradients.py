"""Gradient rules, written once for both roads.

A rule takes the road's functions as `call` and the relation in the road's form, which
only has to offer `reverse()`. SpMM and SDDMM are each other's gradients; so are the
extremum's backward and its transpose, `select` (see the roads). Every rule is therefore
differentiable again, by the same functions.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

# The normalisation of the reversed relation that scales each edge by the same factor.
FLIPPED = {"none": "none", "dst": "src", "src": "dst"}


class Calls(Protocol):
    """The differentiable functions of a road that the rules call."""

    def spmm(
        self, relation: Any, x: Tensor, weight: Tensor | None, normalize: str
    ) -> Tensor:
        """Sum of weighted source features per destination."""

    def sddmm(self, relation: Any, a: Tensor, b: Tensor, normalize: str) -> Tensor:
        """Dot products of the two ends of every edge."""


def spmm(
    call: Calls,
    relation: Any,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    normalize: str,
    x_dtype: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of y_i = r_i sum_e w_e c_j x_j with respect to x and w.

    dx_j = c_j sum_e w_e r_i dy_i over the reversed relation, and
    dw_e = r_i c_j <dy_i, x_j>. A gradient is formed where its inputs were kept:
    `x_dtype` for x, `x` for the weights.
    """
    grad_x = grad_weight = None
    if x_dtype is not None:
        flipped = FLIPPED[normalize]
        grad_x = call.spmm(relation.reverse(), grad, weight, flipped).to(x_dtype)
    if x is not None and weight is not None:
        grad_weight = call.sddmm(relation, grad, x, normalize).to(weight.dtype)
    return grad_x, grad_weight


def sddmm(
    call: Calls,
    relation: Any,
    grad: Tensor,  # [E]
    a: Tensor,
    b: Tensor,
    normalize: str,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of s_e = r_i c_j <a_i, b_j> with respect to a and b."""
    grad_a = grad_b = None
    if needs[0]:
        grad_a = call.spmm(relation, b, grad, normalize).to(a.dtype)
    if needs[1]:
        flipped = FLIPPED[normalize]
        grad_b = call.spmm(relation.reverse(), a, grad, flipped).to(b.dtype)
    return grad_a, grad_b
