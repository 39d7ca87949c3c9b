"""Launching the products of edge features and vectors of their destinations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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

_WARP = 32
_VECTOR = 16  # bytes that a thread loads at once
_MOST_WIDTH = 128
# Where edges are taken as they come: loads of a tile by each thread, and most edges.
# With more loads, edges are more than lanes: their numbers go through shared memory.
_LOADS = 2
_MOST_EDGES = 128
# Heads whose loads are under way together: more take registers that other warps need.
_MOST_UNROLLED = 4
# Of a walk over rows: numbers and edges of a tile, units of a program.
_TILE = 1024
_ROW_EDGES = 16
_MOST_ROW = 512
_CHUNK = 256
_UNITS = 4

_NAMES = {
    "feature_dots": ("node_ptr", "feature_ptr", "out_ptr"),
    "feature_spread": ("weight_ptr", "node_ptr", "out_ptr"),
}
_MORE_NAMES = ("more_weight_ptr", "more_node_ptr")


class Product(NamedTuple):
    """What a launcher depends on besides a relation.

    Args:
        name: Which product.
        heads: Heads of the vectors.
        width: Features of an edge.
        itemsize: Bytes of a number of the second operand.
        pair: Whether `feature_spread` adds a second product to the first.
        by_row: Whether numbers of edges stand in the order of the rows.
    """

    name: str
    heads: int
    width: int
    itemsize: int
    pair: bool
    by_row: bool


class EdgesPass:
    """A product with a row for each edge (`kernels.edge_features`), on a relation.

    Args:
        graph: The relation.
        product: `feature_dots` or `feature_spread`.
    """

    def __init__(self, graph: Graph, product: Product) -> None:
        from pyg_tiga.kernels import edge_features

        name, heads, width, itemsize, pair, by_row = product
        is_spread = name == "feature_spread"
        block_d = min(power_of_2(width), _MOST_WIDTH)
        tile = _WARP * _LOADS * _VECTOR // itemsize
        block_e = min(max(1, tile // block_d), _MOST_EDGES)
        arguments = {
            **place_arguments(graph.rows().perm if by_row else None),
            "target_ptr": _targets(graph, by_row),
            "num_dst": graph.num_dst,
            "num_edges": graph.num_edges,
            **({"PAIR": pair} if is_spread else {}),
            "HEADS": heads,
            "WIDTH": width,
            "UNROLL": _unrolled(heads),
            "BLOCK_E": block_e,
            "BLOCK_D": block_d,
        }
        slices = -(-width // block_d) if is_spread else 1
        grid = (-(-graph.num_edges // block_e), slices)
        names = _NAMES[name] + (_MORE_NAMES if pair else ())
        kernel = getattr(edge_features, name)
        self._launch = Prepared(kernel, grid, arguments, names, graph.rows().index)

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Launch on two operands, the result and what a pair adds, all contiguous."""
        self._launch(stream, *tensors)


class SumsPass:
    """Sums over the edges of each row (`kernels.edge_features`), on a relation.

    Args:
        graph: The relation.
        product: `feature_sums`.
    """

    def __init__(self, graph: Graph, product: Product) -> None:
        from pyg_tiga.kernels.edge_features import feature_sums

        heads, width = product.heads, product.width
        rows = graph.rows()
        items = rows.work_items(_CHUNK)
        blocks = _sum_blocks(heads, width, product.itemsize)
        arguments = {
            **unit_arguments(rows, items, _CHUNK),
            **place_arguments(rows.perm),
            "BY_ROW": product.by_row,
            "HEADS": heads,
            "WIDTH": width,
            "BLOCK_R": _UNITS,
            **blocks,
        }
        grid = (
            -(-(rows.num_rows + items.num_items) // _UNITS),
            -(-heads // blocks["BLOCK_H"]),
            -(-width // blocks["BLOCK_D"]),
        )
        pieces = items.num_items * heads * width
        self._part = room_of({"part_ptr": pieces})
        names: tuple[Any, ...] = ("weight_ptr", "feature_ptr", "out_ptr")
        names += (self._part,) if pieces else ()
        self._walk = Prepared(feature_sums, grid, arguments, names, rows.index)
        self._merge = merge_sums(rows, items, heads * width)

    def __call__(self, stream: int, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Launch on the two operands and the result, all contiguous."""
        part = new_room(out, self._part)
        self._walk(stream, first, second, out, *part)
        if self._merge is not None:
            self._merge(stream, *part, out)


def _targets(graph: Graph, by_row: bool) -> Tensor:
    """Destinations in the order in which edges are taken."""
    return graph.row_ids() if by_row else graph.targets()


def _unrolled(heads: int) -> int:
    """How many heads a step of a loop over all of them takes."""
    return max(n for n in range(1, _MOST_UNROLLED + 1) if heads % n == 0)


def _sum_blocks(heads: int, width: int, itemsize: int) -> dict[str, int]:
    """A tile of U times S edges: S are what one load of each thread covers."""
    block_d = min(power_of_2(width), _MOST_WIDTH)
    block_h = min(power_of_2(heads), max(1, _MOST_ROW // block_d))
    row = block_h * block_d
    # A tile has a number for each thread at least: none may be there twice.
    lanes = min(_WARP, max(1, _WARP * _VECTOR // (row * itemsize)))
    edges = max(lanes, min(_ROW_EDGES, _TILE // row))
    return {
        "BLOCK_U": edges // lanes,
        "BLOCK_S": lanes,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }


def _prepare(graph: Graph, name: str, by_row: bool) -> type[EdgesPass] | type[SumsPass]:
    """The pass of a product; what it reads is safe on the current stream from here."""
    if name == "feature_sums":
        graph.rows().work_items(_CHUNK)
        return SumsPass
    _targets(graph, by_row)
    return EdgesPass


def multiply(
    graph: Graph,
    name: str,
    dtype: torch.dtype,
    first: Tensor,
    second: Tensor,
    *more: Tensor,
    by_row: bool = False,
) -> Tensor:
    """A product; of `feature_spread` with `more`, that of two others added in.

    Args:
        graph: The relation.
        name: Which one.
        dtype: That of the result.
        first: Its first operand.
        second: Its second.
        *more: Two others, of the same dtypes.
        by_row: Numbers of edges ``[E, H]`` stand in the order of the rows; features
            have the caller's.
    """
    heads = second.size(1) if name == "feature_spread" else first.size(1)
    width = second.size(-1)
    shape = shape_of(name, graph.num_dst, graph.num_edges, heads, width)
    out = first.new_empty(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    if first.numel() == 0 or second.numel() == 0:
        return out.zero_()
    index = out.get_device()
    with device_guard(index):
        make = _prepare(graph, name, by_row)
        itemsize = second.dtype.itemsize
        product = Product(name, heads, width, itemsize, bool(more), by_row)
        run = found(graph, ("features", product), make)
        operands = [x.contiguous() for x in (first, second, *more)]
        run(current_stream(index), *operands[:2], out, *operands[2:])
    return out


def _run(
    problem: Problem, schedule: Schedule | None, graph: Graph, *operands: Tensor
) -> Tensor:
    return multiply(graph, problem.op, problem.out_dtype, *operands)


_LIMITS = Limits(devices=("cuda", "cpu"), dtypes=FLOATS, min_capability=(8, 0))

FEATURE_DOTS, FEATURE_SUMS, FEATURE_SPREAD = (
    Implementation("triton", "triton", name, _LIMITS, _run, missing)
    for name in ("feature_dots", "feature_sums", "feature_spread")
)
