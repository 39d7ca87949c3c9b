from __future__ import annotations

import re

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.relation import Graph, relation_of, relation_of_adj
from tests.relation.naive import tensor

# Wrong types, shapes and sizes


@pytest.mark.parametrize(
    ("edge_index", "error", "message"),
    [
        ([[0], [0]], TypeError, "'edge_index' must be a tensor (got list)"),
        (None, TypeError, "'edge_index' must be a tensor (got NoneType)"),
        (
            torch.ones(2, 3),
            TypeError,
            "'edge_index' must hold integers (got torch.floa",
        ),
        (torch.ones(2, 3) > 0, TypeError, "(got torch.bool)"),
        (torch.ones(2, 3) + 0j, TypeError, "(got torch.complex64)"),
        (torch.ones(2, 2).to_sparse(), TypeError, "Call 'Graph.from_adj'"),
        (torch.ones(3, 4).long(), ValueError, "shape [2, num_edges] (got [3, 4])"),
        (torch.ones(4, 2).long(), ValueError, "Call 'edge_index.t()'"),
        (torch.ones(4).long(), ValueError, "(got [4])"),
        (torch.ones(1, 2, 3).long(), ValueError, "(got [1, 2, 3])"),
    ],
)
def test_bad_edge_index(edge_index, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Graph.from_edge_index(edge_index, 3)
    if isinstance(edge_index, torch.Tensor) and edge_index.layout == torch.strided:
        with pytest.raises(error, match=re.escape(message)):
            relation_of(edge_index, 3, 3)


@pytest.mark.parametrize("name", ["num_nodes", "num_src", "num_dst"])
def test_bad_sizes(name):
    edge_index = tensor([(0, 0)])
    with pytest.raises(ValueError, match="must not be negative"):
        Graph.from_edge_index(edge_index, **{name: -1})
    with pytest.raises(TypeError, match="must be an integer"):
        Graph.from_edge_index(edge_index, **{name: 2.5})
    with pytest.raises(ValueError, match="'num_dst' must not be negative"):
        relation_of(edge_index, 1, -1)


def test_bad_flow():
    with pytest.raises(ValueError, match="'flow' must be 'source_to_target' or"):
        Graph.from_edge_index(tensor([(0, 0)]), 1, flow="up")
    with pytest.raises(ValueError, match="'flow'"):
        relation_of(tensor([(0, 0)]), 1, 1, flow="up")


@pytest.mark.parametrize(
    ("rowptr", "col", "error", "message"),
    [
        ([0, 1], torch.tensor([0]), TypeError, "'rowptr' must be a tensor (got list)"),
        (torch.tensor([0, 1]), torch.ones(1), TypeError, "'col' must hold integers"),
        (torch.tensor([0, 1]), torch.zeros(1, 1).long(), ValueError, "'col' must have"),
        (torch.zeros(0).long(), torch.zeros(0).long(), ValueError, "(got none)"),
        (
            torch.tensor([0, 1]),
            torch.zeros(1, device="meta").long(),
            ValueError,
            "same device (got 'cpu' and 'meta')",
        ),
    ],
)
def test_bad_csr(rowptr, col, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Graph.from_csr(rowptr, col)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("make", [Graph.from_adj, relation_of_adj])
def test_bad_matrix(make):
    with pytest.raises(TypeError, match="'adj_t' must be a tensor"):
        make([[0]])
    with pytest.raises(TypeError, match=re.escape("Call 'Graph.from_edge_index'")):
        make(tensor([(0, 0)]))
    with pytest.raises(TypeError, match="COO, CSR or CSC"):
        make(torch.ones(4, 4).to_sparse_bsr((2, 2)))
    with pytest.raises(ValueError, match=re.escape("(got [2, 2, 2])")):
        make(torch.ones(2, 2, 2).to_sparse())
    with pytest.raises(ValueError, match=re.escape("(got [2, 2])")):
        make(torch.ones(2, 2).to_sparse(1))


# Indices out of range


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize(
    ("edge", "what", "value", "end"),
    [
        ((5, 0), "source", 5, 0),
        ((-1, 0), "source", -1, 0),
        ((0, 4), "destination", 4, 1),
        ((0, -3), "destination", -3, 1),
    ],
)
def test_bad_index_is_named(edge, what, value, end, dtype):
    edges = [(0, 0), (4, 3), edge, (0, 0), (0, -1)]
    size = 5 if what == "source" else 4
    message = (
        f"'edge_index' holds the {what} index {value} at position 2 "
        f"(edge_index[{end}, 2]), but there are {size} {what} nodes (valid: 0 to "
        f"{size - 1})"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Graph.from_edge_index(tensor(edges, dtype), num_src=5, num_dst=4)
    with pytest.raises(ValueError, match=re.escape(message)):
        relation_of(tensor(edges, dtype), 5, 4)
    turned = message.replace(f"[{end}, 2]", f"[{1 - end}, 2]")
    with pytest.raises(ValueError, match=re.escape(turned)):
        relation_of(tensor(edges, dtype).flip(0), 5, 4, flow="target_to_source")


@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 1, -(2**32), -(2**63), 2**62])
def test_indices_that_do_not_fit_into_32_bits(value):
    with pytest.raises(ValueError, match=f"source index {value} at position 1"):
        Graph.from_edge_index(tensor([(0, 0), (value, 0)]), 3)
    with pytest.raises(ValueError, match=f"destination index {value} at position 1"):
        Graph.from_edge_index(tensor([(0, 0), (0, value)]), 3)


def test_negative_index_with_inferred_size():
    with pytest.raises(ValueError, match="index -1 at position 0"):
        Graph.from_edge_index(tensor([(-1, 0), (2, 2)]))
    with pytest.raises(ValueError, match="index -1 at position 0"):
        Graph.from_edge_index(tensor([(-1, -1)]))


@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 3), (3, 0), (0, 0)])
def test_edges_without_nodes(num_src, num_dst):
    what = "source" if num_src == 0 else "destination"
    with pytest.raises(ValueError, match=f"the {what} index 1 at position 0"):
        Graph.from_edge_index(tensor([(1, 1)]), num_src=num_src, num_dst=num_dst)


