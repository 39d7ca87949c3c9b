from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.nn import GATConv
from tests.nn.gat_checks import (
    EDGE_DIM,
    SQUARE,
    features,
    ignore_sparse_warnings,
    pair_of_layers,
    twin_of,
)


@pytest.mark.parametrize("pair", [False, True])
def test_batches_are_refused(pair):
    case, x, _ = features(SQUARE)
    x = x.expand(2, -1, -1)
    theirs, ours = twin_of(GATConv(8, 3)), GATConv(8, 3)
    given = (x, x) if pair else x
    with pytest.raises(AssertionError, match="Static graphs not supported"):
        theirs(given, case.edge_index)
    with pytest.raises(ValueError, match="Static graphs not supported"):
        ours(given, case.edge_index)


BAD_SIZES = ["ab", 6, (6.0, 6.0), (-1, 6), (6, -1), ("a", 6), (True, 6), (6, 6, 6)]


def bad_calls():
    x, index = torch.randn(6, 8), torch.tensor([[0, 1], [2, 3]])
    wide, attr = torch.randn(6, 9), torch.randn(2, EDGE_DIM)
    matrix = torch.eye(6).to_sparse_csr()
    return {
        "width": (x[:, :7], index, None, None, r"'x' must have shape .*8\]"),
        "width_of_pair": ((x, wide), index, None, None, r"'x\[1\]' must have shape"),
        "one_dimension": (x[0], index, None, None, "'x' must have shape"),
        "no_tensor": ((None, x), index, None, None, "'x' must be a tensor"),
        "dtype": (x.double(), index, None, None, "'x' must have the dtype"),
        "integers": (x.long(), index, None, None, "'x' must have the dtype"),
        "float_index": (x, index.float(), None, None, "must hold integers"),
        "bool_index": (x, index.bool(), None, None, "must hold integers"),
        "shape": (x, index.new_zeros(3, 2), None, None, r"shape \[2, num_edges\]"),
        "one_row": (x, index[0], None, None, r"shape \[2, num_edges\]"),
        "kind": (x, [[0, 1], [2, 3]], None, None, "'edge_index' must be"),
        "size": (x, index, None, (7, 6), "'x' must have 7 rows by 'size'"),
        "size_of_pair": ((x, x[:5]), index, None, (6, 4), r"'x\[1\]' must have 4"),
        "columns": (x[:5], matrix, None, None, "'x' must have 6 rows"),
        "rows": ((x, x[:5]), matrix, None, None, r"'x\[1\]' must have 6 rows"),
        "too_large": (x, index + 4, None, None, "index 6 .* 6 destination nodes"),
        "large_with_attr": (x, index + 4, attr, None, "index 6 .* 6 destination"),
        "negative": (x, index - 1, None, None, "index -1 .* 6 source nodes"),
        "negative_with_attr": (x, index - 3, attr, None, "index -3 .* 6 source"),
        "device": (x.to("meta"), index, None, None, "device"),
        "attr_rows": (x, index, attr[:1], None, "'edge_attr' must have 2 rows"),
        "attr_width": (x, index, attr[:, :2], None, "'edge_attr' must have shape"),
        "attr_one_dimension": (x, index, attr[:, 0], None, "'edge_attr' must have"),
        "attr_dtype": (x, index, attr.double(), None, "'edge_attr' must have the d"),
        "attr_device": (x, index, attr.to("meta"), None, "'edge_attr' must be on"),
        "attr_kind": (x, index, [1.0, 2.0], None, "'edge_attr' must be a tensor"),
        "attr_batch": (x, index, attr[None], None, r"'edge_attr' .*got \[1, 2, 3\]"),
        "no_leading": (x[0], index, None, None, r"shape \[num_nodes, 8\] \(got \[8"),
        "nothing": (x, None, None, None, "'edge_index' must be .* 'NoneType'"),
        "nothing_with_attr": (x, None, attr, None, "'edge_index' must be .* 'NoneTy"),
        "numpy": (x, index.numpy(), None, None, "'edge_index' must be .* 'ndarray'"),
        "list_with_attr": (x, [[0, 1]], attr, None, "'edge_index' must be .* 'list'"),
        "row_with_attr": (x, index[0], attr, None, r"'edge_index' .*\(got \[2\]"),
        "shape_with_attr": (x, index.new_zeros(3, 2), attr, None, r"\(got \[3, 2\]"),
        "batch_with_attr": (x, index[None], attr, None, r"\(got \[1, 2, 2\]"),
        "batch_of_both": (x, index[None], attr[None], None, r"\(got \[1, 2, 2\]"),
        **{
            f"size_{size}": (x, index, None, size, "'size' must be a pair of node")
            for size in BAD_SIZES
        },
    }


