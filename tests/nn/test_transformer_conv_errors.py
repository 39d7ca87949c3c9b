from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga.nn import TransformerConv
from tests.nn.layer_error_checks import ErrorDuties

X, EDGES = torch.randn(6, 8), torch.tensor([[0, 1], [2, 3]])


class TestErrors(ErrorDuties):
    layer = TransformerConv


def test_edge_features_that_are_not_given():
    with pytest.raises(AssertionError):
        TransformerConv._pyg_class(8, 3, edge_dim=2)(X, EDGES)
    with pytest.raises(ValueError, match="'edge_attr' must be given"):
        TransformerConv(8, 3, edge_dim=2)(X, EDGES)


def test_sizes_of_a_reversed_pair_are_named():
    layer = TransformerConv(8, 3, flow="target_to_source")
    edge_index = EdgeIndex(EDGES, sparse_size=(6, 7))
    with pytest.raises(ValueError, match="'x' must have 7 rows by 'sparse_size'"):
        layer((X, X.clone()), edge_index)
    edge_index = EdgeIndex(EDGES, sparse_size=(7, 6))
    with pytest.raises(ValueError, match=r"'x\[1\]' must have 7 rows by 'sparse_size'"):
        layer((X, X.clone()), edge_index)


@pytest.mark.parametrize("x", [None, 3.0, (X,)])
def test_features_that_are_no_pair(x):
    with pytest.raises(ValueError, match="'x' must be a tensor or a pair"):
        TransformerConv(8, 3)(x, EDGES)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    ("edge_attr", "message"),
    [
        (torch.randn(15), r"'edge_attr' must have shape .*, 2\] \(got \[15\]"),
        (torch.tensor(1.0), r"'edge_attr' must have shape .*, 2\] \(got \[\]"),
        (torch.randn(2, 3), r"'edge_attr' must have shape .*, 2\] \(got \[2, 3\]"),
        (torch.randn(1, 3), r"'edge_attr' must have shape .*, 2\] \(got \[1, 3\]"),
        ("a", r"'edge_attr' must be a tensor \(got 'str'\)"),
    ],
)
def test_edge_features_that_do_not_fit(edge_attr, message, hooked):
    layer = TransformerConv(8, 3, edge_dim=2)
    if hooked:
        layer.register_propagate_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=message):
        layer(X, EDGES, edge_attr)
