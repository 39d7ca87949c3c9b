"""Launching the weights of edges, from scores that a forward wrote."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.impls.attention_launch import found, place_arguments, unit_arguments
from pyg_tiga.impls.attention_types import Options, State
from pyg_tiga.impls.prepared import Prepared
from pyg_tiga.problem import power_of_2
from pyg_tiga.relation.graph import Graph

_TILE = 128  # numbers of a tile
_MOST_HEADS = 32
_CHUNK = 1024
_UNITS = 4  # of a program


class WeightsPass:
    """Weights ``[E, H]`` in the caller's order.

    Args:
        graph: The relation.
        heads: Heads.
        dropout: Probability of dropping a weight.
        factor: What kept weights are multiplied by.
    """

    def __init__(self, graph: Graph, heads: int, dropout: float, factor: float) -> None:
        from pyg_tiga.kernels.edge_weights import edge_weights

        rows = graph.rows()
        items = rows.work_items(_CHUNK)
        block_h = min(power_of_2(heads), _MOST_HEADS)
        arguments = {
            **unit_arguments(rows, items, _CHUNK),
            **place_arguments(rows),
            "drop_p": float(dropout),
            "drop_factor": float(factor),
            "HEADS": heads,
            "DROPOUT": dropout > 0,
            "BLOCK_R": _UNITS,
            "BLOCK_E": _TILE // block_h,
            "BLOCK_H": block_h,
        }
        names = ["score_ptr", "m_ptr", "l_ptr", "out_ptr"]
        names += ["seed_ptr"] if dropout > 0 else []
        programs = -(-(rows.num_rows + items.num_items) // _UNITS)
        grid = (programs, -(-heads // block_h))
        self.launch = Prepared(edge_weights, grid, arguments, tuple(names), rows.index)


def edge_weights(
    graph: Graph,
    scores: Tensor,  # [E, H]
    state: State,
    seed: Tensor | None,
    options: Options,
    stream: int,
) -> Tensor:
    """Weights from scores in the order of the rows, on the current device."""
    out = scores.new_empty(scores.shape)
    if out.numel() == 0:
        return out
    graph.rows().work_items(_CHUNK)  # Safe to read on this stream.
    numbers = (scores.size(1), options.dropout, options.factor)
    run = found(graph, ("edge_weights", *numbers), WeightsPass)
    seeds = () if options.dropout == 0 else (seed,)
    run.launch(stream, scores, state.m, state.total, out, *seeds)
    return out
