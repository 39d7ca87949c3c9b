from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

import pyg_tiga as tg
from pyg_tiga import _features, testing
from pyg_tiga.nn import SAGEConv
from pyg_tiga.nn._sage_inputs import parent_ties, takes_segments

CASE = testing.make_case(testing.row("unsorted"))
X, EDGES = CASE.x, CASE.edge_index


class OnCuda:
    """Stands for features on a CUDA device."""

    is_cuda = True


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")
@pytest.mark.parametrize("installed", [False, True], ids=["without", "with"])
def test_ties_follow_the_parent(monkeypatch, installed):
    module = object() if installed else None
    monkeypatch.setattr(_features, "torch_scatter", lambda: module)
    lists = [EDGES, EDGES.int(), EdgeIndex(EDGES, sparse_size=(24, 24)), CASE.graph()]
    matrix = torch.eye(24).to_sparse_csr()
    assert [parent_ties(edges, X) for edges in lists] == ["split"] * 4
    expected = "first" if installed else "split"
    assert [parent_ties(edges, OnCuda()) for edges in lists[:3]] == [expected] * 3
    for edges in (matrix, tg.Graph.from_adj(matrix)):
        assert parent_ties(edges, X) == "first"
        assert parent_ties(edges, OnCuda()) == "first"


def test_segments_are_for_sorted_edges_of_deterministic_layers():
    plain = EdgeIndex(EDGES, sparse_size=(24, 24))
    by_row, by_col = (plain.sort_by(order).values for order in ("row", "col"))
    layer = SAGEConv(8, 3, aggr="max")
    assert not any(takes_segments(layer, e) for e in (EDGES, plain, by_row, by_col))
    torch.use_deterministic_algorithms(True)
    try:
        layer = SAGEConv(8, 3, aggr="max")
    finally:
        torch.use_deterministic_algorithms(False)
    found = [takes_segments(layer, e) for e in (EDGES, plain, by_row, by_col)]
    assert found == [False, False, False, True]
    layer.flow = "target_to_source"
    found = [takes_segments(layer, e) for e in (EDGES, plain, by_row, by_col)]
    assert found == [False, False, True, False]
