"""What lets a call of GATConv pass without the checks one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor

from pyg_tiga.nn import GATConv
from pyg_tiga.nn._gat_inputs import usual_call
from pyg_tiga.relation.memo import relation_of

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


class _Deaf(GATConv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j


def _with(act: Callable[[GATConv], Any], **options: Any) -> GATConv:
    layer = GATConv(4, 2, **options)
    act(layer)
    return layer


def _hook(*_: object) -> None:
    pass


UNUSUAL_LAYERS = {
    "aggr": lambda: GATConv(4, 2, aggr="mean"),
    "aggr module": lambda: _with(
        lambda layer: layer.aggr_module.register_forward_hook(_hook)
    ),
    "decomposed": lambda: _with(lambda layer: setattr(layer, "decomposed_layers", 2)),
    "node_dim": lambda: _with(lambda layer: setattr(layer, "node_dim", -2)),
    "message hook": lambda: _with(
        lambda layer: layer.register_message_forward_hook(_hook)
    ),
    "edge update hook": lambda: _with(
        lambda layer: layer.register_edge_update_forward_pre_hook(_hook)
    ),
    "explain": lambda: _with(lambda layer: setattr(layer, "explain", True)),
    "subclass": lambda: _Deaf(4, 2),
    "instance": lambda: _with(lambda layer: setattr(layer, "update", layer.update)),
    "heads": lambda: _with(lambda layer: setattr(layer, "heads", 2)),
    "mean of heads": lambda: GATConv(4, 2, heads=2, concat=False),
    "residual": lambda: GATConv(4, 2, residual=True),
    "two maps": lambda: GATConv((4, 4), 2),
    "lazy": lambda: GATConv(-1, 2),
    "hooked map": lambda: _with(lambda layer: layer.lin.register_forward_hook(_hook)),
    "replaced map": lambda: _with(
        lambda layer: setattr(layer, "lin", torch.nn.Linear(4, 2, bias=False))
    ),
    "width": lambda: GATConv(5, 2),
    "dtype": lambda: GATConv(4, 2).double(),
    "dropout": lambda: _with(lambda layer: setattr(layer, "dropout", 1.5)),
}


def test_most_calls_are_usual() -> None:
    x, layer = torch.randn(3, 4), GATConv(4, 2, heads=2, dropout=0.5)
    graph, found = usual_call(layer, x, EDGES)
    assert graph is relation_of(EDGES, 3, 3)
    wanted = (layer.lin.weight, layer.att_src, layer.att_dst, layer.bias)
    assert all(one is other for one, other in zip(found, wanted, strict=True))
    assert usual_call(GATConv(4, 2, bias=False), x, EDGES.int())[1].bias is None


@pytest.mark.parametrize("name", UNUSUAL_LAYERS)
def test_unusual_layers_are_looked_at(name: str) -> None:
    layer = UNUSUAL_LAYERS[name]()
    assert usual_call(layer, torch.randn(3, 4), EDGES) is None


@pytest.mark.parametrize(
    ("x", "edges"),
    [
        ((torch.randn(3, 4), torch.randn(3, 4)), EDGES),
        (torch.randn(2, 3, 4), EDGES),
        (torch.randn(3, 4, device="meta"), EDGES),
        (torch.randn(3, 4), EDGES.float()),
        (torch.randn(3, 4), EDGES.t()),
        (torch.randn(3, 4), EDGES[0]),
        (torch.randn(3, 4), torch_geometric.EdgeIndex(EDGES)),
        (torch.randn(3, 4), torch.eye(3).to_sparse()),
    ],
)
def test_unusual_inputs_are_looked_at(x: Any, edges: Any) -> None:
    assert usual_call(GATConv(4, 2), x, edges) is None


def test_unusual_modes_are_looked_at() -> None:
    x, layer = torch.randn(3, 4), GATConv(4, 2)
    with torch.autocast("cpu"):
        assert usual_call(layer, x, EDGES) is None
    with torch.autograd.forward_ad.dual_level():
        assert usual_call(layer, x, EDGES) is None
    inside = []
    torch.func.grad(lambda x: (inside.append(usual_call(layer, x, EDGES)), x.sum())[1])(
        x
    )
    assert inside == [None]
    handle = torch.nn.modules.module.register_module_forward_hook(_hook)
    try:
        assert usual_call(layer, x, EDGES) is None
    finally:
        handle.remove()
    assert usual_call(layer, x, EDGES) is not None


@pytest.mark.parametrize("name", ["message", "propagate", "edge_updater"])
def test_methods_replaced_later_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, layer = torch.randn(3, 4), GATConv(4, 2)
    assert usual_call(layer, x, EDGES) is not None
    monkeypatch.setattr(GATConv, name, lambda *_: None, raising=False)
    assert usual_call(layer, x, EDGES) is None
