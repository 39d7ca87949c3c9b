"""Streams, CUDA graphs and waits: what only a device can show."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.relation import Graph, check, clear, edges, forget, relation_of
from pyg_tiga.relation.csr import cut_rows
from pyg_tiga.relation.stats import Readback
from tests.relation.naive import as_lists, group

pytestmark = pytest.mark.gpu

NUM_NODES, NUM_EDGES = 2000, 30_000


@pytest.fixture
def deferred(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", "deferred")


def random_edges(num_edges=NUM_EDGES, num_nodes=NUM_NODES):
    # A third of the edges goes to node 0, which is then cut into pieces.
    edge_index = torch.randint(num_nodes, (2, num_edges))
    edge_index[1, ::3] = 0
    return edge_index


def made_on_host(edge_index):
    return Graph.from_edge_index(edge_index.cpu(), NUM_NODES)


def same(on_device, on_host):
    assert as_lists(on_device) == as_lists(on_host)
    assert on_device.stats == on_host.stats
    for chunk in (64, 100, 1024):
        pieces = on_device.work_items(chunk)
        expected = on_host.work_items(chunk)
        for found, wanted in zip(pieces.tensors(), expected.tensors(), strict=True):
            kept = found[: wanted.numel()].tolist()
            assert kept == wanted.tolist()
    inverse = on_device.degree_inv().cpu()
    torch.testing.assert_close(inverse, on_host.degree_inv())
    assert on_device.row_index().tolist() == on_host.row_index().tolist()


@contextmanager
def no_sync():
    """Raise at whatever makes the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def counted_syncs():
    """Count what makes the host wait."""
    count = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield count
        count += [w for w in caught if "synchronizing" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def warm():
    """Have what is made once per device behind us."""
    made = Graph.from_edge_index(random_edges().cuda(), NUM_NODES)
    made.columns()
    torch.cuda.synchronize()


# The same groupings as on the host


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_edge_index(dtype):
    edge_index = random_edges()
    host = Graph.from_edge_index(edge_index, NUM_NODES)
    device = Graph.from_edge_index(edge_index.to("cuda", dtype), NUM_NODES)
    same(device.rows(), host.rows())
    same(device.columns(), host.columns())
    assert device.slots().tolist() == host.slots().tolist()
    assert device.targets().tolist() == host.targets().tolist()
    if host.ranks() is not None:
        assert device.ranks().tolist() == host.ranks().tolist()


@pytest.mark.parametrize("order", ["row", "col"])
def test_sorted_edge_index(order):
    edge_index = EdgeIndex(random_edges(), sparse_size=(NUM_NODES, NUM_NODES))
    edge_index = edge_index.sort_by(order).values
    host, device = (Graph.from_edge_index(e) for e in (edge_index, edge_index.cuda()))
    same(device.rows(), host.rows())
    same(device.columns(), host.columns())
    presorted = device.rows() if order == "col" else device.columns()
    assert presorted.perm is None


def test_csr():
    rows = Graph.from_edge_index(random_edges(), NUM_NODES).rows()
    host = Graph.from_csr(rows.ptr, rows.index)
    device = Graph.from_csr(rows.ptr.cuda(), rows.index.cuda())
    same(device.rows(), host.rows())
    same(device.columns(), host.columns())


def test_strided_edges():
    edge_index = random_edges().t().contiguous()
    host = Graph.from_edge_index(edge_index.t(), NUM_NODES)
    device = Graph.from_edge_index(edge_index.cuda().t(), NUM_NODES)
    same(device.rows(), host.rows())


def test_no_edges():
    none = torch.empty(2, 0, dtype=torch.long, device="cuda")
    made = Graph.from_edge_index(none, num_src=3, num_dst=2)
    assert as_lists(made.rows()) == [[], []]
    assert as_lists(made.columns()) == [[], [], []]


def test_to_and_back():
    host = Graph.from_edge_index(random_edges(), NUM_NODES)
    device = host.to("cuda")
    same(device.rows(), host.rows())
    same(copy.deepcopy(device).to("cpu").rows(), host.rows())
    assert device.to("cuda") is device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    edge_index = random_edges()
    host = Graph.from_edge_index(edge_index, NUM_NODES)
    second = Graph.from_edge_index(edge_index.to("cuda:1"), NUM_NODES)
    same(second.rows(), host.rows())
    same(second.columns(), host.columns())


# Bad indices


@pytest.mark.parametrize("value", [-1, NUM_NODES, 2**31, 2**32 + 1, -(2**63)])
@pytest.mark.parametrize("end", [0, 1])
def test_bad_index(value, end):
    edge_index = random_edges()
    edge_index[end, 17] = value
    what = ("source", "destination")[end]
    with pytest.raises(ValueError, match=f"{what} index {value} at position 17"):
        relation_of(edge_index.cuda(), NUM_NODES, NUM_NODES)
    torch.cuda.synchronize()


def test_deferred_bad_index(deferred, warm):
    edge_index = random_edges()
    edge_index[1, 17] = NUM_NODES
    edge_index[0, 23] = -1
    on_device = edge_index.cuda()
    with no_sync():
        made = relation_of(on_device, NUM_NODES, NUM_NODES)
    torch.cuda.synchronize()
    for use in (made.rows, made.columns, made.validate):
        with pytest.raises(ValueError, match="destination index 2000 at position 17"):
            use()
    pairs = list(zip(*edge_index.tolist(), strict=True))
    built = made._edges.built(1)
    assert as_lists(built) == group(pairs, 1, NUM_NODES, NUM_NODES)


def test_deferred_is_reported_by_a_later_relation(deferred):
    bad = random_edges()
    bad[1, 17] = -4
    relation_of(bad.cuda(), NUM_NODES, NUM_NODES)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="destination index -4 at position 17"):
        relation_of(random_edges().cuda(), NUM_NODES, NUM_NODES)


