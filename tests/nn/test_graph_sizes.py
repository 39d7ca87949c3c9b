"""Layers on relations whose numbers of nodes are not those of the features."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyg_tiga as tg
import pyg_tiga.nn
from tests.nn.layer_checks import ignore_sparse_warnings

LAYERS = pytest.mark.parametrize(
    "name", ["SAGEConv", "GATConv", "GATv2Conv", "TransformerConv"]
)
X = torch.randn(7, 4)
EDGES = torch.tensor([[0, 1, 2, 6, 4], [0, 0, 0, 0, 0]])
RULE = (
    r"'x' must have a row for each source and for each destination.*\(7, {}\) \(got 7"
)


def layer_of(name: str, **options: Any) -> torch.nn.Module:
    return getattr(pyg_tiga.nn, name)(4, 3, **options)


def graph_of(num_dst: int) -> tg.Graph:
    return tg.Graph.from_edge_index(EDGES, num_src=7, num_dst=num_dst)


@LAYERS
@pytest.mark.parametrize("num_dst", [1, 4, 9])
@pytest.mark.parametrize("hooked", [False, True])
def test_one_tensor_for_two_kinds_of_nodes(
    name: str, num_dst: int, hooked: bool
) -> None:
    layer = layer_of(name)
    if hooked:
        layer.register_propagate_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=RULE.format(num_dst)):
        layer(X, graph_of(num_dst))


@LAYERS
@pytest.mark.parametrize("hooked", [False, True])
def test_a_pair_with_other_rows(name: str, hooked: bool) -> None:
    layer = layer_of(name)
    if hooked:
        layer.register_propagate_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"'x\[1\]' must have 4 rows by 'num_dst'"):
        layer((X, X[:5]), graph_of(4))
    with pytest.raises(ValueError, match=r"'x' must have 7 rows by 'num_src'"):
        layer((X[:6], X[:4]), graph_of(4))
    layer((X, X[:4]), graph_of(4))


@ignore_sparse_warnings
@LAYERS
def test_one_tensor_on_a_matrix(name: str) -> None:
    matrix = torch.ones(4, 7).to_sparse_csr()
    with pytest.raises(ValueError, match="'x' must have"):
        layer_of(name)(X, matrix)


@ignore_sparse_warnings
def test_destinations_that_are_not_read() -> None:
    layer = layer_of("SAGEConv", root_weight=False)
    matrix = torch.ones(4, 7).to_sparse_csr()
    out = layer(X, tg.Graph.from_adj(matrix))
    torch.testing.assert_close(out, layer(X, matrix))


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
@pytest.mark.parametrize("size", [(7, 4), (7, 9), (6, 7)])
def test_one_tensor_beside_another_size(name: str, size: tuple[int, int]) -> None:
    count = next(n for n in size if n != 7)
    with pytest.raises(ValueError, match=f"'x' must have {count} rows by 'size'"):
        layer_of(name)(X, EDGES, size=size)
