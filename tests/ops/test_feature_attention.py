"""Attention with edge features as one function, against the same in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga.functional import graph_attention
from pyg_tiga.ops import feature_attention
from pyg_tiga.planner import pin

NUM_DST, NUM_SRC, NUM_EDGES, HEADS, CHANNELS, FEATURES = 9, 12, 60, 3, 5, 4
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"objective": "memory"},
    "dropped and masked": {"dropout": 0.4, "masked": True},
    "loops and biases": {"self_loops": True, "biased": True},
    "all": {"self_loops": True, "biased": True, "dropout": 0.4, "masked": True},
}


class Given:
    """Operands on edges in no order."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator)
            return drawn.to(device).requires_grad_()

        ends = [
            torch.randint(0, size, (NUM_EDGES,), generator=generator)
            for size in (NUM_SRC, NUM_DST)
        ]
        self.edge_index = torch.stack(ends).to(device)
        self.leaves = {
            "query": draw(NUM_DST, HEADS, CHANNELS),
            "key": draw(NUM_SRC, HEADS, CHANNELS),
            "value": draw(NUM_SRC, HEADS, CHANNELS),
            "edge_attr": draw(NUM_EDGES, FEATURES),
            "edge_proj": draw(HEADS, CHANNELS, FEATURES),
        }
        self.biases = {
            "edge_bias": draw(NUM_EDGES, HEADS),
            "loop_bias": draw(NUM_DST, HEADS),
        }
        self.grad = draw(NUM_DST, HEADS, CHANNELS).detach()
        self.mask = torch.arange(NUM_EDGES, device=device) % 4 != 1

    def out(
        self, *, masked: bool = False, biased: bool = False, **options: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The result, and what it can be differentiated by."""
        given = {**self.leaves, **(self.biases if biased else {})}
        leaves = list(given.values())
        options |= {"edge_mask": self.mask} if masked else {}
        if options.get("dropout"):
            options["seed"] = torch.tensor([7], device=self.mask.device)
        size = (NUM_SRC, NUM_DST)
        found = graph_attention(relation=self.edge_index, size=size, **given, **options)
        return found, leaves


@pytest.fixture(autouse=True)
def kernels():
    with pin("triton"):
        yield


@pytest.fixture
def in_parts(monkeypatch):
    """Lets the function be called in parts."""

    def switch() -> None:
        monkeypatch.setattr(feature_attention, "_is_joint", lambda *given: False)

    return switch


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_equals_its_parts(device, choice, in_parts):
    given = Given(device)
    found, leaves = given.out(**choice)
    assert type(found.grad_fn).__name__ == "_FeatureAttentionBackward"
    ours = torch.autograd.grad(found, leaves, given.grad)
    in_parts()
    expected, _ = given.out(**choice)
    theirs = torch.autograd.grad(expected, leaves, given.grad)
    for x, y in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=5e-5)


def test_a_backward_without_kernels(device):
    given = Given(device)
    found, leaves = given.out()
    ours = torch.autograd.grad(found, leaves, given.grad, retain_graph=True)
    with pin("scatter"):
        theirs = torch.autograd.grad(found, leaves, given.grad)
    for x, y in zip(ours, theirs, strict=True):
        assert not y.requires_grad
        torch.testing.assert_close(x, y, rtol=1e-5, atol=5e-5)


def test_second_derivatives(device, in_parts):
    given = Given(device)

    def twice() -> tuple[Tensor, ...]:
        found, leaves = given.out()
        first = torch.autograd.grad(found, leaves, given.grad, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    ours = twice()
    in_parts()
    for x, y in zip(ours, twice(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["edge_attr", "edge_proj", "query", "value"])
def test_a_gradient_alone(device, name):
    given = Given(device)
    found, leaves = given.out()
    every = torch.autograd.grad(found, leaves, given.grad)
    for other in given.leaves.values():
        other.requires_grad_(other is given.leaves[name])
    alone = torch.autograd.grad(given.out()[0], given.leaves[name], given.grad)[0]
    torch.testing.assert_close(alone, every[list(given.leaves).index(name)])


def test_edits_are_noticed(device):
    given = Given(device)
    found, leaves = given.out()
    with torch.no_grad():
        given.leaves["edge_attr"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found, leaves, given.grad)


@pytest.mark.parametrize("heads", [2, 9])
def test_products_over_nodes(heads):
    x, y = torch.randn(7, heads, 3), torch.randn(7, heads, 2)
    found = feature_attention._over_nodes(x, y)
    torch.testing.assert_close(found, torch.einsum("nhc,nhd->hcd", x, y))
