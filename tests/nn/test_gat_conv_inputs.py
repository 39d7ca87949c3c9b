from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

import pyg_tiga as tg
from pyg_tiga import _features, testing
from pyg_tiga.nn import GATConv
from tests.nn.gat_checks import (
    BIPARTITE,
    EDGE_DIM,
    LOOPED,
    SQUARE,
    assert_parents_path,
    assert_same,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
)

LOOPS = pytest.mark.parametrize("loops", [True, False], ids=["loops", "no_loops"])
WEIGHTS = pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])


def edge_index_of(case, order=None):
    edge_index = EdgeIndex(case.edge_index, sparse_size=(case.num_src, case.num_dst))
    return edge_index if order is None else edge_index.sort_by(order).values


EDGE_LISTS = {
    "edge_index": lambda case: case.edge_index,
    "int32": lambda case: case.edge_index.int(),
    "EdgeIndex": edge_index_of,
    "EdgeIndex_by_row": lambda case: edge_index_of(case, "row"),
    "EdgeIndex_by_col": lambda case: edge_index_of(case, "col"),
    "strided": lambda case: case.edge_index.t().contiguous().t(),
}


def coo(case, *, coalesced=True, width=None):
    """The edges as a matrix, whose values, one or a row per edge, say nothing."""
    size = (case.num_dst, case.num_src)
    index = case.edge_index.flip(0)
    shape = (index.size(1),) if width is None else (index.size(1), width)
    value = torch.linspace(0.5, 1.5, index.size(1)).view(-1, *[1] * (len(shape) - 1))
    value = value.expand(shape).contiguous()
    matrix = torch.sparse_coo_tensor(index, value, size + shape[1:])
    return matrix.coalesce() if coalesced else matrix


MATRICES = {
    "coo": coo,
    "coo_uncoalesced": lambda case: coo(case, coalesced=False),
    "csr": lambda case: coo(case).to_sparse_csr(),
}


@pytest.mark.parametrize("form", EDGE_LISTS)
@pytest.mark.parametrize("row", [SQUARE, LOOPED, BIPARTITE], ids=str)
@LOOPS
@WEIGHTS
def test_every_form_of_an_edge_list(form, row, loops, weights):
    case, x, edge_attr = features(row)
    options = {"heads": 2, "add_self_loops": loops, "edge_dim": EDGE_DIM}
    ours, theirs = pair_of_layers((8, 8), 5, **options)
    edges = EDGE_LISTS[form](case)
    # By narrow indices the gradients of the parent are wrong.
    theirs_take = case.edge_index if form == "int32" else edges
    assert_same(
        ours, theirs, x, edges, edge_attr, weights=weights, their_edges=theirs_take
    )
    assert is_fused(ours)


@pytest.mark.parametrize("form", EDGE_LISTS)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@LOOPS
def test_returned_edges_are_those_of_pyg(form, row, loops):
    case, x, _ = features(row)
    edges = EDGE_LISTS[form](case)
    found = [
        layer(x, edges, return_attention_weights=True)
        for layer in pair_of_layers((8, 8), 5, heads=2, add_self_loops=loops)
    ]
    (_, (ours, weight)), (_, (theirs, plain)) = found
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(weight, plain)
    if isinstance(ours, EdgeIndex):
        assert ours.sparse_size() == theirs.sparse_size()
        assert ours.sort_order == theirs.sort_order
    if not loops:
        assert ours is edges


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8])
def test_every_integer_dtype_is_an_index(dtype):
    case, x, edge_attr = features(LOOPED)
    ours, theirs = pair_of_layers(8, 5, edge_dim=EDGE_DIM)
    long = case.edge_index
    assert_same(ours, theirs, x, long.to(dtype), edge_attr, their_edges=long)


@pytest.mark.parametrize("flag", [True, 1, False, None, 0])
def test_truth_of_return_attention_weights(flag):
    case, x, _ = features(SQUARE)
    for layer in pair_of_layers(8, 5):
        out = layer(x, case.edge_index, return_attention_weights=flag)
        assert isinstance(out, tuple) == bool(flag)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", MATRICES)
