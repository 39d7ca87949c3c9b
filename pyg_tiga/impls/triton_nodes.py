"""Scores of nodes for additive attention, and the gradients of their vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.attention_launch import (
    NODE_ELEMENTS,
    SUM_WARPS,
    found,
    outside,
)
from pyg_tiga.impls.launch import current_stream, device_guard
from pyg_tiga.impls.prepared import Prepared, Room
from pyg_tiga.problem import power_of_2
from pyg_tiga.relation.graph import Graph

# Programs that share all nodes where each leaves a partial sum, and numbers that one
# of them loads at once.
_SUM_PROGRAMS = 528
_SUM_ELEMENTS = 4096
_SUM_COLUMNS = 256  # of a node in one program
_PARTIALS, _WIDTH = 512, 16  # of a tile that adds them up


class ScoresPass:
    """<x, first> and, with `second`, <x, second> per node and head.

    Args:
        graph: A relation of the nodes.
        shape: N, H and C.
        dtypes: Of x and of the vectors.
        second: Whether there is a second vector.
        rooms: Buffers in which the scores stand.
    """

    def __init__(
        self,
        graph: Graph,
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, ...],
        second: bool,
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.node_scores import node_scores

        num_nodes, heads, channels = shape
        blocks = _blocks(heads, channels, NODE_ELEMENTS, _SUM_ELEMENTS)
        arguments = {**_dimensions(shape), "SECOND": second, **blocks}
        grid = (
            -(-num_nodes // blocks["BLOCK_N"]),
            -(-heads // blocks["BLOCK_H"]),
        )
        vectors = ("first_att_ptr", *(("second_att_ptr",) if second else ()))
        scores = ("first_ptr", *(("second_ptr",) if second else ()))
        names = ("x_ptr", *vectors, *outside(scores, rooms), *rooms)
        absent = graph.rows().index
        self.launch = Prepared(node_scores, grid, arguments, names, absent, 4)


class ScoresBackwardPass:
    """Partial sums over the nodes of grad_n x_n, for one or two gradients.

    Args:
        graph: A relation of the nodes.
        shape: N, H and C.
        dtype: Of x.
        second: Whether there is a second gradient.
        programs: Partial sums, and
        stride: the distance between them.
        rooms: Buffers in which gradients and sums stand.
    """

    def __init__(
        self,
        graph: Graph,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        second: bool,
        programs: int,
        stride: int,
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.node_scores import node_scores_backward

        _, heads, channels = shape
        blocks = _blocks(heads, channels, _SUM_COLUMNS, _SUM_ELEMENTS)
        arguments = {**_dimensions(shape), "stride_p": stride}
        arguments |= {"SECOND": second, **blocks}
        grid = (
            programs,
            -(-heads // blocks["BLOCK_H"]),
            -(-channels // blocks["BLOCK_C"]),
        )
        grads = ("grad_first_ptr", *(("grad_second_ptr",) if second else ()))
        names = ("x_ptr", *outside((*grads, "sums_ptr"), rooms), *rooms)
        absent = graph.rows().index
        kernel = node_scores_backward
        self.launch = Prepared(kernel, grid, arguments, names, absent, SUM_WARPS)


class PartialsPass:
    """The sum of partial sums, in fixed order.

    Args:
        graph: A relation of the nodes.
        programs: How many there are of the first numbers, and of the others.
        split: How many numbers are first.
        width: Numbers in each.
        rooms: The buffer in which they stand.
    """

    def __init__(
        self,
        graph: Graph,
        programs: tuple[int, int],
        split: int,
        width: int,
        rooms: tuple[Room, ...] = (),
    ) -> None:
        from pyg_tiga.kernels.node_scores import sum_partials

        block_w = min(power_of_2(width), _WIDTH)
        blocks = {"BLOCK_P": _PARTIALS, "BLOCK_W": block_w}
        counts = {"programs": programs[0], "others": programs[1], "split": split}
        arguments = {**counts, "width": width, **blocks}
        grid = (-(-width // block_w),)
        names = (*outside(("sums_ptr", "out_ptr"), rooms), *rooms)
        absent = graph.rows().index
        self.launch = Prepared(sum_partials, grid, arguments, names, absent, SUM_WARPS)


def sum_programs(shape: tuple[int, int, int]) -> int:
    """Programs of a sum over all nodes."""
    num_nodes, heads, channels = shape
    blocks = _blocks(heads, channels, _SUM_COLUMNS, _SUM_ELEMENTS)
    return min(_SUM_PROGRAMS, max(1, -(-num_nodes // blocks["BLOCK_N"])))


def _blocks(heads: int, channels: int, most: int, elements: int) -> dict[str, int]:
    """Nodes, heads and channels of a tile, with at most `most` numbers of a node."""
    block_c = min(power_of_2(channels), 128)
    block_h = min(power_of_2(heads), max(1, most // block_c))
    block_n = max(1, elements // (block_c * block_h))
    return {"BLOCK_N": block_n, "BLOCK_H": block_h, "BLOCK_C": block_c}


def _dimensions(shape: tuple[int, int, int]) -> dict[str, int]:
    num_nodes, heads, channels = shape
    return {
        "num_nodes": num_nodes,
        "HEADS": heads,
        "CHANNELS": channels,
        "stride_n": heads * channels,
        "stride_h": channels,
    }


def node_scores(
    graph: Graph,
    x: Tensor,  # [N, H, C]
    first: Tensor,  # [H, C]
    second: Tensor | None,  # [H, C]
) -> tuple[Tensor, Tensor | None]:
    """<x, first> and <x, second> per node and head, ``[N, H]`` float32 each."""
    x, first = x.contiguous(), first.contiguous()
    vectors = (first,) if second is None else (first, second.contiguous())
    scores = tuple(x.new_empty(x.shape[:2], dtype=torch.float32) for _ in vectors)
    if scores[0].numel():
        index, dtypes = x.get_device(), tuple(v.dtype for v in (x, *vectors))
        key = ("scores", tuple(x.shape), dtypes, second is not None)
        with device_guard(index):
            run = found(graph, key, ScoresPass)
            run.launch(current_stream(index), x, *vectors, *scores)
    return scores[0], None if second is None else scores[1]


def node_scores_backward(
    graph: Graph,
    x: Tensor,  # [N, H, C]
    grad_first: Tensor,  # [N, H]
    grad_second: Tensor | None,  # [N, H]
) -> Tensor:
    """Gradients of the two vectors, or of the first, ``[1 or 2, H, C]`` float32."""
    x, shape = x.contiguous(), tuple(x.shape)
    grads = (grad_first,) if grad_second is None else (grad_first, grad_second)
    programs = sum_programs(shape)
    part = x.new_empty(programs, len(grads), *shape[1:], dtype=torch.float32)
    out = torch.empty_like(part[0])
    if part.numel():
        index, stride = x.get_device(), part.stride(0)
        key = (shape, x.dtype, len(grads) > 1, programs, stride)
        with device_guard(index):
            run = found(graph, ("scores_backward", *key), ScoresBackwardPass)
            run.launch(current_stream(index), x, *grads, part)
            counts = ((programs, programs), stride, stride)
            run = found(graph, ("partials", *counts), PartialsPass)
            run.launch(current_stream(index), part, out)
    return out
