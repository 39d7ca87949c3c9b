"""Parameters of other shapes than a layer's own do what they do in PyG's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch import Tensor

import pyg_tiga.nn
from pyg_tiga import planner
from tests.nn.layer_checks import assert_parents_path, is_fused

NODES, HEADS, CHANNELS = 7, 2, 3
WIDTH = HEADS * CHANNELS
EDGES = torch.tensor([[0, 1, 2, 6, 4, 3, 3], [1, 2, 0, 3, 6, 6, 5]])
X, EDGE_ATTR = torch.randn(NODES, 4), torch.randn(EDGES.size(1), 2)
ROWS = [(1, 1, CHANNELS), (1, HEADS, 1), (1, 1, 1), (CHANNELS,), (HEADS, 1), ()]
BIASES = [(1,), (NODES, WIDTH), (1, WIDTH), ()]


def attention(
    layer: str, places: list[tuple[str, list[tuple[int, ...]]]], **options: Any
) -> list[Any]:
    options = {"in_channels": 4, "out_channels": CHANNELS, "heads": HEADS, **options}
    return [
        pytest.param(layer, options, name, shape, id=f"{layer}-{name}-{shape}")
        for name, shapes in places
        for shape in shapes
    ]


def sage(name: str, shape: tuple[int, ...], **options: Any) -> list[Any]:
    options = {"in_channels": 4, "out_channels": CHANNELS, **options}
    return [pytest.param("SAGEConv", options, name, shape, id=f"{name}-{shape}")]


CASES = [
    *attention("GATConv", [("att_src", ROWS), ("att_dst", ROWS), ("bias", BIASES)]),
    *attention("GATConv", [("att_edge", ROWS)], edge_dim=2),
    *attention("GATConv", [("bias", [(1,)])], concat=False),
    *attention("GATv2Conv", [("att", ROWS), ("bias", BIASES)]),
    *attention("TransformerConv", [("lin_key.bias", [(1,)])]),
    *attention("TransformerConv", [("lin_skip.weight", [(1, 4)])], bias=False),
    *sage("lin_r.weight", (1, 4)),
    *sage("lin_r.weight", (1, 4), bias=False),
    *sage("lin_l.weight", (1, 4), bias=False),
    *sage("lin_l.bias", (1,)),
    *sage("lin_l.bias", (NODES, CHANNELS)),
    *sage("lin_l.bias", (1,), aggr="max"),
]


def run(layer: Any, *given: Any) -> list[Tensor | None]:
    x = X.clone().requires_grad_()
    out = layer(x, *given)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def outcome(layer: Any, *given: Any) -> Any:
    """What a layer gives, or the kind of error where it gives none."""
    try:
        return run(layer, *given)
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("family", ["scatter", "triton"])
@pytest.mark.parametrize(("cls", "options", "name", "shape"), CASES)
def test_as_in_the_parents_layer(
    cls: str,
    options: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    family: str,
) -> None:
    theirs = getattr(torch_geometric.nn, cls)(**options)
    ours = getattr(pyg_tiga.nn, cls)(**options)
    ours.load_state_dict(theirs.state_dict())
    given = (EDGES, EDGE_ATTR) if "edge_dim" in options else (EDGES,)
    value = torch.randn(shape)
    for layer in (ours, theirs):
        owner, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, torch.nn.Parameter(value.clone()))
    with planner.pin(family):
        found = outcome(ours, *given)
    expected = outcome(theirs, *given)
    if isinstance(expected, list):
        torch.testing.assert_close(found, expected)
    else:
        assert found is expected
    changed = "'heads' or 'out_channels' changed"
    assert_parents_path(ours, changed if leaf in ("att", "att_src") else name)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        ("GATConv", {"bias": False}),
        ("GATConv", {"in_channels": (-1, -1), "residual": True}),
        ("GATConv", {"in_channels": -1, "heads": True}),
        ("GATv2Conv", {"in_channels": -1, "concat": False}),
        ("TransformerConv", {"in_channels": -1, "concat": False}),
        ("TransformerConv", {"beta": True}),
        ("SAGEConv", {"in_channels": -1, "project": False}),
        ("SAGEConv", {"project": True, "bias": False}),
    ],
)
def test_layers_whose_shapes_are_their_own_are_fused(
    cls: str, options: dict[str, Any]
) -> None:
    layer = getattr(pyg_tiga.nn, cls)(
        **{"in_channels": 4, "out_channels": CHANNELS, **options}
    )
    for _ in range(2):
        layer(X, EDGES)
        assert is_fused(layer), layer.explain_plan()
