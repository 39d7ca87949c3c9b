"""Layers whose linear maps of the same features are one step, on the CPU too."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from pyg_tiga.nn import GATv2Conv, TransformerConv, _linear
from pyg_tiga.ops import projections
from tests.nn.layer_checks import (
    BIPARTITE,
    SQUARE,
    assert_same,
    features,
    is_fused,
    pair_of_layers,
)

CASES = {
    "transformer": (TransformerConv, {}, ("lin_query", "lin_key", "lin_value")),
    "transformer, gated": (TransformerConv, {"beta": True}, ("lin_key", "lin_skip")),
    "transformer, no root": (TransformerConv, {"root_weight": False}, ("lin_key",)),
    "gatv2": (GATv2Conv, {}, ("lin_l", "lin_r")),
    "gatv2, residual": (GATv2Conv, {"residual": True}, ("lin_l", "res")),
    "gatv2, shared": (GATv2Conv, {"share_weights": True}, ("lin_l",)),
}


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """How many maps each step had."""
    monkeypatch.setattr(projections, "_DEVICES", frozenset(("cpu", "cuda")))
    found = []

    def counted(x, maps):
        found.append(len(maps))
        return projections.project(x, maps)

    monkeypatch.setattr(_linear, "project", counted)
    return found


@pytest.fixture(params=CASES)
def case(request):
    cls, options, names = CASES[request.param]
    return cls, {"heads": 2, **options}, names


def gradients_of(loss, leaves, **options):
    """Gradients, with zeros where a map takes no part."""
    options |= {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(loss, leaves, **options)


def test_steps(steps):
    data, x, _ = features(SQUARE)
    TransformerConv(8, 6).double()(x, data.edge_index)
    TransformerConv(8, 6).double()((x, x.clone()), data.edge_index)
    GATv2Conv(8, 6, residual=True).double()(x, data.edge_index)
    assert steps == [4, 2, 2, 3]
    with torch.no_grad():
        TransformerConv(8, 6).double()(x, data.edge_index)
    assert len(steps) == 4


@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
def test_gradients_are_the_parents(case, row, steps):
    cls, options, _ = case
    data, x, _ = features(row)
    layers = pair_of_layers(cls, 8 if row.square else (8, 8), 6, **options)
    assert_same(*layers, x, data.edge_index, weights=True)
    assert steps
    assert is_fused(layers[0])


def test_hooks_hear_of_their_maps(case, steps):
    cls, options, names = case
    data, x, _ = features(SQUARE)
    ours, theirs = pair_of_layers(cls, 8, 6, **options)
    heard = []
    for layer in (ours, theirs):
        for name in names:
            module = getattr(layer, name)
            module.register_forward_hook(
                lambda module, args, out, name=name: heard.append(name)
            )
            module.register_forward_hook(lambda module, args, out: out * 2)
    assert_same(ours, theirs, x, data.edge_index)
    half = len(heard) // 2
    assert heard[:half] == heard[half:]
    assert set(heard) == set(names)
    assert is_fused(ours)


@pytest.mark.parametrize("kind", ["pruned", "parametrised"])
def test_maps_that_are_computed(case, kind):
    cls, options, names = case
    data, x, _ = features(SQUARE)
    layers = pair_of_layers(cls, 8, 6, **options)
    for layer in layers:
        module = getattr(layer, names[0])
        if kind == "pruned":
            prune.l1_unstructured(module, "weight", amount=0.5)
        else:
            parametrizations.weight_norm(module)
    assert_same(*layers, x, data.edge_index)
    assert is_fused(layers[0])


def test_one_map_under_two_names(case, steps):
    cls, options, names = case
    data, x, _ = features(SQUARE)
    layers = pair_of_layers(cls, 8, 6, **options)
    first, second = names[0], names[-1]
    for layer in layers:
        setattr(layer, second, getattr(layer, first))
    assert_same(*layers, x, data.edge_index)
    assert steps


def test_parameters_of_a_call(case, steps):
    cls, options, _ = case
    data, x, _ = features(SQUARE)
    ours, theirs = pair_of_layers(cls, 8, 6, **options)
    given = {
        name: torch.randn_like(value).requires_grad_()
        for name, value in ours.named_parameters()
    }
    grads = []
    for layer in (ours, theirs):
        out = torch.func.functional_call(layer, given, (x, data.edge_index))
        loss = out.sin().sum()
        grads.append(gradients_of(loss, list(given.values())))
    assert steps
    torch.testing.assert_close(*grads)
    assert all(p.grad is None for p in ours.parameters())


def test_lazy_maps(case, steps):
    cls, options, _ = case
    data, x, _ = features(SQUARE)
    layers = []
    for kind in (cls, cls._pyg_class):
        torch.manual_seed(1)
        layer = kind(-1, 6, **options)
        layer(x.float(), data.edge_index)
        layers.append(layer.double())
    assert not steps
    assert_same(*layers, x, data.edge_index)
    assert steps


def test_frozen_maps(case):
    cls, options, names = case
    data, x, _ = features(SQUARE)
    layers = pair_of_layers(cls, 8, 6, **options)
    for layer in layers:
        getattr(layer, names[0]).requires_grad_(False)
    assert_same(*layers, x, data.edge_index)


def test_second_derivatives(case):
    cls, options, _ = case
    data, x, _ = features(SQUARE)
    layers = pair_of_layers(cls, 8, 6, **options)
    found = []
    for layer in layers:
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        loss = layer(leaves[0], data.edge_index).sin().sum()
        grads = gradients_of(loss, leaves, create_graph=True)
        second = sum(grad.square().sum() for grad in grads)
        found.append(gradients_of(second, leaves))
    torch.testing.assert_close(*found)
