"""Edits in place between forward and backward: an error, or no difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import Tensor

from pyg_tiga import functional, planner
from pyg_tiga import nn as ours
from pyg_tiga.impls import vendor_attention
from pyg_tiga.planner import dispatch

NODES, EDGES, HEADS, WIDTH = 6, 20, 2, 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any family, however small the problem."""
    monkeypatch.setattr(vendor_attention, "FEWEST", 0)
    dispatch._plan.cache_clear()
    yield
    dispatch._plan.cache_clear()


FAMILIES = pytest.mark.parametrize("family", ["triton", "scatter", "vendor"])


class Call:
    """A function of attention with what it takes, drawn anew."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        draw = lambda *shape: torch.randn(shape, device=device).requires_grad_()  # noqa: E731
        self.edges = torch.randint(NODES, (2, EDGES), device=device)
        nodes, vector = (NODES, HEADS, WIDTH), (HEADS, WIDTH)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "additive": [nodes, nodes[:2], nodes[:2]],
            "gat": [nodes, vector, vector],
            "dot": [nodes] * 3,
            "features": [nodes] * 3,
            "gatv2": [nodes, nodes, vector],
        }
        self.leaves = [draw(*shape) for shape in shapes[name]]
        self.mask = torch.rand(EDGES, device=device) < 0.7
        self.seed = torch.tensor([3], device=device)
        self.attr = torch.randn(EDGES, 3, device=device)
        self.proj = torch.randn(HEADS, WIDTH, 3, device=device)

    def __call__(self) -> Tensor:
        """The result."""
        first, *rest = self.leaves
        options: dict[str, Any] = {"edge_mask": self.mask, "dropout": 0.4}
        options |= {"seed": self.seed, "size": (NODES, NODES)}
        if self.name == "additive":
            return functional.additive_attention(self.edges, first, *rest, **options)
        if self.name == "gat":
            return functional.gat_attention(self.edges, first, first, *rest, **options)
        if self.name == "gatv2":
            return functional.gatv2_attention(self.edges, first, *rest, **options)
        if self.name == "features":
            options |= {"edge_attr": self.attr, "edge_proj": self.proj}
        return functional.graph_attention(first, *rest, self.edges, **options)


CALLS = pytest.mark.parametrize("name", ["additive", "gat", "dot", "features", "gatv2"])


def skip_unless_possible(family: str, name: str) -> None:
    if family == "vendor" and name not in ("additive", "gat"):
        pytest.skip("no vendor runs scores of vectors")


@FAMILIES
@CALLS
@pytest.mark.parametrize("edited", ["mask", "seed"])
def test_edits_of_what_has_no_gradient_are_errors(
    name: str, edited: str, family: str
) -> None:
    skip_unless_possible(family, name)
    call = Call(name, torch.device("cpu"))
    with planner.pin(family):
        for is_edited in (False, True):
            out = call()
            value = getattr(call, edited)
            if is_edited:
                value.logical_not_() if edited == "mask" else value.add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace"):
                    out.sum().backward()
            else:
                out.sum().backward()


@FAMILIES
@CALLS
def test_edits_of_the_result_make_no_difference(name: str, family: str) -> None:
    skip_unless_possible(family, name)
    call = Call(name, torch.device("cpu"))
    weight = torch.randn(NODES, HEADS, WIDTH)
    with planner.pin(family):
        expected = torch.autograd.grad(call(), call.leaves, weight)
        out = call()
        out.mul_(2.0)
        found = torch.autograd.grad(out, call.leaves, weight / 2)
        again = call()
        again.mul_(2.0)
        twice = torch.autograd.grad(again, call.leaves, weight / 2, create_graph=True)
    for one, other, third in zip(found, expected, twice, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(third, other, rtol=1e-4, atol=1e-4)


LAYERS: dict[str, Callable[[Any], Any]] = {
    "gat": lambda nn: nn.GATConv(3, 4, heads=2, bias=False),
    "gat, edges": lambda nn: nn.GATConv(3, 4, edge_dim=2, bias=False),
    "gatv2": lambda nn: nn.GATv2Conv(3, 4, heads=2, bias=False),
    "transformer": lambda nn: nn.TransformerConv(3, 4, heads=2, root_weight=False),
    "transformer, edges": lambda nn: nn.TransformerConv(
        3, 4, edge_dim=2, root_weight=False
    ),
}


@pytest.mark.parametrize("family", ["triton", "scatter"])
@pytest.mark.parametrize("name", LAYERS)
def test_activations_in_place_are_those_of_the_parent(name: str, family: str) -> None:
    mine, theirs = LAYERS[name](ours), LAYERS[name](torch_geometric.nn)
    theirs.load_state_dict(mine.state_dict())
    x, edges = torch.randn(NODES, 3), torch.randint(NODES, (2, EDGES))
    attr = (torch.randn(EDGES, 2),) if "edges" in name else ()
    found = []
    for layer in (mine, theirs):
        leaf = x.clone().requires_grad_()
        with planner.pin(family):
            out = layer(leaf, edges, *attr).relu_()
            out.square().sum().backward()
        found.append([out, leaf.grad, *[p.grad for p in layer.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
