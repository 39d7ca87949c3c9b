"""Launching what brings edges into another order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_tiga.impls.attention_launch import found
from pyg_tiga.impls.launch import current_stream, device_guard
from pyg_tiga.impls.prepared import Prepared
from pyg_tiga.problem import power_of_2
from pyg_tiga.relation.graph import Graph

# Numbers of a tile: 8 in each thread.
_TILE = 1024
_MOST_HEADS = 32
_WARPS = 4

# Where those of one order stand in another; None: it is the same order.
_PLACES = {
    ("caller", "rows"): lambda graph: graph.rows().perm,
    ("columns", "rows"): lambda graph: graph.places(),
    ("columns", "caller"): lambda graph: graph.reverse().ranks(),
    ("rows", "caller"): lambda graph: graph.ranks(),
}


def places_of(graph: Graph, given: str, wanted: str) -> Tensor | None:
    """Where an array of the edges has those of an order, ``[E]``.

    Args:
        graph: The relation.
        given: Order of the array: ``"caller"``, ``"columns"`` or ``"rows"``.
        wanted: The other order.

    Returns:
        None where both are the same.
    """
    return _PLACES[given, wanted](graph)


class EdgeOrderPass:
    """Numbers of the edges in another order; see :func:`places_of`.

    Args:
        graph: The relation.
        heads: H.
        given: Order of the numbers.
        wanted: Order of the result.
    """

    def __init__(self, graph: Graph, heads: int, given: str, wanted: str) -> None:
        from pyg_tiga.kernels import edge_order

        index = places_of(graph, given, wanted)
        self._shape, self._take = (graph.num_edges, heads), None
        if index is None or 0 in self._shape:
            return
        block_h = min(power_of_2(heads), _MOST_HEADS)
        block_e = _TILE // block_h
        grid = (-(-graph.num_edges // block_e), -(-heads // block_h))
        sizes = {"HEADS": heads, "BLOCK_E": block_e, "BLOCK_H": block_h}
        arguments = {"index_ptr": index, "num_edges": graph.num_edges, **sizes}
        names = ("value_ptr", "out_ptr")
        kernel = edge_order.take_edges
        self._take = Prepared(kernel, grid, arguments, names, index, _WARPS)

    def __call__(self, stream: Any, values: Tensor) -> Tensor:
        """Launch on values ``[E, H]``, contiguous, of the current device."""
        if self._take is None:
            return values
        out = values.new_empty(self._shape)
        self._take(stream, values, out)
        return out


def take_edges(graph: Graph, values: Tensor, given: str, wanted: str) -> Tensor:
    """Values ``[E, H]`` of one order in another. Not differentiable."""
    places_of(graph, given, wanted)  # Safe to read on this stream.
    index = values.get_device()
    with device_guard(index):
        key = ("edge_order", values.size(1), given, wanted)
        return found(graph, key, EdgeOrderPass)(current_stream(index), values)
