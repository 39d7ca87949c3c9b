from __future__ import annotations

from typing import ClassVar, Optional

import pytest
import torch

import pyg_tiga as tg
from pyg_tiga.nn import TransformerConv
from tests.nn.layer_checks import EDGE_DIM, assert_parents_path, pair_of_layers
from tests.nn.layer_parent_checks import (
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
    for what in ("propagate", "message", "aggregate")
    for when in ("pre_", "")
]


class TestParentsPath(ParentDuties):
    layer = TransformerConv
    rich: ClassVar = {"beta": True}


@pytest.mark.parametrize("name", HOOKS)
def test_message_passing_hooks_are_heard(name):
    check_hook(TransformerConv, name)


class Doubled(TransformerConv):
    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        args = (query_i, key_j, value_j, edge_attr, index, ptr, size_i)
        return 2 * super().message(*args)


class Inherits(Doubled):
    pass


class Bare(TransformerConv):
    pass


@pytest.mark.parametrize("cls", [Doubled, Inherits])
def test_methods_of_subclasses_are_called(cls):
    check_override(cls(8, 3, heads=2, root_weight=False), "message")


def test_subclass_without_a_body():
    check_subclass(Bare(8, 3))


def test_subclass_named_like_the_parent():
    class TransformerConv(tg.nn.TransformerConv):
        def __init__(self, width):
            super().__init__(width, 3)

    check_subclass(TransformerConv(8))


def test_subclass_named_like_the_parent_overrides_message():
    # PyG knows classes by module and name, and another here has this one.
    class TransformerConv(tg.nn.TransformerConv):
        def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
            args = (query_i, key_j, value_j, edge_attr, index, ptr, size_i)
            return 2 * super().message(*args)

    layer = TransformerConv(8, 3, heads=2, root_weight=False)
    check_override(layer, "message")


def test_subclass_with_its_own_propagate_call():
    class Mine(TransformerConv):
        def forward(self, x, edge_index, weight):
            # propagate_type: (value: Tensor, weight: Tensor)
            return self.propagate(edge_index, value=self.lin_value(x), weight=weight)

        def message(self, value_j, weight):
            return value_j * weight.view(-1, 1)

    layer = Mine(8, 3)
    weight = torch.rand(EDGES.size(1))
    out = layer(X, EDGES, weight)
    expected = tg.functional.spmm(EDGES, layer.lin_value(X), weight)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("flag", [None, True, False])
def test_edge_features_without_edge_dim_are_added_by_the_parent(flag):
    ours, theirs = pair_of_layers(TransformerConv, 8, 3, dtype=torch.float32)
    edge_attr = torch.rand(EDGES.size(1), 1, 3)
    args = (X, EDGES, edge_attr, flag)
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert not torch.allclose(theirs(X, EDGES), theirs(*args[:3]))
    assert_parents_path(ours, "where there is no 'edge_dim'")


def test_edge_features_that_the_parent_reads_otherwise():
    options = {"heads": 2, "edge_dim": EDGE_DIM, "dtype": torch.float32}
    ours, theirs = pair_of_layers(TransformerConv, 8, 3, **options)
    for layer in (ours, theirs):
        layer.lin_edge.register_forward_hook(lambda _, __, out: 2 * out)
    args = (X, EDGES, EDGE_ATTR)
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert_parents_path(ours, "'lin_edge' is not a plain linear map")
    ours, theirs = pair_of_layers(TransformerConv, 8, 3, **options)
    args = (X, EDGES, EDGE_ATTR[:1])
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert_parents_path(ours, "'edge_attr' has one row for all edges")


def test_batches_are_the_parents():
    ours, theirs = pair_of_layers(TransformerConv, 8, 3, dtype=torch.float32)
    out = ours(X[None], EDGES)
    assert out.shape == (1, 16, 3)
    assert torch.equal(out, theirs(X[None], EDGES))
    assert_parents_path(ours, "'x' has 3 dimensions")


def test_heads_changed_to_as_wide_a_layer():
    ours, theirs = pair_of_layers(TransformerConv, 8, 3, heads=4, dtype=torch.float32)
    for layer in (ours, theirs):
        layer.heads, layer.out_channels = 2, 6
    torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))
    assert not ours._record.reasons


class Noting(TransformerConv):
    # TorchScript reads types, and no strings.
    __annotations__: ClassVar = {"noted": Optional[torch.Tensor]}  # noqa: UP045

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.noted = None


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("options", [{}, {"heads": 2, "beta": True}, {"concat": False}])
def test_torchscript_of_a_model(options):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = TransformerConv(8, 3, **options)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(x, edge_index).relu()

    net = Net()
    out = torch.jit.script(net)(X, EDGES)
    torch.testing.assert_close(out, net(X, EDGES))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_of_a_subclass_that_states_types():
    layer = Noting(8, 3)
    out = torch.jit.script(layer)(X, EDGES)
    torch.testing.assert_close(out, layer(X, EDGES))
