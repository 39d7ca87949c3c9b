"""Relations as users give them, in the form that the ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch_geometric.typing import SparseTensor

from pyg_tiga.ops.library import Handle
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import handle_of, relation_of, relation_of_adj

Relation = Any  # Graph, [2, E] tensor, EdgeIndex, SparseTensor or torch sparse tensor
Size = tuple[int | None, int | None] | None


def relation_for_ops(
    relation: Relation, num_src: int, size: Size, flow: str
) -> Graph | Handle:
    """The relation for the eager road, or under a tracer for the compiled one."""
    if isinstance(relation, Handle):
        return relation
    if not is_traced(relation):
        return graph_of(relation, num_src, size, flow)
    if is_edge_list(relation):
        return Handle(*handle_of(relation, *sizes_of(num_src, size), flow))
    if isinstance(relation, Graph) and relation.value is None:
        return Handle(*relation.handle())
    return _handle_with_value(relation)


def is_traced(x: Any) -> bool:
    """Whether a call is recorded, or runs on tensors without data, instead of done.

    By `torch.compile`, `torch.export`, `make_fx` or a fake or other dispatch mode.
    """
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or (isinstance(x, Tensor) and x.is_meta)
    )


@torch.compiler.disable
def _handle_with_value(relation: Relation) -> Handle:
    """What defines a matrix or weighted graph; taken apart outside of a compiled graph.

    The values are copied, because Dynamo cannot take views of a sparse tensor.
    """
    graph = relation if isinstance(relation, Graph) else relation_of_adj(relation)
    value = None if graph.value is None else graph.value.clone()
    return Handle(*graph.handle(), value=value)


def graph_of(relation: Relation, num_src: int, size: Size, flow: str) -> Graph:
    """The relation as a graph; through the memo if it is not one.

    Args:
        relation: See :mod:`pyg_tiga.functional`.
        num_src: Rows of the source features.
        size: ``(N_src, N_dst)`` of an edge list, where it says more.
        flow: As in PyG, for an edge list.
    """
    if isinstance(relation, Graph):
        return relation
    if is_edge_list(relation):
        return relation_of(relation, *sizes_of(num_src, size), flow)
    if isinstance(relation, (Tensor, SparseTensor)):
        return relation_of_adj(relation)
    raise TypeError(
        f"'relation' must be a 'pyg_tiga.Graph', an integer tensor [2, num_edges], an "
        f"'EdgeIndex', a 'SparseTensor' or a torch sparse tensor (got "
        f"{type(relation).__name__})"
    )


def is_edge_list(relation: Relation) -> bool:
    """Whether it is a dense tensor (of whatever shape and dtype)."""
    return isinstance(relation, Tensor) and relation.layout == torch.strided


def sizes_of(num_src: int, size: Size) -> tuple[int, int]:
    """(N_src, N_dst); without anything else, there are as many of both."""
    if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
        raise ValueError(f"'size' must be a pair (num_src, num_dst) (got {size!r})")
    first, second = size if size is not None else (None, None)
    num_src = num_src if first is None else first
    return num_src, num_src if second is None else second
