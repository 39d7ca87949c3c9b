"""Copies of a graph, and a graph whose tensors are edited."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.relation import Graph, relation_of
from tests.relation.naive import as_lists, group, tensor
from tests.relation.test_graph import (
    BY_DST,
    EDGES,
    NUM_DST,
    NUM_SRC,
    check,
    csr_of,
    make,
    matrix,
)

# Copies


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_copies(how, layout):
    adj, edges, value = matrix(layout)
    graph = Graph.from_adj(adj).reverse()
    if how == "deepcopy":
        other = copy.deepcopy(graph)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(graph))
    else:
        buffer = io.BytesIO()
        torch.save(graph, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    check(other, group(edges, 0, NUM_SRC, NUM_DST), group(edges, 1, NUM_DST, NUM_SRC))
    assert other.rows() is not graph.rows()
    assert other.value.tolist() == value.tolist()
    assert other.handle()[0][0].data_ptr() != graph.handle()[0][0].data_ptr()


def test_shallow_copy_shares():
    graph = make()
    other = copy.copy(graph)
    assert other.rows() is graph.rows()
    del other
    assert Graph.from_handle(*graph.handle()).rows() is graph.rows()


def test_to():
    graph = make()
    assert graph.to("cpu") is graph
    assert "num_src=5, num_dst=4, num_edges=6, device='cpu'" in repr(graph)


# Edits after construction


def edit(edge_index):
    edge_index[:, 0] = 0


@pytest.mark.parametrize("built", ["rows", "both"])
def test_a_graph_keeps_its_edges_when_the_tensor_is_edited(built):
    edge_index = tensor(EDGES)
    graph = make(edge_index)
    if built == "both":
        graph.columns()
        graph.slots()
    edit(edge_index)
    check(graph)
    assert graph.edge_index().tolist() == tensor(EDGES).tolist()
    check(Graph.from_handle(*graph.handle()))
    check(copy.deepcopy(graph))
    assert as_lists(make(edge_index).rows()) != BY_DST
    assert as_lists(relation_of(edge_index, NUM_SRC, NUM_DST).rows()) != BY_DST


@pytest.mark.parametrize("order", ["row", "col"])
def test_a_sorted_graph_keeps_its_edges(order):
    end = 0 if order == "row" else 1
    edges = sorted(EDGES, key=lambda edge: edge[end])
    plain = tensor(edges)
    graph = make(EdgeIndex(plain, sort_order=order))
    plain.zero_()
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert graph.edge_index().tolist() == tensor(edges).tolist()


def test_a_csr_graph_keeps_its_edges():
    rowptr, col, edges = csr_of(EDGES)
    graph = Graph.from_csr(rowptr, col, num_src=NUM_SRC)
    col.zero_()
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))


def test_a_graph_of_an_inference_tensor_keeps_its_edges():
    with torch.inference_mode():
        edge_index = tensor(EDGES)
        graph = make(edge_index)
        edge_index.zero_()
        check(graph)
        assert graph.edge_index().tolist() == tensor(EDGES).tolist()
        found = Graph.from_handle(*graph.handle())
        assert found.rows() is graph.rows()
    check(copy.deepcopy(graph))


def test_what_is_built_in_inference_mode_can_be_saved_for_backward():
    edge_index = tensor(EDGES)
    with torch.inference_mode():
        graph = relation_of(edge_index, NUM_SRC, NUM_DST)
        built = [graph.rows(), graph.columns()]
        arrays = [a for g in built for a in (g.ptr, g.index, g.perm, g.degree_inv())]
        arrays += [a for g in built for a in g.work_items(1).tensors()]
        arrays.append(graph.slots())
    assert not any(array.is_inference() for array in arrays)
