"""Bounds of the memo, and its use by several threads."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from pyg_tiga.relation import Graph, cache, clear, forget
from tests.relation.naive import as_lists, group, tensor
from tests.relation.test_memo import EDGES, relation


def test_entries_are_bounded_and_the_oldest_goes(empty_memo, builds):
    empty_memo.max_entries = 3
    kept = [tensor(EDGES) for _ in range(4)]
    for edge_index in kept[:3]:
        relation(edge_index)
    relation(kept[0])
    relation(kept[3])
    assert len(empty_memo) == 3
    builds.clear()
    relation(kept[0])
    relation(kept[2])
    relation(kept[3])
    assert builds == []
    relation(kept[1])
    assert builds == [1]


@pytest.mark.skipif(cache._use_count is None, reason="PyTorch does not tell holders")
@pytest.mark.parametrize("held", ["tensor", "view", None])
def test_entries_go_when_their_edges_cannot_be_asked_for(empty_memo, builds, held):
    edge_index = tensor(EDGES)
    relation(edge_index)
    if held == "view":
        view = edge_index.view(-1)[3:]
    if held != "tensor":
        del edge_index
    other = tensor(EDGES)
    relation(other)
    assert len(empty_memo) == (1 if held is None else 2)
    if held == "view":
        builds.clear()
        relation(torch.as_strided(view, (2, 5), (5, 1), 0))
        assert builds == []


def test_batches_do_not_pile_up(empty_memo):
    for _ in range(20):
        relation(tensor(EDGES)).columns()
    assert len(empty_memo) == (20 if cache._use_count is None else 1)


def test_bytes_are_bounded_and_the_newest_stays(empty_memo):
    edge_index = tensor(EDGES * 20)
    size = edge_index.nbytes + Graph.from_edge_index(edge_index, 3).nbytes()
    empty_memo.max_bytes = lambda device: 3 * size
    held = [tensor(EDGES * 20) for _ in range(5)]
    for edge_index in held:
        relation(edge_index)
    assert len(empty_memo) == 3
    empty_memo.max_bytes = lambda device: 1
    relation(tensor(EDGES))
    assert len(empty_memo) == 1


def test_bytes_count_what_is_built_later(empty_memo):
    held = [tensor(EDGES * 20) for _ in range(2)]
    found = [relation(edge_index) for edge_index in held]
    size = sum(one.nbytes() + e.nbytes for one, e in zip(found, held, strict=True))
    empty_memo.max_bytes = lambda device: size
    found[1].columns()
    assert len(empty_memo) == 1
    assert relation(held[1]) is found[1]


def test_eviction_frees(empty_memo):
    edge_index = tensor(EDGES)
    arrays = weakref.ref(relation(edge_index).rows())
    storage = weakref.ref(edge_index)
    relation(edge_index).columns()
    relation(edge_index).reverse()
    gc.disable()
    try:
        del edge_index
        assert storage() is None
        assert arrays() is not None
        empty_memo.max_entries = 1
        relation(tensor(EDGES))
        assert arrays() is None
    finally:
        gc.enable()


def test_a_users_graph_survives_eviction(empty_memo, builds):
    mine = Graph.from_edge_index(tensor(EDGES), 3)
    held = relation(mine.edge_index())
    empty_memo.max_entries = 1
    relation(tensor(EDGES))
    del held
    builds.clear()
    assert Graph.from_handle(*mine.handle()).rows() is mine.rows()
    assert builds == []


def test_pinned_edges_stay(empty_memo):
    edge_index = tensor(EDGES)
    alive = weakref.ref(relation(edge_index).rows())
    empty_memo.pin(relation(edge_index)._edges)
    forget(edge_index)
    clear()
    assert alive() is not None


def test_threads_build_once(builds):
    edge_index = tensor(EDGES)
    start = threading.Barrier(8)
    found = []

    def work():
        start.wait()
        for _ in range(50):
            found.append(relation(edge_index))
            found[-1].columns()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 400
    assert len({id(one) for one in found}) == 1
    assert sorted(builds) == [0, 1]


def test_threads_with_evictions(empty_memo):
    empty_memo.max_entries = 2
    shared = [tensor(EDGES[: k + 1]) for k in range(5)]
    wrong = []

    def work(first):
        for step in range(100):
            k = (first + step) % 5
            rows = as_lists(relation(shared[k]).rows())
            if rows != group(EDGES[: k + 1], 1, 3, 3):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(empty_memo) <= 2
