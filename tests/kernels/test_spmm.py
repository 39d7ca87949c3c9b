"""Our kernels against the reference, on every row: interpreted on CPU, real on CUDA.

The interpreter needs seconds where a GPU needs microseconds. It gets every row and
every kernel flag in fp32, and of the cross products a selection; CUDA gets them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, planner, reference
from pyg_tiga.planner import dispatch
from pyg_tiga.problem import Schedule
from pyg_tiga.testing import (
    ROWS,
    Case,
    Row,
    assert_accurate,
    assert_gradient_accurate,
    make_case,
    row,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows that the interpreter also runs in half precision.
HALF_ROWS = ("hub_row", "duplicates", "offset")
SUMS = {
    "cpu": (("sum", False), ("mean", True)),
    "cuda": (("sum", False), ("sum", True), ("mean", False), ("mean", True)),
}
EXTREMA = {
    "cpu": (("max", "split"), ("min", "first")),
    "cuda": (("max", "split"), ("min", "first"), ("max", "first"), ("min", "split")),
}
RUNS = {"cpu": 2, "cuda": 10}
SCHEDULES = {
    "short": Schedule(rows=4, edges=2, slice=16, warps=1, chunk=64),
    "long": Schedule(rows=1, edges=8, slice=32, warps=1, chunk=64),
    "two": Schedule(rows=2, edges=4, slice=128, warps=2, chunk=128),
}


def _on_every_device() -> list[Any]:
    """Rows in every dtype: a selection on the CPU, all of them on CUDA."""
    cases = []
    for problem, dtype in itertools.product(ROWS, DTYPES):
        name = f"{problem}-{str(dtype).removeprefix('torch.')}"
        if dtype == torch.float32 or problem.name in HALF_ROWS:
            cases.append(pytest.param(problem, dtype, "cpu", id=f"cpu-{name}"))
        marks = pytest.mark.gpu
        cases.append(
            pytest.param(problem, dtype, "cuda", id=f"cuda-{name}", marks=marks)
        )
    return cases


EVERY_CASE = pytest.mark.parametrize("problem, dtype, device", _on_every_device())


@pytest.fixture(autouse=True)
def triton_only() -> Iterator[None]:
    with planner.pin("triton"):
        yield


@pytest.fixture(params=SCHEDULES, ids=str)
def schedule(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run with this schedule; hubs of the rows are longer than its chunk."""
    chosen = SCHEDULES[request.param]
    monkeypatch.setattr(dispatch, "default_schedule", lambda problem: chosen)
    dispatch._plan.cache_clear()
    yield
    dispatch._plan.cache_clear()


def _grads(out: Tensor, case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, case.grad.to(out.dtype))


def _leaves(case: Case) -> tuple[Tensor, Tensor]:
    return case.x.detach().requires_grad_(), case.weight.detach().requires_grad_()


def _reference_sum(case: Case, reduce: str, weighted: bool) -> tuple[Tensor, ...]:
    x, weight = _leaves(case)
    normalize = "dst" if reduce == "mean" else "none"
    used = weight if weighted else None
    out = reference.spmm(case.graph(), x, used, normalize)
    return (out, *_grads(out, case, *((x, weight) if weighted else (x,))))


@EVERY_CASE
def test_sums_and_their_gradients(
    problem: Row, dtype: torch.dtype, device: str
) -> None:
    case = make_case(problem, dtype, device)
    for reduce, weighted in SUMS[device]:
        x, weight = _leaves(case)
        out = functional.spmm(case.graph(), x, weight if weighted else None, reduce)
        found = (out, *_grads(out, case, *((x, weight) if weighted else (x,))))
        plain = _reference_sum(case, reduce, weighted)
        truth = _reference_sum(case.double(), reduce, weighted)
        assert functional.last_plan().implementation.family == "triton"
        assert_accurate(found[0], plain[0], truth[0])
        for got, want, exact in zip(found[1:], plain[1:], truth[1:], strict=True):
            assert_gradient_accurate(got, want, exact)


@pytest.mark.parametrize("name", ["hub_row", "hub_column", "width_63"])
def test_schedules_agree_with_the_reference(
    name: str, schedule: None, device: torch.device
) -> None:
    case = make_case(row(name), torch.float32, device)
    x, weight = _leaves(case)
    out = functional.spmm(case.graph(), x, weight, "mean")
    found = (out, *_grads(out, case, x, weight))
    plain = _reference_sum(case, "mean", True)
    truth = _reference_sum(case.double(), "mean", True)
    for got, want, exact in zip(found, plain, truth, strict=True):
        assert_gradient_accurate(got, want, exact)
    _check_extrema(case)


