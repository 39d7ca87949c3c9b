"""The vendor family: PyTorch's CSR kernel on the CPU, cuSPARSE on CUDA."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from pyg_tiga import UnsupportedError, functional, planner, reference
from pyg_tiga.testing import Row, make_case, row
from tests.impls.family_checks import (
    EVERY_ROW,
    HALVES,
    MANY,
    check_sums,
    star,
    sums,
)

NAMES = {"cpu": "torch_sparse_mm", "cuda": "cusparse"}
SUMS = pytest.mark.parametrize(
    ("reduce", "weighted"),
    [("sum", False), ("sum", True), ("mean", False), ("mean", True)],
)


@pytest.fixture(autouse=True)
def vendor_only() -> Any:
    with planner.pin("vendor"):
        yield


@SUMS
@EVERY_ROW
def test_sums_and_their_gradients(
    problem: Row, reduce: str, weighted: bool, device: torch.device
) -> None:
    case = make_case(problem, torch.float32, device)
    check_sums(case, sums(case, reduce, weighted), reduce, weighted)
    chosen = functional.last_plan().implementation
    assert (chosen.name, chosen.family) == (NAMES[device.type], "vendor")


@HALVES
@pytest.mark.parametrize("name", ["hub_row", "hub_column", "unsorted"])
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(row(name), dtype, device)
    for reduce, weighted in (("sum", False), ("sum", True), ("mean", True)):
        check_sums(case, sums(case, reduce, weighted), reduce, weighted)


@HALVES
def test_half_precision_accumulates_in_float32(
    dtype: torch.dtype, device: torch.device
) -> None:
    edge_index, x = star(dtype, device)
    x.requires_grad_()
    assert (functional.spmm(edge_index, x)[0] == MANY).all()
    assert (functional.spmm(edge_index, x, reduce="mean")[0] == 1).all()
    out = functional.spmm(edge_index.flip(0), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (grad[0] == MANY).all()


def test_float64_stays_float64(device: torch.device) -> None:
    case = make_case(row("hub_row"), torch.float64, device)
    for reduce in ("sum", "mean"):
        found = sums(case, reduce, True)
        assert found[0].dtype == torch.float64
        check_sums(case, found, reduce, True)


@pytest.mark.parametrize("reduce", ["max", "min"])
@EVERY_ROW
def test_extrema_without_a_gradient(problem: Row, reduce: str) -> None:
    case = make_case(problem)
    out = functional.spmm(case.graph(), case.x, reduce=reduce)
    assert functional.last_plan().implementation.name == "torch_sparse_mm"
    with planner.pin("scatter"):
        expected = functional.spmm(case.graph(), case.x, reduce=reduce)
    assert torch.equal(out, expected)


def test_extrema_keep_nan_and_infinity() -> None:
    case = make_case(row("unsorted"))
    x = case.x.clone()
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    graph = case.graph()
    for reduce in ("sum", "max", "min"):
        out = functional.spmm(graph, x, reduce=reduce)
        # Not the scatter family: torch_scatter, where it is installed, drops a NaN.
        if reduce == "sum":
            expected = reference.spmm(graph, x, None, "none")
        else:
            expected = reference.spmm_extremum(graph, x, reduce)[0]
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_gradients_of_extrema_are_refused() -> None:
    case = make_case(row("unsorted"))
    x = case.x.clone().requires_grad_()
    with pytest.raises(UnsupportedError) as caught:
        functional.spmm(case.graph(), x, reduce="max")
    assert caught.value.rejections == {
        "torch_sparse_mm": ["ties is split, required none"]
    }
    with planner.pin(None):
        functional.spmm(case.graph(), x, reduce="max")
    plan = functional.last_plan()
    assert plan.implementation.name == "scatter"
    assert "not torch_sparse_mm: ties is split, required none" in plan.explain()


def test_deterministic_mode_refuses_cusparse(device: torch.device) -> None:
    case = make_case(row("unsorted"), torch.float32, device)
    problem = functional.plan_spmm(case.graph(), case.x).problem
    strict = dataclasses.replace(problem, deterministic=True)
    if device.type == "cpu":
        assert planner.plan(strict).implementation.name == "torch_sparse_mm"
        return
    with pytest.raises(UnsupportedError, match="no fixed order"):
        planner.plan(strict)


def test_autocast_leaves_the_dtype_alone(device: torch.device) -> None:
    case = make_case(row("unsorted"), torch.float32, device)
    plain = functional.spmm(case.graph(), case.x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = functional.spmm(case.graph(), case.x)
    assert torch.equal(out, plain)


def test_pytorchs_notice_of_beta_is_not_heard() -> None:
    case = make_case(row("unsorted"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.spmm(case.graph(), case.x)
