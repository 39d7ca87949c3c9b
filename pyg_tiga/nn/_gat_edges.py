"""What attention layers read from edges and their features, and give back of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.sparse import set_sparse_value

from pyg_tiga.nn._edges import for_functional, for_parent
from pyg_tiga.nn._inputs import (
    check_device,
    check_dtype,
    check_edges,
    is_edge_list,
    is_sparse_tensor,
    num_edges,
)
from pyg_tiga.nn._linear import module_of
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import relation_of_adj

__all__: list[str] = []

_MERGED = "merged"


def check_edge_attr(
    layer: Any, edge_attr: Any, edge_index: Any, counts: tuple[int, int]
) -> None:
    """Hold edge features to what the layer does with them, or PyG for self-loops.

    Without a map that reads them, PyG still extends them by those of self-loops.

    Raises:
        ValueError: They do not fit, or ``fill_value`` does not fit them.
    """
    lin = module_of(layer, "lin_edge")
    # PyG has no features of self-loops in a SparseTensor, and does not look at others.
    loops = layer.add_self_loops and not is_sparse_tensor(edge_index)
    is_read = not is_unread(edge_index, min(counts) if layer.add_self_loops else 0)
    if lin is not None and is_read:
        dtype = None
        if loops and layer.fill_value == "mean" and _is_integral(edge_attr):
            # Means are floating-point numbers, and promote the rest.
            dtype = torch.get_default_dtype()
        check_edge_features(edge_attr, edge_index, lin, dtype)
    elif loops:
        check_edge_rows(edge_attr, edge_index)
    if loops and isinstance(layer.fill_value, Tensor):
        _check_fill(layer.fill_value, edge_attr, min(counts))


def _is_integral(value: Any) -> bool:
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex()
    )


def _check_fill(fill: Tensor, edge_attr: Tensor, num_loops: int) -> None:
    wanted = [num_loops, *edge_attr.shape[1:]]
    shape = list(fill.shape)
    if len(shape) != len(wanted):
        shape = [1, *shape]
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    if len(shape) > len(wanted) or any(n not in (1, want) for n, want in pairs):
        raise ValueError(
            f"'fill_value' must expand to the features of all self-loops, {wanted} "
            f"(got {list(fill.shape)})"
        )


def feature_row_reasons(layer: Any, edge_attr: Any, edge_index: Any) -> list[str]:
    """Reasons for the parent's path that lie in the number of edge features.

    Where it adds none for self-loops, PyG adds those of one edge to all.
    """
    if (
        layer.add_self_loops
        or not isinstance(edge_attr, Tensor)
        or edge_attr.dim() not in (1, 2)
        or edge_attr.size(0) != 1
    ):
        return []
    check_edges(edge_index)
    if num_edges(edge_index) in (0, 1):
        return []
    return ["'edge_attr' has one row for all edges"]


def check_edge_features(
    edge_attr: Any,  # [E, D] or [E]
    edge_index: Any,
    module: torch.nn.Module,
    dtype: torch.dtype | None = None,
) -> None:
    """Hold edge features to the edges and to the linear map that reads them.

    Args:
        edge_attr: The features; one dimension counts as ``[E, 1]``.
        edge_index: The edges.
        module: The map, which is PyG's.
        dtype: What the map reads them in, if it is not their own.

    Raises:
        ValueError: Wrong shape, dtype or device.
    """
    _require_edge_tensor(edge_attr)
    width = module.in_channels
    found = edge_attr.size(1) if edge_attr.dim() == 2 else 1
    if edge_attr.dim() not in (1, 2) or (width > 0 and found != width):
        raise ValueError(
            f"'edge_attr' must have shape [num_edges, {width}] (got "
            f"{list(edge_attr.shape)})"
        )
    check_edge_rows(edge_attr, edge_index)
    check_dtype("edge_attr", edge_attr, module, dtype or edge_attr.dtype)
    check_device("edge_attr", edge_attr, edge_index)


def check_edge_width(edge_attr: Any, module: torch.nn.Module) -> None:
    """Hold edge features of any dimensions to what PyG's linear map can read.

    Raises:
        ValueError: They are no tensor, or of another width.
    """
    if type(module) is not Linear or module._forward_pre_hooks:
        return  # Another map takes what it takes, and so does one behind a hook.
    _require_edge_tensor(edge_attr)
    width = module.in_channels
    if edge_attr.dim() == 0 or (width > 0 and edge_attr.size(-1) != width):
        raise ValueError(
            f"'edge_attr' must have shape [num_edges, {width}] (got "
            f"{list(edge_attr.shape)})"
        )


def check_edge_rows(edge_attr: Any, edge_index: Any) -> None:
    """Hold edge features to one row per edge, whether or not a map reads them.

    Raises:
        ValueError: It is no tensor, or there are other than as many rows.
    """
    _require_edge_tensor(edge_attr)
    count = num_edges(edge_index)
    if edge_attr.dim() == 0 or edge_attr.size(0) != count:
        raise ValueError(
            f"'edge_attr' must have {count} rows, one for each edge (got "
            f"{list(edge_attr.shape)})"
        )


def _require_edge_tensor(edge_attr: Any) -> None:
    if not isinstance(edge_attr, Tensor):
        raise ValueError(
            f"'edge_attr' must be a tensor (got '{type(edge_attr).__name__}')"
        )


def is_unread(edge_index: Any, num_loops: int) -> bool:
    """Whether there are no scores for edge features to be part of.

    PyG then does not look at them, and their map gets no gradient, not even zeros. A
    compiled graph that may serve any number of edges asks nothing of it.
    """
    if torch.compiler.is_compiling():
        return all(
            statically_known_true(count == 0)
            for count in (num_loops, num_edges(edge_index))
        )
    return num_loops == 0 and num_edges(edge_index) == 0


def relation_for(edge_index: Any, self_loops: bool) -> Any:
    """The edges as the functions take them.

    Where it adds self-loops to a torch sparse matrix, PyG merges entries that occur
    twice. Being flagged as coalesced does not rule these out: PyG sets the flag on
    matrices that it did not sort, and CSR has none.
    """
    is_matrix = isinstance(edge_index, Tensor) and not is_edge_list(edge_index)
    if not (self_loops and is_matrix):
        return for_functional(edge_index)
    graph = relation_of_adj(edge_index.detach()).with_value(None)
    known = graph.scratch
    if _MERGED not in known:
        # None where there is nothing to merge: a graph in its own cache were a cycle.
        known[_MERGED] = _merge(graph)
    merged = known[_MERGED]
    return graph if merged is None else merged


def _merge(graph: Graph) -> Graph | None:
    """The graph with each edge once; None if so it is."""
    with torch.inference_mode(False):
        src, dst = graph.ends()
        keys = dst.long() * graph.num_src + src  # [E]
        once = keys.unique()
        if once.numel() == keys.numel():
            return None
        edges = torch.stack((once % graph.num_src, once // graph.num_src))
        sizes = {"num_src": graph.num_src, "num_dst": graph.num_dst}
        return Graph.from_edge_index(edges, **sizes)


def run_parent(forward: Any, layer: Any, x: Any, edge_index: Any, *args: Any) -> Any:
    """What GATConv's parent gives for edges that PyG need not take."""
    edge_attr, size, wants_weights = args
    given = edge_index
    edge_index, size = parents_edges(edge_index, size)
    found = forward(x, edge_index, edge_attr, size, wants_weights)
    returns_given = bool(wants_weights) and not layer.add_self_loops
    return with_given_edges(found, given) if returns_given else found


