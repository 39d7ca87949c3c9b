"""Edits through an `EdgeIndex`, and what holds on to it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.relation import Graph, origin, relation_of
from pyg_tiga.relation.cache import has_no_other_holder
from tests.relation.naive import as_lists, group, tensor

EDGES = [(0, 1), (2, 0), (1, 1), (0, 2), (2, 1)]
ZEROS = [(0, 0)] * 5


def rows(edge_index):
    return as_lists(relation_of(edge_index, 3, 3).rows())


@pytest.mark.parametrize("built", ["rows", "both"])
@pytest.mark.parametrize("held", [True, False])
def test_a_graph_at_work_keeps_its_edges(built, held):
    edge_index = EdgeIndex(tensor(EDGES))
    if held:
        graph = Graph.from_edge_index(edge_index, 3).current()
    else:
        graph = relation_of(edge_index, 3, 3)
    back = graph.reverse()
    if built == "both":
        graph.columns()
    edge_index.zero_()
    for _ in range(2):
        assert as_lists(back.rows()) == group(EDGES, 0, 3, 3)
        assert as_lists(graph.rows()) == group(EDGES, 1, 3, 3)
        edge_index.fill_(1)
    edge_index.zero_()
    assert rows(edge_index) == group(ZEROS, 1, 3, 3)


def test_wrappers_in_turns_on_one_tensor(builds):
    inner = tensor(EDGES)
    first, second = EdgeIndex(inner), EdgeIndex(inner)
    graphs = [relation_of(edges, 3, 3) for edges in (first, second)]
    assert relation_of(inner, 3, 3).rows() is graphs[0].rows() is graphs[1].rows()
    assert builds == [1]
    second.zero_()
    assert as_lists(graphs[1].columns()) == group(EDGES, 0, 3, 3)
    assert rows(second) == rows(inner) == group(ZEROS, 1, 3, 3)


def test_a_call_is_answered_with_the_same_graph():
    edge_index = EdgeIndex(tensor(EDGES))
    graph = relation_of(edge_index, 3, 3)
    assert relation_of(edge_index, 3, 3) is graph
    assert relation_of(edge_index, 3, 3, "target_to_source").columns() is graph.rows()


def test_nothing_keeps_the_wrapper_or_its_tensor():
    edge_index = EdgeIndex(tensor(EDGES))
    graph = relation_of(edge_index, 3, 3)
    mine = Graph.from_edge_index(edge_index, 3)
    edges = graph._edges
    gone = weakref.ref(edge_index)
    gc.disable()
    try:
        del edge_index
        assert gone() is None
        assert all(has_no_other_holder(*held) for held in edges.storages.items())
        gone = weakref.ref(mine)
        del mine
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle", "torch"])
def test_copies_count_their_own_edits(how):
    edge_index = EdgeIndex(tensor(EDGES))
    edge_index.copy_(tensor(EDGES))
    relation_of(edge_index, 3, 3)
    if how == "torch":
        buffer = io.BytesIO()
        torch.save(edge_index, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(edge_index))
    else:
        other = getattr(copy, how)(edge_index)
    assert rows(other) == group(EDGES, 1, 3, 3)
    graph = relation_of(other, 3, 3)
    other.zero_()
    assert as_lists(graph.columns()) == group(EDGES, 0, 3, 3)
    assert rows(other) == group(ZEROS, 1, 3, 3)
    shares = how == "copy"
    assert rows(edge_index) == group(ZEROS if shares else EDGES, 1, 3, 3)


def test_edits_of_swapped_wrappers():
    edge_index, other = EdgeIndex(tensor(EDGES)), EdgeIndex(tensor(ZEROS))
    graph = relation_of(edge_index, 3, 3)
    mine = Graph.from_edge_index(edge_index, 3)
    torch.utils.swap_tensors(edge_index, other)
    assert rows(other) == group(EDGES, 1, 3, 3)
    other.zero_()
    assert as_lists(graph.columns()) == group(EDGES, 0, 3, 3)
    assert as_lists(mine.rows()) == group(ZEROS, 1, 3, 3)


def test_another_tensor_in_the_wrapper():
    edge_index, inner = EdgeIndex(tensor(EDGES)), tensor(EDGES)
    graph = relation_of(edge_index, 3, 3)
    edge_index._data = inner
    relation_of(edge_index, 3, 3)
    edge_index.zero_()
    assert as_lists(graph.columns()) == group(EDGES, 0, 3, 3)
    assert rows(edge_index) == group(ZEROS, 1, 3, 3)


def test_a_wrapper_first_seen_in_inference_mode():
    edge_index = EdgeIndex(tensor(EDGES))
    with torch.inference_mode():
        graph = relation_of(edge_index, 3, 3)
        edge_index.zero_()
        assert rows(edge_index) == group(ZEROS, 1, 3, 3)
    assert as_lists(graph.columns()) == group(EDGES, 0, 3, 3)
    edge_index.fill_(1)
    assert rows(edge_index) == group([(1, 1)] * 5, 1, 3, 3)


def test_opcheck():
    torch.library.opcheck(origin.copied, (torch.arange(6).view(2, 3),))
