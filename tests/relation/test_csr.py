from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_tiga.relation.csr import (
    cut_rows,
    group_coo,
    group_csr,
    index_dtype,
    ranks,
    slots,
    transpose,
)
from tests.relation.naive import INDEX_DTYPES, as_lists, graphs, group, tensor

quick = settings(max_examples=40, deadline=None)


def check_arrays(grouping):
    """Shapes and dtypes that kernels rely on."""
    assert grouping.ptr.dtype == grouping.index.dtype == grouping.index_dtype
    assert grouping.index_dtype == torch.int32
    assert grouping.ptr.shape == (grouping.num_rows + 1,)
    assert grouping.index.shape == (grouping.num_edges,)
    assert grouping.ptr.is_contiguous()
    assert grouping.index.is_contiguous()
    if grouping.perm is not None:
        assert grouping.perm.dtype == torch.int32
        assert sorted(grouping.perm.tolist()) == list(range(grouping.num_edges))
    if grouping.num_cols:
        inside = (grouping.index >= 0) & (grouping.index < grouping.num_cols)
        assert inside.all()


@quick
@given(graphs(), st.sampled_from(INDEX_DTYPES), st.sampled_from([0, 1]))
def test_group_coo_matches_naive(graph, dtype, end):
    edges, *sizes = graph
    grouping, faults = group_coo(tensor(edges, dtype), end, tuple(sizes))
    assert as_lists(grouping) == group(edges, end, sizes[end], sizes[1 - end])
    assert faults.good.tolist() == [len(edges)]
    check_arrays(grouping)


@quick
@given(graphs(), st.sampled_from([0, 1]))
def test_trusted_edges_give_the_same_grouping(graph, end):
    edges, *sizes = graph
    edge_index = tensor(edges, torch.int32)
    grouping, faults = group_coo(edge_index, end, tuple(sizes), trusted=True)
    assert faults is None
    assert as_lists(grouping) == group(edges, end, sizes[end], sizes[1 - end])
    assert edge_index.tolist() == tensor(edges).tolist()
    check_arrays(grouping)


@quick
@given(graphs(), st.sampled_from([0, 1]))
def test_sorted_edges_are_not_permuted(graph, end):
    edges, *sizes = graph
    edges = sorted(edges, key=lambda edge: edge[end])
    grouping, faults = group_coo(tensor(edges), end, tuple(sizes), is_sorted=True)
    assert grouping.perm is None
    assert as_lists(grouping) == group(edges, end, sizes[end], sizes[1 - end])
    assert faults.good.tolist() == [len(edges)]
    check_arrays(grouping)


far = st.sampled_from([-1, -(2**31), -(2**32), -(2**63), 5, 6, 2**31, 2**32 + 2, 2**62])


@quick
@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=20),
    st.lists(st.tuples(st.integers(0, 4), far), min_size=1, max_size=3),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_bad_edges_are_reached_by_no_row(edges, bad, end, swapped):
    edges = edges + [edge[::-1] if swapped else edge for edge in bad]
    sizes = (5, 4)
    grouping, faults = group_coo(tensor(edges), end, sizes)
    expected = group(edges, end, sizes[end], sizes[1 - end])
    assert as_lists(grouping) == expected
    good = sum(map(len, expected))
    assert good < len(edges)
    assert faults.good.tolist() == [good]
    place, *ends = faults.locate().tolist()
    is_bad = [not (0 <= a < 5 and 0 <= b < 4) for a, b in edges]
    assert place == is_bad.index(True)
    assert tuple(ends) == edges[place]
    check_arrays(grouping)


@pytest.mark.parametrize(
    "edges", [[(0, 0), (9, 1)], [(0, -1), (0, 1)], [(0, 1), (0, 0)]]
)
def test_a_fault_empties_presorted_rows(edges):
    grouping, faults = group_coo(tensor(edges), 1, (3, 3), is_sorted=True)
    assert grouping.ptr.tolist() == [0, 0, 0, 0]
    assert faults.good.tolist() == [-1]
    check_arrays(grouping)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_strided_edges(dtype):
    edges = [(2, 0), (1, 1), (0, 0), (2, 2), (1, 0)]
    pairs = torch.tensor(edges, dtype=dtype)
    wide = torch.zeros(2, 10, dtype=dtype)
    wide[:, ::2] = pairs.t()
    for edge_index in (pairs.t(), wide[:, ::2], pairs.t().flip(0).flip(0)):
        grouping, _ = group_coo(edge_index, 1, (3, 3))
        assert as_lists(grouping) == group(edges, 1, 3, 3)


@quick
@given(graphs())
def test_csr_and_its_transpose(graph):
    edges, *sizes = graph
    edges = sorted(edges, key=lambda edge: edge[0])
    edge_index = tensor(edges)
    degree = torch.bincount(edge_index[0], minlength=sizes[0])
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    rows, faults = group_csr(rowptr, edge_index[1], sizes[1])
    assert faults.good.tolist() == [len(edges)]
    assert rows.perm is None
    assert as_lists(rows) == group(edges, 0, *sizes)
    columns = transpose(rows)
    assert as_lists(columns) == group(edges, 1, *sizes[::-1])
    check_arrays(rows)
    check_arrays(columns)


