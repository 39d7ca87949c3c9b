"""From the `edge_index` that a layer is called with to its relation, built once.

What is found again: the same storage at the same offset, shape and strides, not edited
since, with the same numbers of nodes, flow and sort order. An entry keeps the storage
alive, so that no new tensor can come to lie at its address and pass for it. Entries are
bounded in number and bytes; the least recently used goes first.

Edits that the version counter of the tensor does not count go unnoticed: those through
`.data`, a shared NumPy array, DLPack or the untyped storage, by another process that
shares the memory, or through another `EdgeIndex` around the same tensor. Call
:func:`forget` after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from pyg_tiga.relation import inputs
from pyg_tiga.relation.cache import CACHE
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.handles import Handle, layout_of
from pyg_tiga.relation.inputs import Flow
from pyg_tiga.relation.origin import latest_origin


def handle_of(
    edge_index: Tensor,  # [2, E]
    num_src: int,
    num_dst: int,
    flow: Flow = "source_to_target",
) -> Handle:
    """The handle of an `edge_index`, without building or looking up anything."""
    tensor, layout = inputs.plain(edge_index)
    return [tensor], layout_of(layout, inputs.dst_end_of(flow)), num_src, num_dst


def relation_of(
    edge_index: Tensor,  # [2, E]
    num_src: int,
    num_dst: int,
    flow: Flow = "source_to_target",
) -> Graph:
    """The relation of an `edge_index`, from the memo if it is known.

    Args:
        edge_index: Edges, a plain tensor or a PyG `EdgeIndex`.
        num_src: Source nodes.
        num_dst: Destination nodes.
        flow: With `"target_to_source"`, row 0 holds the destinations.

    Raises:
        TypeError: `edge_index` is no dense integer tensor.
        ValueError: Its shape is wrong, or an index is out of range.
        RuntimeError: It is not known, and a CUDA graph is being captured.
    """
    global _recent
    if isinstance(edge_index, EdgeIndex):
        return _relation_of_wrapped(edge_index, num_src, num_dst, flow)
    if type(edge_index) is Tensor:
        edge_index = inputs.unwrapped(edge_index)
    graph = known_relation(edge_index, num_src, num_dst, flow)
    if graph is None:
        graph = Graph.from_handle(*handle_of(edge_index, num_src, num_dst, flow))
        if type(edge_index) is Tensor and not edge_index.is_inference():
            request = _request(edge_index, num_src, num_dst, flow)
            _recent = (request, ref(graph))
    return graph


def _relation_of_wrapped(
    edge_index: EdgeIndex, num_src: int, num_dst: int, flow: Flow
) -> Graph:
    handle = handle_of(edge_index, num_src, num_dst, flow)
    graph, origin = Graph.from_handle(*handle), latest_origin(edge_index)
    return graph if origin is None else graph.watching(origin)


def known_relation(
    edge_index: Any, num_src: int, num_dst: int, flow: str
) -> Graph | None:
    """The last answer of :func:`relation_of`, if it is asked the same again.

    Then the edges are a plain tensor that has passed all checks.
    """
    request, answer = _recent
    # A reference to what is gone gives None. Asked first: what is alive keeps the
    # storage of the request, so that its address cannot be another's.
    graph = answer()
    if (
        graph is None
        or type(edge_index) is not Tensor
        or edge_index.layout is not torch.strided
        or edge_index.is_inference()
        or is_functorch_wrapped_tensor(edge_index)
        or request != _request(edge_index, num_src, num_dst, flow)
        or not graph.is_fresh()
    ):
        return None
    return graph


def _request(
    edge_index: Tensor, num_src: int, num_dst: int, flow: str
) -> tuple[Any, ...]:
    return (
        edge_index._version,
        edge_index.untyped_storage()._cdata,
        edge_index.data_ptr(),
        edge_index.dtype,
        edge_index.shape,
        edge_index.stride(),
        num_src,
        num_dst,
        flow,
    )


def _nothing() -> None:
    """A reference to what is gone."""


_NO_ANSWER = ((), _nothing)
# The last answer, for the next layer of a model. It keeps nothing alive, and holds no
# reference to the tensor, not even a weak one: PyTorch does not swap tensors that have
# any (`torch.utils.swap_tensors`).
_recent: tuple[tuple[Any, ...], Callable[[], Graph | None]]
_recent = _NO_ANSWER


def relation_of_adj(adj_t: Tensor | SparseTensor) -> Graph:
    """The relation of a sparse matrix, from the memo if its structure is known.

    Args:
        adj_t: A sparse matrix whose rows are destinations; see
            :meth:`Graph.from_adj`.

    Raises:
        TypeError: It is something else.
        ValueError: It does not have two dimensions, or an index is out of range.
    """
    parts = inputs.take_adjacency(adj_t)
    layout = layout_of(parts.layout, parts.dst_end)
    num_src, num_dst = parts.sizes[1 - parts.dst_end], parts.sizes[parts.dst_end]
    known = Graph.from_handle(parts.tensors, layout, num_src, num_dst)
    return known if parts.value is None else known.with_value(parts.value)


def forget(edge_index: Tensor | SparseTensor | Graph) -> None:
    """Drop everything built from the storage of an `edge_index`.

    Needed after an edit that the tensor's version counter does not count; see
    :mod:`pyg_tiga.relation.memo`. A :class:`Graph` of this storage reads its edges
    anew, too. What a captured CUDA graph reads stays alive.
    """
    if not isinstance(edge_index, (Graph, Tensor, SparseTensor)):
        raise TypeError(
            f"'edge_index' must be a tensor, a 'SparseTensor' or a 'pyg_tiga.Graph' "
            f"(got {type(edge_index).__name__})"
        )
    global _recent
    _recent = _NO_ANSWER
    if isinstance(edge_index, Graph):
        CACHE.forget(edge_index.handle()[0])
    elif isinstance(edge_index, SparseTensor) or edge_index.layout != torch.strided:
        CACHE.forget(inputs.take_adjacency(edge_index).tensors)
    else:
        CACHE.forget([inputs.plain(edge_index)[0]])


def clear() -> None:
    """Drop all entries of the memo."""
    global _recent
    _recent = _NO_ANSWER
    CACHE.clear()
