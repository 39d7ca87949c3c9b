"""What the tests of the families share: a call with its gradients, and the truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, reference
from pyg_tiga.testing import ROWS, Case, assert_accurate, assert_gradient_accurate

EVERY_ROW = pytest.mark.parametrize("problem", ROWS, ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
NORMALIZE = {"sum": "none", "mean": "dst"}
MANY = 4096  # Both half types hold it, and neither counts up to it by ones.


def sums(case: Case, reduce: str, weighted: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a sum or mean, by whatever the planner chooses."""
    x, weight = _leaves(case)
    used = weight if weighted else None
    out = functional.spmm(case.graph(), x, used, reduce)
    return _with_gradients(out, case, x, weight, weighted)


def check_sums(
    case: Case,
    found: tuple[Tensor, ...],
    reduce: str,
    weighted: bool,
    open_terms: int = 0,
) -> None:
    """Hold output and gradients to the float64 truth."""
    plain = _reference_sums(case, reduce, weighted)
    truth = _reference_sums(case.double(), reduce, weighted)
    assert_accurate(found[0], plain[0], truth[0], open_terms=open_terms)
    for got, want, exact in zip(found[1:], plain[1:], truth[1:], strict=True):
        assert_gradient_accurate(got, want, exact, open_terms=open_terms)


def extremum(
    case: Case, reduce: str, ties: str, weighted: bool = False
) -> tuple[Tensor, ...]:
    """Output and gradients of a maximum or minimum."""
    x, weight = _leaves(case)
    used = weight if weighted else None
    out = functional.spmm(case.graph(), x, used, reduce, ties=ties)
    return _with_gradients(out, case, x, weight, weighted)


def check_extremum(
    case: Case,
    found: tuple[Tensor, ...],
    reduce: str,
    ties: str,
    weighted: bool = False,
    open_terms: int = 0,
) -> None:
    """Hold the output to equality and gradients to the float64 truth."""
    plain = _reference_extremum(case, reduce, ties, weighted)
    truth = _reference_extremum(case.double(), reduce, ties, weighted)
    assert torch.equal(found[0], plain[0])
    for got, want, exact in zip(found[1:], plain[1:], truth[1:], strict=True):
        assert_gradient_accurate(got, want, exact, open_terms=open_terms)


def star(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Edges from `MANY` nodes to node 0, and a feature of 1 at every node."""
    src = torch.arange(MANY, device=device)
    edge_index = torch.stack([src, torch.zeros_like(src)])
    return edge_index, torch.ones(MANY, 3, dtype=dtype, device=device)


def _reference_sums(case: Case, reduce: str, weighted: bool) -> tuple[Tensor, ...]:
    x, weight = _leaves(case)
    used = weight if weighted else None
    out = reference.spmm(case.graph(), x, used, NORMALIZE[reduce])
    return _with_gradients(out, case, x, weight, weighted)


def _reference_extremum(
    case: Case, reduce: str, ties: str, weighted: bool
) -> tuple[Tensor, ...]:
    x, weight = _leaves(case)
    used = weight if weighted else None
    out, _ = reference.spmm_extremum(case.graph(), x, reduce, used, ties)
    return _with_gradients(out, case, x, weight, weighted)


def _leaves(case: Case) -> tuple[Tensor, Tensor]:
    return case.x.detach().requires_grad_(), case.weight.detach().requires_grad_()


def _with_gradients(
    out: Tensor, case: Case, x: Tensor, weight: Tensor, weighted: bool
) -> tuple[Tensor, ...]:
    wanted = (x, weight) if weighted else (x,)
    grads = torch.autograd.grad(out, wanted, case.grad.to(out.dtype))
    return (out.detach(), *grads)
