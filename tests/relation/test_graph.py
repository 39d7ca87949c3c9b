from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.utils import to_torch_csc_tensor, to_torch_csr_tensor

from pyg_tiga.relation import Graph, forget, relation_of_adj, stats
from pyg_tiga.relation import inputs as inputs_module
from tests.relation.naive import INDEX_DTYPES, as_lists, graphs, group, tensor

quick = settings(max_examples=30, deadline=None)

# Unsorted, with a duplicate (2 -> 1), a self-loop (1 -> 1), an isolated destination 3
# and an isolated source 4.
EDGES = [(2, 1), (0, 2), (1, 1), (3, 0), (2, 1), (0, 0)]
NUM_SRC, NUM_DST = 5, 4
BY_DST = group(EDGES, 1, NUM_DST, NUM_SRC)
BY_SRC = group(EDGES, 0, NUM_SRC, NUM_DST)


def make(edge_index=None, **options):
    edge_index = tensor(EDGES) if edge_index is None else edge_index
    sizes = {"num_src": NUM_SRC, "num_dst": NUM_DST} | options
    return Graph.from_edge_index(edge_index, **sizes)


def check(graph, by_dst=BY_DST, by_src=BY_SRC):
    assert as_lists(graph.rows()) == by_dst
    assert as_lists(graph.columns()) == by_src
    assert (graph.rows().num_rows, graph.rows().num_cols) == (
        graph.num_dst,
        graph.num_src,
    )


# Edge lists


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_edge_index(dtype):
    graph = make(tensor(EDGES, dtype))
    check(graph)
    assert (graph.kind, graph.num_src, graph.num_dst) == ("csr", NUM_SRC, NUM_DST)
    assert (graph.num_edges, graph.device) == (6, torch.device("cpu"))
    assert graph.index_dtype == torch.int32
    assert graph.value is None


@quick
@given(graphs(), st.booleans())
def test_flow_says_which_row_holds_the_destinations(graph, reversed_flow):
    edges, first, second = graph
    flow = "target_to_source" if reversed_flow else "source_to_target"
    num_src, num_dst = (second, first) if reversed_flow else (first, second)
    made = Graph.from_edge_index(
        tensor(edges), num_src=num_src, num_dst=num_dst, flow=flow
    )
    end = 0 if reversed_flow else 1
    sizes = (first, second)
    assert as_lists(made.rows()) == group(edges, end, sizes[end], sizes[1 - end])
    assert as_lists(made.columns()) == group(edges, 1 - end, sizes[1 - end], sizes[end])


def test_columns_are_built_only_when_asked_for():
    graph = make()
    before = graph.nbytes()
    assert "by source: not built" in graph.explain()
    graph.rows().degree_inv()
    graph.columns()
    assert graph.nbytes() > before
    assert "not built" not in graph.explain()


def test_numbers_of_nodes():
    edge_index = tensor(EDGES)
    assert make(edge_index, num_src=None, num_dst=None, num_nodes=7).num_dst == 7
    assert make(edge_index, num_src=9, num_dst=None, num_nodes=7).num_src == 9
    square = Graph.from_edge_index(edge_index)
    assert (square.num_src, square.num_dst) == (4, 4)
    half = Graph.from_edge_index(edge_index, num_src=6)
    assert (half.num_src, half.num_dst) == (6, 3)
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long))
    assert (empty.num_src, empty.num_dst, empty.num_edges) == (0, 0, 0)


def test_no_edges_and_no_nodes():
    none = torch.empty(2, 0, dtype=torch.long)
    graph = Graph.from_edge_index(none, num_src=3, num_dst=0)
    assert as_lists(graph.rows()) == []
    assert as_lists(graph.columns()) == [[], [], []]
    assert graph.rows().max_degree == 0
    assert graph.rows().work_items(64).num_items == 0
    assert graph.edge_index().shape == (2, 0)
    graph.explain()


@pytest.mark.parametrize("order", ["row", "col"])
def test_edge_index_class_skips_the_sort(order):
    end = 0 if order == "row" else 1
    edges = sorted(EDGES, key=lambda edge: edge[end])
    edge_index = EdgeIndex(
        tensor(edges), sparse_size=(NUM_SRC, NUM_DST), sort_order=order
    )
    graph = Graph.from_edge_index(edge_index)
    assert (graph.num_src, graph.num_dst) == (NUM_SRC, NUM_DST)
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    presorted = graph.columns() if order == "row" else graph.rows()
    other = graph.rows() if order == "row" else graph.columns()
    assert presorted.perm is None
    assert other.perm is not None


def test_edge_index_class_without_order():
    check(make(EdgeIndex(tensor(EDGES))))
    known = Graph.from_edge_index(EdgeIndex(tensor(EDGES), sparse_size=(7, None)))
    assert (known.num_src, known.num_dst) == (7, 3)


# CSR and sparse matrices


