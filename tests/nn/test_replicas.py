"""Replicas as `torch.nn.DataParallel` makes them: parameters are plain attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

from pyg_tiga import nn

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sage": ("SAGEConv", {}),
    "sage, narrow": ("SAGEConv", {"out_channels": 2}),
    "sage, max": ("SAGEConv", {"aggr": "max", "project": True}),
    "sage, no root": ("SAGEConv", {"root_weight": False, "bias": False}),
    "gat": ("GATConv", {"heads": 2}),
    "gatv2": ("GATv2Conv", {"residual": True}),
    "transformer": ("TransformerConv", {"heads": 2}),
    "gat, edges": ("GATConv", {"heads": 2, "edge_dim": 3, "residual": True}),
}


def replica(model: torch.nn.Module) -> torch.nn.Module:
    """What `torch.nn.parallel.replicate` makes, without a GPU to copy to."""
    copies = {}
    for module in model.modules():
        copy = copies[module] = module._replicate_for_data_parallel()
        copy._former_parameters = {}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            setattr(copy, name, None if child is None else copies[child])
        for name, value in module._parameters.items():
            if value is None:
                copy._parameters[name] = None
            else:
                setattr(copy, name, value.clone())
    return copies[model]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", CASES)
def test_replicas_are_layers(name: str, mode: Callable[[], Any]) -> None:
    kind, options = CASES[name]
    options = {"in_channels": 5, "out_channels": 7, **options}
    ours, theirs = getattr(nn, kind)(**options), getattr(pyg, kind)(**options)
    theirs.load_state_dict(ours.state_dict())
    x, edge_index = torch.randn(6, 5), torch.randint(6, (2, 20))
    args = (x, edge_index)
    if "edge_dim" in options:
        args = (*args, torch.randn(20, options["edge_dim"]))
    with mode():
        found, expected = replica(ours)(*args), replica(theirs)(*args)
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
    if found.requires_grad:
        grads = [
            torch.autograd.grad(out.sum(), [*layer.parameters()])
            for out, layer in ((found, ours), (expected, theirs))
        ]
        torch.testing.assert_close(*grads)
    assert "PyG" not in ours.explain_plan()
