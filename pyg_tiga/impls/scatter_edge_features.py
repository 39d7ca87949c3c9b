"""Products of edge features and vectors of their destinations that run anywhere.

Each is a part of the gradients of the other two (`kernels.edge_features`):

* `feature_dots`: vectors ``[N_dst, H, D]`` and features ``[E, D]`` give ``[E, H]``;
* `feature_sums`: weights ``[E, H]`` and features ``[E, D]`` give ``[N_dst, H, D]``;
* `feature_spread`: weights ``[E, H]`` and vectors ``[N_dst, H, D]`` give ``[E, D]``.

Edges stand in the caller's order.
"""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.impls.base import Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.reference_attention import widened
from pyg_tiga.relation.graph import Graph


def shape_of(
    name: str, num_dst: int, num_edges: int, heads: int, width: int
) -> tuple[int, ...]:
    """Shape of a product."""
    if name == "feature_sums":
        return num_dst, heads, width
    return num_edges, heads if name == "feature_dots" else width


def product(name: str, graph: Graph, first: Tensor, second: Tensor) -> Tensor:
    """A product in plain PyTorch, in the accumulator; differentiable."""
    target = graph.ends()[1].long()
    first, second = (x.to(widened(x.dtype)) for x in (first, second))
    if name == "feature_dots":
        rows = first.index_select(0, target)  # [E, H, D]
        return (rows * second.unsqueeze(1)).sum(-1)
    if name == "feature_spread":
        rows = second.index_select(0, target)
        return (first.unsqueeze(-1) * rows).sum(1)
    shape = shape_of(name, graph.num_dst, 0, first.size(1), second.size(1))
    weighted = first.unsqueeze(-1) * second.unsqueeze(1)  # [E, H, D]
    return weighted.new_zeros(shape).index_add(0, target, weighted)


def _run(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    first: Tensor,
    second: Tensor,
) -> Tensor:
    return product(problem.op, graph, first, second).to(problem.out_dtype)


FEATURE_DOTS, FEATURE_SUMS, FEATURE_SPREAD = (
    Implementation("scatter", "scatter", name, Limits(), _run)
    for name in ("feature_dots", "feature_sums", "feature_spread")
)
