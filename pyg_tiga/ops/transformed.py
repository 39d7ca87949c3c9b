"""The road of `torch.func` transforms and forward-mode differentiation.

It is the reference, which composes with them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_tiga import reference
from pyg_tiga.errors import log_fallback
from pyg_tiga.ops.bodies import scaled
from pyg_tiga.relation.graph import Graph


def is_active(*operands: Tensor | None) -> bool:
    """Whether a transform of `torch.func` is at work, or an operand has a tangent."""
    return torch._C._are_functorch_transforms_active() or has_tangent(*operands)


def has_tangent(*operands: Tensor | None) -> bool:
    """Whether one of the operands has a tangent."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None
        for x in operands
    )


def note() -> None:
    """Log once that transforms take this road."""
    log_fallback(
        "an operation under torch.func or with tangents",
        "fused kernels have no rule for transforms",
    )


class _Transformed:
    """The road's differentiable functions; `relation` is a `Graph`."""

    @staticmethod
    def spmm(
        relation: Graph, x: Tensor, weight: Tensor | None, normalize: str
    ) -> Tensor:
        note()
        return reference.spmm(relation, x, weight, normalize)

    @staticmethod
    def sddmm(relation: Graph, a: Tensor, b: Tensor, normalize: str) -> Tensor:
        note()
        if normalize == "dst":
            a = scaled(a, relation.rows())
        elif normalize == "src":
            b = scaled(b, relation.columns())
        return reference.sddmm(relation, a, b)

    @staticmethod
    def extremum(relation: Graph, x: Tensor, reduce: str, ties: str) -> Tensor:
        note()
        return reference.spmm_extremum(relation, x, reduce, ties=ties)[0]

    @staticmethod
    def weighted_extremum(
        relation: Graph, x: Tensor, weight: Tensor, reduce: str, ties: str
    ) -> Tensor:
        note()
        return reference.spmm_extremum(relation, x, reduce, weight, ties)[0]

    @staticmethod
    def extremum_backward(
        relation: Graph, grad: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        note()
        saved = (x, out, aux, ties)
        return reference.spmm_extremum_backward(relation, grad, *saved)

    @staticmethod
    def extremum_select(
        relation: Graph, value: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        note()
        return reference.spmm_extremum_select(relation, value, x, out, aux, ties)


TRANSFORMED = _Transformed()
