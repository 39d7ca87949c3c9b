from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

import pyg_tiga as tg
from pyg_tiga import _features
from pyg_tiga.nn import SAGEConv
from tests.nn.sage_checks import (
    AGGR,
    BIPARTITE,
    EDGE_LISTS,
    MATRICES,
    SQUARE,
    assert_same,
    coo,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    run,
    values_of,
)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.int32])
def test_every_integer_dtype_is_an_index(dtype):
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 5)
    long = case.edge_index
    assert_same(ours, theirs, x, long.to(dtype), their_edges=long)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", [*MATRICES, *EDGE_LISTS])
@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_every_form_of_the_edges(form, row, aggr, device):
    case, x = features(row, aggr, device=device)
    if form in MATRICES and case.x.is_cuda and aggr in ("max", "min"):
        pytest.skip("PyG has no such reduction of a torch sparse tensor on CUDA")
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr, device=device)
    edges = (MATRICES | EDGE_LISTS)[form](case)
    assert_same(ours, theirs, x, edges)
    assert is_fused(ours)


@ignore_sparse_warnings
@pytest.mark.gpu
@pytest.mark.parametrize("form", MATRICES)
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema_of_matrices_on_cuda_are_those_of_the_cpu(form, aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr)
    edges = MATRICES[form](case)
    plain, plain_grads = run(theirs, x, edges)
    out, grads = run(ours.cuda(), x.cuda(), edges.cuda())
    torch.testing.assert_close(out.cpu(), plain)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.cpu(), plain_grads[name])


@ignore_sparse_warnings
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
def test_gradients_reach_the_stored_values(aggr, form, out_channels):
    case, x = features(SQUARE, aggr)
    grads = []
    for layer in pair_of_layers(8, out_channels, aggr=aggr):
        matrix = MATRICES[form](case).requires_grad_()
        layer(x, matrix).square().sum().backward()
        grads.append(matrix.grad.to_dense())
    torch.testing.assert_close(*grads)


@pytest.mark.skipif(
    _features.torch_sparse() is None, reason="torch_sparse is not installed"
)
@pytest.mark.parametrize("has_value", [True, False], ids=["value", "no_value"])
@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_sparse_tensor_values_are_ignored(has_value, row, aggr):
    case, x = features(row, aggr)
    src, dst = case.edge_index
    adj_t = SparseTensor(
        row=dst,
        col=src,
        value=values_of(case) if has_value else None,
        sparse_sizes=(case.num_dst, case.num_src),
    )
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, x, adj_t)
    assert is_fused(ours)


@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_graph_counts_as_what_it_was_built_from(row, aggr):
    case, x = features(row, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, x, case.graph(), their_edges=case.edge_index)
    assert is_fused(ours)


@ignore_sparse_warnings
@AGGR
def test_graph_of_a_matrix_carries_its_values(aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr)
    matrix = coo(case).to_sparse_csr()
    out = ours(x, tg.Graph.from_adj(matrix))
    torch.testing.assert_close(out, theirs(x, matrix))


@pytest.mark.parametrize("size", [None, (35, 8), (None, 8), (35, None)], ids=str)
def test_bipartite_with_size(size):
    case, x = features(BIPARTITE, "mean")
    ours, theirs = pair_of_layers((8, 8), 5)
    assert_same(ours, theirs, x, case.edge_index, size)


@pytest.mark.parametrize("size", [(35, 8), (None, 8), (35, 40)], ids=str)
@AGGR
def test_bipartite_without_destination_features(size, aggr):
    case, (x, _) = features(BIPARTITE, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, (x, None), case.edge_index, size)


def test_no_size_and_no_destinations_means_square():
    case, (x, _) = features(BIPARTITE, "mean")
    ours, theirs = pair_of_layers((8, 8), 5)
    assert_same(ours, theirs, (x, None), case.edge_index)
    assert ours((x, None), case.edge_index).size(0) == 35


@pytest.mark.parametrize("form", EDGE_LISTS)
@AGGR
def test_target_to_source(form, aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr, flow="target_to_source")
    assert_same(ours, theirs, x, EDGE_LISTS[form](case))
    assert is_fused(ours)


def test_target_to_source_gathers_from_the_first_of_a_pair():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 5, flow="target_to_source")
    assert_same(ours, theirs, (x, case.x_dst), case.edge_index)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", [*MATRICES, "graph"])