class Quick(Readback):
    """A copy that has always landed when somebody looks."""

    def landed(self):
        if self.event is not None:
            self.event.synchronize()
        return True


def test_the_call_that_builds_reports_nothing(deferred, monkeypatch):
    monkeypatch.setattr(edges, "Readback", Quick)
    bad = random_edges()
    bad[1, 17] = NUM_NODES
    made = relation_of(bad.cuda(), NUM_NODES, NUM_NODES)
    for use in (made.rows, made.columns):
        with pytest.raises(ValueError, match="destination index 2000 at position 17"):
            use()


def test_summaries_are_recycled(deferred):
    """More relations than a stock of small buffers holds, each with its own verdict."""
    made = []
    for k in range(150):
        bad = random_edges(100)
        bad[0, k % 100] = NUM_NODES + k
        made.append(Graph.from_edge_index(bad.cuda(), NUM_NODES))
        check._open.clear()
    for k, graph in enumerate(made):
        with pytest.raises(ValueError, match=f"{NUM_NODES + k} at position {k % 100} "):
            graph.validate()


# Waits


def test_one_wait_for_each_grouping(warm):
    edge_index = random_edges().cuda()
    with counted_syncs() as count:
        made = relation_of(edge_index, NUM_NODES, NUM_NODES)
        made.rows().work_items(128)
        made.rows().degree_inv()
    assert len(count) == 1
    with counted_syncs() as count:
        made.columns().work_items(128)
        made.slots()
    assert len(count) == 1
    with no_sync():
        for _ in range(3):
            again = relation_of(edge_index, NUM_NODES, NUM_NODES)
            again.rows().work_items(128)
            again.columns().degree_inv()


@pytest.mark.parametrize("layout", ["coo", "sorted", "csr"])
def test_no_wait_when_deferred(deferred, warm, layout):
    host = random_edges()
    if layout == "sorted":
        host = host[:, host[1].argsort(stable=True)]
    edge_index = host.cuda()
    ready = Graph.from_edge_index(edge_index, NUM_NODES)
    rowptr, col = ready.rows().ptr.clone(), ready.rows().index.clone()
    torch.cuda.synchronize()
    edge_index = edge_index.clone()
    with no_sync():
        if layout == "csr":
            made = Graph.from_csr(rowptr, col)
        elif layout == "sorted":
            made = Graph.from_edge_index(EdgeIndex(edge_index, sort_order="col"), 2000)
        else:
            made = Graph.from_edge_index(edge_index, NUM_NODES)
        made.rows().work_items(64)
        made.columns().work_items(64)
        made.slots()
        made.ranks()
        made.targets()
    torch.cuda.synchronize()
    wanted = host
    if layout == "csr":
        wanted = torch.stack((col.cpu(), ready.rows().row_index().cpu()))
    same(made.rows(), made_on_host(wanted).rows())
    same(made.columns(), made_on_host(wanted).columns())


