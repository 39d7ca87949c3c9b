"""The peers of attention with two vectors, each called as its own documentation says.

turbo_gnn and anemoi-models are no dependencies: ``benchmarks/setup_peers.sh`` installs
them on the machine that measures. Where one is missing, its records say so.

turbo_gnn takes both groupings of the edges with int32 ids and columns in order, as its
own constructor makes them, once. Its ``gatv2_aggr`` wants destinations first; its
``graph_transformer_aggr`` calls that vector Q which is gathered from the sources, and
that one K which belongs to the destination. Results are ``[N, H, C]``. Its GATv2
launches on the default stream, and so does its dot product's backward: nothing of that
is in a CUDA graph, so no replay counts. GATv2's backward also takes ``[N, H]`` numbers
from CUDA itself, which the measured peak does not see.

anemoi wants queries, keys and values ``[N, H, C]``, and one such row per edge of
projected edge features, in the order of the destinations, with the groupings that its
own ``edge_index_to_csc`` makes. It is given all that once, edge features in this order
among it, and no call has to sort anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATv2Conv, TransformerConv

from benchmarks.attention_checks import SLOPE
from benchmarks.graphs import BenchGraph
from benchmarks.peers import PeerMissing

TURBO_GNN, ANEMOI = "turbo_gnn", "anemoi"
DEFAULT_STREAM = "it launches on the default stream"

Core = Callable[..., Tensor]


def pyg_gatv2_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """PyG's GATv2Conv."""
    return GATv2Conv(in_channels, out_channels, heads, **options)


def pyg_transformer_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """PyG's TransformerConv."""
    return TransformerConv(in_channels, out_channels, heads, **options)


class PygGatv2(torch.nn.Module):
    """PyG's GATv2Conv from its projections on; att ``[1, H, C]`` is its parameter."""

    def __init__(self, edge_index: Tensor, att: Tensor) -> None:
        super().__init__()
        _, heads, channels = att.shape
        options = {"add_self_loops": False, "bias": False, "negative_slope": SLOPE}
        self.conv = GATv2Conv(1, channels, heads, **options)
        self.conv.att = att
        self.edge_index = edge_index

    def forward(self, x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        """The output ``[N, H, C]``; ``att`` is the parameter that it has."""
        pair = (x_src, x_dst)
        alpha = self.conv.edge_updater(self.edge_index, x=pair, edge_attr=None)
        return self.conv.propagate(self.edge_index, x=pair, alpha=alpha)


class PygDot(torch.nn.Module):
    """PyG's TransformerConv from its projections on."""

    def __init__(self, edge_index: Tensor, heads: int, channels: int) -> None:
        super().__init__()
        self.conv = TransformerConv(1, channels, heads, bias=False, root_weight=False)
        self.edge_index = edge_index

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output ``[N, H, C]``."""
        vectors = {"query": query, "key": key, "value": value}
        out = self.conv.propagate(self.edge_index, **vectors, edge_attr=None)
        self.conv._alpha = None
        return out


def turbo_gatv2(graph: BenchGraph) -> Core:
    """turbo_gnn's GATv2 of (x_src, x_dst, att ``[1, H, C]``)."""
    turbo, on = _turbo_gnn(graph)

    def call(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        att = att.view(att.shape[1:])
        return turbo.gatv2_aggr(
            on, x_dst, x_neighbors=x_src, attention_weights=att, negative_slope=SLOPE
        )

    return call


def turbo_dot(graph: BenchGraph) -> Core:
    """turbo_gnn's dot-product attention of (query, key, value)."""
    turbo, on = _turbo_gnn(graph)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = query.size(2) ** -0.5
        return turbo.graph_transformer_aggr(
            on, query, Q=key, K=query, V=value, scale=scale
        )

    return call


def _turbo_gnn(graph: BenchGraph) -> tuple[ModuleType, Any]:
    """The module and its form of the graph."""
    turbo = _import(TURBO_GNN, "turbo_gnn")
    make = turbo.AdjacencyForwardBackwardWithNodeBuckets.from_edge_list

    def built() -> Any:
        return make(graph.edge_index, graph.num_nodes, index_dtype=torch.int32)

    return turbo, graph.form(TURBO_GNN, built)


def form_bytes(graph: BenchGraph, peer: str) -> int:
    """Bytes of the tensors in the form of a graph that a peer has had made."""
    return _nbytes(graph.form(peer, tuple))


def _nbytes(form: object) -> int:
    if isinstance(form, Tensor):
        return form.nbytes
    if isinstance(form, tuple):
        return sum(_nbytes(each) for each in form)
    return _nbytes(tuple(getattr(form, "__dict__", {}).values()))


class AnemoiConv(torch.nn.Module):
    """A TransformerConv with edge features on anemoi's attention, not on PyG's.

    It has the parameters of the given layer. Edge features come and leave in the order
    that `arranged` makes.
    """

    def __init__(self, parent: torch.nn.Module, graph: BenchGraph) -> None:
        super().__init__()
        module = _import(ANEMOI, "anemoi.models.triton.gt")
        self._attend = module.graph_transformer_attention_conv
        self._parent = parent
        self._groupings, self._order = anemoi_groupings(graph)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        """The output ``[N, H * C]`` for edge features ``[E, F]``."""
        lin, shape = self._parent, (-1, self._parent.heads, self._parent.out_channels)
        vectors = (layer(x) for layer in (lin.lin_query, lin.lin_key, lin.lin_value))
        query, key, value = (each.view(shape) for each in vectors)
        edges = lin.lin_edge(features).view(shape)
        out = self._attend(query, key, value, edges, *self._groupings)
        return out.flatten(1) + lin.lin_skip(x)

    def arranged(self, features: Tensor) -> Tensor:
        """Edge features in anemoi's order, as a leaf."""
        return features.detach()[self._order].requires_grad_(features.requires_grad)

    def restored(self, features: Tensor) -> Tensor:
        """Edge features, or their gradients, in the order of the graph."""
        found = torch.empty_like(features)
        found[self._order] = features
        return found


def anemoi_groupings(graph: BenchGraph) -> tuple[tuple[Any, Any], Tensor]:
    """Anemoi's arguments for a graph, and its order of the edges."""
    utils = _import(ANEMOI, "anemoi.models.triton.utils")
    size = (graph.num_nodes, graph.num_nodes)

    def built() -> tuple[tuple[Any, Any], Tensor]:
        csc, order, reverse = utils.edge_index_to_csc(graph.edge_index, size)
        return (csc, reverse), order

    return graph.form(ANEMOI, built)


def _import(peer: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, ValueError) as failure:
        # anemoi raises a ValueError where there is no Triton.
        raise PeerMissing(f"{peer} is not installed: {failure}") from failure
