"""What the ops do: describe the call as a `Problem`, ask the planner, run the plan."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pyg_tiga import _features, reference
from pyg_tiga.planner import Plan, plan
from pyg_tiga.problem import Problem
from pyg_tiga.relation.csr import Grouping
from pyg_tiga.relation.graph import Graph


class _Last(threading.local):
    plan: Plan | None = None


_last = _Last()


def last_plan() -> Plan | None:
    """The plan of the last forward operation that ran in this thread."""
    return _last.plan


def spmm_problem(
    graph: Graph, x: Tensor, weight: Tensor | None, normalize: str
) -> Problem:
    """The problem of :func:`spmm`."""
    dtype = x.dtype if weight is None else torch.result_type(x, weight)
    return _problem(
        "spmm", graph, x, dtype, weighted=weight is not None, normalize=normalize
    )


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, normalize: str) -> Tensor:
    """Sum of weighted source features per destination, ``[N_dst, F]``."""
    chosen = _last.plan = plan(spmm_problem(graph, x, weight, normalize))
    return chosen.run(graph, x, weight)


def extremum_problem(
    graph: Graph, x: Tensor, reduce: str, ties: str, weighted: bool = False
) -> Problem:
    """The problem of :func:`spmm_extremum`."""
    return _problem(
        "spmm_extremum", graph, x, x.dtype, reduce=reduce, ties=ties, weighted=weighted
    )


def spmm_extremum(
    graph: Graph, x: Tensor, reduce: str, ties: str
) -> tuple[Tensor, Tensor]:
    """Maximum or minimum per destination, and what its backward needs (or size 0)."""
    chosen = _last.plan = plan(extremum_problem(graph, x, reduce, ties))
    return chosen.run(graph, x)


def weighted_extremum(
    graph: Graph, x: Tensor, weight: Tensor, reduce: str, ties: str
) -> Tensor:
    """Extremum of weighted messages; differentiable, since only the reference does it.

    Raises:
        UnsupportedError: When an implementation is pinned that cannot weight messages.
    """
    _last.plan = plan(extremum_problem(graph, x, reduce, ties, weighted=True))
    split = "split" if ties == "none" else ties
    return reference.spmm_extremum(graph, x, reduce, weight, split)[0]


def spmm_extremum_backward(
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]; not read, and may be empty, for unweighted "first"
    out: Tensor,  # [N_dst, F]; likewise
    aux: Tensor,  # [N_dst, F]
    ties: str,
) -> Tensor:
    """Gradient of the extremum with respect to x, ``[N_src, F]``."""
    problem = _extremum_problem("spmm_extremum_backward", graph, grad, x, ties)
    return plan(problem).run(graph, grad, x, out, aux)


def spmm_extremum_select(
    graph: Graph,
    value: Tensor,  # [N_src, F]
    x: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: str,
) -> Tensor:
    """The transpose of the backward: each destination's share of its winners."""
    problem = _extremum_problem("spmm_extremum_select", graph, value, x, ties)
    return plan(problem).run(graph, value, x, out, aux)


def sddmm(graph: Graph, a: Tensor, b: Tensor, normalize: str) -> Tensor:
    """Dot products of the two ends of every edge, ``[E]`` in the caller's order.

    `normalize` scales as in :func:`spmm`: each is a part of the other's gradient.
    """
    if normalize == "dst":
        a = _scaled(a, graph.rows())
    elif normalize == "src":
        b = _scaled(b, graph.columns())
    problem = _problem("sddmm", graph, b, torch.result_type(a, b))
    return plan(problem).run(graph, a, b)


def _scaled(x: Tensor, rows: Grouping) -> Tensor:
    """Rows of x over their degrees, rounded to the dtype of x once."""
    double = x.dtype == torch.float64
    inverse = rows.degree_inv(torch.float64 if double else torch.float32)
    return (x * inverse.unsqueeze(1)).to(x.dtype)


def _extremum_problem(
    op: str,
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    ties: str,
) -> Problem:
    # The gradient of x is gathered by source: the relation's columns are its rows.
    turned = graph.reverse() if op == "spmm_extremum_backward" else graph
    return _problem(op, turned, grad, x.dtype, ties=ties, reduce="max")


def _problem(
    op: str,
    graph: Graph,
    x: Tensor,  # [N, F]
    out_dtype: torch.dtype,
    *,
    reduce: str = "sum",
    normalize: str = "none",
    weighted: bool = False,
    ties: str = "none",
) -> Problem:
    device = x.device
    cuda = device.type == "cuda"
    return Problem(
        op=op,
        num_dst=graph.num_dst,
        num_src=graph.num_src,
        num_edges=graph.num_edges,
        features=x.size(1),
        dtype=x.dtype,
        out_dtype=out_dtype,
        index_dtype=graph.index_dtype,
        device=device.type,
        capability=_features.cuda_capability(device.index) if cuda else (0, 0),
        relation=graph.kind,
        reduce=reduce,
        normalize=normalize,
        weighted=weighted,
        ties=ties,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
