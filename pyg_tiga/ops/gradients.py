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


def dtypes_of(
    one: Tensor, other: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Any, Any]:
    """Dtypes of the gradients of two operands; None for one that is not wanted."""
    wants_one, wants_other = needs
    return (
        one.dtype if wants_one else None,
        other.dtype if wants_other and other is not None else None,
    )


def spmm(
    call: Calls,
    relation: Any,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    normalize: str,
    dtypes: tuple[Any, Any],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of y_i = r_i sum_e w_e c_j x_j with respect to x and w.

    dx_j = c_j sum_e w_e r_i dy_i over the reversed relation, and
    dw_e = r_i c_j <dy_i, x_j>. Each reads the other's operand, which need not be there
    where `dtypes` (see :func:`dtypes_of`) does not ask for it.
    """
    grad_x = grad_weight = None
    x_dtype, weight_dtype = dtypes
    if x_dtype is not None:
        flipped, weight = FLIPPED[normalize], _conjugate(weight)
        grad_x = call.spmm(relation.reverse(), grad, weight, flipped).to(x_dtype)
    if weight_dtype is not None:
        found = call.sddmm(relation, grad, _conjugate(x), normalize)
        grad_weight = found.to(weight_dtype)
    return grad_x, grad_weight


def sddmm(
    call: Calls,
    relation: Any,
    grad: Tensor,  # [E]
    a: Tensor | None,
    b: Tensor | None,
    normalize: str,
    dtypes: tuple[Any, Any],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of s_e = r_i c_j <a_i, b_j> with respect to a and b.

    Each reads the other; see :func:`spmm`.
    """
    grad_a = grad_b = None
    a_dtype, b_dtype = dtypes
    if a_dtype is not None:
        grad_a = call.spmm(relation, _conjugate(b), grad, normalize).to(a_dtype)
    if b_dtype is not None:
        reverse, flipped = relation.reverse(), FLIPPED[normalize]
        grad_b = call.spmm(reverse, _conjugate(a), grad, flipped).to(b_dtype)
    return grad_a, grad_b


def _conjugate(operand: Tensor | None) -> Tensor | None:
    """The conjugate, in memory: PyTorch's conventions for complex gradients."""
    if operand is None or not operand.is_complex():
        return operand
    return operand.conj().resolve_conj()