@pytest.mark.parametrize("row", [SQUARE, LOOPED, BIPARTITE], ids=str)
@LOOPS
def test_torch_sparse_matrices(form, row, loops):
    case, x, _ = features(row)
    ours, theirs = pair_of_layers((8, 8), 5, heads=2, add_self_loops=loops)
    edges = MATRICES[form](case)
    # PyG refuses an uncoalesced matrix without self-loops.
    theirs_take = edges.coalesce() if form == "coo_uncoalesced" else edges
    assert_same(ours, theirs, x, edges, their_edges=theirs_take)
    assert is_fused(ours)


def twice(form):
    """A matrix in which some entries occur twice, made anew."""
    rows, columns = torch.tensor([[0, 0, 1, 2, 2, 3, 3], [1, 1, 0, 1, 2, 3, 3]])
    if form == "csr":
        ptr = torch.tensor([0, 2, 3, 5, 7])
        return torch.sparse_csr_tensor(ptr, columns, torch.ones(7), (4, 4))
    index = torch.stack((rows, columns))
    matrix = torch.sparse_coo_tensor(index, torch.ones(7), (4, 4))
    # As PyG leaves a matrix that it took.
    return matrix._coalesced_(True) if form == "coo_flagged" else matrix


@ignore_sparse_warnings
@pytest.mark.parametrize("form", ["coo", "coo_flagged", "csr"])
@pytest.mark.parametrize("loops", [True, False])
def test_entries_that_occur_twice(form, loops):
    x = features(SQUARE)[1][:4]
    ours, theirs = pair_of_layers(8, 5, heads=2, add_self_loops=loops)
    # PyG refuses an uncoalesced matrix without self-loops.
    plain = twice(form)
    plain = plain.coalesce() if form == "coo" and not loops else plain
    assert_same(ours, theirs, x, twice(form), their_edges=plain)
    assert is_fused(ours)


@ignore_sparse_warnings
@pytest.mark.parametrize("order", ["theirs_first", "weights_first", "inference_first"])
def test_entries_that_occur_twice_in_a_matrix_in_use(order):
    x = features(SQUARE)[1][:4]
    ours, theirs = pair_of_layers(8, 5)
    expected = theirs(x, twice("coo"))
    matrix = twice("coo")
    if order == "theirs_first":
        theirs(x, matrix)
    elif order == "weights_first":
        ours(x, matrix, return_attention_weights=True)
    else:
        with torch.inference_mode():
            ours(x, matrix)
    for _ in range(2):
        out = ours(x, matrix)
        torch.testing.assert_close(out, expected)
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
@LOOPS
def test_the_parents_path_returns_the_edges_that_were_given(dtype, loops):
    case, x, _ = features(LOOPED)
    edges = case.edge_index.to(dtype)
    ours, theirs = pair_of_layers(8, 5, aggr="mean", add_self_loops=loops)
    out = ours(x, edges, return_attention_weights=True)
    plain = theirs(x, case.edge_index, return_attention_weights=True)
    torch.testing.assert_close(out[0], plain[0])
    torch.testing.assert_close(out[1][1], plain[1][1])
    assert torch.equal(out[1][0].long(), plain[1][0])
    if loops:
        assert out[1][0].dtype is torch.int64
    else:
        assert out[1][0] is edges
    assert_parents_path(ours, "aggr")


@ignore_sparse_warnings
@pytest.mark.parametrize("form", ["coo", "csr"])
@WEIGHTS
def test_edge_features_of_a_matrix(form, weights):
    case, x, edge_attr = features(LOOPED)
    edges = MATRICES[form](case)
    edge_attr = edge_attr[: edges._nnz()]
    options = {"heads": 2, "edge_dim": EDGE_DIM, "add_self_loops": False}
    ours, theirs = pair_of_layers(8, 5, **options)
    assert_same(ours, theirs, x, edges, edge_attr, weights=weights)
    assert is_fused(ours)
    out = ours(x, edges, edge_attr, return_attention_weights=True)
    plain = theirs(x, edges, edge_attr, return_attention_weights=True)
    torch.testing.assert_close(out[1][0].to_dense(), plain[1][0].to_dense())


