"""What attention layers may do with their edges, and GATConv with its parameters."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.functional.arguments import check_number
from pyg_tiga.functional.attention import Weights
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._attention import row_reasons
from pyg_tiga.nn._inputs import (
    check_device,
    check_edges,
    check_features,
    is_matrix,
    is_sparse_tensor,
    num_edges,
    usual_graph,
    usual_shape,
)
from pyg_tiga.nn._linear import is_plain, is_untouched
from pyg_tiga.relation.graph import Graph

__all__: list[str] = []

_NUMBERS = (float, int)


def check_options(heads: Any, dropout: Any, negative_slope: Any = 0.0) -> None:
    """Hold options of a new layer to numbers that it can run with.

    Raises:
        ValueError: They are something else.
        TypeError: ``negative_slope`` is no number.
    """
    check_number("negative_slope", negative_slope)
    if not isinstance(heads, Integral) or heads < 1:
        raise ValueError(f"'heads' must be a positive integer (got {heads!r})")
    if not isinstance(dropout, (Real, Tensor)):
        raise ValueError(f"'dropout' must be a number in [0, 1] (got {dropout!r})")


def check_nodes(
    name: str,
    x: Any,
    lin: torch.nn.Module,
    edge_index: Any,
    layer: str = "GATConv",
) -> None:
    """Hold node features to the edges and to the linear map that reads them.

    Raises:
        ValueError: Wrong shape, dtype or device.
    """
    if isinstance(x, Tensor) and x.dim() > 2:
        raise ValueError(
            f"Static graphs not supported in '{layer}': '{name}' must have shape "
            f"[num_nodes, in_channels] (got {list(x.shape)})"
        )
    check_features(name, x, lin, leading="")
    check_device(name, x, edge_index)


def matrix_reasons(layer: Any, matrix: Any, edge_attr: Any, weights: Any) -> list[str]:
    """Reasons for the parent's path that lie in a sparse matrix.

    That is where PyG refuses it, or reorders it.
    """
    reasons = []
    loops = getattr(layer, "add_self_loops", False)
    reads_attr = edge_attr is not None and layer._modules.get("lin_edge") is not None
    if is_sparse_tensor(matrix):
        value = matrix.storage.value()
        wide = value is not None and value.dim() > 1
        if loops and layer.edge_dim is not None:
            reasons.append("PyG has no self-loops for a SparseTensor with edge_dim")
    else:
        wide = matrix.dense_dim() > 0
        if matrix.layout not in (torch.sparse_coo, torch.sparse_csr):
            name = layer._pyg_class.__name__
            reasons.append(f"PyG's {name} refuses the layout {matrix.layout}")
        elif edge_attr is not None and loops:
            reasons.append("PyG refuses 'edge_attr' for a matrix with self-loops")
        elif reads_attr and not _is_coalesced(matrix):
            reasons.append("PyG refuses an uncoalesced matrix")
    if wide:
        reasons.append("the matrix holds a row of values per entry")
    if weights and loops:
        reasons.append("PyG sorts the weights of a matrix and its self-loops")
    return reasons


def wide_reasons(layer: Any, edge_attr: Tensor, edge_index: Any) -> list[str]:
    """Reasons for the parent's path that lie in the dimensions of edge features.

    None where PyG has no answer either: the checks say so better.
    """
    if layer.add_self_loops and not is_matrix(edge_index):
        check_edges(edge_index)
        if edge_attr.size(0) != num_edges(edge_index):
            return []
    return [f"'edge_attr' has {edge_attr.dim()} dimensions"]


def size_reasons(
    layer: Any,
    x: tuple[Tensor, Tensor | None],
    counts: tuple[int, int],
    size: tuple[int | None, int | None] | None,
) -> list[str]:
    """Reasons that lie in sizes which the operation does not take."""
    reasons = row_reasons(x[1], counts)
    if (
        not reasons
        and size is not None
        and layer.add_self_loops
        and min(size) != min(counts)
    ):
        return [f"size={size} is not that of the nodes, {counts}"]
    return reasons


def plain_weights(layer: Any, x: Tensor) -> Weights | None:
    """The parameters, where the layer can run on x in one step."""
    if (
        torch._C._is_any_autocast_enabled()
        or is_traced(x)
        or x.layout is not torch.strided
        or not is_plain(layer._modules.get("lin"))
    ):
        return None
    return _weights_for(layer, x)


def usual_call(layer: Any, x: Any, edge_index: Any) -> tuple[Graph, Weights] | None:
    """Graph and parameters of a call like most: one step, with nothing to say about it.

    That is, all that a layer checks before :func:`plain_weights` and there in one
    condition, for the features of one kind of nodes and an edge list, and nothing else.
    Where it does not hold, the checks one by one find out why, or that all is well. For
    eager calls.
    """
    # Whether a tracer listens comes before anything that it would record.
    if not (
        type(layer.dropout) in _NUMBERS
        and type(layer.negative_slope) in _NUMBERS
        and layer.negative_slope == layer.negative_slope
        and 0.0 <= layer.dropout <= 1.0
        and layer._is_usual()
    ):
        return None
    shape = usual_shape(x)
    lin = layer._modules.get("lin")
    # No module hears of all calls, or the layer were not usual.
    if shape is None or not is_untouched(lin) or lin.in_channels != shape[1]:
        return None
    weights = _weights_for(layer, x)
    if weights is None:
        return None
    wanted = (1, layer.heads, layer.out_channels)
    width = layer.heads * layer.out_channels
    if not (
        weights.att_src.shape == wanted == weights.att_dst.shape
        and weights.lin.shape == (width, shape[1])
        and (weights.bias is None or weights.bias.shape == (width,))
    ):
        return None
    graph = usual_graph(edge_index, x, shape[0], layer.flow)
    return None if graph is None else (graph, weights)


def _weights_for(layer: Any, x: Tensor) -> Weights | None:
    """The parameters of a layer with one map, if they go with x in one step."""
    modules, parameters = layer._modules, layer._parameters
    if (
        not (layer.concat or layer.heads == 1)
        or modules.get("res") is not None
        or "bias" not in parameters
    ):
        return None
    maps = modules["lin"]._parameters
    weight, bias = maps.get("weight"), parameters["bias"]
    att_src, att_dst = parameters.get("att_src"), parameters.get("att_dst")
    if (
        weight is None
        or att_src is None
        or att_dst is None
        or maps.get("bias") is not None
    ):
        return None
    dtype, device = x.dtype, x.device
    for value in (weight, att_src, att_dst, bias):
        if value is not None and not (
            value.dtype is dtype and value.device == device and value.is_contiguous()
        ):
            return None
    return Weights(weight, att_src, att_dst, bias)


def _is_coalesced(matrix: Tensor) -> bool:
    return matrix.layout is not torch.sparse_coo or matrix.is_coalesced()
