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
