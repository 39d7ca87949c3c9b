from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch_geometric.nn

from pyg_tiga import testing
from pyg_tiga.nn import TransformerConv
from tests.nn.layer_checks import (
    BIPARTITE,
    EDGE_LISTS,
    LOOPED,
    SQUARE,
    assert_same,
    coo,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    plain_edges,
    seeded,
    weights_in,
)
from tests.nn.layer_duties_checks import WEIGHTS, EdgeDuties, StateDuties
from tests.nn.layer_modes_checks import ModeDuties

OPTIONS = [
    {},
    {"heads": 1},
    {"concat": False},
    {"beta": True},
    {"beta": True, "concat": False},
    {"root_weight": False},
    {"root_weight": False, "beta": True, "concat": False},
    {"bias": False},
]


def name_of(options):
    return "-".join(f"{key}_{value}" for key, value in options.items()) or "default"


class TestDuties(StateDuties, EdgeDuties, ModeDuties):
    layer = TransformerConv
    rich: ClassVar = {"beta": True}
    autocast_dtype = torch.bfloat16


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@WEIGHTS
def test_options(options, row, weights):
    case, x, _ = features(row)
    widths = 8 if row.square else (8, 8)
    options = {"heads": 4, **options}
    ours, theirs = pair_of_layers(TransformerConv, widths, 6, **options)
    assert_same(ours, theirs, x, case.edge_index, weights=weights)
    assert_same(ours.eval(), theirs.eval(), x, case.edge_index)
    assert is_fused(ours)


def test_widths_of_a_pair():
    case, (x, x_dst), _ = features(BIPARTITE)
    ours, theirs = pair_of_layers(TransformerConv, (8, 5), 5, heads=2, beta=True)
    assert_same(ours, theirs, (x, x_dst[:, :5]), case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize("form", EDGE_LISTS)
@WEIGHTS
def test_target_to_source_of_a_pair(form, weights):
    case, x, _ = features(testing.row("more_destinations"))
    # The second of the pair is the destinations all the same, of the first row.
    edges = EDGE_LISTS[form](case)
    options = {"heads": 2, "flow": "target_to_source"}
    ours, theirs = pair_of_layers(TransformerConv, (8, 8), 5, **options)
    given = (x[1], x[0])
    plain = plain_edges(form, case, edges)
    assert_same(ours, theirs, given, edges, weights=weights, plain=plain)
    assert is_fused(ours)


@pytest.mark.parametrize(
    "change",
    [
        {"concat": False, "root_weight": False, "lin_beta": None},
        {"root_weight": False},
        {"beta": False},
        {"lin_beta": None},
        {"flow": "target_to_source"},
        {"lin_key": torch.nn.Linear(8, 12).double()},
    ],
    ids=lambda change: "-".join(change),
)
def test_attributes_changed_after_construction(change):
    case, x, _ = features(LOOPED)
    layers = pair_of_layers(TransformerConv, 8, 6, heads=2, beta=True)
    for layer in layers:
        for name, value in change.items():
            setattr(layer, name, value)
    assert_same(*layers, x, case.edge_index, weights=True)
    assert is_fused(layers[0])


@pytest.mark.parametrize("flag", [True, False, None, 1, 0])
def test_kind_of_return_attention_weights(flag):
    case, x, _ = features(SQUARE)
    for layer in pair_of_layers(TransformerConv, 8, 5):
        out = layer(x, case.edge_index, return_attention_weights=flag)
        assert isinstance(out, tuple) == isinstance(flag, bool)


class WithMask(torch_geometric.nn.TransformerConv):
    """PyG's layer, which drops what it is told to."""

    # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)
    keep: torch.Tensor | None = None

    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        training, self.training = self.training, False
        args = (query_i, key_j, value_j, edge_attr, index, ptr, size_i)
        out = super().message(*args)
        self.training = training
        return out * self.keep.unsqueeze(-1) / (1 - self.dropout)


@WEIGHTS
def test_dropout_is_after_the_returned_weights(weights):
    case, _, _ = features(LOOPED)
    # One-hot values of the edges' sources say which weights a destination kept.
    edges = torch.unique(case.edge_index, dim=1)
    x = torch.eye(16, dtype=torch.float64)
    options = {"heads": 4, "dropout": 0.5}
    ours, _ = pair_of_layers(TransformerConv, 16, 16, **options)
    theirs = WithMask(16, 16, **options).double()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        theirs.keep = _kept(ours, x, edges)
        assert (weights_in(seeded(ours, x, edges, None, True)) > 0).all()
    assert 0.3 < theirs.keep.float().mean() < 0.9
    forward = ours.forward
    ours.forward = lambda *args: torch.manual_seed(3) and forward(*args)
    assert_same(ours, theirs, x, edges, weights=weights)
    assert is_fused(ours)


def _kept(layer, x, edges):
    twin = TransformerConv(16, 16, heads=4, dropout=0.5, root_weight=False).double()
    twin.load_state_dict(layer.state_dict())
    twin.lin_value.weight.copy_(torch.eye(16, dtype=torch.float64).repeat(4, 1))
    twin.lin_value.bias.zero_()
    out = seeded(twin, x, edges).view(16, 4, 16)  # [N_dst, H, N_src]
    return out[edges[1], :, edges[0]] != 0  # [E, H]


@ignore_sparse_warnings
def test_weights_of_a_matrix_that_is_not_merged_yet():
    case, x, _ = features(LOOPED)
    matrix = coo(case, coalesced=False)
    ours, theirs = pair_of_layers(TransformerConv, 8, 5)
    out, (edges, weight) = ours(x, matrix, None, True)
    plain, (merged, expected) = theirs(x, matrix.coalesce(), None, True)
    torch.testing.assert_close((out, weight), (plain, expected))
    torch.testing.assert_close(edges.to_dense(), merged.to_dense())
    assert is_fused(ours)


def test_layer_forgets_its_weights():
    case, x, _ = features(LOOPED)
    layer = TransformerConv(8, 5).double()
    layer(x, case.edge_index, None, True)
    assert layer._alpha is None