def test_target_to_source_refuses_matrices(form):
    case, x = features(SQUARE, "mean")
    layers = pair_of_layers(8, 5, flow="target_to_source")
    edges = case.graph() if form == "graph" else MATRICES[form](case)
    for layer in layers:
        with pytest.raises(ValueError):
            layer(x, edges)


@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
@AGGR
def test_batch_of_features(aggr, out_channels):
    case, x = features(SQUARE, aggr)
    x = torch.stack([x, x.flip(0), 2 * x])  # [3, N, F]
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


def bad_calls():
    x, index = torch.randn(6, 8), torch.tensor([[0, 1], [2, 3]])
    wide = torch.randn(6, 9)
    matrix = torch.eye(6).to_sparse_csr()
    return {
        "width": (x[:, :7], index, None, r"'x' must have shape .*8\]"),
        "width_of_destinations": ((x, wide), index, None, r"'x\[1\]' must have shape"),
        "one_dimension": (x[0], index, None, "'x' must have shape"),
        "no_tensor": ((None, x), index, None, "'x' must be a tensor"),
        "dtype": (x.double(), index, None, "'x' must have the dtype"),
        "integer_features": (x.long(), index, None, "'x' must have the dtype"),
        "float_index": (x, index.float(), None, "'edge_index' must hold integers"),
        "bool_index": (x, index.bool(), None, "'edge_index' must hold integers"),
        "shape_of_index": (x, index.new_zeros(3, 2), None, r"shape \[2, num_edges\]"),
        "one_row_of_index": (x, index[0], None, r"shape \[2, num_edges\]"),
        "kind_of_index": (x, [[0, 1], [2, 3]], None, "'edge_index' must be"),
        "size": (x, index, (7, 6), "'x' must have 7 rows by 'size'"),
        "size_of_destinations": ((x, x[:5]), index, (6, 4), r"'x\[1\]' must have 4"),
        "matrix_columns": (x[:5], matrix, None, "'x' must have 6 rows"),
        "matrix_rows": ((x, x[:5]), matrix, None, r"'x\[1\]' must have 6 rows"),
        "too_large": (x, index + 4, None, "index 6 .* 6 destination nodes"),
        "negative": (x, index - 1, None, "index -1 .* 6 source nodes"),
        "device": (x.to("meta"), index, None, "device"),
        "nothing": (x, None, None, "'edge_index' must be .* 'NoneType'"),
        "numpy": (x, index.numpy(), None, "'edge_index' must be .* 'ndarray'"),
        "batch_of_index": (x, index[None], None, r"\(got \[1, 2, 2\]"),
        **{
            f"size_{size}": (x, index, size, "'size' must be a pair of node counts")
            for size in ("ab", 6, (6.0, 6.0), (-1, 6), (6, -1), (True, 6), (6, 6, 6))
        },
    }


@ignore_sparse_warnings
@pytest.mark.parametrize("name", list(bad_calls()))
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_bad_input_is_named(name, aggr):
    x, edges, size, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message):
        SAGEConv((8, 8), 3, aggr=aggr)(x, edges, size)


def test_edge_index_knows_its_size():
    case, x = features(SQUARE, "mean")
    edge_index = EdgeIndex(case.edge_index, sparse_size=(24, 30))
    for layer in pair_of_layers(8, 3):
        with pytest.raises(ValueError):
            layer(x, edge_index)


@pytest.mark.gpu
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_features_and_edges_on_different_devices(aggr):
    case, x = features(SQUARE, aggr)
    layer = SAGEConv(8, 3, aggr=aggr).cuda()
    with pytest.raises(ValueError, match="'x' must be on the device of 'edge_index'"):
        layer(x.cuda(), case.edge_index)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_second_device(aggr):
    device = torch.device("cuda:1")
    case, x = features(SQUARE, aggr, device=device)
    ours, theirs = pair_of_layers(8, 3, aggr=aggr, device=device)
    assert_same(ours, theirs, x, case.edge_index)


def test_mixed_flow_and_pair_that_cannot_be_added():
    case, (x, x_dst) = features(BIPARTITE, "mean")
    index = case.edge_index.clamp(max=7)
    layer = SAGEConv((8, 8), 3, flow="target_to_source")
    with pytest.raises(ValueError, match="target_to_source"):
        layer((x, x_dst), index)