@pytest.mark.parametrize(
    ("rowptr", "col"),
    [
        ([0, 1, 2], [0, 3]),
        ([0, 1, 2], [-1, 0]),
        ([1, 1, 2], [0, 0]),
        ([0, 1, 1], [0, 0]),
        ([0, 2, 1], [0, 0]),
        ([0, 3, 2], [0, 0]),
        ([0, -1, 2], [0, 0]),
        ([0, 2**32 + 1, 2], [0, 0]),
        ([0, 1], []),
        ([1], []),
    ],
)
def test_a_fault_empties_csr_rows_and_columns(rowptr, col):
    col = torch.tensor(col, dtype=torch.int64)
    rows, faults = group_csr(torch.tensor(rowptr), col, 3)
    assert faults.good.tolist() == [-1]
    assert rows.ptr.tolist() == [0] * len(rowptr)
    columns = transpose(rows)
    assert columns.ptr.tolist() == [0, 0, 0, 0]
    check_arrays(rows)
    check_arrays(columns)


@quick
@given(graphs())
def test_row_index_and_degree_inv(graph):
    edges, *sizes = graph
    grouping, _ = group_coo(tensor(edges), 1, tuple(sizes))
    lists = as_lists(grouping)
    expected = [row for row, found in enumerate(lists) for _ in found]
    assert grouping.row_index().tolist() == expected
    inverse = torch.tensor([1 / max(len(found), 1) for found in lists])
    torch.testing.assert_close(grouping.degree_inv(), inverse)
    assert grouping.degree_inv() is grouping.degree_inv()
    assert grouping.degree_inv(torch.float64).tolist() == [
        1 / max(len(found), 1) for found in lists
    ]


def test_row_index_stays_in_range_with_unreached_positions():
    grouping, _ = group_coo(tensor([(0, 0), (0, 7), (0, 1)]), 1, (2, 3))
    assert grouping.row_index().tolist() == [0, 1, 2]


@quick
@given(graphs())
def test_slots_tie_the_groupings(graph):
    edges, *sizes = graph
    rows, _ = group_coo(tensor(edges), 1, tuple(sizes))
    columns, _ = group_coo(tensor(edges), 0, tuple(sizes))
    place = slots(rows, columns)
    assert rows.perm[place].tolist() == columns.perm.tolist()
    assert rows.perm[ranks(rows)].tolist() == list(range(rows.num_edges))


def pieces_of(lists, chunk):
    """Rows, starts and owners of the pieces, in plain Python."""
    row, start, hub_row, hub_ptr, first = [], [], [], [0], 0
    for i, found in enumerate(lists):
        if len(found) > chunk:
            starts = list(range(first, first + len(found), chunk))
            row += [i] * len(starts)
            start += starts
            hub_row.append(i)
            hub_ptr.append(len(row))
        first += len(found)
    return row, start, hub_row, hub_ptr


@quick
@given(graphs(), st.integers(1, 6))
def test_work_items_are_exact_on_the_cpu(graph, chunk):
    edges, *sizes = graph
    grouping, _ = group_coo(tensor(edges), 1, tuple(sizes))
    items = grouping.work_items(chunk)
    found = [array.tolist() for array in items.tensors()]
    assert found == list(pieces_of(as_lists(grouping), chunk))
    assert items.num_items == len(found[0])
    assert items.num_hubs == len(found[2])
    assert items is grouping.work_items(chunk)


@quick
@given(graphs(), st.integers(1, 6))
def test_work_items_within_bounds_are_padded(graph, chunk):
    edges, *sizes = graph
    grouping, _ = group_coo(tensor(edges), 1, tuple(sizes))
    most_items, most_hubs = 2 * len(edges) // chunk, len(edges) // chunk
    items = cut_rows(grouping.ptr, chunk, most_items, most_hubs)
    row, start, hub_row, hub_ptr = pieces_of(as_lists(grouping), chunk)
    more_items, more_hubs = most_items - len(row), most_hubs - len(hub_row)
    assert more_items >= 0
    assert more_hubs >= 0
    assert items.row.tolist() == row + [-1] * more_items
    assert items.start.tolist() == start + [0] * more_items
    assert items.hub_row.tolist() == hub_row + [-1] * more_hubs
    expected = hub_ptr + [len(row)] * more_hubs
    assert items.hub_ptr.tolist() == expected[: items.num_hubs + 1]
    assert all(array.dtype == torch.int32 for array in items.tensors())


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunk_must_be_positive(chunk):
    grouping, _ = group_coo(tensor([(0, 0)]), 1, (1, 1))
    with pytest.raises(ValueError, match="'chunk' must be positive"):
        grouping.work_items(chunk)


def test_nbytes_counts_what_is_kept():
    grouping, _ = group_coo(tensor([(0, 0), (0, 0), (1, 0)]), 1, (2, 2))
    arrays = (3 + 3 + 3) * 4
    assert grouping.nbytes == arrays
    grouping.degree_inv()
    assert grouping.nbytes == arrays + 2 * 4
    items = grouping.work_items(2)
    more = sum(array.nbytes for array in items.tensors())
    assert grouping.nbytes == arrays + 2 * 4 + more


def test_index_dtype():
    assert index_dtype(10, 10, 10) == torch.int32
    assert index_dtype(2**31 - 2, 1, 1) == torch.int32
    assert index_dtype(2**31 - 1, 1, 1) == torch.int64
    assert index_dtype(1, 1, 2**31) == torch.int64


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_node_numbers_beyond_int32(end, dtype):
    edges = [(0, 3), (2, 1), (0, 1), (7, 0)]
    sizes = (2**40, 4) if end == 1 else (8, 2**40)
    edge_index = tensor(edges, dtype)
    if end == 1 and dtype == torch.int64:
        edges[0] = (2**33, 3)
        edge_index = tensor(edges)
    grouping, faults = group_coo(edge_index, end if end else 0, sizes)
    assert faults.good.tolist() == [4]
    assert grouping.index_dtype == torch.int64
    assert as_lists(grouping) == group(edges, end, sizes[end], sizes[1 - end])