@ignore_sparse_warnings
@pytest.mark.parametrize("form", ["coo", "csr"])
def test_weights_of_a_matrix_with_self_loops_are_the_parents(form):
    case, x, _ = features(LOOPED)
    ours, theirs = pair_of_layers(8, 5)
    edges = MATRICES[form](case)
    out = ours(x, edges, return_attention_weights=True)
    plain = theirs(x, edges, return_attention_weights=True)
    torch.testing.assert_close(out[1][1], plain[1][1])
    assert_parents_path(ours, "PyG sorts the weights")


@ignore_sparse_warnings
def test_values_that_are_edge_features():
    case, x, _ = features(LOOPED)
    matrix = coo(case, width=EDGE_DIM)
    options = {"edge_dim": EDGE_DIM, "add_self_loops": False}
    ours, theirs = pair_of_layers(8, 5, **options)
    assert torch.equal(ours(x, matrix), theirs(x, matrix))
    assert_parents_path(ours, "a row of values per entry")


@ignore_sparse_warnings
@pytest.mark.parametrize("case_name", ["csc", "edge_attr_and_loops", "uncoalesced"])
def test_matrices_that_pyg_refuses(case_name):
    case, x, edge_attr = features(LOOPED)
    loops = case_name == "edge_attr_and_loops"
    matrix = coo(case, coalesced=case_name != "uncoalesced")
    matrix = matrix.to_sparse_csc() if case_name == "csc" else matrix
    edge_attr = edge_attr[: matrix._nnz()]
    raised = []
    for layer in pair_of_layers(8, 5, edge_dim=EDGE_DIM, add_self_loops=loops):
        with pytest.raises(Exception) as caught:
            layer(x, matrix, edge_attr)
        raised.append(caught.type)
    assert raised[0] is raised[1]


@pytest.mark.skipif(
    _features.torch_sparse() is None, reason="torch_sparse is not installed"
)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@LOOPS
def test_sparse_tensor(row, loops):
    case, x, edge_attr = features(row)
    src, dst = case.edge_index
    size = (case.num_dst, case.num_src)
    adj_t = SparseTensor(row=dst, col=src, sparse_sizes=size)
    ours, theirs = pair_of_layers((8, 8), 5, heads=2, add_self_loops=loops)
    assert_same(ours, theirs, x, adj_t)
    assert is_fused(ours)
    outs = [layer(x, adj_t, return_attention_weights=True) for layer in (ours, theirs)]
    weights = [out[1].storage.value() for out in outs]
    torch.testing.assert_close(*weights)
    options = {"edge_dim": EDGE_DIM, "add_self_loops": loops}
    ours, theirs = pair_of_layers((8, 8), 5, **options)
    if not loops:
        assert_same(ours, theirs, x, adj_t, edge_attr)
        return
    for layer in (ours, theirs):
        with pytest.raises(NotImplementedError):
            layer(x, adj_t, edge_attr)


@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@LOOPS
@WEIGHTS
def test_graph_counts_as_its_edges(row, loops, weights):
    case, x, edge_attr = features(row)
    options = {"heads": 2, "add_self_loops": loops, "edge_dim": EDGE_DIM}
    ours, theirs = pair_of_layers((8, 8), 5, **options)
    edges = case.edge_index
    graph = case.graph()
    assert_same(ours, theirs, x, graph, edge_attr, weights=weights, their_edges=edges)
    assert is_fused(ours)
    ours.register_message_forward_hook(lambda *_: None)
    assert_same(ours, theirs, x, graph, edge_attr, weights=weights, their_edges=edges)
    assert not is_fused(ours)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")
def test_values_of_a_graph_are_ignored():
    case, x, _ = features(LOOPED)
    layer = GATConv(8, 5)
    graph = tg.Graph.from_adj(coo(case).to_sparse_csr())
    out = layer(x, graph)
    torch.testing.assert_close(out, layer(x, coo(case)))
    layer.register_message_forward_hook(lambda *_: None)
    torch.testing.assert_close(out, layer(x, graph))


@pytest.mark.parametrize("size", [None, (35, 8)], ids=str)
@LOOPS
def test_bipartite_with_size(size, loops):
    case, x, _ = features(BIPARTITE)
    ours, theirs = pair_of_layers((8, 8), 5, heads=2, add_self_loops=loops)
    assert_same(ours, theirs, x, case.edge_index, size=size, weights=True)
    assert is_fused(ours)


