"""Groupings built by our kernels against those of PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga import _features
from pyg_tiga.impls.triton_build import TritonBuild
from pyg_tiga.relation import Graph, fused, relation_of, stats
from pyg_tiga.relation.check import ListFaults, Names
from pyg_tiga.relation.csr import group_coo, group_csr, transpose
from tests.relation.naive import INDEX_DTYPES, as_lists, group, tensor

BUILD = TritonBuild(devices=("cpu", "cuda"))
FAR = [-1, -(2**31), -(2**32), -(2**63), 5, 2**31, 2**32 + 2, 2**62]


def random_edges(num_edges, sizes, hub=None):
    ends = [torch.randint(size, (num_edges,)) for size in sizes]
    if hub is not None:
        ends[1][: num_edges // 2] = hub
    return torch.stack(ends)


def check_same(edge_index, end, sizes, *, is_sorted=False):
    """The same arrays and the same summary as PyTorch's operations give."""
    assert BUILD.serves(edge_index.device)
    found, summary = BUILD.group_coo(edge_index, end, sizes, is_sorted)
    wanted, faults = group_coo(edge_index, end, sizes, is_sorted=is_sorted)
    assert found.index_dtype == found.index.dtype == wanted.index_dtype
    torch.testing.assert_close(found.ptr, wanted.ptr)
    assert (found.perm is None) == (wanted.perm is None)
    if found.perm is not None:
        torch.testing.assert_close(found.perm, wanted.perm)
    reached = int(wanted.ptr[-1])
    torch.testing.assert_close(found.index[:reached], wanted.index[:reached])
    assert ((found.index >= 0) & (found.index < max(sizes[1 - end], 1))).all()
    expected = stats.summarise(found.ptr, found.index, faults.good)
    assert summary[: stats.LENGTH].tolist() == expected.tolist()
    values = summary.tolist()
    if not stats.is_good(values, edge_index.size(1)):
        assert values[stats.FOUND :][:3] == faults.locate().tolist()
        names = Names(sizes, 1)
        words = ListFaults(end if is_sorted else None).describe(names)
        located = faults.locate().tolist()
        assert words(values[stats.FOUND :]) == faults.describe(names)(located)
    return found, values


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_dtypes(device, dtype, end):
    sizes = (90, 120)
    edge_index = random_edges(300, sizes, hub=7)
    found, _ = check_same(edge_index.to(device, dtype), end, sizes)
    pairs = list(zip(*edge_index.tolist(), strict=True))
    assert as_lists(found) == group(pairs, end, sizes[end], sizes[1 - end])


@pytest.mark.parametrize("num_edges", [0, 1, 2, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 200), (200, 3), (128, 127)])
def test_sizes(device, num_edges, sizes):
    for end in (0, 1):
        edge_index = random_edges(num_edges, sizes).to(device)
        check_same(edge_index, end, sizes)
        edge_index = edge_index[:, edge_index[end].argsort(stable=True)]
        check_same(edge_index, end, sizes, is_sorted=True)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_no_edges_and_no_nodes(device, sizes, is_sorted):
    none = torch.empty(2, 0, dtype=torch.int64, device=device)
    for end in (0, 1):
        found, _ = check_same(none, end, sizes, is_sorted=is_sorted)
        assert found.ptr.tolist() == [0] * (sizes[end] + 1)


@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("bad_end", [0, 1])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_faults(device, value, bad_end, is_sorted):
    sizes = (5, 4)
    for places in ([0], [1499], [700, 1300, 1301]):
        edge_index = random_edges(1500, sizes)
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
        edge_index[bad_end, places] = value
        for end in (0, 1):
            sorted_here = is_sorted and end == 1
            _, values = check_same(
                edge_index.to(device), end, sizes, is_sorted=sorted_here
            )
            assert values[stats.FOUND] == places[0]


@pytest.mark.parametrize("place", [1, 1023, 1024, 1025, 2047])
def test_edges_that_are_not_sorted_as_said(device, place):
    edge_index = torch.zeros(2, 2048, dtype=torch.int64)
    edge_index[0] = 3
    edge_index[0, place] = 2
    found, values = check_same(edge_index.to(device), 0, (4, 1), is_sorted=True)
    assert found.ptr.tolist() == [0] * 5
    assert values[stats.FOUND] == place


