"""The scatter family, with and without torch_scatter, against the float64 truth."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import _features, functional, planner
from pyg_tiga.relation.graph import Graph
from pyg_tiga.testing import Case, Row, make_case, row
from tests.impls.family_checks import (
    EVERY_ROW,
    HALVES,
    MANY,
    check_extremum,
    check_sums,
    extremum,
    star,
    sums,
)

pytestmark = pytest.mark.scatter

SUMS = pytest.mark.parametrize(
    ("reduce", "weighted"),
    [("sum", False), ("sum", True), ("mean", False), ("mean", True)],
)
REDUCE = pytest.mark.parametrize("reduce", ["max", "min"])
TIES = pytest.mark.parametrize("ties", ["split", "first"])


class Spy:
    """torch_scatter, with a count of its calls."""

    def __init__(self, module: ModuleType) -> None:
        self.calls: Counter[str] = Counter()
        self._module = module

    def segment_csr(self, *args: Any, reduce: str) -> Tensor:
        self.calls[reduce] += 1
        return self._module.segment_csr(*args, reduce=reduce)


@pytest.fixture(params=["without", "with"])
def spy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Spy | None:
    """torch_scatter if it is to be used, else nothing."""
    module = _features.torch_scatter()
    found = None
    if request.param == "with":
        if module is None:
            pytest.skip("torch_scatter is not installed")
        found = Spy(module)
    monkeypatch.setattr(_features, "torch_scatter", lambda: found)
    return found


@pytest.fixture(autouse=True)
def scatter_only() -> Any:
    with planner.pin("scatter"):
        yield


def _open_terms(case: Case) -> int:
    """Length of the longest sum whose order is left open: GPUs add atomically."""
    if not case.x.is_cuda or case.edge_index.numel() == 0:
        return 0
    return max(int(ends.long().bincount().max()) for ends in case.edge_index)


def _count(spy: Spy | None, reduce: str) -> int:
    return 0 if spy is None else spy.calls[reduce]


@SUMS
@EVERY_ROW
def test_sums_and_their_gradients(
    problem: Row, reduce: str, weighted: bool, spy: Spy | None, device: torch.device
) -> None:
    case = make_case(problem, torch.float32, device)
    found = sums(case, reduce, weighted)
    check_sums(case, found, reduce, weighted, _open_terms(case))
    assert functional.last_plan().implementation.family == "scatter"
    plain = reduce == "sum" and not weighted
    assert bool(_count(spy, "sum")) == (plain and spy is not None)


@TIES
@REDUCE
@EVERY_ROW
def test_extrema_and_their_gradients(
    problem: Row, reduce: str, ties: str, spy: Spy | None, device: torch.device
) -> None:
    case = make_case(problem, torch.float32, device)
    for features in (case, case.tied()):
        found = extremum(features, reduce, ties)
        check_extremum(features, found, reduce, ties, open_terms=_open_terms(features))
        forward = functional.spmm(features.graph(), features.x, reduce=reduce)
        assert torch.equal(forward, found[0])
    # torch_scatter knows neither rule at ties: it runs where no gradient is wanted.
    assert _count(spy, reduce) == (0 if spy is None else 2)


@TIES
@REDUCE
@pytest.mark.parametrize("name", ["duplicates", "hub_row", "no_edges"])
def test_weighted_extrema(
    name: str, reduce: str, ties: str, spy: Spy | None, device: torch.device
) -> None:
    case = make_case(row(name), torch.float32, device).tied()
    found = extremum(case, reduce, ties, weighted=True)
    check_extremum(
        case, found, reduce, ties, weighted=True, open_terms=_open_terms(case)
    )


@HALVES
@pytest.mark.parametrize("name", ["hub_row", "hub_column", "unsorted"])
def test_half_precision(
    name: str, dtype: torch.dtype, spy: Spy | None, device: torch.device
) -> None:
    case = make_case(row(name), dtype, device)
    for reduce, weighted in (("sum", False), ("sum", True), ("mean", True)):
        found = sums(case, reduce, weighted)
        check_sums(case, found, reduce, weighted, _open_terms(case))
    case = case.tied()
    for reduce, ties in (("max", "split"), ("min", "first")):
        found = extremum(case, reduce, ties)
        check_extremum(case, found, reduce, ties, open_terms=_open_terms(case))


@HALVES
def test_half_precision_accumulates_in_float32(
    dtype: torch.dtype, spy: Spy | None, device: torch.device
) -> None:
    edge_index, x = star(dtype, device)
    x.requires_grad_()
    assert (functional.spmm(edge_index, x)[0] == MANY).all()
    assert (functional.spmm(edge_index, x, reduce="mean")[0] == 1).all()
    # The other way round the long sum is that of the gradient.
    out = functional.spmm(edge_index.flip(0), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (grad[0] == MANY).all()


def test_integers_are_summed(spy: Spy | None) -> None:
    case = make_case(row("unsorted"))
    x = torch.arange(24).view(24, 1)
    out = functional.spmm(case.graph(), x)
    assert out.dtype == torch.int64
    assert torch.equal(out.double(), functional.spmm(case.graph(), x.double()))


def test_a_bad_index_is_never_read(
    spy: Spy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_TIGA_VALIDATE", "deferred")
    bad = torch.tensor([[0, 1], [2, 10**6]])
    for reduce in ("sum", "mean", "max"):
        with pytest.raises(ValueError, match="1000000"):
            functional.spmm(bad.clone(), torch.ones(3, 2), reduce=reduce)


def _explained(case: Case, **options: Any) -> str:
    return functional.plan_spmm(case.graph(), case.x, **options).explain()


def test_the_plan_says_what_runs(spy: Spy | None) -> None:
    case = make_case(row("unsorted"))
    for reduce in ("sum", "mean", "max", "min"):
        text = _explained(case, reduce=reduce)
        assert "runs: scatter (scatter)" in text
        assert "chosen by: pinned" in text
    with planner.pin(None):
        text = _explained(case, weight=case.weight, reduce="max")
    assert "runs: scatter (scatter)" in text
    assert "chosen by: table" in text
    assert "not torch_sparse_mm: weighted is True, required False" in text


def test_a_graph_that_needs_no_scatter_says_so() -> None:
    edge_index = torch.tensor([[0, 1], [1, 0]])
    graph = Graph.from_edge_index(edge_index, 2)
    with planner.pin(None):
        plan = functional.plan_spmm(graph, torch.ones(2, 2))
    assert plan.implementation.family == "vendor"
    assert plan.rejected == {}
