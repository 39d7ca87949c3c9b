"""What GATConv may do with its edges and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.functional.attention import Weights
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._inputs import (
    INT_DTYPES,
    check_device,
    check_features,
    is_sparse_tensor,
)
from pyg_tiga.nn._linear import is_plain

__all__: list[str] = []


def check_nodes(name: str, x: Any, lin: torch.nn.Module, edge_index: Any) -> None:
    """Hold node features to the edges and to the linear map that reads them.

    Raises:
        ValueError: Wrong shape, dtype or device.
    """
    if isinstance(x, Tensor) and x.dim() > 2:
        raise ValueError(
            f"Static graphs not supported in 'GATConv': '{name}' must have shape "
            f"[num_nodes, in_channels] (got {list(x.shape)})"
        )
    check_features(name, x, lin)
    check_device(name, x, edge_index)


def matrix_reasons(layer: Any, matrix: Any, edge_attr: Any, weights: Any) -> list[str]:
    """Reasons for the parent's path that lie in a sparse matrix.

    That is where PyG refuses it, or reorders it.
    """
    reasons = []
    if is_sparse_tensor(matrix):
        value = matrix.storage.value()
        wide = value is not None and value.dim() > 1
        if layer.add_self_loops and layer.edge_dim is not None:
            reasons.append("PyG has no self-loops for a SparseTensor with edge_dim")
    else:
        wide = matrix.dense_dim() > 0
        if matrix.layout not in (torch.sparse_coo, torch.sparse_csr):
            reasons.append(f"PyG's GATConv refuses the layout {matrix.layout}")
        elif edge_attr is not None and layer.add_self_loops:
            reasons.append("PyG refuses 'edge_attr' for a matrix with self-loops")
        elif edge_attr is not None and not _is_coalesced(matrix):
            reasons.append("PyG refuses an uncoalesced matrix")
    if wide:
        reasons.append("the matrix holds a row of values per entry")
    if weights and layer.add_self_loops:
        reasons.append("PyG sorts the weights of a matrix and its self-loops")
    return reasons


def plain_weights(layer: Any, x: Tensor) -> Weights | None:
    """The parameters, where the layer can run on x in one step."""
    modules, parameters = layer._modules, layer._parameters
    lin = modules.get("lin")
    if (
        not (layer.concat or layer.heads == 1)
        or lin is None
        or modules.get("res") is not None
        or torch._C._is_any_autocast_enabled()
        or not is_plain(lin)
        or is_traced(x)
        or "bias" not in parameters
    ):
        return None
    maps = lin._parameters
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


def usual_weights(layer: Any, x: Any, edge_index: Any) -> Weights | None:
    """The parameters of a call like most: one step, with nothing to say about it.

    That is, all that a layer checks before :func:`plain_weights` in one condition, for
    the features of one kind of nodes and an edge list, and nothing else. Where it does
    not hold, the checks one by one find out why, or that all is well. For eager calls.
    """
    if not (
        isinstance(x, Tensor)
        and type(edge_index) is Tensor
        and x.dim() == 2
        and edge_index.dim() == 2
        and edge_index.size(0) == 2
        and edge_index.dtype in INT_DTYPES
        and edge_index.layout is torch.strided
        and x.device == edge_index.device
        and 0.0 <= layer.dropout <= 1.0
        and layer._is_usual()
    ):
        return None
    weights = plain_weights(layer, x)
    if (
        weights is None
        or weights.att_src.shape != (1, layer.heads, layer.out_channels)
        or x.size(1) != layer._modules["lin"].in_channels
    ):
        return None
    return weights


def _is_coalesced(matrix: Tensor) -> bool:
    return matrix.layout is not torch.sparse_coo or matrix.is_coalesced()
