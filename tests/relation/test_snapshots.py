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


def edited():
    return [(0, 0), *EDGES[1:]]


@pytest.mark.parametrize("built", ["rows", "both"])
def test_a_graph_follows_edits_of_its_tensor(built):
    edge_index = tensor(EDGES)
    graph = make(edge_index)
    back = graph.reverse()
    if built == "both":
        graph.columns()
        graph.slots()
    edit(edge_index)
    by_dst, by_src = (
        group(edited(), 1, NUM_DST, NUM_SRC),
        group(edited(), 0, NUM_SRC, NUM_DST),
    )
    assert "not built" in graph.explain().splitlines()[1]
    check(graph, by_dst, by_src)
    check(back, by_src, by_dst)
    assert graph.edge_index().tolist() == edge_index.tolist()
    check(Graph.from_handle(*graph.handle()), by_dst, by_src)
    check(copy.deepcopy(graph), by_dst, by_src)
    assert graph.rows() is make(edge_index).rows()
    assert graph.rows() is relation_of(edge_index, NUM_SRC, NUM_DST).rows()
    assert back.columns() is graph.rows()


@pytest.mark.parametrize("built", ["rows", "both"])
def test_what_a_call_works_on_keeps_its_edges(built):
    edge_index = tensor(EDGES)
    graph = make(edge_index)
    held = graph.current()
    assert graph.current() is held
    assert held.current() is held
    assert held.rows() is graph.rows()
    if built == "both":
        held.columns()
        held.slots()
        held.ranks()
    edit(edge_index)
    assert held.targets().tolist() == tensor(EDGES)[1].tolist()
    assert held.rows().perm[held.ranks()].tolist() == list(range(len(EDGES)))
    assert graph.current() is not held
    assert as_lists(graph.current().rows()) != BY_DST
    check(held)
    check(held.reverse().reverse())
    assert held.edge_index().tolist() == tensor(EDGES).tolist()


def test_values_come_with_the_graph_of_a_call():
    graph = make().with_value(torch.ones(6))
    assert graph.current().value is graph.value
    graph.value = torch.zeros(6)
    assert graph.current().value is graph.value
    assert graph.reverse().current().value is graph.value


def test_a_graph_reports_edits_out_of_range():
    edge_index = tensor(EDGES)
    graph = make(edge_index)
    edge_index[1, 2] = NUM_DST
    for _ in range(2):
        with pytest.raises(ValueError, match="destination index 4 at position 2"):
            graph.current()
    edge_index[1, 2] = 1
    check(graph)


@pytest.mark.parametrize("order", [None, "row", "col"])
def test_a_graph_follows_an_edge_index_object(order):
    end = 0 if order == "row" else 1
    edges = sorted(EDGES, key=lambda edge: edge[end]) if order else EDGES
    wrapped = EdgeIndex(tensor(edges), sort_order=order)
    graph = make(wrapped)
    held = graph.current()
    wrapped.zero_()
    zeros = [(0, 0)] * 6
    new = group(zeros, 1, NUM_DST, NUM_SRC), group(zeros, 0, NUM_SRC, NUM_DST)
    check(graph, *new)
    check(held, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert held.edge_index().tolist() == tensor(edges).tolist()
    wrapped.as_tensor().fill_(1)
    ones = [(1, 1)] * 6
    check(graph, group(ones, 1, NUM_DST, NUM_SRC), group(ones, 0, NUM_SRC, NUM_DST))


def test_a_csr_graph_follows_edits():
    rowptr, col, edges = csr_of(EDGES)
    graph = Graph.from_csr(rowptr, col, num_src=NUM_SRC)
    held = graph.current()
    col.zero_()
    new = [(0, dst) for _, dst in edges]
    check(graph, group(new, 1, NUM_DST, NUM_SRC), group(new, 0, NUM_SRC, NUM_DST))
    check(held, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))


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
        arrays += [graph.slots(), graph.ranks(), graph.targets()]
    assert not any(array.is_inference() for array in arrays)
