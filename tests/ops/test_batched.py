"""Many gradients in one backward: those of each, whoever batches them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, planner
from pyg_tiga.nn import GATConv, SAGEConv
from pyg_tiga.ops.batched import batchable

COUNT, NODES, EDGES, WIDTH = 3, 12, 40, 8
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": lambda: GATConv(WIDTH, 4, heads=2),
    "gat, averaged": lambda: GATConv(WIDTH, 4, heads=2, concat=False),
    "gat, residual": lambda: GATConv(WIDTH, 4, heads=2, residual=True),
    "sage": lambda: SAGEConv(WIDTH, WIDTH),
    "sage, max": lambda: SAGEConv(WIDTH, 4, aggr="max"),
    "sage, narrow": lambda: SAGEConv(WIDTH, 2, aggr="sum", normalize=True),
}


@pytest.fixture(params=["triton", None], ids=["triton", "chosen"])
def family(request: pytest.FixtureRequest) -> str | None:
    return request.param


def edges(device: torch.device) -> Tensor:
    return torch.randint(NODES, (2, EDGES), device=device)


def pinned(family: str | None) -> Any:
    return planner.pin(family) if family else torch.enable_grad()


def check(out: Tensor, inputs: list[Tensor]) -> None:
    grads = torch.randn(COUNT, *out.shape, device=out.device)
    options = {"retain_graph": True}
    one_by_one = [torch.autograd.grad(out, inputs, grad, **options) for grad in grads]
    expected = [torch.stack(column) for column in zip(*one_by_one, strict=True)]

    found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, **options)
    torch.testing.assert_close(list(found), expected)

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad, **options)

    found = torch.func.vmap(backward)(grads)
    torch.testing.assert_close(list(found), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, family: str | None, device: torch.device) -> None:
    layer = LAYERS[name]().to(device)
    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    with pinned(family):
        for _ in range(2):
            check(layer(x, edges(device)), [x, *layer.parameters()])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_sums(reduce: str, family: str | None, device: torch.device) -> None:
    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    weight = torch.rand(EDGES, device=device, requires_grad=True)
    with pinned(family):
        check(functional.spmm(edges(device), x, reduce=reduce), [x])
        if reduce == "sum":
            inputs = [x, weight]
            check(functional.spmm(edges(device), x, weight), inputs)
            check(functional.sddmm(edges(device), x, x), [x])


def test_terms_and_dropout(family: str | None, device: torch.device) -> None:
    value = torch.randn(NODES, 2, 4, device=device, requires_grad=True)
    alphas = [
        torch.randn(NODES, 2, device=device, requires_grad=True) for _ in range(2)
    ]
    term = torch.randn(EDGES, 2, device=device, requires_grad=True)
    seed = torch.tensor([5], device=device)
    with pinned(family):
        out = functional.additive_attention(
            edges(device), value, *alphas, edge_term=term, dropout=0.5, seed=seed
        )
        check(out, [value, *alphas, term])


class _Elsewhere(torch.autograd.Function):
    """Runs its backward in another thread, as those of a GPU do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        @batchable
        def double(ctx: Any, grad: Tensor) -> tuple[Tensor]:
            assert grad.shape == (NODES,)
            return (grad * 2,)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(double, ctx, grad).result()[0]


def test_a_thread_that_knows_of_no_batch() -> None:
    x, grads = torch.randn(NODES, requires_grad=True), torch.randn(COUNT, NODES)
    out = _Elsewhere.apply(x)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    assert torch.equal(found, 2 * grads)


def test_hessians() -> None:
    layer, edge_index = GATConv(WIDTH, 4).double(), edges(torch.device("cpu"))
    x = torch.randn(NODES, WIDTH, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return layer(x, edge_index).square().sum()

    hessian = torch.autograd.functional.hessian
    found = hessian(loss, x, vectorize=True)
    torch.testing.assert_close(found, hessian(loss, x))
    assert found.abs().sum() > 0
