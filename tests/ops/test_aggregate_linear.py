"""The step of aggregation and linear maps against its parts, twice differentiable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga.ops.aggregate_linear import Maps, aggregate_linear
from pyg_tiga.ops.eager import EAGER
from pyg_tiga.testing import Case, make_case, row

FORMS = ["same", "bipartite", "no root", "no bias"]


def _operands(form: str, device: torch.device) -> tuple[Case, list[Tensor | None]]:
    name = "more_sources" if form == "bipartite" else "unsorted"
    case = make_case(row(name), torch.float64, device)
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(device).requires_grad_()

    x = case.x[:, :3].clone().requires_grad_()
    x_dst = None
    if form != "no root":
        x_dst = draw(case.num_dst, 4) if form == "bipartite" else x
    right = None if x_dst is None else draw(2, x_dst.size(1))
    bias = None if form == "no bias" else draw(2)
    return case, [x, x_dst, draw(2, 3), bias, right]


@pytest.mark.parametrize("normalize", ["none", "dst"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_its_parts(form: str, normalize: str, device: torch.device) -> None:
    case, (x, x_dst, left, bias, right) = _operands(form, device)
    graph = case.graph()
    whole = aggregate_linear(graph, x, x_dst, Maps(left, bias, right), normalize)
    parts = F.linear(EAGER.spmm(graph, x, None, normalize), left, bias)
    if right is not None:
        parts = parts + F.linear(x_dst, right)
    torch.testing.assert_close(whole, parts)
    leaves = [t for t in dict.fromkeys((x, x_dst, left, bias, right)) if t is not None]
    grad = torch.randn_like(parts)
    for got, want in zip(
        torch.autograd.grad(whole, leaves, grad),
        torch.autograd.grad(parts, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_is_differentiable_twice(form: str) -> None:
    case, operands = _operands(form, torch.device("cpu"))
    graph = case.graph()
    given = list(dict.fromkeys(t for t in operands if t is not None))
    order = {id(t): place for place, t in enumerate(given)}
    places = [None if t is None else order[id(t)] for t in operands]

    def call(*tensors: Tensor) -> Tensor:
        x, x_dst, *maps = (None if p is None else tensors[p] for p in places)
        return aggregate_linear(graph, x, x_dst, Maps(*maps), "dst")

    assert torch.autograd.gradcheck(call, tuple(given))
    assert torch.autograd.gradgradcheck(call, tuple(given))


def test_without_gradients_nothing_is_kept() -> None:
    case, (x, x_dst, left, bias, right) = _operands("same", torch.device("cpu"))
    with torch.no_grad():
        out = aggregate_linear(case.graph(), x, x_dst, Maps(left, bias, right), "dst")
    assert out.grad_fn is None
