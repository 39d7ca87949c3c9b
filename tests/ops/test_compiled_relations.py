"""Relations of every form under a tracer: gradients are those of eager calls.

One of pointers crosses an op's boundary as two tensors, where an edge list is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import EdgeIndex

from pyg_tiga import Graph, functional, nn, spmm_csr

NUM_NODES = 4
PTR = torch.tensor([0, 2, 3, 3, 5])
COL = torch.tensor([1, 2, 0, 1, 3])
ROW = torch.tensor([0, 0, 1, 3, 3])
EDGES = torch.stack([COL, ROW])
ATT = torch.linspace(-1, 1, 4).view(2, 2)

MATRIX = torch.sparse_csr_tensor(
    PTR, COL, torch.linspace(0.5, 2, COL.numel()), (NUM_NODES, NUM_NODES)
)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": lambda matrix: matrix.to_sparse_coo().coalesce(),
    "CSR": lambda matrix: matrix.to_sparse_csr(),
    "CSC": lambda matrix: matrix.to_sparse_csc(),
}
FORMS: dict[str, Callable[[], Any]] = {
    "edges": lambda: EDGES,
    "graph of edges": lambda: Graph.from_edge_index(EDGES, NUM_NODES),
    "graph of pointers": lambda: Graph.from_csr(PTR, COL, NUM_NODES),
    "EdgeIndex": lambda: EdgeIndex(EDGES.clone(), sparse_size=(NUM_NODES, NUM_NODES)),
    "graph of an EdgeIndex": lambda: Graph.from_edge_index(FORMS["EdgeIndex"]()),
    "reversed": lambda: Graph.from_csr(PTR, COL, NUM_NODES).reverse(),
    "graph of COO": lambda: Graph.from_adj(LAYOUTS["COO"](MATRIX)),
    "graph of CSR": lambda: Graph.from_adj(LAYOUTS["CSR"](MATRIX)),
    "graph of CSC": lambda: Graph.from_adj(LAYOUTS["CSC"](MATRIX)),
}


class Listening(TorchDispatchMode):
    """Sees every operation, as counters and tracers do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def heads(x: Tensor) -> Tensor:
    return x.view(NUM_NODES, 2, -1)


def features(relation: Any, x: Tensor, weight: Tensor) -> Tensor:
    return functional.graph_attention(
        heads(x),
        heads(x).sin(),
        heads(x),
        relation,
        edge_attr=weight.unsqueeze(1),
        edge_proj=ATT.unsqueeze(2),
    )


def through(cls: type[Any], **options: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    first, second = cls(4, 4, **options), cls(4, 3, **options)
    return lambda relation, x, _: second(first(x, relation).relu(), relation)


CALLS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sum": lambda r, x, w: functional.spmm(r, x),
    "weighted": lambda r, x, w: functional.spmm(r, x, w, "mean"),
    "max": lambda r, x, w: functional.spmm(r, x, reduce="max"),
    "weighted max": lambda r, x, w: functional.spmm(r, x, w, "max"),
    "sddmm": lambda r, x, w: functional.sddmm(r, x, x.sin()) * w,
    "additive": lambda r, x, w: functional.additive_attention(
        r, heads(x), heads(x).sum(-1), heads(x).cos().sum(-1)
    ),
    "dot": lambda r, x, w: functional.graph_attention(
        heads(x), heads(x).sin(), heads(x), r, edge_bias=w.unsqueeze(1).expand(-1, 2)
    ),
    "dot_norm": lambda r, x, w: functional.graph_attention(
        heads(x), heads(x).sin(), heads(x), r, qk_norm=ATT
    ),
    "features": features,
    "gatv2": lambda r, x, w: functional.gatv2_attention(r, heads(x), heads(x), ATT),
    "weights": lambda r, x, w: functional.graph_attention_weights(
        heads(x), heads(x).sin(), r
    )[0],
    "SAGEConv": through(nn.SAGEConv),
    "GATConv": through(nn.GATConv, add_self_loops=False),
    "GATv2Conv": through(nn.GATv2Conv, add_self_loops=False),
    "TransformerConv": through(nn.TransformerConv),
}


def results(call: Callable[..., Tensor], *given: Any) -> list[Tensor | None]:
    """The output and the gradients of all operands that are tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_NODES, 4, generator=generator).requires_grad_()
    weight = torch.rand(COL.numel(), generator=generator).requires_grad_()
    out = call(*given, x, weight)
    cotangent = torch.linspace(-1, 2, out.numel()).view(out.shape)
    found = torch.autograd.grad(out, (x, weight), cotangent, allow_unused=True)
    return [out.detach(), *found]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_eager_calls(name: str, form: str) -> None:
    torch._dynamo.reset()
    call, relation = CALLS[name], FORMS[form]()
    expected = results(call, relation)
    same(results(torch.compile(call, backend="aot_eager"), relation), expected)
    with Listening():
        found = results(call, relation)
    same(found, expected)


def test_a_matrix_of_pointers() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return spmm_csr(PTR, COL, weight, x)

    same(results(torch.compile(call, backend="aot_eager")), results(call))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_the_values_of_a_matrix(layout: str, compiled: bool) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 2 * NUM_NODES).view(NUM_NODES, 2)
    matrix = LAYOUTS[layout](MATRIX).detach().requires_grad_()
    graph = Graph.from_adj(matrix)

    def call(x: Tensor) -> Tensor:
        return functional.spmm(graph, x)

    run = torch.compile(call, backend="aot_eager") if compiled else call
    out = run(x)
    torch.testing.assert_close(out, matrix.detach().to_dense() @ x)
    (grad,) = torch.autograd.grad(out.sum(), matrix)
    expected = x.sum(1) * (MATRIX.to_dense() != 0)
    torch.testing.assert_close(grad.to_dense(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_a_matrix_are_seen_as_they_are(layout: str) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 2 * NUM_NODES).view(NUM_NODES, 2).requires_grad_()
    matrix = LAYOUTS[layout](MATRIX).clone()
    graph = Graph.from_adj(matrix)
    run = torch.compile(lambda x: functional.spmm(graph, x), backend="aot_eager")
    for call in (run, lambda x: functional.spmm(graph, x)):
        matrix.values().mul_(2)
        out = call(x)
        torch.testing.assert_close(out, matrix.to_dense() @ x)
    matrix.values().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
