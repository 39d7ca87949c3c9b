from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.relation import (
    Graph,
    cache,
    clear,
    forget,
    handle_of,
    memo,
    relation_of,
)
from pyg_tiga.relation.cache import key_of
from tests.relation.naive import as_lists, group, tensor

EDGES = [(0, 1), (2, 0), (1, 1), (0, 2), (2, 1)]
BY_DST = group(EDGES, 1, 3, 3)


def relation(edge_index, num_src=3, num_dst=3, **options):
    return relation_of(edge_index, num_src, num_dst, **options)


def check(edge_index, edges, num_src=3, num_dst=3):
    found = relation(edge_index, num_src, num_dst)
    assert as_lists(found.rows()) == group(edges, 1, num_dst, num_src)


def test_hit(builds):
    edge_index = tensor(EDGES)
    first = relation(edge_index)
    assert relation(edge_index) is first
    assert Graph.from_handle(*first.handle()) is first
    assert Graph.from_handle(*handle_of(edge_index, 3, 3)) is first
    assert relation(edge_index.detach()) is first
    assert relation(edge_index[:]) is first
    assert builds == [1]


def test_a_graph_of_the_user_is_found(builds):
    edge_index = tensor(EDGES)
    mine = Graph.from_edge_index(edge_index, 3)
    assert relation(edge_index).rows() is mine.rows()
    assert Graph.from_edge_index(edge_index, 3).rows() is mine.rows()
    assert builds == [1]


def test_edits_in_place_are_noticed():
    edge_index = tensor(EDGES)
    check(edge_index, EDGES)
    edge_index[:, 0] = 2
    check(edge_index, [(2, 2), *EDGES[1:]])
    edge_index.view(-1)[0].fill_(1)
    check(edge_index, [(1, 2), *EDGES[1:]])
    edge_index.copy_(tensor(EDGES))
    check(edge_index, EDGES)
    with torch.inference_mode():
        edge_index.zero_()
    check(edge_index, [(0, 0)] * 5)


def test_a_second_version_counter_on_the_storage_is_noticed():
    edge_index = tensor(EDGES)
    check(edge_index, EDGES)
    edge_index.zero_()
    # The new tensor's counter starts at the version of the entry.
    assert edge_index.data._version == 0
    check(edge_index.data, [(0, 0)] * 5)


def test_edits_through_data_need_forget():
    edge_index = tensor(EDGES)
    held = relation(edge_index)
    edge_index.data.zero_()
    forget(edge_index)
    check(edge_index, [(0, 0)] * 5)
    assert as_lists(held.rows()) == BY_DST
    assert as_lists(held.columns()) == group(EDGES, 0, 3, 3)


def test_edits_through_numpy_need_forget():
    array = np.array(EDGES).T.copy()
    edge_index = torch.from_numpy(array)
    mine = Graph.from_edge_index(edge_index, 3)
    array[:] = 0
    forget(mine)
    check(edge_index, [(0, 0)] * 5)
    assert as_lists(mine.rows()) == group([(0, 0)] * 5, 1, 3, 3)


@pytest.mark.parametrize(
    "what", [lambda e, g: e, lambda e, g: g, lambda e, g: e[:, 1:]]
)
def test_a_graph_of_the_user_forgets_too(what):
    edge_index = tensor(EDGES)
    mine = Graph.from_edge_index(edge_index, 3)
    before = mine.current()
    edge_index.data.zero_()
    forget(what(edge_index, mine))
    assert as_lists(mine.current().rows()) == group([(0, 0)] * 5, 1, 3, 3)
    assert as_lists(before.rows()) == BY_DST
    assert as_lists(before.columns()) == group(EDGES, 0, 3, 3)


def test_known_edges_can_be_swapped():
    edge_index, other = tensor(EDGES), tensor([(0, 0)] * 5)
    check(edge_index, EDGES)
    check(edge_index, EDGES)
    torch.utils.swap_tensors(edge_index, other)
    check(edge_index, [(0, 0)] * 5)
    check(other, EDGES)


def test_the_last_answer_is_of_one_storage_and_counter():
    array = np.array(EDGES).T.copy()
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    check(first, EDGES)
    # The same memory with as many edits, counted elsewhere.
    second.zero_()
    first.data.zero_()
    first.view(-1)[0].fill_(0)
    assert first._version == second._version
    check(second, [(0, 0)] * 5)
    check(first, [(0, 0)] * 5)


def test_forget_drops_every_view_and_nothing_else(empty_memo, builds):
    edge_index, other = tensor(EDGES), tensor(EDGES)
    kept = relation(other)
    for part in (edge_index, edge_index[:, 1:], edge_index.flip(0)[:, 1:]):
        relation(part)
    relation(edge_index, flow="target_to_source")
    assert len(empty_memo) == 4
    forget(edge_index)
    assert len(empty_memo) == 2
    assert relation(other) is kept
    builds.clear()
    check(edge_index, EDGES)
    assert builds == [1]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_forget_takes_what_relations_are_made_of(empty_memo):
    eye = torch.eye(3)
    for made in (eye.to_sparse_csr(), eye.to_sparse_coo(), eye.to_sparse_csc()):
        memo.relation_of_adj(made)
        assert len(empty_memo) == 1
        forget(made)
        assert len(empty_memo) == 0
    wrapped = EdgeIndex(tensor(EDGES))
    relation(wrapped)
    forget(wrapped)
    assert len(empty_memo) == 0


def test_clear(empty_memo):
    relation(tensor(EDGES))
    clear()
    assert len(empty_memo) == 0