def test_work_items_within_bounds():
    host = Graph.from_edge_index(random_edges(), NUM_NODES).rows()
    most = (2 * NUM_EDGES // 64, NUM_EDGES // 64)
    expected = cut_rows(host.ptr, 64, *most)
    ptr = host.ptr.cuda()
    with no_sync():
        found = cut_rows(ptr, 64, *most)
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        assert one.tolist() == other.tolist()


# Streams


def test_another_stream_waits_for_the_build(deferred):
    edge_index = random_edges().cuda()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        made = relation_of(edge_index, NUM_NODES, NUM_NODES)
        made.rows()
        made.rows().degree_inv()
        made.rows().work_items(64)
    # On the current stream, without any wait of the test's own.
    rows = made.rows()
    total = rows.index.sum() + rows.perm.sum()
    inverse = rows.degree_inv().sum()
    items = rows.work_items(64).start.sum()
    host = Graph.from_edge_index(edge_index.cpu(), NUM_NODES).rows()
    assert total.item() == (host.index.sum() + host.perm.sum()).item()
    torch.testing.assert_close(inverse.item(), host.degree_inv().sum().item())
    assert items.item() == host.work_items(64).start.sum().item()


def test_memory_is_not_reused_while_another_stream_reads(empty_memo):
    edge_index = random_edges().cuda()
    made = relation_of(edge_index, NUM_NODES, NUM_NODES)
    expected = made.rows().index.sum().item()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rows = made.rows()
        torch.cuda._sleep(100_000_000)
        total = rows.index.sum()
    address, size = rows.index.data_ptr(), rows.index.numel()
    del rows, made
    forget(edge_index)
    clear()
    taken = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for _ in range(8)]
    assert address not in [one.data_ptr() for one in taken]
    torch.cuda.synchronize()
    assert total.item() == expected


# CUDA graphs


def test_a_relation_is_not_built_during_capture():
    known, new = random_edges().cuda(), random_edges().cuda()
    made = relation_of(known, NUM_NODES, NUM_NODES)
    made.columns()
    forward_only = relation_of(known[:, 1:], NUM_NODES, NUM_NODES)
    torch.cuda.synchronize()
    builders = {
        "A relation": lambda: relation_of(new, NUM_NODES, NUM_NODES),
        "inverse degrees": made.rows().degree_inv,
        "work items": lambda: made.rows().work_items(64),
        "slot map": made.slots,
        "rank map": made.ranks,
        "list of ends": made.targets,
        "relation": forward_only.columns,
    }
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = torch.ones(1, device="cuda") + 1
        for what, build in builders.items():
            with pytest.raises(RuntimeError, match=f"{what}.* while a CUDA graph"):
                build()
    captured.replay()
    assert out.item() == 2
    # Nothing half-built was left behind.
    host = made_on_host(known)
    same(made.rows(), host.rows())
    same(made.columns(), host.columns())
    same(forward_only.reverse().rows(), made_on_host(known[:, 1:]).columns())


@pytest.mark.parametrize("mode", ["sync", "deferred"])
def test_a_captured_relation_is_pinned(monkeypatch, empty_memo, mode):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", mode)
    edge_index = random_edges().cuda()
    made = relation_of(edge_index, NUM_NODES, NUM_NODES)
    made.rows().degree_inv()
    made.columns()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = relation_of(edge_index, NUM_NODES, NUM_NODES)
        total = found.rows().index.sum() + found.columns().index.sum()
        inverse = found.rows().degree_inv().sum()
    expected = made.rows().index.sum() + made.columns().index.sum()
    expected, expected_inverse = expected.item(), made.rows().degree_inv().sum()
    forget(edge_index)
    clear()
    del made, found, edge_index
    torch.cuda.empty_cache()
    rubbish = [torch.full((NUM_EDGES,), 9, device="cuda") for _ in range(16)]
    captured.replay()
    assert total.item() == expected
    torch.testing.assert_close(inverse, expected_inverse)
    del rubbish