def csr_of(edges, dtype=torch.int64):
    """Edges ordered by destination, as (rowptr, col), and these edges."""
    edges = sorted(edges, key=lambda edge: edge[1])
    degree = torch.bincount(tensor(edges)[1], minlength=NUM_DST)
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return rowptr.to(dtype), tensor(edges)[0].to(dtype), edges


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_csr(dtype):
    rowptr, col, edges = csr_of(EDGES, dtype)
    graph = Graph.from_csr(rowptr, col, num_src=NUM_SRC)
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert graph.rows().perm is None
    assert graph.edge_index().tolist() == tensor(edges).tolist()
    assert graph.reverse().edge_index().tolist() == tensor(edges).flip(0).tolist()
    assert Graph.from_csr(rowptr, col).num_src == NUM_DST


def matrix(layout):
    """A sparse matrix of distinct entries, rows being destinations, and its edges."""
    edges = sorted(set(EDGES), key=lambda edge: edge[::-1])
    if layout == "csc":
        edges = sorted(edges)
    value = torch.arange(1.0, len(edges) + 1)
    index = tensor(edges).flip(0)
    if layout == "coo":
        adj = torch.sparse_coo_tensor(index, value, (NUM_DST, NUM_SRC)).coalesce()
    elif layout == "csr":
        adj = to_torch_csr_tensor(index, value, (NUM_DST, NUM_SRC))
    else:
        adj = to_torch_csc_tensor(index, value, (NUM_DST, NUM_SRC))
    return adj, edges, value


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_torch_sparse(layout):
    adj, edges, value = matrix(layout)
    graph = Graph.from_adj(adj)
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert graph.value.tolist() == value.tolist()
    assert graph.edge_index().tolist() == tensor(edges).tolist()
    grouped = {"csr": graph.rows(), "csc": graph.columns()}.get(layout)
    assert grouped is None or grouped.perm is None
    again = relation_of_adj(adj)
    assert again.rows() is relation_of_adj(adj).rows()
    assert again.value.tolist() == value.tolist()
    assert graph.reverse().value is graph.value


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_uncoalesced_entries_stay_edges():
    value = torch.arange(6.0)
    adj = torch.sparse_coo_tensor(tensor(EDGES).flip(0), value, (NUM_DST, NUM_SRC))
    graph = Graph.from_adj(adj)
    check(graph)
    assert graph.value.tolist() == value.tolist()
    assert not adj.is_coalesced()
    assert relation_of_adj(adj).rows() is relation_of_adj(adj).rows()
    with pytest.raises(ValueError, match="coalesce"):
        Graph.from_adj(adj.requires_grad_())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_stored_values_carry_gradients(layout):
    adj, _, value = matrix(layout)
    adj.requires_grad_()
    (Graph.from_adj(adj).value ** 2).sum().backward()
    assert adj.grad.to_sparse_csr().values().tolist() == (2 * value).tolist()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_coalesced_flag_that_lies_is_not_believed():
    index = tensor(EDGES).flip(0)
    adj = torch.sparse_coo_tensor(index, torch.ones(6), (NUM_DST, NUM_SRC))
    check(Graph.from_adj(adj._coalesced_(True)))


class FakeSparseTensor:
    """What the package reads of a `torch_sparse.SparseTensor`."""

    def __init__(self, rowptr, col, value, sizes):
        self._csr, self._sizes = (rowptr, col, value), sizes

    def csr(self):
        return self._csr

    def sparse_sizes(self):
        return self._sizes


@pytest.mark.parametrize("valued", [False, True])
def test_sparse_tensor_protocol(monkeypatch, valued):
    monkeypatch.setattr(inputs_module, "SparseTensor", FakeSparseTensor)
    rowptr, col, edges = csr_of(EDGES)
    value = torch.rand(6) if valued else None
    adj = FakeSparseTensor(rowptr, col, value, (NUM_DST, NUM_SRC))
    graph = Graph.from_adj(adj)
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert graph.value is value
    assert relation_of_adj(adj).rows() is relation_of_adj(adj).rows()


def test_sparse_tensor():
    torch_sparse = pytest.importorskip("torch_sparse")
    dst, src = tensor(EDGES).flip(0)
    adj = torch_sparse.SparseTensor(
        row=dst, col=src, value=torch.arange(6.0), sparse_sizes=(NUM_DST, NUM_SRC)
    )
    row, col, value = adj.coo()
    edges = list(zip(col.tolist(), row.tolist(), strict=True))
    graph = Graph.from_adj(adj)
    check(graph, group(edges, 1, NUM_DST, NUM_SRC), group(edges, 0, NUM_SRC, NUM_DST))
    assert graph.value.tolist() == value.tolist()
    assert relation_of_adj(adj).rows() is relation_of_adj(adj).rows()
    forget(adj)


