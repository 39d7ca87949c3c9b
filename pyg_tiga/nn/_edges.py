"""Edges that a layer was given, as functions take them and as PyG's layers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.nn._inputs import (
    INT_DTYPES,
    SOURCE_TO_TARGET,
    check_own_size,
    is_edge_list,
    is_sparse_tensor,
    no_integers,
    size_of,
)
from pyg_tiga.relation.graph import Graph

__all__: list[str] = []


def for_functional(edge_index: Any) -> Any:
    """The edges as PyG's SAGE and GIN read them.

    They ignore the values of a ``SparseTensor``, and only of these, and merge entries
    of a COO tensor that occur twice. Of a graph it is what the call works on.
    """
    if isinstance(edge_index, Graph):
        return edge_index.current()
    if is_sparse_tensor(edge_index):
        return edge_index.set_value(None, layout=None)
    if isinstance(edge_index, Tensor) and edge_index.layout is torch.sparse_coo:
        return edge_index.coalesce()
    return edge_index


def flow_for(edges: Any, flow: str) -> str:
    """What functions take as the flow of edges that a layer has checked.

    A graph knows its direction, also where the layer made it of an edge list.
    """
    return SOURCE_TO_TARGET if isinstance(edges, Graph) else flow


def for_parent(edge_index: Any, size: Any) -> tuple[Any, Any]:
    """The edges and their size as PyG takes them, from what we take besides.

    Indices become int64: PyTorch's gathers refuse narrow ones, and its scatters on the
    CPU have accepted int32 and then read gradients from wrong places.

    Raises:
        ValueError: A size that is not that of the graph, or an edge list that does not
            hold integers.
    """
    if isinstance(edge_index, Graph):
        graph = edge_index
        own = (graph.num_src, graph.num_dst)
        check_own_size(own, size_of(size))
        if graph.value is None:
            return _wide(graph.edge_index()), own
        rows, value = graph.rows(), graph.value
        value = value if rows.perm is None else value.index_select(0, rows.perm)
        return _compressed(torch.sparse_csr, rows.ptr, rows.index, value, own[::-1])
    if is_edge_list(edge_index):
        if edge_index.dtype not in INT_DTYPES:
            raise no_integers(edge_index)
        return _wide(edge_index), size
    if isinstance(edge_index, Tensor):
        return _with_wide_indices(edge_index), size
    return edge_index, size


def _wide(index: Tensor) -> Tensor:
    return index if index.dtype is torch.int64 else index.to(torch.int64)


def _with_wide_indices(matrix: Tensor) -> Tensor:
    """A sparse matrix with indices of int64; those of COO are always."""
    if matrix.layout is torch.sparse_csr:
        ptr, index = matrix.crow_indices(), matrix.col_indices()
    elif matrix.layout is torch.sparse_csc:
        ptr, index = matrix.ccol_indices(), matrix.row_indices()
    else:
        return matrix
    if index.dtype is torch.int64:
        return matrix
    return _compressed(matrix.layout, ptr, index, matrix.values(), matrix.shape)[0]


def _compressed(
    layout: torch.layout,
    ptr: Tensor,
    index: Tensor,
    value: Tensor,
    shape: Sequence[int],
) -> tuple[Tensor, None]:
    """A sparse matrix, which says its size itself."""
    matrix = torch.sparse_compressed_tensor(
        _wide(ptr),
        _wide(index),
        value,
        tuple(shape),
        layout=layout,
        device=value.device,
    )
    return matrix, None
