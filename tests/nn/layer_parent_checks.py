"""What every attention layer owes as a drop-in, as tests to inherit: PyG's own path."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import MessagePassing

import pyg_tiga as tg
from tests.nn.layer_checks import (
    LOOPED,
    assert_parents_path,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    twin_of,
)
from tests.nn.layer_duties_checks import Base

CASE, X, EDGE_ATTR = features(LOOPED, torch.float32)
EDGES = CASE.edge_index


def check_hook(cls, name):
    """Hold a layer to hearing one kind of hook, and to what PyG hears."""
    ours, theirs = pair_of_layers(cls, 8, 3, heads=2, dtype=torch.float32)
    heard = []
    handles = [
        getattr(layer, f"register_{name}")(lambda module, *args: heard.append(module))
        for layer in (ours, theirs)
    ]
    assert torch.equal(*(layer(X, EDGES) for layer in (ours, theirs)))
    assert heard == [ours, theirs]
    assert_parents_path(ours, "hooks are registered")
    handles[0].remove()
    ours(X, EDGES)
    assert is_fused(ours)


def check_override(layer, name, factor=2):
    """Hold a subclass, whose method doubles what it gives, to calling it."""
    theirs = type(layer)._pyg_class(8, 3, heads=2, **silent(layer))
    theirs.load_state_dict(layer.state_dict())
    for _ in range(2):
        torch.testing.assert_close(layer(X, EDGES), factor * theirs(X, EDGES))
        assert_parents_path(layer, f"'{name}' is overridden")
        assert len(layer._record.reasons) == 1


def silent(layer):
    """Options with which the output is the aggregate alone."""
    is_transformer = "Transformer" in layer._pyg_class.__name__
    return {"root_weight": False} if is_transformer else {"bias": False}


def heir_of(cls, name, **body):
    """A subclass whose name, by which PyG knows it, no other layer's heir has."""
    return type(f"{name}{cls.__name__}", (cls,), body)


