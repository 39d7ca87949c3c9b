from __future__ import annotations

import pytest
import torch
import torch_geometric.nn
from torch_geometric.nn import MessagePassing

import pyg_tiga as tg
from pyg_tiga import testing
from pyg_tiga.nn import SAGEConv
from tests.nn.sage_checks import assert_parents_path, twin_of

CASE = testing.make_case(testing.row("unsorted"))
X, EDGES = CASE.x, CASE.edge_index


class Doubled(SAGEConv):
    def message(self, x_j):
        return 2 * x_j


class Shifted(SAGEConv):
    def update(self, inputs):
        return inputs + 1


class Aggregated(SAGEConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return 3 * super().aggregate(inputs, index, ptr, dim_size)


class OwnPropagate(SAGEConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return 5 * kwargs["x"][0]


class Inherits(Doubled):
    pass


class Mixin:
    def update(self, inputs):
        return inputs + 1


class Mixed(Mixin, SAGEConv):
    pass


@pytest.mark.parametrize(
    ("cls", "expected", "reason"),
    [
        (Doubled, lambda mean: 2 * mean, "'message' is overridden"),
        (Inherits, lambda mean: 2 * mean, "'message' is overridden"),
        (Shifted, lambda mean: mean + 1, "'update' is overridden"),
        (Mixed, lambda mean: mean + 1, "'update' is overridden"),
        (Aggregated, lambda mean: 3 * mean, "'aggregate' is overridden"),
        (OwnPropagate, lambda mean: 5 * X, "'propagate' is overridden"),
    ],
)
def test_overridden_methods_are_called(cls, expected, reason):
    layer = cls(8, 3, root_weight=False)
    mean = tg.functional.spmm(EDGES, X, reduce="mean")
    for _ in range(2):
        out = layer(X, EDGES)
        torch.testing.assert_close(out, layer.lin_l(expected(mean)))
        assert_parents_path(layer, reason)
        assert len(layer._record.reasons) == 1


def test_method_replaced_on_an_instance():
    layer = SAGEConv(8, 3, root_weight=False)
    layer.message = lambda x_j: 2 * x_j
    mean = tg.functional.spmm(EDGES, X, reduce="mean")
    torch.testing.assert_close(layer(X, EDGES), layer.lin_l(2 * mean))
    assert_parents_path(layer, "'message' is overridden")


def make_named_like_the_parent():
    class SAGEConv(tg.nn.SAGEConv):
        def __init__(self, width):
            super().__init__(width, 3)

    return SAGEConv(8)


def make_made_at_run_time():
    return type("SAGEConv", (SAGEConv,), {})(8, 3)


def make_without_a_body():
    class Mine(SAGEConv):
        pass

    return Mine(8, 3)


@pytest.mark.parametrize(
    "make", [make_named_like_the_parent, make_made_at_run_time, make_without_a_body]
)
def test_subclasses_work_on_both_paths(make):
    layer = make()
    theirs = twin_of(layer)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert not layer._record.reasons
    layer.register_message_forward_hook(lambda *args: None)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert_parents_path(layer, "hooks are registered")


def test_subclass_named_like_the_parent_overrides_message():
    class SAGEConv(tg.nn.SAGEConv):
        def message(self, x_j):
            return 2 * x_j

    layer = SAGEConv(8, 3, root_weight=False, bias=False)
    theirs = torch_geometric.nn.SAGEConv(8, 3, root_weight=False, bias=False)
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X, EDGES), 2 * theirs(X, EDGES))


def test_subclass_with_its_own_propagate_call():
    class WithWeights(SAGEConv):
        def forward(self, x, edge_index, edge_weight):
            # propagate_type: (x: OptPairTensor, edge_weight: Tensor)
            out = self.propagate(
                edge_index, x=(x, x), edge_weight=edge_weight, size=None
            )
            return self.lin_l(out) + self.lin_r(x)

        def message(self, x_j, edge_weight):
            return x_j * edge_weight.view(-1, 1)

    layer = WithWeights(8, 3)
    weight = torch.ones(EDGES.size(1))
    torch.testing.assert_close(layer(X, EDGES, weight), twin_of(layer)(X, EDGES))


class Scriptable(SAGEConv):
    def message(self, x_j: torch.Tensor) -> torch.Tensor:
        return 2 * x_j


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_subclass_keeps_its_message():
    layer = Scriptable(8, 3)
    out = torch.jit.script(layer)(X, EDGES)
    torch.testing.assert_close(out, layer(X, EDGES))


def test_is_a_message_passing_layer():
    layer = SAGEConv(8, 3)
    assert isinstance(layer, torch_geometric.nn.SAGEConv)
    assert isinstance(layer, MessagePassing)
