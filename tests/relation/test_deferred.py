"""The deferred index check, with the copy to the host held back by the test."""

from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.impls.attention_types import Options, State
from pyg_tiga.impls.edge_weights import edge_weights
from pyg_tiga.impls.launch import current_stream
from pyg_tiga.ops.edge_features import product
from pyg_tiga.planner import pin
from pyg_tiga.relation import Graph, check, edges, relation_of
from pyg_tiga.relation.stats import Readback
from tests.relation.naive import as_lists, group, tensor

GOOD = [(0, 1), (2, 0), (1, 1)]
BAD = [(0, 1), (2, 7), (9, 0), (1, 1)]
MESSAGE = "destination index 7 at position 1"


class Slow(Readback):
    """A copy that lands when the test says so, or when somebody waits for it."""

    arrived = False

    def __init__(self, values, deferred):
        assert deferred
        super().__init__(values, deferred)

    def landed(self):
        return type(self).arrived

    def values(self):
        type(self).arrived = True
        return super().values()


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", "deferred")
    Slow.arrived = False
    monkeypatch.setattr(edges, "Readback", Slow)
    return Slow


def test_the_next_use_raises(slow):
    graph = relation_of(tensor(BAD), 3, 3)
    # Bad edges, before they are reported, are in no row.
    assert as_lists(graph.rows()) == group(BAD, 1, 3, 3)
    assert as_lists(graph.columns()) == group(BAD, 0, 3, 3)
    slow.arrived = True
    for use in (graph.rows, graph.columns, graph.validate, graph.reverse().rows):
        with pytest.raises(ValueError, match=MESSAGE):
            use()
    with pytest.raises(ValueError, match=MESSAGE):
        relation_of(graph.handle()[0][0], 3, 3).rows()


def test_maps_of_bad_edges_stay_within_bounds(slow):
    graph = Graph.from_edge_index(tensor(BAD), 3)
    assert sorted(graph.ranks().tolist()) == [0, 1, 2, 3]
    assert graph.targets().tolist() == [1, 7, 0, 1]
    bad = Graph.from_csr(torch.tensor([0, 3, 2]), torch.tensor([0, 7]), num_src=3)
    assert bad.targets().tolist() == [1, 1]
    assert bad.reverse().targets().max() < 3
    assert sorted(bad.reverse().ranks().tolist()) == [0, 1]


def test_kernels_leave_bad_edges_alone(slow, device):
    graph = Graph.from_edge_index(tensor(BAD).to(device), 3)
    ones = torch.ones(3, 2, 4, device=device)
    given = {
        "feature_dots": (ones, ones.new_ones(4, 4)),
        "feature_sums": (ones.new_ones(4, 2), ones.new_ones(4, 4)),
        "feature_spread": (ones.new_ones(4, 2), ones),
    }
    with pin("triton"):
        dots, sums, spread = (
            product(name, graph, *given[name], torch.float32) for name in given
        )
    # Vectors are there for the destination of an edge whose source is out of range.
    assert dots[:, 0].tolist() == [4, 0, 4, 4]
    assert spread[:, 0].tolist() == [2, 0, 2, 2]
    assert sums[:, 0, 0].tolist() == [0, 2, 0]
    state = State(None, ones.new_zeros(3, 2), ones.new_ones(3, 2), None, None)
    scores = torch.zeros(4, 2, device=device)
    scores[2:] = float("nan")  # Of edges in no row, which nobody wrote.
    stream = current_stream(scores.get_device())
    weights = edge_weights(graph, scores, state, None, Options(1.0), stream)
    assert weights[:, 0].tolist() == [1, 0, 0, 1]


def test_validate_waits(slow):
    graph = Graph.from_edge_index(tensor(BAD), 3)
    with pytest.raises(ValueError, match=MESSAGE):
        graph.validate()
    slow.arrived = False
    good = Graph.from_edge_index(tensor(GOOD), 3)
    good.validate()
    assert slow.arrived
    assert good.rows().max_degree == 2


@pytest.mark.parametrize("read", ["ends", "edge_index"])
def test_the_callers_edges_are_handed_out_checked(slow, read):
    graph = Graph.from_edge_index(tensor(BAD), 3)
    with pytest.raises(ValueError, match=MESSAGE):
        getattr(graph, read)()


def test_values_are_those_of_the_build(slow):
    edge_index = tensor(BAD)
    graph = Graph.from_edge_index(edge_index, 3)
    edge_index.zero_()
    with pytest.raises(ValueError, match=MESSAGE):
        graph.validate()


def test_a_later_relation_reports_an_earlier_one(slow):
    relation_of(tensor(BAD), 3, 3)
    slow.arrived = True
    with pytest.raises(ValueError, match=MESSAGE):
        relation_of(tensor(GOOD), 3, 3)
    relation_of(tensor(GOOD), 3, 3)


def test_open_checks_are_bounded(slow):
    held = [tensor(GOOD) for _ in range(80)]
    for edge_index in held:
        slow.arrived = False
        relation_of(edge_index, 3, 3)
    assert len(check._open) <= 66


def test_presorted_edges_with_a_fault_are_all_dropped(slow):
    graph = Graph.from_edge_index(
        EdgeIndex(tensor([(0, 0), (9, 1), (1, 1)]), sort_order="col"), 3
    )
    assert as_lists(graph.rows()) == [[], [], []]
    assert as_lists(graph.columns()) == [[(0, 0)], [(1, 2)], []]
    with pytest.raises(ValueError, match="source index 9 at position 1"):
        graph.validate()


@pytest.mark.parametrize(
    ("rowptr", "col", "message"),
    [
        ([0, 1, 2], [0, 5], "source index 5 at position 1"),
        ([0, 3, 2], [0, 0], "'rowptr' must rise"),
        ([0, 1], [], "'rowptr' must rise"),
    ],
)
def test_csr_with_a_fault_is_dropped(slow, rowptr, col, message):
    col = torch.tensor(col, dtype=torch.int64)
    graph = Graph.from_csr(torch.tensor(rowptr), col, num_src=3)
    assert all(row == [] for row in as_lists(graph.rows()))
    assert all(row == [] for row in as_lists(graph.columns()))
    with pytest.raises(ValueError, match=message):
        graph.validate()


def test_bounds_until_the_statistics_are_there(slow):
    edge_index = tensor([(0, 0)] * 200 + [(1, 1)] * 3)
    graph = Graph.from_edge_index(edge_index, 3)
    rows = graph.rows()
    assert rows.stats is None
    assert rows.max_degree is None
    assert "on their way" in graph.explain()
    assert rows.work_items(512).num_items == 0
    slow.arrived = True
    graph.validate()
    assert rows.max_degree == 200
    assert rows.work_items(64).num_items == 4


def test_good_edges_are_trusted_once_checked(slow):
    graph = Graph.from_edge_index(tensor(GOOD), 3)
    assert not graph._edges.is_validated()
    slow.arrived = True
    graph.rows()
    assert graph._edges.is_validated()
    assert as_lists(graph.columns()) == group(GOOD, 0, 3, 3)


def test_deferred_on_the_cpu_is_as_strict(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", "deferred")
    with pytest.raises(ValueError, match=MESSAGE):
        relation_of(tensor(BAD), 3, 3)
    assert as_lists(relation_of(tensor(GOOD), 3, 3).rows()) == group(GOOD, 1, 3, 3)
    empty = torch.empty(2, 0, dtype=torch.long)
    assert relation_of(empty, 3, 3).rows().ptr.tolist() == [0, 0, 0, 0]
