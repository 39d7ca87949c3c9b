"""The `torch.library` ops: opcheck, gradients twice, equality with the eager road."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional
from pyg_tiga.ops import bodies, library
from pyg_tiga.testing import ROWS, Case, Row, make_case, row

LAYOUTS = ("coo", "coo:reversed")


def _relation(case: Case, layout: str) -> tuple[Any, ...]:
    sizes = (case.num_src, case.num_dst)
    if layout == "coo":
        return ([case.edge_index], layout, *sizes)
    return ([case.edge_index.flip(0)], layout, *sizes)


def _op_arguments(case: Case, layout: str) -> dict[Any, tuple[Any, ...]]:
    relation = _relation(case, layout)
    x = case.x.detach().requires_grad_()
    weight = case.weight.detach().requires_grad_()
    a = case.x_dst.detach().requires_grad_()
    grad = case.grad.detach().requires_grad_()
    arguments = {
        library.spmm_op: (*relation, x, weight, "dst"),
        library.sddmm_op: (*relation, a, x, "src"),
        library.extremum_op: (*relation, x, "max", "split"),
    }
    out, aux = library.extremum_op(*relation, case.x, "max", "split")
    saved = (case.x, out, aux, "split")
    arguments[library.extremum_backward_op] = (*relation, grad, *saved)
    arguments[library.extremum_select_op] = (*relation, x, *saved)
    arguments[library.weighted_extremum_op] = (*relation, x, weight, "max", "split")
    given = (case.x, case.weight)
    out, aux = library.weighted_extremum_op(*relation, *given, "max", "split")
    given = (case.grad, *given, out, aux, "split")
    arguments[library.weighted_extremum_backward_op] = (*relation, *given)
    return arguments


OPS = (
    "spmm_op",
    "sddmm_op",
    "extremum_op",
    "extremum_backward_op",
    "extremum_select_op",
    "weighted_extremum_op",
    "weighted_extremum_backward_op",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, layout: str, device: torch.device) -> None:
    case = make_case(row("more_sources"), torch.float32, device)
    call = getattr(library, op)
    torch.library.opcheck(call, _op_arguments(case, layout)[call])


@pytest.mark.parametrize("normalize", ["none", "dst", "src"])
def test_sums_are_differentiable_twice(normalize: str) -> None:
    case = make_case(row("more_sources"), torch.float64)
    relation = library.Handle(*_relation(case, "coo"))
    inputs = [case.x[:, :2].detach(), case.weight, case.x_dst[:, :2].detach()]
    x, weight, a = (t.clone().requires_grad_() for t in inputs)

    def spmm(x: Tensor, weight: Tensor) -> Tensor:
        return library.LIBRARY.spmm(relation, x, weight, normalize)

    def sddmm(a: Tensor, b: Tensor) -> Tensor:
        return library.LIBRARY.sddmm(relation, a, b, normalize)

    assert torch.autograd.gradcheck(spmm, (x, weight))
    assert torch.autograd.gradgradcheck(spmm, (x, weight))
    assert torch.autograd.gradcheck(sddmm, (a, x))
    assert torch.autograd.gradgradcheck(sddmm, (a, x))


@pytest.mark.parametrize("road", ["eager", "library"])
@pytest.mark.parametrize("ties", ["split", "first"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_are_differentiable_twice(reduce: str, ties: str, road: str) -> None:
    case = make_case(row("more_sources"), torch.float64)
    x = case.x[:, :3].clone().requires_grad_()

    def extremum(x: Tensor) -> Tensor:
        if road == "eager":
            return functional.spmm(case.graph(), x, reduce=reduce, ties=ties)
        relation = library.Handle(*_relation(case, "coo"))
        return library.LIBRARY.extremum(relation, x, reduce, ties)

    assert torch.autograd.gradcheck(extremum, (x,))
    assert torch.autograd.gradgradcheck(extremum, (x,))


def _losses(reduce: str, weighted: bool) -> Callable[..., Tensor]:
    def loss(edge_index: Tensor, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        out = functional.spmm(
            edge_index,
            x,
            weight if weighted else None,
            reduce,
            size=(x.size(0), grad.size(0)),
        )
        return (out * grad).sum()

    return loss


@pytest.mark.parametrize(
    ("reduce", "weighted"),
    [("sum", False), ("sum", True), ("mean", True), ("max", False), ("min", False)],
)
def test_eager_and_compiled_roads_are_equal(
    reduce: str, weighted: bool, device: torch.device
) -> None:
    case = make_case(row("more_destinations"), torch.float32, device)
    loss = _losses(reduce, weighted)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for call in (loss, compiled):
        x = case.x.clone().requires_grad_()
        weight = case.weight.clone().requires_grad_()
        value = call(case.edge_index, x, weight, case.grad)
        wanted = (x, weight) if weighted else (x,)
        results.append((value.detach(), *torch.autograd.grad(value, wanted)))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


@pytest.mark.parametrize("ties", ["split", "first"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_weighted_extrema_are_compiled_whole(reduce: str, ties: str) -> None:
    case = make_case(row("unsorted"))
    # Whole numbers: there are ties.
    given = (case.x.round(), (4 * case.weight).round())

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return functional.spmm(case.edge_index, x, weight, reduce, ties=ties)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for run in (call, compiled):
        leaves = [value.clone().requires_grad_() for value in given]
        out = run(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, case.grad)])
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(eager, other)


def test_weighted_extrema_are_exported() -> None:
    case = make_case(row("unsorted"))

    class Model(torch.nn.Module):
        def forward(self, edges: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            return functional.spmm(edges, x, weight, "max")

    given = (case.edge_index, case.x, case.weight)
    program = torch.export.export(Model(), given).module()
    torch.testing.assert_close(program(*given), Model()(*given))


@pytest.mark.parametrize("problem", ROWS, ids=str)
def test_fakes_have_the_real_form(problem: Row) -> None:
    case = make_case(problem)
    relation = _relation(case, "coo")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = library.spmm_op(
            [mode.from_tensor(case.edge_index)],
            *relation[1:],
            mode.from_tensor(case.x),
            None,
            "none",
        )
    real = library.spmm_op(*relation, case.x, None, "none")
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype
    assert fake.stride() == real.stride()


def test_a_graph_crosses_the_boundary_by_its_handle() -> None:
    case = make_case(row("unsorted"))
    graph = case.graph().reverse()
    out = library.LIBRARY.spmm(library.Handle(*graph.handle()), case.grad, None, "none")
    assert torch.equal(out, bodies.spmm(graph, case.grad, None, "none"))
