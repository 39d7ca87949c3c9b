"""Tangents that only the gradient of a result brings: forward over reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor

from pyg_tiga import functional, nn, planner

NUM_NODES = 5
EDGES = torch.tensor([[0, 1, 2, 3, 1, 1, 4, 0], [1, 1, 0, 2, 3, 4, 1, 1]])
WEIGHT = torch.linspace(0.2, 1.4, EDGES.size(1))


def edges(x: Tensor) -> Tensor:
    return EDGES.to(x.device)


def heads(x: Tensor) -> Tensor:
    return x.view(NUM_NODES, 2, -1)


def layer(cls: type[Any], *args: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    made = cls(4, *args, **options)
    return lambda x: made.to(x)(x, edges(x))


ATT = torch.linspace(-1, 1, 4).view(2, 2)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: functional.spmm(edges(x), x),
    "mean": lambda x: functional.spmm(edges(x), x, reduce="mean"),
    "weighted": lambda x: functional.spmm(edges(x), x, WEIGHT.to(x), "mean"),
    "max": lambda x: functional.spmm(edges(x), x, reduce="max"),
    "first max": lambda x: functional.spmm(edges(x), x, reduce="max", ties="first"),
    "sddmm": lambda x: functional.sddmm(edges(x), x, x.sin()),
    "additive": lambda x: functional.additive_attention(
        edges(x), heads(x), heads(x).sum(-1), heads(x).cos().sum(-1)
    ),
    "gat": lambda x: functional.gat_attention(
        edges(x), heads(x), heads(x), ATT.to(x), ATT.to(x)
    ),
    "dot": lambda x: functional.graph_attention(
        heads(x), heads(x).sin(), heads(x), edges(x)
    ),
    "dot_norm": lambda x: functional.graph_attention(
        heads(x), heads(x).sin(), heads(x), edges(x), qk_norm=ATT.to(x)
    ),
    "features": lambda x: functional.graph_attention(
        heads(x),
        heads(x).sin(),
        heads(x),
        edges(x),
        edge_attr=WEIGHT.to(x).unsqueeze(1),
        edge_proj=ATT.to(x).unsqueeze(2),
    ),
    "gatv2": lambda x: functional.gatv2_attention(
        edges(x), heads(x), heads(x), ATT.to(x)
    ),
    "SAGEConv": layer(nn.SAGEConv, 3),
    "narrow SAGEConv": layer(nn.SAGEConv, 9),
    "GATConv": layer(nn.GATConv, 2, heads=2),
    "GATv2Conv": layer(nn.GATv2Conv, 2, heads=2),
    "TransformerConv": layer(nn.TransformerConv, 2, heads=2),
}


def product(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, and its derivative along a direction of the result's gradient."""
    x = x.clone().requires_grad_()
    out = call(x)
    grad, tangent = torch.linspace(-1, 2, 2 * out.numel()).to(x).view(2, *out.shape)
    with fw.dual_level():
        (found,) = torch.autograd.grad(out, x, fw.make_dual(grad, tangent))
        primal, along = fw.unpack_dual(found)
        assert along is not None
        return primal.detach(), along.detach()


@pytest.mark.parametrize("family", [None, "scatter", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_carried_on(name: str, family: str | None, device: torch.device) -> None:
    has_kernels = family == "triton" or device.type == "cuda"
    dtype = torch.float32 if has_kernels else torch.float64
    x = torch.linspace(-2, 2, 4 * NUM_NODES).sin().view(NUM_NODES, 4)
    x = x.to(device, dtype)
    call = CALLS[name]
    with planner.pin(family):
        primal, along = product(call, x)
    x = x.double().requires_grad_()
    with planner.pin("scatter"):
        out = call(x)
        grads = torch.linspace(-1, 2, 2 * out.numel()).to(x)
        wanted = [
            torch.autograd.grad(out, x, grad, retain_graph=True)[0]
            for grad in grads.view(2, *out.shape)
        ]
    # Gradients are linear in the result's.
    torch.testing.assert_close(primal.double(), wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(along.double(), wanted[1], rtol=1e-4, atol=1e-4)
