"""Numbers of the edges in another order."""

from __future__ import annotations

import pytest
import torch

from pyg_tiga import Graph
from pyg_tiga.impls.edge_order import places_of, take_edges

ORDERS = [
    ("caller", "rows"),
    ("columns", "rows"),
    ("columns", "caller"),
    ("rows", "caller"),
]


def _places(graph: Graph, order: str) -> torch.Tensor:
    """The caller's place of each edge in an order."""
    count = torch.arange(graph.num_edges)
    if order == "caller":
        return count
    perm = (graph.rows() if order == "rows" else graph.columns()).perm
    return count if perm is None else perm.cpu().long()


@pytest.mark.parametrize("given,wanted", ORDERS)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 40])
def test_take_edges(heads: int, given: str, wanted: str, device: torch.device) -> None:
    edges = torch.randint(50, (2, 1500), device=device)
    graph = Graph.from_edge_index(edges, 50)
    values = torch.randn(1500, heads, device=device)
    of_given, of_wanted = (values[_places(graph, o)] for o in (given, wanted))
    assert torch.equal(take_edges(graph, of_given, given, wanted), of_wanted)


def test_values_that_have_the_order_already(device: torch.device) -> None:
    ptr, index = ([0, 1, 3, 3], [2, 0, 1])
    ptr, index = (torch.tensor(x, device=device) for x in (ptr, index))
    graph = Graph.from_csr(ptr, index, 3)
    assert places_of(graph, "caller", "rows") is None
    values = torch.randn(3, 2, device=device)
    assert take_edges(graph, values, "caller", "rows") is values


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_take(shape: tuple[int, int], device: torch.device) -> None:
    edges = torch.zeros(2, shape[0], dtype=torch.long, device=device)
    graph = Graph.from_edge_index(edges, 3)
    values = torch.ones(shape, device=device)
    assert take_edges(graph, values, "columns", "caller").shape == shape
