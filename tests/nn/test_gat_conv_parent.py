from __future__ import annotations

import pytest
import torch
import torch_geometric.nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import MessagePassing

import pyg_tiga as tg
from pyg_tiga.nn import GATConv
from tests.nn.gat_checks import (
    EDGE_DIM,
    LOOPED,
    assert_parents_path,
    features,
    is_fused,
    pair_of_layers,
    twin_of,
)

CASE, X, EDGE_ATTR = features(LOOPED)
EDGES = CASE.edge_index
HOOKS = [
    f"{what}_forward_{when}hook"
    for what in ("propagate", "message", "aggregate", "edge_update")
    for when in ("pre_", "")
]


def test_explains_its_plan():
    layer = GATConv(8, 3, heads=2)
    assert layer.explain_plan() == "GATConv(8, 3, heads=2)\nhas not run yet"
    layer(X, EDGES)
    text = layer.explain_plan()
    assert "attention" in text
    assert "runs:" in text
    assert layer.explain() == text
    assert tg.explain(layer) == text


def test_explain_mode_of_pyg_still_works():
    layer = GATConv(8, 3)
    theirs = twin_of(layer)
    mask = torch.linspace(-2, 2, EDGES.size(1))
    outs = []
    for conv in (layer, theirs):
        conv.explain = True
        conv._edge_mask = mask
        conv._loop_mask = EDGES[0] != EDGES[1]
        outs.append(conv(X, EDGES))
    torch.testing.assert_close(*outs)
    assert_parents_path(layer, "explain mode is on")
    layer.explain = False
    torch.testing.assert_close(layer(X, EDGES), twin_of(layer)(X, EDGES))
    assert is_fused(layer)


@pytest.mark.parametrize("layer", [GATConv, tg.nn.SAGEConv])
def test_explain_mode_of_a_class_whose_parent_is_used(layer):
    parent = layer(8, 3).eval()

    class Mine(layer):
        pass

    mine = Mine(8, 3).eval()
    mine.load_state_dict(parent.state_dict())
    found = []
    for conv in (parent, mine):
        conv.explain = True
        conv._edge_mask = torch.linspace(-2, 2, EDGES.size(1))
        conv._loop_mask = EDGES[0] != EDGES[1]
        found.append(conv(X, EDGES))
        conv.explain = False
        assert not torch.allclose(conv(X, EDGES), found[-1])
    torch.testing.assert_close(*found)


def test_explainer_of_pyg():
    class Net(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.conv = layer

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    layer = GATConv(8, 3)
    masks = []
    for conv in (layer, twin_of(layer)):
        torch.manual_seed(0)
        explainer = Explainer(
            Net(conv),
            GNNExplainer(epochs=2),
            explanation_type="model",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        masks.append(explainer(X, EDGES).edge_mask)
    torch.testing.assert_close(*masks)


@pytest.mark.parametrize("name", HOOKS)
def test_message_passing_hooks_are_heard(name):
    ours, theirs = pair_of_layers(8, 3, heads=2)
    heard = []
    handles = [
        getattr(layer, f"register_{name}")(lambda module, *args: heard.append(module))
        for layer in (ours, theirs)
    ]
    outs = [layer(X, EDGES) for layer in (ours, theirs)]
    assert torch.equal(*outs)
    assert heard == [ours, theirs]
    assert_parents_path(ours, "hooks are registered")
    handles[0].remove()
    ours(X, EDGES)
    assert is_fused(ours)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"aggr": "mean"}, "aggr='mean' has no fused form"),
        ({"aggr": "max"}, "aggr='max' has no fused form"),
        ({"aggr": ["add", "max"]}, "aggr=['add', 'max'] has no fused form"),
    ],
    ids=str,
)
def test_options_without_a_fused_form(monkeypatch, options, reason):
    ours, theirs = pair_of_layers(8, 3, bias=False, **options)
    theirs_raises = options["aggr"] == ["add", "max"]
    if not theirs_raises:
        assert torch.equal(ours(X, EDGES), theirs(X, EDGES))
        assert_parents_path(ours, reason)
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    with pytest.raises(tg.UnsupportedError, match="has no fused form"):
        GATConv(8, 3, **options)


def test_decomposed_layers_are_the_parents():
    ours, theirs = pair_of_layers(8, 4, decomposed_layers=2)
    for layer in (ours, theirs):
        with pytest.raises(AttributeError, match="chunk"):
            layer(X, EDGES)
    assert_parents_path(ours, "decomposed_layers=2")
    ours.decomposed_layers = 1
    torch.testing.assert_close(ours(X, EDGES), twin_of(ours, 8, 4)(X, EDGES))
    assert is_fused(ours)


def test_another_node_dim():
    ours, theirs = pair_of_layers(8, 3)
    raised = []
    for layer in (ours, theirs):
        layer.node_dim = -2
        with pytest.raises(Exception) as caught:
            layer(X, EDGES)
        raised.append(caught.type)
    assert raised[0] is raised[1]
    assert_parents_path(ours, "node_dim=-2")


def test_heads_changed_after_construction():
    ours, theirs = pair_of_layers(8, 3, heads=2)
    raised = []
    for layer in (ours, theirs):
        layer.heads = 3
        with pytest.raises(RuntimeError) as caught:
            layer(X, EDGES)
        raised.append(str(caught.value))
    assert raised[0] == raised[1]
    assert_parents_path(ours, "'heads' or 'out_channels' changed")


