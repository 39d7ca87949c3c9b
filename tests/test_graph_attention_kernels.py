"""Attention with two vectors by our kernels: functions and layers, end to end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, testing
from pyg_tiga.nn import GATv2Conv, TransformerConv
from tests.vector_checks import FORMS, OPTIONS, Given

pytestmark = [pytest.mark.usefixtures("small_pieces")]

EVERY_FORM = pytest.mark.parametrize("form", FORMS)
# Each alone is tested on the kernels themselves.
SOME = ("plain", "everything")
SOME_OPTIONS = pytest.mark.parametrize("options", [OPTIONS[k] for k in SOME], ids=SOME)
OBJECTIVES = pytest.mark.parametrize("objective", ["time", "memory"])
ROWS = ("hub_row", "hub_column", "more_sources", "no_edges")
LAYERS: dict[str, Any] = {
    "gatv2": lambda: GATv2Conv(8, 4, heads=2),
    "gatv2, shared": lambda: GATv2Conv(8, 4, heads=2, share_weights=True),
    "gatv2, averaged": lambda: GATv2Conv(8, 4, 3, concat=False, residual=True),
    "transformer": lambda: TransformerConv(8, 4, heads=2, beta=True),
    "transformer, bare": lambda: TransformerConv(8, 5, root_weight=False),
}


def runs_ours(form: str) -> None:
    plan = functional.last_plan()
    assert plan.implementation.family == "triton"
    assert plan.problem.form == form


@OBJECTIVES
@SOME_OPTIONS
@EVERY_FORM
@pytest.mark.parametrize("name", ROWS)
def test_functions(
    name: str,
    form: str,
    options: dict[str, Any],
    objective: str,
    device: torch.device,
) -> None:
    row = testing.row(name)
    given = Given(form, row, torch.float32, device=device, **options)
    truth = Given(form, row, torch.float64, device="cpu", **options)
    out = given.out(objective=objective)
    if name != "no_edges":
        runs_ours(form)
    expected = truth.dense()[0]
    torch.testing.assert_close(
        out.detach().double().cpu(), expected.detach(), rtol=1e-4, atol=1e-5
    )
    found, exact = given.gradients(out), truth.gradients(expected)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("row", ["hub_row", "hub_column", "self_loops"])
def test_layers(name: str, row: str, device: torch.device) -> None:
    case = testing.make_case(testing.row(row), device=device)
    layer = LAYERS[name]().to(device)
    theirs = copy.deepcopy(layer).double()
    theirs.__class__ = layer._pyg_class
    x = torch.randn(case.num_src, 8, device=device)
    found, expected = (
        _step(each, x.to(next(each.parameters()).dtype), case.edge_index)
        for each in (layer, theirs)
    )
    runs_ours("gatv2" if name.startswith("gatv2") else "dot")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def _step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x, edge_index)
    grad = torch.linspace(-1, 1, out.numel(), device=x.device, dtype=out.dtype)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(out, inputs, grad.view_as(out), allow_unused=True)
    found = [
        torch.zeros_like(of) if one is None else one
        for one, of in zip(found, inputs, strict=True)
    ]
    return [out.detach(), *found]