def test_nodes_but_none_at_an_end(device):
    edge_index = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for end in (0, 1):
        check_same(edge_index, end, (0, 3))
        check_same(edge_index, end, (3, 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_strides(device, dtype, is_sorted):
    edge_index = random_edges(50, (9, 9))
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].to(device, dtype)
    wide = torch.full((2, 150), 77, dtype=dtype, device=device)
    wide[:, ::3] = edge_index
    turned = edge_index.t().contiguous().t()
    both = edge_index[:1].expand(2, -1).sort(1).values[:1].expand(2, -1)
    for strided in (wide[:, ::3], turned, turned[:, 1:], edge_index[:, 1:], both):
        check_same(strided, 1, (9, 9), is_sorted=is_sorted)


@pytest.mark.parametrize("end", [0, 1])
def test_node_numbers_beyond_int32(device, end):
    sizes = (2**40, 4) if end == 1 else (8, 2**40)
    edge_index = tensor([(0, 3), (2, 1), (0, 1), (7, 0)]).to(device)
    found, _ = check_same(edge_index, end, sizes)
    assert found.index_dtype == torch.int64


def test_long_rows_and_sampled_edges(device):
    """More edges than the signature looks at, and products that overflow."""
    degrees = torch.tensor([0, 1, 2, 5, 64, 65, 128, 129, 9000, 4097])
    rows = torch.repeat_interleave(torch.arange(10), degrees)
    cols = torch.randint(2**31 - 3, rows.shape)
    edge_index = torch.stack((rows, cols)).to(device)
    check_same(edge_index, 0, (10, 2**31 - 3), is_sorted=True)
    check_same(edge_index.flip(1), 0, (10, 2**31 - 3))


def test_programs_share_blocks_of_rows(device, monkeypatch):
    monkeypatch.setattr("pyg_tiga.impls.triton_build._MOST_ROW_PROGRAMS", 2)
    edge_index = random_edges(400, (700, 700), hub=600).to(device)
    check_same(edge_index, 1, (700, 700))
    rows, _ = group_coo(edge_index, 1, (700, 700))
    check_summary(rows, rows.ptr[-1:])


def check_summary(rows, good):
    found = BUILD.summarise(rows.ptr, rows.index, good)
    expected = stats.summarise(rows.ptr, rows.index, good)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("num_edges", [0, 1, 5000])
def test_csr_and_its_transpose(device, num_edges):
    edge_index = random_edges(num_edges, (60, 300)).to(device)
    rows, _ = group_coo(edge_index, 0, (60, 300))
    for rowptr in (rows.ptr, rows.ptr + 1):
        again, faults = group_csr(rowptr, rows.index, 300)
        check_summary(again, faults.good)
        columns = transpose(again)
        check_summary(columns, columns.ptr[-1:])


def test_tiles_hold_the_constants():
    assert len(stats.THRESHOLDS) <= 64
    assert len(stats.CHUNKS) == 8
    # Rows of a stock must stay aligned as Triton likes it.
    assert stats.WIDTH * 8 % 16 == 0


# Through the front door


@pytest.fixture
def injected(monkeypatch):
    """Our kernels on every device, and the calls they get."""
    calls = []

    class Counted(TritonBuild):
        def group_coo(self, *arguments):
            calls.append("group_coo")
            return super().group_coo(*arguments)

        def summarise(self, *arguments):
            calls.append("summarise")
            return super().summarise(*arguments)

    monkeypatch.setattr(fused, "_injected", Counted(devices=("cpu", "cuda")))
    return calls


def test_import_injects_the_builder():
    assert fused._injected == TritonBuild()
    assert fused.builder_for(torch.device("cpu")) is None


@pytest.mark.gpu
def test_only_real_kernels_serve_a_device():
    served = fused.builder_for(torch.device("cuda", 0)) is not None
    assert served == _features.has_triton()


@pytest.mark.parametrize("mode", ["sync", "deferred"])
def test_graphs_are_built_with_them(device, monkeypatch, injected, mode):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", mode)
    edge_index = random_edges(200, (20, 30), hub=3)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].to(device)
    with monkeypatch.context() as without:
        without.setattr(fused, "_injected", None)
        plain = Graph.from_edge_index(edge_index.clone(), num_src=20, num_dst=30)
        plain.columns()
    assert injected == []
    sorted_edges = EdgeIndex(edge_index.clone(), sort_order="col", sparse_size=(20, 30))
    for made in (
        relation_of(edge_index, 20, 30),
        Graph.from_edge_index(sorted_edges),
        Graph.from_csr(plain.rows().ptr, plain.rows().index, 20),
    ):
        made.validate()
        for side in ("rows", "columns"):
            found, wanted = getattr(made, side)(), getattr(plain, side)()
            assert found.ptr.tolist() == wanted.ptr.tolist()
            assert found.index.tolist() == wanted.index.tolist()
            made.validate()
            plain.validate()
            assert found.stats == wanted.stats
        assert made.slots().tolist() == plain.slots().tolist()


def test_one_call_for_each_grouping(device, injected):
    made = Graph.from_edge_index(random_edges(50, (9, 9)).to(device), 9)
    assert injected == ["group_coo"]
    made.columns()
    assert injected == ["group_coo"] * 2
    rows = made.rows()
    Graph.from_csr(rows.ptr, rows.index).columns()
    assert injected == ["group_coo"] * 2 + ["summarise"] * 2


@pytest.mark.parametrize("mode", ["sync", "deferred"])
def test_messages_are_the_same(device, monkeypatch, injected, mode):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", mode)
    bad = tensor([(0, 1), (2, 7), (9, 0), (1, 1)]).to(device)
    with pytest.raises(ValueError, match="destination index 7 at position 1"):
        relation_of(bad, 3, 3).validate()
    falls = tensor([(0, 2), (1, 1)]).to(device)
    with pytest.raises(ValueError, match=r"edge_index\[1\] falls to 1 at position 1"):
        Graph.from_edge_index(EdgeIndex(falls, sort_order="col"), 3).validate()
    rowptr, col = torch.tensor([[0, 1, 2], [0, 5, 0]], device=device)
    with pytest.raises(ValueError, match="source index 5 at position 1"):
        Graph.from_csr(rowptr, col[:2], 3).validate()
    assert "group_coo" in injected