@EVERY_CASE
def test_extrema_and_their_gradients(
    problem: Row, dtype: torch.dtype, device: str
) -> None:
    case = make_case(problem, dtype, device)
    _check_extrema(case.tied())
    if device == "cuda":
        _check_extrema(case)


def test_ties_and_reductions_are_independent(device: torch.device) -> None:
    case = make_case(row("duplicates"), torch.float32, device)
    for features in (case, case.tied()):
        _check_extrema(features, EXTREMA["cuda"])


def _check_extrema(case: Case, kinds: Iterable[tuple[str, str]] | None = None) -> None:
    for reduce, ties in kinds or EXTREMA[case.x.device.type]:
        x, _ = _leaves(case)
        out = functional.spmm(case.graph(), x, reduce=reduce, ties=ties)
        (grad,) = _grads(out, case, x)
        plain = _reference_extremum(case, reduce, ties)
        truth = _reference_extremum(case.double(), reduce, ties)
        assert torch.equal(out, plain[0])
        assert_gradient_accurate(grad, plain[1], truth[1], f"{reduce} {ties}")
        forward = functional.spmm(case.graph(), case.x, reduce=reduce)
        assert torch.equal(forward, out)


def _reference_extremum(case: Case, reduce: str, ties: str) -> tuple[Tensor, Tensor]:
    x, _ = _leaves(case)
    graph = case.graph()
    out, aux = reference.spmm_extremum(graph, x, reduce, ties=ties)
    grad = case.grad.to(out.dtype)
    return out, reference.spmm_extremum_backward(graph, grad, x, out, aux, ties)


@pytest.mark.parametrize("name", ["hub_row", "hub_column", "duplicates"])
def test_first_winner_without_atomics_is_the_same(
    name: str, device: torch.device
) -> None:
    case = make_case(row(name), torch.float32, device).tied()
    grads = []
    for implementation in ("triton_columns", "triton_winners"):
        with planner.pin("triton"):
            x, _ = _leaves(case)
            out = functional.spmm(case.graph(), x, reduce="max", ties="first")
        with planner.pin(implementation):
            grads += _grads(out, case, x)
    torch.testing.assert_close(grads[0], grads[1])


def test_nan_and_infinity_are_kept(device: torch.device) -> None:
    case = make_case(row("unsorted"), torch.float32, device)
    x = case.x.clone()
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    graph = case.graph()
    for reduce in ("max", "min"):
        for ties in ("split", "first"):
            leaf = x.clone().requires_grad_()
            out = functional.spmm(graph, leaf, reduce=reduce, ties=ties)
            (grad,) = _grads(out, case, leaf)
            want, aux = reference.spmm_extremum(graph, x, reduce, ties=ties)
            torch.testing.assert_close(out, want, equal_nan=True, rtol=0, atol=0)
            expected = reference.spmm_extremum_backward(
                graph, case.grad, x, want, aux, ties
            )
            torch.testing.assert_close(grad, expected, equal_nan=True)
    out = functional.spmm(graph, x)
    torch.testing.assert_close(out, reference.spmm(graph, x), equal_nan=True)


def test_rows_of_minus_infinity_are_not_empty_rows(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 1], [0, 0]], device=device)
    x = torch.full((2, 4), float("-inf"), device=device)
    out = functional.spmm(edge_index, x, reduce="max")
    assert (out[0] == float("-inf")).all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("ties", ["split", "first"])
def test_bit_identical_from_run_to_run(ties: str, device: torch.device) -> None:
    case = make_case(row("hub_row"), torch.float32, device)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [_everything(case, ties) for _ in range(RUNS[device.type])]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def _everything(case: Case, ties: str) -> list[Tensor]:
    x, weight = _leaves(case)
    out = functional.spmm(case.graph(), x, weight, "mean")
    best = functional.spmm(case.graph(), x, reduce="max", ties=ties)
    return [
        out,
        best,
        *_grads(out, case, x, weight),
        *_grads(best, case, x),
    ]


@pytest.mark.parametrize("problem", ROWS, ids=str)
def test_sddmm_and_its_gradients(problem: Row, device: torch.device) -> None:
    case = make_case(problem, torch.float32, device)
    results = []
    for part, op in (
        (case, functional.sddmm),
        (case, reference.sddmm),
        (case.double(), reference.sddmm),
    ):
        a, b = part.x_dst.clone().requires_grad_(), part.x.detach().requires_grad_()
        out = op(part.graph(), a, b)
        results.append((out, *torch.autograd.grad(out, (a, b), part.weight)))
    for got, want, exact in zip(*results, strict=True):
        assert_gradient_accurate(got, want, exact)
