from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch_geometric.nn

from pyg_tiga import _features, testing
from pyg_tiga.nn import GATv2Conv
from tests.nn.layer_checks import (
    BIPARTITE,
    LOOPED,
    MATRICES,
    SQUARE,
    assert_parents_path,
    assert_same,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    seeded,
    weights_in,
)
from tests.nn.layer_duties_checks import WEIGHTS, EdgeDuties, StateDuties
from tests.nn.layer_modes_checks import ModeDuties

OPTIONS = [
    {},
    {"heads": 1},
    {"concat": False},
    {"share_weights": True},
    {"share_weights": True, "residual": True, "bias": False},
    {"residual": True},
    {"residual": True, "concat": False, "bias": False},
    {"add_self_loops": False},
    {"negative_slope": 0.0},
    {"negative_slope": -0.5},
    {"negative_slope": 1.5},
    {"edge_dim": 3},
]


def name_of(options):
    return "-".join(f"{key}_{value}" for key, value in options.items()) or "default"


class TestDuties(StateDuties, EdgeDuties, ModeDuties):
    layer = GATv2Conv
    rich: ClassVar = {"residual": True}
    autocast_dtype = torch.float32


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@WEIGHTS
def test_options(options, row, weights):
    case, x, _ = features(row)
    widths = 8 if row.square else (8, 8)
    ours, theirs = pair_of_layers(GATv2Conv, widths, 6, **{"heads": 4, **options})
    assert_same(ours, theirs, x, case.edge_index, weights=weights)
    assert_same(ours.eval(), theirs.eval(), x, case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize("share", [False, True])
def test_widths_of_a_pair(share):
    case, (x, x_dst), _ = features(BIPARTITE)
    widths = (8, 8) if share else (8, 5)
    x_dst = x_dst if share else x_dst[:, :5]
    options = {"heads": 2, "residual": True, "share_weights": share}
    ours, theirs = pair_of_layers(GATv2Conv, widths, 5, **options)
    assert_same(ours, theirs, (x, x_dst), case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_one_tensor_as_a_pair(share, flow):
    case, x, _ = features(SQUARE)
    options = {"heads": 2, "share_weights": share, "flow": flow}
    ours, theirs = pair_of_layers(GATv2Conv, 8, 5, **options)
    assert_same(ours, theirs, (x, x), case.edge_index, weights=True)
    assert is_fused(ours)


def test_more_destinations_than_sources():
    case, x, _ = features(testing.row("more_destinations"))
    ours, theirs = pair_of_layers(GATv2Conv, (8, 8), 5, heads=2)
    assert_same(ours, theirs, x, case.edge_index, weights=True)
    assert is_fused(ours)


@pytest.mark.parametrize(
    "change",
    [
        {"add_self_loops": False},
        {"negative_slope": -0.3},
        {"concat": False, "bias": None, "res": None},
        {"share_weights": True},
        {"flow": "target_to_source"},
        {"lin_edge": None, "edge_dim": None},
        {"lin_r": torch.nn.Linear(8, 12).double()},
    ],
    ids=lambda change: "-".join(change),
)
def test_attributes_changed_after_construction(change):
    case, x, _ = features(LOOPED)
    layers = pair_of_layers(GATv2Conv, 8, 6, heads=2, edge_dim=3, residual=True)
    for layer in layers:
        for name, value in change.items():
            setattr(layer, name, value)
    assert_same(*layers, x, case.edge_index, weights=True)
    assert_same(*layers, (x, case.x_dst), case.edge_index)
    assert is_fused(layers[0])


@pytest.mark.parametrize("flag", [True, 1, False, None, 0])
def test_truth_of_return_attention_weights(flag):
    case, x, _ = features(SQUARE)
    for layer in pair_of_layers(GATv2Conv, 8, 5):
        out = layer(x, case.edge_index, return_attention_weights=flag)
        assert isinstance(out, tuple) == bool(flag)


class WithMask(torch_geometric.nn.GATv2Conv):
    """PyG's layer, which drops what it is told to."""

    # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
    # propagate_type: (x: PairTensor, alpha: Tensor)
    keep: torch.Tensor | None = None

    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        training, self.training = self.training, False
        alpha = super().edge_update(x_j, x_i, edge_attr, index, ptr, dim_size)
        self.training = training
        return alpha * self.keep / (1 - self.dropout)


@WEIGHTS
@pytest.mark.parametrize("loops", [True, False], ids=["loops", "no_loops"])
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
def test_all_see_the_mask_of_the_weights(row, loops, weights):
    case, x, _ = features(row)
    widths = 8 if row.square else (8, 8)
    options = {"heads": 4, "dropout": 0.5, "add_self_loops": loops}
    ours, _ = pair_of_layers(GATv2Conv, widths, 6, **options)
    theirs = WithMask(widths, 6, **options).double()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        theirs.keep = weights_in(seeded(ours, x, case.edge_index, None, True)) != 0
    assert 0.3 < theirs.keep.float().mean() < 0.9
    forward = ours.forward
    ours.forward = lambda *args: torch.manual_seed(3) and forward(*args)
    assert_same(ours, theirs, x, case.edge_index, weights=weights)
    assert is_fused(ours)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", ["coo", "csr"])
def test_weights_of_a_matrix_with_self_loops_are_the_parents(form):
    case, x, _ = features(LOOPED)
    ours, theirs = pair_of_layers(GATv2Conv, 8, 5)
    edges = MATRICES[form](case)
    outs = [layer(x, edges, None, True) for layer in (ours, theirs)]
    torch.testing.assert_close(*map(weights_in, outs))
    assert_parents_path(ours, "PyG sorts the weights")


@ignore_sparse_warnings
@pytest.mark.parametrize("loops", [True, False])
def test_entries_that_occur_twice(loops):
    _, x, _ = features(LOOPED)
    columns = torch.tensor([1, 1, 0, 1, 2, 3, 3])
    ptr, ones = torch.tensor([0, 2, 3, 5, 7]), torch.ones(7).double()
    matrix = torch.sparse_csr_tensor(ptr, columns, ones, (4, 4))
    ours, theirs = pair_of_layers(GATv2Conv, 8, 5, add_self_loops=loops)
    assert_same(ours, theirs, x[:4], matrix)
    assert is_fused(ours)


@pytest.mark.skipif(
    _features.torch_sparse() is None, reason="torch_sparse is not installed"
)
def test_self_loops_of_a_sparse_tensor_with_edge_dim_are_refused_by_the_parent():
    case, x, _ = features(LOOPED)
    src, dst = case.edge_index
    adj_t = _features.torch_sparse().SparseTensor(row=dst, col=src)
    for layer in pair_of_layers(GATv2Conv, 8, 5, edge_dim=3):
        with pytest.raises(NotImplementedError):
            layer(x, adj_t)
