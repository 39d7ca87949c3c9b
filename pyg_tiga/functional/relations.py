"""Relations as users give them, in the form that the ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.ops.library import Handle
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import handle_of, relation_of, relation_of_adj

Relation = Any  # Graph, [2, E] tensor, EdgeIndex, SparseTensor or torch sparse tensor
Size = tuple[int | None, int | None] | None


def relation_for_ops(
    relation: Relation, num_src: int, size: Size, flow: str
) -> Graph | Handle:
    """The relation for the eager road, or while compiling for the compiled one."""
    if not torch.compiler.is_compiling():
        return graph_of(relation, num_src, size, flow)
    if is_edge_list(relation):
        return Handle(*handle_of(relation, *sizes_of(num_src, size), flow))
    graph = graph_of(relation, num_src, size, flow)
    return Handle(*graph.handle(), value=graph.value)


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
    return relation_of_adj(relation)


def is_edge_list(relation: Relation) -> bool:
    """Whether it is a dense tensor (of whatever shape and dtype)."""
    return isinstance(relation, Tensor) and relation.layout == torch.strided


def sizes_of(num_src: int, size: Size) -> tuple[int, int]:
    """(N_src, N_dst); without anything else, there are as many of both."""
    first, second = size if size is not None else (None, None)
    num_src = num_src if first is None else first
    return num_src, num_src if second is None else second
