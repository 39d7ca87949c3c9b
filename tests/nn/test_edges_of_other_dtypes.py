"""Edge lists that hold no integers are refused on every path, as PyG refuses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyg_tiga.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "sage": lambda: SAGEConv(3, 4),
    "sage, median": lambda: SAGEConv(3, 4, aggr="median"),
    "gat": lambda: GATConv(3, 4),
    "gat, max": lambda: GATConv(3, 4, aggr="max"),
    "gatv2": lambda: GATv2Conv(3, 4),
    "gatv2, max": lambda: GATv2Conv(3, 4, aggr="max"),
    "transformer": lambda: TransformerConv(3, 4),
    "transformer, max": lambda: TransformerConv(3, 4, aggr="max"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_no_integers(name: str, dtype: torch.dtype) -> None:
    edges = torch.randint(2, (2, 8)).to(dtype)
    with pytest.raises(ValueError, match="'edge_index' must hold integers"):
        LAYERS[name]()(torch.randn(6, 3), edges)


def test_edge_features_on_the_parents_path() -> None:
    layer, edges = GATv2Conv(3, 4, edge_dim=2), torch.rand(2, 8)
    with pytest.raises(ValueError, match="'edge_index' must hold integers"):
        layer(torch.randn(6, 3), edges, torch.randn(8, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_narrow_integers_are_widened(dtype: torch.dtype) -> None:
    x, edges = torch.randn(6, 3), torch.randint(6, (2, 8))
    layer = GATConv(3, 4, aggr="max")
    assert torch.equal(layer(x, edges.to(dtype)), layer(x, edges))
