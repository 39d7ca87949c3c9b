"""Launching the weights of edges, from scores that a forward wrote."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.impls.attention_launch import found
from pyg_tiga.impls.attention_types import Options, State
from pyg_tiga.impls.prepared import Prepared
from pyg_tiga.problem import power_of_2
from pyg_tiga.relation.graph import Graph

# Numbers of a tile: 8 in each thread.
_TILE = 1024
_MOST_HEADS = 32
_WARPS = 4


class WeightsPass:
    """Weights ``[E, H]`` in the caller's order, or in that of the rows.

    Args:
        graph: The relation.
        heads: Heads.
        dropout: Probability of dropping a weight.
        factor: What kept weights are multiplied by.
        by_row: Whether they have the order of the rows.
    """

    def __init__(
        self, graph: Graph, heads: int, dropout: float, factor: float, by_row: bool
    ) -> None:
        from pyg_tiga.kernels.edge_weights import edge_weights

        rows, (targets, ranks) = graph.rows(), _maps(graph, by_row)
        block_h = min(power_of_2(heads), _MOST_HEADS)
        block_e = _TILE // block_h
        arguments = {
            **({} if ranks is None else {"rank_ptr": ranks}),
            "target_ptr": targets,
            "ptr_ptr": rows.ptr,
            "num_rows": rows.num_rows,
            "num_edges": rows.num_edges,
            "drop_p": float(dropout),
            "drop_factor": float(factor),
            "HEADS": heads,
            "HAS_RANK": ranks is not None,
            "BY_ROW": by_row,
            "DROPOUT": dropout > 0,
            "BLOCK_E": block_e,
            "BLOCK_H": block_h,
        }
        names = ["score_ptr", "m_ptr", "l_ptr", "out_ptr"]
        names += ["seed_ptr"] if dropout > 0 else []
        grid = (-(-rows.num_edges // block_e), -(-heads // block_h))
        made = (edge_weights, grid, arguments, tuple(names), rows.index, _WARPS)
        self.launch = Prepared(*made)


def _maps(graph: Graph, by_row: bool) -> tuple[Tensor, Tensor | None]:
    """Destinations of edges in either order, and their places in the other one."""
    if by_row:
        return graph.row_ids(), graph.rows().perm
    return graph.targets(), graph.ranks()


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
    _maps(graph, options.by_row)  # Safe to read on this stream from here on.
    numbers = (scores.size(1), options.dropout, options.factor, options.by_row)
    run = found(graph, ("edge_weights", *numbers), WeightsPass)
    seeds = () if options.dropout == 0 else (seed,)
    run.launch(stream, scores, state.m, state.total, out, *seeds)
    return out