def test_strict_raises_at_the_call(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    layer = GATConv(8, 3)
    layer(X, EDGES)
    layer.register_edge_update_forward_hook(lambda *args: None)
    with pytest.raises(tg.UnsupportedError, match="hooks are registered"):
        layer(X, EDGES)
    layer = GATConv(8, 3, edge_dim=EDGE_DIM)
    layer.lin_edge.register_forward_hook(lambda *args: None)
    with pytest.raises(tg.UnsupportedError, match="'lin_edge'"):
        layer(X, EDGES, EDGE_ATTR)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
def test_tracing_sees_pytorch_operators_only():
    layer = GATConv(8, 3).eval()
    traced = torch.jit.trace(layer, (X, EDGES), check_trace=False)
    assert "pyg_tiga::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(X, EDGES), layer(X, EDGES))


def test_function_transforms_take_the_parents_path():
    layer = GATConv(8, 3, add_self_loops=False)
    theirs = twin_of(layer, 8, 3, add_self_loops=False)

    def loss_of(conv):
        return lambda x: conv(x, EDGES).square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss_of(layer))(X), torch.func.grad(loss_of(theirs))(X)
    )
    assert_parents_path(layer, "torch.func")


class Doubled(GATConv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


class Inherits(Doubled):
    pass


class Scored(GATConv):
    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        alpha = super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
        return 2 * alpha


class Updated(GATConv):
    def update(self, inputs):
        return 2 * inputs


class Aggregated(GATConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class OwnUpdater(GATConv):
    def edge_updater(self, edge_index, size=None, **kwargs):
        return 2 * MessagePassing.edge_updater(self, edge_index, size, **kwargs)


class OwnPropagate(GATConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return 2 * MessagePassing.propagate(self, edge_index, size, **kwargs)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Doubled, "message"),
        (Inherits, "message"),
        (Scored, "edge_update"),
        (Updated, "update"),
        (Aggregated, "aggregate"),
        (OwnUpdater, "edge_updater"),
        (OwnPropagate, "propagate"),
    ],
)
def test_overridden_methods_are_called(cls, name):
    layer = cls(8, 3, heads=2, bias=False)
    theirs = twin_of(layer, 8, 3, heads=2, bias=False)
    for _ in range(2):
        torch.testing.assert_close(layer(X, EDGES), 2 * theirs(X, EDGES))
        assert_parents_path(layer, f"'{name}' is overridden")
        assert len(layer._record.reasons) == 1


def test_overridden_update_sees_edge_features_without_edge_dim():
    class Weighted(GATConv):
        def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
            alpha = super().edge_update(alpha_j, alpha_i, None, index, ptr, dim_size)
            return alpha * edge_attr.view(-1, 1)

    layer = Weighted(8, 3, fill_value=1.0)
    weight = torch.ones(EDGES.size(1))
    torch.testing.assert_close(layer(X, EDGES, weight), twin_of(layer)(X, EDGES))


@pytest.mark.parametrize("name", ["message", "edge_update", "edge_updater"])
def test_method_replaced_on_an_instance(name):
    layer = GATConv(8, 3, bias=False)
    theirs = twin_of(layer, bias=False)
    stock = getattr(layer, name)
    setattr(layer, name, lambda *args, **kwargs: 2 * stock(*args, **kwargs))
    if name != "edge_updater":
        # PyG passes the arguments of the signature that it saw at construction.
        setattr(layer, name, _doubled(stock, name))
    torch.testing.assert_close(layer(X, EDGES), 2 * theirs(X, EDGES))
    assert_parents_path(layer, f"'{name}' is overridden")


def _doubled(stock, name):
    if name == "message":
        return lambda x_j, alpha: 2 * stock(x_j, alpha)
    return lambda alpha_j, alpha_i, edge_attr, index, ptr, dim_size: (
        2 * stock(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
    )


def make_named_like_the_parent():
    class GATConv(tg.nn.GATConv):
        def __init__(self, width):
            super().__init__(width, 3)

    return GATConv(8)


def make_made_at_run_time():
    return type("GATConv", (GATConv,), {})(8, 3)


def make_without_a_body():
    class Mine(GATConv):
        pass

    return Mine(8, 3)


@pytest.mark.parametrize(
    "make", [make_named_like_the_parent, make_made_at_run_time, make_without_a_body]
)
def test_subclasses_work_on_both_paths(make):
    layer = make()
    theirs = twin_of(layer)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert is_fused(layer)
    layer.register_message_forward_hook(lambda *args: None)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert_parents_path(layer, "hooks are registered")


def test_subclass_named_like_the_parent_overrides_message():
    class GATConv(tg.nn.GATConv):
        def message(self, x_j, alpha):
            return 2 * super().message(x_j, alpha)

    layer = GATConv(8, 3, bias=False)
    theirs = twin_of(layer, bias=False)
    torch.testing.assert_close(layer(X, EDGES), 2 * theirs(X, EDGES))


def test_is_a_layer_of_pyg():
    assert issubclass(GATConv, torch_geometric.nn.GATConv)
