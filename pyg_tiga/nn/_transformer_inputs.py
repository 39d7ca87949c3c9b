"""What TransformerConv may do with its inputs, and gives back of its edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_tiga.nn._gat_edges import check_edge_width
from pyg_tiga.nn._inputs import (
    check_count,
    check_edges,
    is_edge_list,
    is_matrix,
    is_sparse_tensor,
    name_of,
    node_counts,
    num_edges,
    pair_of,
)
from pyg_tiga.nn._linear import has_bias, is_plain, module_of
from pyg_tiga.nn._shapes import map_reasons
from pyg_tiga.relation.graph import Graph

__all__: list[str] = []


def width_reasons(layer: Any) -> list[str]:
    """Reasons for the parent's path that lie in the widths of the linear maps."""
    wanted = layer.heads * layer.out_channels
    names = ("lin_key", "lin_query", "lin_value")
    if not all(_width_of(module_of(layer, name)) in (None, wanted) for name in names):
        return ["'heads' or 'out_channels' changed after construction"]
    reasons = map_reasons(layer, (*names, "lin_edge"), wanted)
    if layer.root_weight:
        root = wanted if layer.concat else layer.out_channels
        reasons += map_reasons(layer, ("lin_skip",), root)
        reasons += map_reasons(layer, ("lin_beta",), 1)
    return reasons


def _width_of(lin: torch.nn.Module) -> int | None:
    """What a map of PyG or PyTorch gives; another is taken at its word."""
    return getattr(lin, "out_channels", getattr(lin, "out_features", None))


def batch_reasons(x: Any) -> list[str]:
    """Reasons for the parent's path that lie in the dimensions of node features."""
    parts = pair_of(x)
    dims = [part.dim() for part in parts if isinstance(part, Tensor)]
    return [f"'x' has {max(dims)} dimensions"] if any(n > 2 for n in dims) else []


def feature_reasons(layer: Any, edge_attr: Any, edge_index: Any) -> list[str]:
    """Reasons for the parent's path that lie in edge features, or in their map.

    Raises:
        ValueError: The parent has no answer either.
    """
    if edge_attr is None:
        return []
    lin = module_of(layer, "lin_edge")
    if lin is None:
        return ["'edge_attr' is added as it is where there is no 'edge_dim'"]
    check_edge_width(edge_attr, lin)
    reasons = []
    if is_matrix(edge_index):
        reasons.append("edge features beside a sparse matrix")
    if not is_plain(lin) or has_bias(lin):
        reasons.append("'lin_edge' is not a plain linear map")
    is_dense = isinstance(edge_attr, Tensor) and edge_attr.layout is torch.strided
    if not is_dense or edge_attr.dim() != 2:
        reasons.append("'edge_attr' is no dense matrix")
    elif edge_attr.size(0) == 1 and not is_matrix(edge_index):
        check_edges(edge_index)
        if num_edges(edge_index) != 1:
            reasons.append("'edge_attr' has one row for all edges")
    return reasons


def attended_counts(
    edge_index: Any,
    x_src: Tensor,  # [N_src, F]
    x_dst: Tensor,  # [N_dst, F]
    flow: str,
) -> tuple[int, int]:
    """Find (N_src, N_dst) as PyG's propagate would, or say what does not fit.

    Unlike other layers this one hands queries and keys to it one by one, so that the
    second of a pair is the destinations with either flow.

    Raises:
        ValueError: Sizes that differ, or a matrix with the other flow.
    """
    if flow == "source_to_target" or not is_edge_list(edge_index):
        counts = node_counts(edge_index, x_src, x_dst, None, flow)
        check_count(
            name_of(x_src, x_dst), x_dst, counts[1], "destinations of 'edge_index'"
        )
        return counts
    if isinstance(edge_index, EdgeIndex):
        rows, columns = edge_index.sparse_size()
        rule = "'sparse_size' of 'edge_index'"
        if columns is not None:
            check_count("x", x_src, columns, rule)
        if rows is not None:
            check_count(name_of(x_src, x_dst), x_dst, rows, rule)
    return x_src.size(0), x_dst.size(0)


def edges_with_weights(
    edge_index: Any,
    relation: Any,
    weight: Tensor,  # [E, H]
) -> Any:
    """The weights in PyG's form, with the edges as they were given."""
    if is_sparse_tensor(edge_index):
        return edge_index.set_value(weight, layout="coo")
    if isinstance(edge_index, Graph):
        return edge_index.edge_index(), weight
    # PyG refuses a matrix whose entries are not merged yet; ours are those of the
    # merged one.
    return (edge_index if is_edge_list(edge_index) else relation), weight