class ParentDuties(Base):
    def test_explains_its_plan(self):
        layer = self.layer(8, 3, heads=2)
        name = self.layer.__name__
        assert layer.explain_plan() == f"{name}(8, 3, heads=2)\nhas not run yet"
        layer(X, EDGES)
        text = layer.explain_plan()
        assert "attention" in text
        assert "runs:" in text
        assert layer.explain() == text == tg.explain(layer)

    def test_explain_mode_of_pyg_still_works(self):
        layer = self.layer(8, 3)
        theirs = twin_of(layer)
        outs = []
        for conv in (layer, theirs):
            conv.explain = True
            conv._edge_mask = torch.linspace(-2, 2, EDGES.size(1))
            conv._loop_mask = EDGES[0] != EDGES[1]
            outs.append(conv(X, EDGES))
        torch.testing.assert_close(*outs)
        assert_parents_path(layer, "explain mode is on")
        layer.explain = False
        torch.testing.assert_close(layer(X, EDGES), twin_of(layer)(X, EDGES))
        assert is_fused(layer)

    def test_explain_mode_of_a_class_whose_parent_is_used(self):
        heir = heir_of(self.layer, "Heir")
        parent, mine = self.layer(8, 3).eval(), heir(8, 3).eval()
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

    def test_explainer_of_pyg(self):
        class Net(torch.nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.conv = layer

            def forward(self, x, edge_index):
                return self.conv(x, edge_index)

        layer = self.layer(8, 3)
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

    @pytest.mark.parametrize("aggr", ["mean", "max", ["add", "max"]], ids=str)
    def test_aggregations_without_a_fused_form(self, monkeypatch, aggr):
        options = {"bias": False, "aggr": aggr, "dtype": torch.float32}
        ours, theirs = pair_of_layers(self.layer, 8, 3, **options)
        if isinstance(aggr, str):
            assert torch.equal(ours(X, EDGES), theirs(X, EDGES))
            assert_parents_path(ours, f"aggr={aggr!r} has no fused form")
        monkeypatch.setenv("PYG_TIGA_STRICT", "1")
        with pytest.raises(tg.UnsupportedError, match="has no fused form"):
            self.layer(8, 3, aggr=aggr)

    def test_sum_is_add(self):
        options = {"aggr": "sum", "dtype": torch.float32}
        ours, theirs = pair_of_layers(self.layer, 8, 3, **options)
        torch.testing.assert_close(ours(X, EDGES), theirs(X, EDGES))
        assert is_fused(ours)

    def test_decomposed_layers_are_the_parents(self):
        options = {"decomposed_layers": 2, "dtype": torch.float32}
        layers = pair_of_layers(self.layer, 8, 4, **options)
        found = []
        for layer in layers:
            try:
                found.append(layer(X, EDGES))
            except (AttributeError, RuntimeError) as error:
                found.append(type(error))
        assert type(found[0]) is type(found[1])
        if isinstance(found[0], torch.Tensor):
            torch.testing.assert_close(*found)
        assert_parents_path(layers[0], "decomposed_layers=2")
        layers[0].decomposed_layers = 1
        torch.testing.assert_close(
            layers[0](X, EDGES), twin_of(layers[0], 8, 4)(X, EDGES)
        )
        assert is_fused(layers[0])

    def test_another_node_dim(self):
        ours, theirs = pair_of_layers(self.layer, 8, 3, dtype=torch.float32)
        raised = []
        for layer in (ours, theirs):
            layer.node_dim = -2
            with pytest.raises(Exception) as caught:
                layer(X, EDGES)
            raised.append(caught.type)
        assert raised[0] is raised[1]
        assert_parents_path(ours, "node_dim=-2")

    def test_heads_changed_after_construction(self):
        ours, theirs = pair_of_layers(self.layer, 8, 3, heads=2, dtype=torch.float32)
        raised = []
        for layer in (ours, theirs):
            layer.heads = 5
            with pytest.raises(RuntimeError) as caught:
                layer(X, EDGES)
            raised.append(str(caught.value))
        assert raised[0] == raised[1]
        assert_parents_path(ours, "'heads' or 'out_channels' changed")

    def test_strict_raises_at_the_call(self, monkeypatch):
        monkeypatch.setenv("PYG_TIGA_STRICT", "1")
        layer = self.layer(8, 3)
        layer(X, EDGES)
        layer.register_message_forward_hook(lambda *args: None)
        with pytest.raises(tg.UnsupportedError, match="hooks are registered"):
            layer(X, EDGES)

    @ignore_sparse_warnings
    def test_values_of_a_graph_are_ignored(self):
        layer = self.layer(8, 3)
        matrix = torch.eye(16).to_sparse_csr() * 2
        graph = tg.Graph.from_adj(matrix)
        out = layer(X, graph)
        torch.testing.assert_close(out, layer(X, matrix))
        layer.register_message_forward_hook(lambda *_: None)
        torch.testing.assert_close(out, layer(X, graph))

    def test_subclasses_made_at_run_time(self):
        for name in ("", "Other"):
            check_subclass(heir_of(self.layer, name)(8, 3))

    def test_overridden_methods_are_called(self):
        def update(self, inputs):
            return 2 * inputs

        def propagate(self, edge_index, size=None, **kwargs):
            return 2 * MessagePassing.propagate(self, edge_index, size, **kwargs)

        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return 2 * cls._pyg_class.aggregate(self, inputs, index, ptr, dim_size)

        cls = self.layer
        for method in (update, propagate, aggregate):
            name = method.__name__
            mine = heir_of(cls, name, **{name: method})
            check_override(mine(8, 3, heads=2, **silent(cls)), name)

    def test_method_replaced_on_an_instance(self):
        layer = self.layer(8, 3, heads=2, **silent(self.layer))
        stock = layer.update
        layer.update = lambda inputs: 2 * stock(inputs)
        check_override(layer, "update")

    def test_is_a_layer_of_pyg(self):
        assert issubclass(self.layer, self.layer._pyg_class)


def check_subclass(layer):
    """Hold a subclass that changes nothing to PyG's layer, on both paths."""
    theirs = twin_of(layer)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert is_fused(layer)
    layer.register_message_forward_hook(lambda *args: None)
    torch.testing.assert_close(layer(X, EDGES), theirs(X, EDGES))
    assert_parents_path(layer, "hooks are registered")