@pytest.mark.parametrize("size", [None, (35, 8), (35, 40)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@LOOPS
@WEIGHTS
def test_bipartite_without_destination_features(size, residual, loops, weights):
    case, (x, _), _ = features(BIPARTITE)
    options = {"heads": 2, "add_self_loops": loops, "residual": residual}
    ours, theirs = pair_of_layers((8, 8), 5, **options)
    assert_same(ours, theirs, (x, None), case.edge_index, size=size, weights=weights)
    assert is_fused(ours)


def test_half_a_size():
    case, (x, _), _ = features(BIPARTITE)
    ours, theirs = pair_of_layers((8, 8), 5, add_self_loops=False)
    assert_same(ours, theirs, (x, None), case.edge_index, size=(None, 8))
    with pytest.raises(ValueError, match="'size' must hold both numbers"):
        GATConv((8, 8), 5)((x, None), case.edge_index, size=(None, 8))


def test_more_destinations_than_sources():
    case, x, edge_attr = features(testing.row("more_destinations"))
    for options in ({}, {"edge_dim": EDGE_DIM, "fill_value": 1.0}):
        ours, theirs = pair_of_layers((8, 8), 5, heads=2, **options)
        attr = edge_attr if options else None
        assert_same(ours, theirs, x, case.edge_index, attr, weights=True)
        assert is_fused(ours)
    # PyG scatters out of bounds where loop features are reduced from edges.
    layer = GATConv((8, 8), 5, edge_dim=EDGE_DIM)
    assert layer(x, case.edge_index, edge_attr).isfinite().all()


@pytest.mark.parametrize("form", EDGE_LISTS)
@LOOPS
@WEIGHTS
def test_target_to_source(form, loops, weights):
    case, x, edge_attr = features(LOOPED)
    options = {"heads": 2, "add_self_loops": loops, "edge_dim": EDGE_DIM}
    options["flow"] = "target_to_source"
    ours, theirs = pair_of_layers(8, 5, **options)
    edges = EDGE_LISTS[form](case)
    # By narrow indices the gradients of the parent are wrong.
    theirs_take = case.edge_index if form == "int32" else edges
    assert_same(
        ours, theirs, x, edges, edge_attr, weights=weights, their_edges=theirs_take
    )
    assert is_fused(ours)


def test_target_to_source_gathers_from_the_first_of_a_pair():
    case, x, _ = features(SQUARE)
    ours, theirs = pair_of_layers(8, 5, flow="target_to_source")
    assert_same(ours, theirs, (x, case.x_dst), case.edge_index)
    assert is_fused(ours)


def test_target_to_source_of_a_pair_of_two_sizes_is_the_parents():
    case, (x, x_dst), _ = features(BIPARTITE)
    edges = case.edge_index.clamp(max=7)
    ours, theirs = pair_of_layers(8, 5, flow="target_to_source")
    torch.testing.assert_close(ours((x, x_dst), edges), theirs((x, x_dst), edges))
    assert_parents_path(ours, "x[1] has 8 rows where the output has 35")


def test_size_that_is_not_that_of_the_nodes_is_the_parents():
    case, x, _ = features(LOOPED)
    edges = EdgeIndex(case.edge_index, sparse_size=(16, 16))
    ours, theirs = pair_of_layers(8, 5)
    out = ours(x, edges, size=(3, 3))
    torch.testing.assert_close(out, theirs(x, edges, size=(3, 3)))
    assert_parents_path(ours, "size=(3, 3)")


@ignore_sparse_warnings
@pytest.mark.parametrize("form", ["coo", "csr", "graph"])
def test_target_to_source_refuses_matrices(form):
    case, x, _ = features(SQUARE)
    edges = case.graph() if form == "graph" else MATRICES[form](case)
    for layer in pair_of_layers(8, 5, flow="target_to_source"):
        with pytest.raises(ValueError):
            layer(x, edges)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device():
    device = torch.device("cuda:1")
    case, x, edge_attr = features(SQUARE, device=device)
    ours, theirs = pair_of_layers(8, 3, edge_dim=EDGE_DIM, device=device)
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
