"""Relations that are first seen under a transform of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_tiga import Graph, functional
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