@pytest.mark.parametrize("max_entries", [1, 64])
@pytest.mark.parametrize("counts", [True, False])
def test_freed_storage_is_not_mistaken_for_a_new_one(
    monkeypatch, empty_memo, max_entries, counts
):
    empty_memo.max_entries = max_entries
    if not counts:
        monkeypatch.setattr(cache, "_use_count", None)
    addresses = set()
    for shift in range(60):
        edges = [((a + shift) % 3, b) for a, b in EDGES]
        edge_index = tensor(edges)
        addresses.add(edge_index.data_ptr())
        check(edge_index, edges)
        del edge_index
    if not counts and max_entries == 64:
        # The entries hold on to their storages, so no address comes back.
        assert len(addresses) == 60
        assert len(empty_memo) == 60


def test_storage_swapped_under_a_tensor():
    edge_index = tensor(EDGES)
    check(edge_index, EDGES)
    other = [(b, a) for a, b in EDGES]
    edge_index.data = tensor(other)
    check(edge_index, other)


def test_views_differ_by_offset_shape_and_strides():
    many = tensor(EDGES * 4)
    edges = EDGES * 4
    for part, expected in (
        (many[:, :10], edges[:10]),
        (many[:, 3:13], edges[3:13]),
        (many[:, ::2], edges[::2]),
        (many[:, :5], edges[:5]),
        (many.flip(0), [(b, a) for a, b in edges]),
        (many, edges),
    ):
        check(part, expected)
    square = torch.tensor([[0, 1], [2, 0]])
    check(square, [(0, 2), (1, 0)])
    check(square.t(), [(0, 1), (2, 0)])
    flat = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    check(flat.view(2, 2), [(0, 2), (1, 2)])
    check(flat.view(torch.uint8).view(2, 8)[:, ::4], [(0, 2), (1, 2)])
    check(
        flat.view(torch.uint8).view(2, 8),
        [(0, 2), *[(0, 0)] * 3, (1, 2)] + [(0, 0)] * 3,
    )


def test_sizes_flow_and_order_are_part_of_the_key():
    edge_index = tensor([(0, 0), (1, 0), (1, 2)])
    found = [
        relation(edge_index),
        relation(edge_index, 4, 3),
        relation(edge_index, 3, 4),
        relation(edge_index, 3, 3, flow="target_to_source"),
        relation(EdgeIndex(edge_index, sort_order="row")),
        relation(EdgeIndex(edge_index, sort_order="col")),
    ]
    assert len({id(one) for one in found}) == len(found)
    assert [(one.num_src, one.num_dst) for one in found[:3]] == [(3, 3), (4, 3), (3, 4)]
    assert as_lists(found[3].rows()) == [[(0, 0)], [(0, 1), (2, 2)], []]
    assert found[4].columns().perm is None
    assert found[5].rows().perm is None
    assert found[0].rows().perm is not None


def test_flow_and_reverse_share_groupings(builds):
    edge_index = tensor(EDGES)
    forward = relation(edge_index)
    backward = relation(edge_index, flow="target_to_source")
    assert backward.rows() is forward.columns()
    assert backward.columns() is forward.rows()
    assert builds == [1, 0]


def test_inference_tensors_make_no_entry(empty_memo):
    with torch.inference_mode():
        edge_index = tensor(EDGES)
        check(edge_index, EDGES)
        edge_index.zero_()
        check(edge_index, [(0, 0)] * 5)
        assert as_lists(
            Graph.from_handle(*handle_of(edge_index, 3, 3)).rows()
        ) == group([(0, 0)] * 5, 1, 3, 3)
        assert len(empty_memo) == 0
        inside = EdgeIndex(tensor(EDGES))
        check(inside, EDGES)
    normal = tensor(EDGES)
    with torch.inference_mode():
        check(normal, EDGES)
        wrapped = EdgeIndex(normal)
        check(wrapped, EDGES)
        wrapped.zero_()
        check(wrapped, [(0, 0)] * 5)
    assert len(empty_memo) == 1


def test_a_relation_of_an_inference_tensor_is_found_while_held():
    with torch.inference_mode():
        held = relation(tensor(EDGES))
        assert Graph.from_handle(*held.handle()).rows() is held.rows()


def test_edits_through_an_edge_index_object_are_noticed():
    edge_index = EdgeIndex(tensor(EDGES))
    first = relation(edge_index)
    assert relation(edge_index) is first
    edge_index.zero_()
    check(edge_index, [(0, 0)] * 5)
    edge_index.as_tensor().copy_(tensor(EDGES))
    check(edge_index, EDGES)
    again = relation(edge_index)
    assert relation(edge_index) is again


def test_subclasses_and_parameters():
    edge_index = tensor(EDGES)
    buffer = torch.nn.Buffer(edge_index)
    fixed = torch.nn.Parameter(edge_index, requires_grad=False)
    assert relation(buffer) is relation(edge_index)
    assert relation(fixed) is relation(edge_index)


def test_bad_edges_make_no_entry(empty_memo):
    edge_index = tensor([(0, 5)])
    for _ in range(2):
        with pytest.raises(ValueError, match="destination index 5"):
            relation(edge_index)
    assert len(empty_memo) == 0
    edge_index.zero_()
    check(edge_index, [(0, 0)])


def test_a_hit_is_cheap():
    edge_index = tensor(EDGES)
    relation(edge_index)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(200):
            relation_of(edge_index, 3, 3)
        best = min(best, (time.perf_counter() - start) / 200)
    # Three times the 6 µs that are aimed at, for loaded machines.
    assert best < 18e-6


def test_key_holds_no_tensor():
    key = key_of((tensor(EDGES),), "coo", (3, 3))
    assert not any(isinstance(part, torch.Tensor) for part in key)
    hash(key)
