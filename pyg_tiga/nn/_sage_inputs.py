"""What SAGEConv may do with its edges and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.dense.linear import Linear

from pyg_tiga import _features
from pyg_tiga.functional.aggregation import Maps
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._inputs import (
    SOURCE_TO_TARGET,
    is_edge_list,
    usual_graph,
    usual_shape,
)
from pyg_tiga.nn._linear import has_bias, is_plain, is_untouched, module_of
from pyg_tiga.nn._shapes import map_reasons
from pyg_tiga.relation.graph import Graph

__all__: list[str] = []

LINEAR_REDUCTIONS = ("sum", "add", "mean")


def width_reasons(layer: Any) -> list[str]:
    """Reasons for the parent's path that lie in the shapes of the linear maps."""
    names = ("lin_l", "lin_r") if layer.root_weight else ("lin_l",)
    reasons = map_reasons(layer, (*names, "lin") if layer.project else names)
    maps = [layer._modules.get(name) for name in names]
    widths = {lin.out_channels for lin in maps if type(lin) is Linear}
    if len(widths) > 1:
        reasons.append(f"'lin_l' and 'lin_r' give {sorted(widths)} channels")
    return reasons


def plain_maps(
    layer: Any, x_src: Tensor, x_dst: Tensor | None, edges: Any
) -> Maps | None:
    """The maps behind the aggregate, where they can run in one step with it."""
    if (
        x_src.dim() != 2
        or torch._C._is_any_autocast_enabled()
        or is_traced(x_src)
        or _has_values(edges)
    ):
        return None
    lin_l, right = module_of(layer, "lin_l"), None
    if layer.root_weight and x_dst is not None:
        lin_r = module_of(layer, "lin_r")
        if x_dst.dim() != 2 or x_dst.dtype != x_src.dtype:
            return None
        if x_dst.layout is not torch.strided:
            return None
        if not is_plain(lin_r) or has_bias(lin_r):
            return None
        right = lin_r.weight
    if not is_plain(lin_l):
        return None
    # As attributes: where a model is replicated, they are no parameters.
    if lin_l.weight.dtype != x_src.dtype:
        return None
    return Maps(lin_l.weight, lin_l.bias, right)


def usual_call(layer: Any, x: Any, edge_index: Any) -> tuple[Graph, Maps] | None:
    """Graph and maps of a call like most: one step, with nothing to say about it.

    That is, all that a layer checks before :func:`plain_maps` and there in one
    condition, for the features of one kind of nodes and an edge list, and nothing else.
    Where it does not hold, the checks one by one find out why, or that all is well. For
    eager calls; in which order to aggregate and to transform is another question.
    """
    # Whether a tracer listens comes before anything that it would record.
    if layer.project or layer.aggr not in LINEAR_REDUCTIONS or not layer._is_usual():
        return None
    shape = usual_shape(x)
    if shape is None:
        return None
    num_nodes, width = shape
    modules, dtype = layer._modules, x.dtype
    # No module hears of all calls, or the layer were not usual.
    lin_l, right = modules.get("lin_l"), None
    if not is_untouched(lin_l) or lin_l.in_channels != width:
        return None
    if layer.root_weight:
        lin_r = modules.get("lin_r")
        if not is_untouched(lin_r) or lin_r.in_channels != width:
            return None
        maps = lin_r._parameters
        right = maps.get("weight")
        if right is None or right.dtype is not dtype:
            return None
        if "bias" not in maps or maps["bias"] is not None:
            return None
    maps = lin_l._parameters
    left = maps.get("weight")
    if left is None or left.dtype is not dtype or "bias" not in maps:
        return None
    bias, channels = maps["bias"], lin_l.out_channels
    if not (
        left.shape == (channels, width)
        and (right is None or right.shape == left.shape)
        and (bias is None or bias.shape == (channels,))
    ):
        return None
    graph = usual_graph(edge_index, x, num_nodes, layer.flow)
    return None if graph is None else (graph, Maps(left, bias, right))


def _has_values(edges: Any) -> bool:
    """Whether a relation weights its edges: matrices do, and some graphs."""
    if isinstance(edges, Graph):
        return edges.value is not None
    return not is_edge_list(edges)


def parent_ties(edge_index: Any, x: Tensor) -> str:
    """Who gets the gradient of a maximum at ties in PyG, for this input.

    * Edge lists, ``EdgeIndex`` among them, are reduced by ``scatter_reduce``:
      ``"split"``. Only on CUDA in eager mode, where torch_scatter is installed, does
      PyG call it instead; it gives all to any one edge, and we take the ``"first"``.
    * Matrices are reduced by ``torch.sparse.mm`` or torch_sparse: ``"first"``.
    * A :class:`pyg_tiga.Graph` counts as what it was built from.
    """
    if isinstance(edge_index, Graph):
        return "split" if edge_index.handle()[1].startswith("coo") else "first"
    if not is_edge_list(edge_index):
        return "first"
    if torch.compiler.is_compiling() or not x.is_cuda:
        return "split"
    return "split" if _features.torch_scatter() is None else "first"


def takes_segments(layer: Any, edge_index: Any) -> bool:
    """Whether PyG reduces these sorted edges by segments.

    So it does in layers that were built in deterministic mode. Without torch_scatter
    this is ``torch.segment_reduce``, whose gradient of a maximum at ties is of its own
    kind: evenly shared where it is positive, and given to each edge in full elsewhere.
    """
    if not isinstance(edge_index, EdgeIndex):
        return False
    if not layer._modules["aggr_module"]._deterministic:
        return False
    if layer.flow == SOURCE_TO_TARGET:
        return edge_index.is_sorted_by_col
    return edge_index.is_sorted_by_row