def test_sizes_are_blamed_by_name():
    for name in ("num_nodes", "num_src", "num_dst"):
        with pytest.raises(ValueError, match=f"'{name}' must not be negative"):
            Graph.from_edge_index(tensor(EDGES), **{name: -1})
        with pytest.raises(TypeError, match=f"'{name}' must be an integer"):
            Graph.from_edge_index(tensor(EDGES), **{name: 2.5})


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_the_default_device_does_not_matter():
    stats._constants.cache_clear()
    stats.table.cache_clear()
    edge_index, adj = tensor(EDGES), torch.eye(3).to_sparse_csr()
    with torch.device("meta"):
        check(make(edge_index))
        assert stats.table(edge_index.device).device == edge_index.device
        assert as_lists(Graph.from_adj(adj).columns()) == [[(k, k)] for k in range(3)]


# Views of one relation


def test_reverse_shares_and_returns():
    graph = make()
    back = graph.reverse()
    assert (back.num_src, back.num_dst) == (NUM_DST, NUM_SRC)
    assert back.rows() is graph.columns()
    assert back.columns() is graph.rows()
    assert back.reverse() is graph
    assert graph.reverse() is back
    assert graph.reverse().reverse() is graph
    assert back.edge_index().tolist() == graph.edge_index().flip(0).tolist()
    src, dst = back.ends()
    assert src.tolist() == tensor(EDGES)[1].tolist()
    assert dst.tolist() == tensor(EDGES)[0].tolist()


def test_slots():
    graph = make()
    place = graph.slots()
    assert graph.rows().perm[place].tolist() == graph.columns().perm.tolist()
    assert place is graph.slots()
    back = graph.reverse().slots()
    assert place[back].tolist() == list(range(6))


def test_ranks_and_targets():
    graph = make()
    graph.columns()
    for one in (graph, graph.reverse()):
        before = graph.nbytes()
        ranks, targets = one.ranks(), one.targets()
        assert one.rows().perm[ranks.long()].tolist() == list(range(6))
        assert one.ranks() is ranks
        assert one.rows().row_index()[ranks].tolist() == targets.tolist()
        assert targets.tolist() == one.ends()[1].tolist()
        assert targets.dtype == ranks.dtype == one.index_dtype
        assert one.targets() is targets
        assert graph.nbytes() == before + ranks.nbytes + targets.nbytes


def test_ranks_and_targets_of_grouped_edges():
    rows = make().rows()
    graph = Graph.from_csr(rows.ptr, rows.index, rows.num_cols)
    assert graph.ranks() is None
    assert graph.targets().tolist() == rows.row_index().tolist()
    back = graph.reverse()
    assert back.targets() is graph.rows().index
    assert back.rows().perm[back.ranks()].tolist() == list(range(6))


def test_no_cycle_keeps_arrays_alive():
    gc.disable()
    try:
        graph = make()
        graph.reverse().columns()
        alive = weakref.ref(graph.rows())
        back = graph.reverse()
        del graph
        assert alive() is not None
        del back
        assert alive() is None
    finally:
        gc.enable()


def test_edge_index_is_the_callers():
    edge_index = tensor(EDGES)
    assert make(edge_index).edge_index().data_ptr() == edge_index.data_ptr()
    flipped = make(
        edge_index.flip(0), flow="target_to_source", num_src=NUM_SRC, num_dst=NUM_DST
    )
    assert flipped.edge_index().tolist() == edge_index.tolist()


@pytest.mark.parametrize("kind", ["coo", "reversed", "csr"])
def test_handle_finds_the_relation(kind):
    if kind == "csr":
        rowptr, col, _ = csr_of(EDGES)
        graph = Graph.from_csr(rowptr, col, num_src=NUM_SRC)
    else:
        graph = make().reverse() if kind == "reversed" else make()
    tensors, layout, num_src, num_dst = graph.handle()
    assert layout == {"reversed": "coo:reversed"}.get(kind, kind)
    assert (num_src, num_dst) == (graph.num_src, graph.num_dst)
    found = Graph.from_handle(tensors, layout, num_src, num_dst)
    assert found.rows() is graph.rows()
    assert found.columns() is graph.columns()


def test_handle_keeps_the_sort_order():
    edges = sorted(EDGES, key=lambda edge: edge[1])
    graph = make(EdgeIndex(tensor(edges), sort_order="col"))
    tensors, layout, *sizes = graph.handle()
    assert layout == "coo_by_col"
    assert type(tensors[0]) is torch.Tensor
    assert Graph.from_handle(tensors, layout, *sizes).rows().perm is None


def test_handle_is_traceable():
    graph = make()

    def step(x):
        tensors, layout, num_src, num_dst = graph.handle()
        return x + tensors[0].sum() + num_src * len(layout) + num_dst

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == step(torch.ones(1)).item()


def test_explain():
    text = make().explain()
    assert "relation csr: 5 -> 4 nodes, 6 edges, cpu" in text
    assert "largest 3" in text
    assert "1 rows without edges" in text