def parents_edges(edge_index: Any, size: Any = None) -> tuple[Any, Any]:
    """The edges and their size as PyG's attention layers take them.

    They ignore the values of a graph's matrix.
    """
    if isinstance(edge_index, Graph):
        edge_index = edge_index.with_value(None)
    return for_parent(edge_index, size)


def with_given_edges(found: Any, given: Any) -> Any:
    """The parent's output and weights with the caller's edge list, if that it is.

    The parent returns its own, which may be wider.
    """
    if not is_edge_list(given):
        return found
    out, (_, alpha) = found
    return out, (given, alpha)


def with_weights(
    layer: Any,
    edge_index: Any,
    relation: Any,
    weight: Tensor,  # [E, H]
    loop_weight: Tensor,  # [L, H]
) -> Any:
    """The weights in PyG's form: without stored loops, the new ones at the end."""
    if is_sparse_tensor(edge_index):
        return edge_index.set_value(weight, layout="coo")
    if isinstance(edge_index, Graph):
        edge_index = edge_index.edge_index()
    elif not is_edge_list(edge_index):
        return set_sparse_value(relation, weight), weight
    if not layer.add_self_loops:
        return edge_index, weight
    edge_index, weight = remove_self_loops(edge_index, weight)
    edge_index, _ = add_self_loops(edge_index, num_nodes=loop_weight.size(0))
    return edge_index, torch.cat([weight, loop_weight])
