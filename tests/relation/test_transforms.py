"""Relations that are first seen under a transform of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_tiga import Graph, functional, nn, spmm_csr
from pyg_tiga.relation import memo

NUM_NODES = 5
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "edges": functional.spmm,
    "mean": lambda edges, x: functional.spmm(edges, x, reduce="mean"),
    "formed inside": lambda edges, x: functional.spmm(edges.flip(0).contiguous(), x),
    "graph": lambda edges, x: functional.spmm(
        Graph.from_edge_index(edges, NUM_NODES), x
    ),
    "attention": lambda edges, x: functional.graph_attention(
        x.view(NUM_NODES, 1, -1),
        x.view(NUM_NODES, 1, -1),
        x.view(NUM_NODES, 1, -1),
        edges,
    ),
}


def csr(edges: Tensor) -> tuple[Tensor, Tensor]:
    order = edges[1].argsort(stable=True)
    counts = edges[1].bincount(minlength=NUM_NODES)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), edges[0][order]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sin().sum())(x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_relation_built_inside_serves_outside(name: str, transform: str) -> None:
    call, apply = CALLS[name], TRANSFORMS[transform]
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NUM_NODES, (2, 9), generator=generator)
    x = torch.randn(NUM_NODES, 3, generator=generator, dtype=torch.float64)
    memo.clear()
    found = apply(lambda x: call(edges, x), x)
    # What it left behind is of use to ordinary calls, and to the same again.
    ordinary = call(edges, x.clone().requires_grad_())
    ordinary.sum().backward()
    torch.testing.assert_close(apply(lambda x: call(edges, x), x), found)
    fresh = edges.clone()
    torch.testing.assert_close(call(fresh, x), ordinary)
    torch.testing.assert_close(apply(lambda x: call(fresh, x), x), found)


PARTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "spmm_csr": lambda ptr, col, x: spmm_csr(ptr, col, None, x),
    "formed inside": lambda ptr, col, x: spmm_csr(ptr.clone(), col.clone(), None, x),
    "graph": lambda ptr, col, x: functional.spmm(Graph.from_csr(ptr, col), x),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_parts_of_a_csr_matrix(name: str, transform: str) -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NUM_NODES, (2, 9), generator=generator)
    x = torch.randn(NUM_NODES, 3, generator=generator, dtype=torch.float64)
    call, apply, parts = PARTS[name], TRANSFORMS[transform], csr(edges)
    memo.clear()
    found = apply(lambda x: call(*parts, x), x)
    expected = apply(lambda x: functional.spmm(edges, x), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(call(*parts, x), functional.spmm(edges, x))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_matrices_made_outside(transform: str, layout: str, as_graph: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(NUM_NODES, NUM_NODES, generator=generator, dtype=torch.float64)
    x = torch.randn(NUM_NODES, 3, generator=generator, dtype=torch.float64)
    matrix = getattr(dense, f"to_sparse_{layout}")()
    make = Graph.from_adj if as_graph else lambda matrix: matrix
    apply = TRANSFORMS[transform]
    memo.clear()
    found = apply(lambda x: functional.spmm(make(matrix), x), x)
    torch.testing.assert_close(found, apply(lambda x: dense @ x, x))
    torch.testing.assert_close(functional.spmm(make(matrix), x), dense @ x)


MANY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "edges": functional.spmm,
    "graph": CALLS["graph"],
    "parts": lambda edges, x: spmm_csr(edges[0], edges[1], None, x),
}


@pytest.mark.parametrize("name", MANY)
def test_a_batch_of_edges_is_refused(name: str) -> None:
    edges, x = torch.zeros(2, NUM_NODES + 1).long(), torch.ones(NUM_NODES, 2)
    functional.spmm(edges, x)
    call = MANY[name]
    with pytest.raises(RuntimeError, match=r"vmap' over the 'edge_index'"):
        torch.func.vmap(lambda edges: call(edges, x))(torch.stack([edges, edges]))
    with pytest.raises(RuntimeError, match=r"functionalize' over the 'edge_index'"):
        torch.func.functionalize(call)(edges, x)


def test_layers_take_a_batch_of_edges() -> None:
    layer, x = nn.SAGEConv(2, 3), torch.randn(NUM_NODES, 2)
    edges = torch.randint(NUM_NODES, (4, 2, 9))
    found = torch.func.vmap(lambda edges: layer(x, edges))(edges)
    torch.testing.assert_close(found, torch.stack([layer(x, e) for e in edges]))
