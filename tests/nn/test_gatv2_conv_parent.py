from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch_geometric.nn import MessagePassing

import pyg_tiga as tg
from pyg_tiga.nn import GATv2Conv
from tests.nn.layer_checks import (
    BIPARTITE,
    EDGE_DIM,
    assert_parents_path,
    features,
    pair_of_layers,
    twin_of,
)
from tests.nn.layer_parent_checks import (
    CASE,
    EDGE_ATTR,
    EDGES,
    ParentDuties,
    X,
    check_hook,
    check_override,
    check_subclass,
)

HOOKS = [
    f"{what}_forward_{when}hook"
    for what in ("propagate", "message", "aggregate", "edge_update")
    for when in ("pre_", "")
]


class TestParentsPath(ParentDuties):
    layer = GATv2Conv
    rich: ClassVar = {"residual": True}

    @pytest.mark.parametrize("weights", [False, True])
    def test_edge_features_are_the_parents(self, weights, monkeypatch):
        options = {"heads": 2, "edge_dim": EDGE_DIM, "dtype": torch.float32}
        ours, theirs = pair_of_layers(GATv2Conv, 8, 3, **options)
        args = (X, EDGES, EDGE_ATTR, *([True] if weights else []))
        torch.testing.assert_close(ours(*args), theirs(*args))
        assert_parents_path(ours, "edge features have no fused form yet")
        graph = (X, CASE.graph(), *args[2:])
        torch.testing.assert_close(ours(*graph), theirs(*args))
        monkeypatch.setenv("PYG_TIGA_STRICT", "1")
        with pytest.raises(tg.UnsupportedError, match="edge features have no fused"):
            ours(*args)


@pytest.mark.parametrize("name", HOOKS)
def test_message_passing_hooks_are_heard(name):
    check_hook(GATv2Conv, name)


class Doubled(GATv2Conv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


class Inherits(Doubled):
    pass


class Bare(GATv2Conv):
    pass


class Scored(GATv2Conv):
    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        return 2 * super().edge_update(x_j, x_i, edge_attr, index, ptr, dim_size)


class OwnUpdater(GATv2Conv):
    def edge_updater(self, edge_index, size=None, **kwargs):
        return 2 * MessagePassing.edge_updater(self, edge_index, size, **kwargs)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Doubled, "message"),
        (Inherits, "message"),
        (Scored, "edge_update"),
        (OwnUpdater, "edge_updater"),
    ],
)
def test_methods_of_subclasses_are_called(cls, name):
    check_override(cls(8, 3, heads=2, bias=False), name)


def test_subclass_without_a_body():
    check_subclass(Bare(8, 3))


def test_subclass_named_like_the_parent():
    class GATv2Conv(tg.nn.GATv2Conv):
        def __init__(self, width):
            super().__init__(width, 3)

    check_subclass(GATv2Conv(8))


def test_subclass_named_like_the_parent_overrides_message():
    # PyG knows classes by module and name, and another here has this one.
    class GATv2Conv(tg.nn.GATv2Conv):
        def message(self, x_j, alpha):
            return 2 * super().message(x_j, alpha)

    check_override(GATv2Conv(8, 3, heads=2, bias=False), "message")


def test_subclass_with_its_own_calls():
    class Mine(GATv2Conv):
        def forward(self, x, edge_index, weight):
            x = self.lin_l(x).view(-1, self.heads, self.out_channels)
            # edge_updater_type: (x: Tensor, weight: Tensor)
            alpha = self.edge_updater(edge_index, x=x, weight=weight)
            # propagate_type: (x: Tensor, alpha: Tensor)
            return self.propagate(edge_index, x=x, alpha=alpha).flatten(1)

        def edge_update(self, x_j, x_i, weight):
            return (x_i * x_j).sum(-1) * weight.view(-1, 1)

    layer = Mine(8, 3, heads=2)
    out = layer(X, EDGES, torch.ones(EDGES.size(1)))
    value = layer.lin_l(X).view(-1, 2, 3)
    src, dst = EDGES
    message = (value[src] * value[dst]).sum(-1, keepdim=True) * value[src]
    expected = torch.zeros_like(value).index_add(0, dst, message)
    torch.testing.assert_close(out, expected.flatten(1))


def test_edge_features_without_edge_dim_are_refused_by_the_parent():
    for layer in pair_of_layers(GATv2Conv, 8, 3, dtype=torch.float32):
        with pytest.raises(AssertionError):
            layer(X, EDGES, EDGE_ATTR)
        if isinstance(layer, GATv2Conv):
            assert_parents_path(layer, "edge features")


@pytest.mark.parametrize("fill_value", ["mean", "add", 1.5], ids=str)
def test_edge_features_of_self_loops(fill_value):
    layer = GATv2Conv(8, 3, edge_dim=1, fill_value=fill_value)
    theirs = twin_of(layer, 8, 3, edge_dim=1, fill_value=fill_value)
    args = (X, EDGES, EDGE_ATTR[:, 0])
    torch.testing.assert_close(layer(*args), theirs(*args))


def test_target_to_source_of_a_pair_of_two_sizes_is_the_parents():
    case, pair, _ = features(BIPARTITE)
    edges = case.edge_index.clamp(max=7)
    ours, theirs = pair_of_layers(GATv2Conv, 8, 5, flow="target_to_source")
    torch.testing.assert_close(ours(pair, edges), theirs(pair, edges))
    assert_parents_path(ours, "x[1] has 8 rows where the output has 35")