@ignore_sparse_warnings
@pytest.mark.parametrize("name", list(bad_calls()))
@pytest.mark.parametrize("weights", [False, True])
def test_bad_input_is_named(name, weights):
    x, edges, edge_attr, size, message = bad_calls()[name]
    weights = weights and name not in ("columns", "rows")
    layer = GATConv((8, 8), 3, edge_dim=EDGE_DIM)
    with pytest.raises(ValueError, match=message):
        layer(x, edges, edge_attr, size, weights)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 1, 3)])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_fill_value_of_a_wrong_shape(shape, edge_dim):
    case, x, edge_attr = features(SQUARE)
    options = {"edge_dim": edge_dim, "fill_value": torch.ones(shape)}
    ours, theirs = pair_of_layers(8, 3, **options)
    with pytest.raises(RuntimeError):
        theirs(x, case.edge_index, edge_attr)
    with pytest.raises(ValueError, match=r"'fill_value' must expand to .*\[24, 3\]"):
        ours(x, case.edge_index, edge_attr)


@pytest.mark.parametrize("given", ["rows", "number", "list"])
@pytest.mark.parametrize("weights", [False, True])
def test_features_that_only_self_loops_would_read(given, weights):
    case, x, edge_attr = features(SQUARE)
    kinds = {"rows": edge_attr[:5], "number": edge_attr[0, 0], "list": [1.0]}
    args = (x, case.edge_index, kinds[given], None, weights)
    ours, theirs = pair_of_layers(8, 3)
    with pytest.raises((IndexError, TypeError)):
        theirs(*args)
    with pytest.raises(ValueError, match="'edge_attr' must"):
        ours(*args)
    for layer in (ours, theirs):
        layer.add_self_loops = False
        layer(*args)


@ignore_sparse_warnings
def test_features_that_self_loops_of_a_matrix_would_read():
    matrix = torch.eye(6).to_sparse_csr()
    for layer in pair_of_layers(8, 3):
        with pytest.raises(AssertionError):
            layer(torch.randn(6, 8), matrix, torch.randn(6, EDGE_DIM))


@pytest.mark.parametrize("heads", [0, -1, 1.5, "a", None])
def test_number_of_heads(heads):
    with pytest.raises(ValueError, match="'heads' must be a positive integer"):
        GATConv(8, 3, heads=heads)


def test_dropout_that_is_no_number():
    with pytest.raises(ValueError, match="'dropout' must be a number"):
        GATConv(8, 3, dropout="a")


def test_edge_index_knows_its_size():
    case, x, _ = features(SQUARE)
    edge_index = EdgeIndex(case.edge_index, sparse_size=(24, 30))
    for layer in pair_of_layers(8, 3):
        with pytest.raises(ValueError):
            layer(x, edge_index)


def test_one_tensor_on_a_matrix_that_is_not_square():
    x, matrix = torch.randn(6, 8), torch.ones(4, 6).to_sparse_coo()
    for layer in pair_of_layers(8, 3):
        with pytest.raises(ValueError):
            layer(x, matrix)


@pytest.mark.gpu
def test_features_and_edges_on_different_devices():
    case, x, _ = features(SQUARE)
    layer = GATConv(8, 3).cuda()
    with pytest.raises(ValueError, match="'x' must be on the device of 'edge_index'"):
        layer(x.cuda(), case.edge_index)