def test_csr_without_nodes():
    with pytest.raises(ValueError, match="'rowptr' must rise"):
        Graph.from_csr(torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="source index 0 at position 0 of 'col'"):
        Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0]), num_src=0)


@pytest.mark.parametrize("order", ["row", "col"])
def test_a_sort_order_that_lies(order):
    edge_index = EdgeIndex(tensor([(0, 0), (1, 1), (0, 0)]), sort_order=order)
    end = 0 if order == "row" else 1
    flow = "target_to_source" if order == "row" else "source_to_target"
    message = f"sorted by {order}, but edge_index[{end}] falls to 0 at position 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        Graph.from_edge_index(edge_index, 2, flow=flow)
    # The other grouping sorts and does not use the flag.
    flow = "source_to_target" if order == "row" else "target_to_source"
    graph = Graph.from_edge_index(edge_index, 2, flow=flow)
    with pytest.raises(ValueError, match=re.escape(message)):
        graph.columns()


@pytest.mark.parametrize(
    ("rowptr", "col", "message"),
    [
        ([0, 1, 2], [0, 3], "'col' holds the source index 3 at position 1"),
        ([0, 1, 2], [-1, 0], "'col' holds the source index -1 at position 0"),
        ([1, 1, 2], [0, 0], "number of edges, 2 (got 1 at position 0)"),
        ([0, 1, 1], [0, 0], "(got 1 at position 2)"),
        ([0, 3, 2], [0, 0], "(got 3 at position 1)"),
        ([0, 2, 1], [0, 0], "(got 1 at position 2)"),
        ([0, 1], [], "number of edges, 0 (got 1 at position 1)"),
        ([3], [], "(got 3 at position 0)"),
    ],
)
def test_bad_csr_values(rowptr, col, message):
    col = torch.tensor(col, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape(message)):
        Graph.from_csr(torch.tensor(rowptr), col, num_src=3)
