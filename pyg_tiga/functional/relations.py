"""Relations as users give them, in the form that the ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch_geometric.typing import SparseTensor

from pyg_tiga.ops.library import Handle
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.inputs import size_of
from pyg_tiga.relation.memo import handle_of, relation_of, relation_of_adj

Relation = Any  # Graph, [2, E] tensor, EdgeIndex, SparseTensor or torch sparse tensor
Size = tuple[int | None, int | None] | None

_SOURCE_TO_TARGET = "source_to_target"


def relation_for_ops(
    relation: Relation,
    num_src: int,
    size: Size,
    flow: str,
    num_dst: int | None = None,
) -> Graph | Handle:
    """The relation for the eager road, or under a tracer for the compiled one.

    Args:
        relation: See :mod:`pyg_tiga.functional`.
        num_src: Rows of the source features.
        size: As the caller of a public function gave it.
        flow: Likewise.
        num_dst: Rows of the destination features, if there are any.

    Raises:
        ValueError: Options that do not fit, or that are not for this relation.
    """
    if isinstance(relation, Handle):
        return relation
    return _checked(relation, num_src, size, flow, num_dst, is_traced(relation))


def relation_for_rows(
    relation: Relation,
    size: Size,
    flow: str,
    src: tuple[str, int],
    dst: tuple[str, int],
) -> Graph | Handle:
    """:func:`relation_for_ops` between operands, each a name and its number of rows."""
    try:
        return relation_for_ops(relation, src[1], size, flow, dst[1])
    except ValueError as error:
        raise of_rows(error, size, src, dst) from None


def of_rows(
    error: ValueError, size: Size, src: tuple[str, int], dst: tuple[str, int]
) -> ValueError:
    """An error about edges, by the operand whose rows are too few for them.

    Where a size is given, it is that which says how many nodes there are.
    """
    fact = str(error).partition(", but")[0]
    for end, (name, count) in (("source", src), ("destination", dst)):
        if size is None and f"'edge_index' holds the {end} index" in fact:
            fact = fact.replace("edge_index", "relation")
            return ValueError(
                f"'{name}' must have a row for each {end} node (got {count} rows): "
                f"{fact}"
            )
    return error


def graph_for_plan(relation: Relation, num_src: int, size: Size, flow: str) -> Graph:
    """The graph of :func:`relation_for_ops`, also under a tracer."""
    return _checked(relation, num_src, size, flow, None, False)


def _checked(
    relation: Relation,
    num_src: int,
    size: Size,
    flow: str,
    num_dst: int | None,
    traced: bool,
) -> Any:
    if is_edge_list(relation):
        sizes = sizes_of(num_src, size, num_dst)
        if traced:
            return Handle(*handle_of(relation, *sizes, flow))
        return _relation_of(relation, *sizes, flow)
    _check_flow(relation, flow)
    if not traced:
        related = graph_of(relation, num_src, None, flow)
    elif isinstance(relation, Graph) and relation.value is None:
        related = Handle(*relation.handle())
    else:
        related = _handle_with_value(relation)
    if size is not None:
        _check_size(relation, related, size)
    return related


def _relation_of(relation: Tensor, num_src: int, num_dst: int, flow: Any) -> Graph:
    """The graph of an edge list, which an error calls what our functions call it."""
    try:
        return relation_of(relation, num_src, num_dst, flow)
    except (TypeError, ValueError) as error:
        message = str(error)
        if not message.startswith("'edge_index' must"):
            raise
        message = message.replace("edge_index", "relation")
        raise type(error)(message) from None


def _check_flow(relation: Relation, flow: Any) -> None:
    """Hold ``flow`` to what it may be for relations that know their destinations."""
    if flow == _SOURCE_TO_TARGET:
        return
    if flow != "target_to_source":
        raise ValueError(
            f"'flow' must be 'source_to_target' or 'target_to_source' (got {flow!r})"
        )
    hint = "its 'reverse()'" if isinstance(relation, Graph) else "the transposed matrix"
    raise ValueError(
        f"'flow' is for a plain 'edge_index': it must be 'source_to_target' with a "
        f"{_kind(relation)}, which knows its destinations (got '{flow}'). Pass {hint} "
        f"instead"
    )


def _check_size(relation: Relation, related: Any, size: Any) -> None:
    """Hold ``size`` to that of a relation which knows its own."""
    own = (related.num_src, related.num_dst)
    if sizes_of(own[0], size, own[1]) != own:
        raise ValueError(
            f"'size' is for a plain 'edge_index': with a {_kind(relation)} it must be "
            f"its own, (num_src, num_dst) = {own} (got {tuple(size)})"
        )


def _kind(relation: Relation) -> str:
    """What a relation that is no edge list is called."""
    if isinstance(relation, Tensor):
        return "sparse tensor"
    return f"'{type(relation).__name__}'"


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
        return relation.current()
    if is_edge_list(relation):
        return _relation_of(relation, *sizes_of(num_src, size), flow)
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


def sizes_of(num_src: int, size: Size, num_dst: int | None = None) -> tuple[int, int]:
    """(N_src, N_dst); without anything else, there are as many of both."""
    if size is None and num_dst is not None:
        return num_src, num_dst
    if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
        raise ValueError(f"'size' must be a pair (num_src, num_dst) (got {size!r})")
    first, second = size if size is not None else (None, None)
    num_src = num_src if first is None else _count("size[0]", first)
    return num_src, num_src if second is None else _count("size[1]", second)


def _count(name: str, value: Any) -> int:
    """A number of nodes, which the memo could take for another that equals it."""
    is_number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if is_number and (torch.compiler.is_compiling() or isinstance(value, torch.SymInt)):
        # As it is: a symbolic one would become a constant, or have a guard on it.
        return value
    return size_of(value, name)
