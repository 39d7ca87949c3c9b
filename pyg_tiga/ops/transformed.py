"""The road of `torch.func` transforms: the reference, which composes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga import reference
from pyg_tiga.errors import log_fallback
from pyg_tiga.relation.graph import Graph


def is_active() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._are_functorch_transforms_active()


def note() -> None:
    """Log once that transforms take this road."""
    log_fallback(
        "an operation under torch.func", "fused kernels have no rule for transforms"
    )


class _Transformed:
    """The road's differentiable functions; `relation` is a `Graph`."""

    @staticmethod
    def spmm(
        relation: Graph, x: Tensor, weight: Tensor | None, normalize: str
    ) -> Tensor:
        note()
        x = x if weight is None else x.to(torch.result_type(x, weight))
        return reference.spmm(relation, x, weight, normalize)

    @staticmethod
    def sddmm(relation: Graph, a: Tensor, b: Tensor, normalize: str) -> Tensor:
        note()
        return reference.sddmm(relation, a, b)

    @staticmethod
    def extremum(relation: Graph, x: Tensor, reduce: str, ties: str) -> Tensor:
        note()
        return reference.spmm_extremum(relation, x, reduce, ties=ties)[0]


TRANSFORMED = _Transformed()
