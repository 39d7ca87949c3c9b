"""Calls of SAGEConv that pass without the checks one by one.

They give the same as with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor

from pyg_tiga.nn import SAGEConv, sage_conv
from pyg_tiga.nn._sage_inputs import usual_call
from pyg_tiga.relation.memo import clear, relation_of
from tests.nn.sage_checks import assert_same_one_by_one, outcome, sage_layer

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
X = torch.arange(12.0).view(3, 4) / 7


@pytest.mark.parametrize("edges", [EDGES + 1, EDGES - 1], ids=["large", "negative"])
@pytest.mark.parametrize("out_channels", [2, 4], ids=["narrower", "as wide"])
def test_indices_out_of_range_are_named(
    edges: Tensor, out_channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for x in (X, X[:, :3], X.double()):
        make = functools.partial(sage_layer, out_channels)
        assert_same_one_by_one(monkeypatch, make, x, edges)
    with pytest.raises(ValueError, match="index"):
        make()(X, edges)


@pytest.mark.parametrize(
    "edit",
    [
        lambda edges: edges.fill_(1),
        lambda edges: edges.add_(1),
        lambda edges: edges.t_(),
        lambda edges: edges.resize_(2, 3),
        lambda edges: edges.unsqueeze_(0),
        lambda edges: setattr(edges, "data", edges.flip(0)),
        lambda edges: setattr(edges, "data", edges.view(torch.float64)),
        lambda edges: setattr(edges, "data", edges[:, :2]),
        lambda edges: setattr(edges, "data", edges.as_strided((2, 4), (1, 2))),
    ],
    ids=["fill", "add", "t", "resize", "unsqueeze", "flip", "dtype", "shape", "stride"],
)
def test_edited_edges_are_looked_at(
    edit: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_tried in (True, False):
        edges, layer = EDGES.clone(), sage_layer()
        with monkeypatch.context() as patch:
            if not is_tried:
                patch.setattr(sage_conv, "usual_call", lambda *_: None)
            layer(X, edges)
            edit(edges)
            found.append(outcome(layer, X, edges))
    anew = outcome(sage_layer(), X, edges.clone())
    assert str(found[0]) == str(found[1]) == str(anew)


def test_the_last_graph_answers_the_same_question_only() -> None:
    edges, twice = EDGES.clone(), X.repeat(2, 1)
    layers = (sage_layer(), sage_layer(flow="target_to_source"))
    first, again = (usual_call(layers[0], X, edges)[0] for _ in range(2))
    assert first is again
    larger, turned = (usual_call(layer, twice, edges)[0] for layer in layers)
    assert (first.num_dst, larger.num_dst, turned.num_dst) == (3, 6, 6)
    degrees = [graph.rows().ptr.diff().tolist() for graph in (larger, turned)]
    assert degrees == [[1, 2, 1, 0, 0, 0], [1, 1, 2, 0, 0, 0]]


def test_strict_mode_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    layer = sage_layer()
    layer(X, EDGES)
    layer.register_message_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="hooks are registered"):
        layer(X, EDGES)


def test_a_usual_call_forgets_why_another_was_the_parents() -> None:
    layer = sage_layer()
    handle = layer.register_message_forward_hook(lambda *_: None)
    layer(X, EDGES)
    assert layer._record.reasons
    handle.remove()
    layer(X, EDGES)
    assert not layer._record.reasons
    assert "spmm" in layer.explain_plan()


USUAL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"aggr": "sum"},
    {"aggr": "add"},
    {"bias": False},
    {"root_weight": False},
    {"normalize": True},
    {"flow": "target_to_source"},
    {"out_channels": 2},
    {"out_channels": 2, "bias": False, "normalize": True},
    {"out_channels": 2, "root_weight": False, "aggr": "sum"},
    {"out_channels": 9},
]


@pytest.mark.parametrize("options", USUAL_OPTIONS, ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("first", [None, True, False])
def test_usual_calls_give_the_same(
    options: dict[str, Any],
    mode: Callable[[], AbstractContextManager[Any]],
    first: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if first is not None:
        narrows = options.get("out_channels") == 2
        monkeypatch.setattr(sage_conv, "transform_first", lambda *_: first and narrows)
    make = functools.partial(sage_layer, **options)
    for x in (X, X.clone().requires_grad_(), torch.nn.Parameter(X), X[:0]):
        for edges in (EDGES, EDGES.int(), EDGES[:, ::2], EDGES[:, :0]):
            if x.size(0) or not edges.size(1):
                assert usual_call(make(), x, edges) is not None
            assert_same_one_by_one(monkeypatch, make, x, edges, mode=mode)


def test_usual_calls_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        edges = EDGES.clone()
        assert usual_call(sage_layer(), X, edges) is not None
        edges[0] = 1
    mode = torch.inference_mode
    assert_same_one_by_one(monkeypatch, sage_layer, X, edges, mode=mode)


def test_a_usual_call_finds_parameters_and_graph() -> None:
    clear()
    layer = sage_layer()
    for _ in range(2):
        graph, maps = usual_call(layer, X, EDGES)
        assert graph is relation_of(EDGES, 3, 3)
        assert maps.left is layer.lin_l.weight
        assert maps.bias is layer.lin_l.bias
        assert maps.right is layer.lin_r.weight
    assert usual_call(sage_layer(bias=False), X, EDGES)[1].bias is None
    assert usual_call(sage_layer(root_weight=False), X, EDGES)[1].right is None
    weights = {"lin_l.weight": torch.ones(4, 4), "lin_l.bias": torch.ones(4)}
    out = torch.func.functional_call(layer, weights, (X, EDGES))
    layer.load_state_dict({**layer.state_dict(), **weights})
    assert torch.equal(out, layer(X, EDGES))


@pytest.mark.parametrize("out_channels", [2, 4], ids=["narrower", "as wide"])
def test_a_bias_of_the_right_map_is_added(out_channels: int) -> None:
    layer = SAGEConv(8, out_channels)
    theirs = torch_geometric.nn.SAGEConv(8, out_channels)
    theirs.load_state_dict(layer.state_dict())
    layer.lin_r = theirs.lin_r = torch_geometric.nn.Linear(8, out_channels)
    torch.nn.init.ones_(layer.lin_r.bias)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x, EDGES), theirs(x, EDGES))
    pair = (x, x.clone())
    torch.testing.assert_close(layer(pair, EDGES), theirs(pair, EDGES))


@pytest.mark.gpu
def test_edges_that_are_known_must_be_on_the_device_of_the_features() -> None:
    layer, edges = sage_layer(), EDGES.clone()
    layer(X, edges)
    assert usual_call(layer, X, edges) is not None
    layer.cuda()
    assert usual_call(layer, X.cuda(), edges) is None
    with pytest.raises(ValueError, match="'x' must be on the device of 'edge_index'"):
        layer(X.cuda(), edges)
