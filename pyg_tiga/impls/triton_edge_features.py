"""Launching the products of edge features and vectors of their destinations."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.impls.attention_launch import found, place_arguments, unit_arguments
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.impls.launch import current_stream, device_guard
from pyg_tiga.impls.prepared import Prepared, room_of
from pyg_tiga.impls.scatter_edge_features import shape_of
from pyg_tiga.impls.triton_spmm import missing
from pyg_tiga.impls.triton_sum import merge_sums, new_room
from pyg_tiga.problem import Problem, Schedule, power_of_2
from pyg_tiga.relation.graph import Graph

# Products of a tile: 16 in each thread of a warp.
_TILE = 512
_MOST_WIDTH = 128
_MOST_HEADS = 8
_MOST_EDGES = 32
_CHUNK = 256
_UNITS = 2  # of a program


class FeaturePass:
    """One of the three products (`kernels.edge_features`) on a relation.

    Args:
        graph: The relation.
        name: Which one.
        heads: Heads of the vectors.
        width: Features of an edge.
    """

    def __init__(self, graph: Graph, name: str, heads: int, width: int) -> None:
        from pyg_tiga.kernels import edge_features

        rows = graph.rows()
        items = rows.work_items(_CHUNK)
        block_d = min(power_of_2(width), _MOST_WIDTH)
        block_h = min(power_of_2(heads), _MOST_HEADS, _TILE // block_d)
        block_e = min(_TILE // (block_d * block_h), _MOST_EDGES)
        slices = {"h": -(-heads // block_h), "d": -(-width // block_d)}
        axes = {"feature_dots": "h", "feature_sums": "hd", "feature_spread": "d"}[name]
        names = {
            "feature_dots": ("node_ptr", "feature_ptr", "out_ptr"),
            "feature_sums": ("weight_ptr", "feature_ptr", "out_ptr"),
            "feature_spread": ("weight_ptr", "node_ptr", "out_ptr"),
        }[name]
        arguments = {
            **unit_arguments(rows, items, _CHUNK),
            **place_arguments(rows),
            "HEADS": heads,
            "WIDTH": width,
            "BLOCK_R": _UNITS,
            "BLOCK_E": block_e,
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
        }
        programs = -(-(rows.num_rows + items.num_items) // _UNITS)
        grid = (programs, *[slices[axis] for axis in axes])
        is_sum = name == "feature_sums"
        pieces = items.num_items if is_sum else 0
        self._part = room_of({"part_ptr": pieces * heads * width})
        names += (self._part,) if pieces else ()
        kernel = getattr(edge_features, name)
        self._walk = Prepared(kernel, grid, arguments, names, rows.index)
        self._merge = merge_sums(rows, items, heads * width) if is_sum else None

    def __call__(self, stream: int, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Launch on the two operands and the result, all contiguous."""
        part = new_room(out, self._part)
        self._walk(stream, first, second, out, *part)
        if self._merge is not None:
            self._merge(stream, *part, out)


def _run(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    first: Tensor,
    second: Tensor,
) -> Tensor:
    name, heads = problem.op, problem.heads
    width = problem.features // max(heads, 1)
    shape = shape_of(name, graph.num_dst, graph.num_edges, heads, width)
    out = first.new_empty(shape, dtype=problem.out_dtype)
    if out.numel() == 0:
        return out
    if first.numel() == 0 or second.numel() == 0:
        return out.zero_()
    index = out.get_device()
    with device_guard(index):
        graph.rows().work_items(_CHUNK)  # Safe to read on this stream.
        run = found(graph, ("features", name, heads, width), FeaturePass)
        run(current_stream(index), first.contiguous(), second.contiguous(), out)
    return out


_LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))

FEATURE_DOTS, FEATURE_SUMS, FEATURE_SPREAD = (
    Implementation("triton", "triton", name, _LIMITS, _run, missing)
    for name in ("feature_dots", "feature_sums", "feature_spread")
)
