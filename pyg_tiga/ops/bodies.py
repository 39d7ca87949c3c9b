"""What the ops do: describe the call as a `Problem`, ask the planner, run the plan."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import _features, reference
from pyg_tiga.planner import Plan, pinned, plan
from pyg_tiga.problem import Problem
from pyg_tiga.relation.csr import Grouping
from pyg_tiga.relation.graph import Graph

_NAMES = ("reduce", "normalize", "weighted", "ties")


class _Last(threading.local):
    plan: Plan | None = None


_last = _Last()


def last_plan() -> Plan | None:
    """The plan of the last forward operation that ran in this thread."""
    return _last.plan


def spmm_plan(graph: Graph, x: Tensor, weight: Tensor | None, normalize: str) -> Plan:
    """The plan of :func:`spmm`."""
    dtype = x.dtype if weight is None else torch.result_type(x, weight)
    return _plan("spmm", graph, x, dtype, "sum", normalize, weight is not None)


def spmm(graph: Graph, x: Tensor, weight: Tensor | None, normalize: str) -> Tensor:
    """Sum of weighted source features per destination, ``[N_dst, F]``."""
    chosen = _last.plan = spmm_plan(graph, x, weight, normalize)
    return chosen.run(graph, x, weight)


def extremum_plan(
    graph: Graph, x: Tensor, reduce: str, ties: str, weighted: bool = False
) -> Plan:
    """The plan of :func:`spmm_extremum`."""
    return _plan("spmm_extremum", graph, x, x.dtype, reduce, "none", weighted, ties)


def spmm_extremum(
    graph: Graph, x: Tensor, reduce: str, ties: str
) -> tuple[Tensor, Tensor]:
    """Maximum or minimum per destination, and what its backward needs (or size 0)."""
    chosen = _last.plan = extremum_plan(graph, x, reduce, ties)
    return chosen.run(graph, x)


def weighted_extremum(
    graph: Graph, x: Tensor, weight: Tensor, reduce: str, ties: str
) -> tuple[Tensor, Tensor]:
    """Extremum of weighted messages; differentiable, since only the reference does it.

    Gives what its backward needs, too.

    Raises:
        UnsupportedError: When an implementation is pinned that cannot weight messages.
    """
    _last.plan = extremum_plan(graph, x, reduce, ties, weighted=True)
    return reference.spmm_extremum(graph, x, reduce, weight, ties)


def spmm_extremum_backward(
    graph: Graph,
    grad: Tensor,  # [N_dst, F]
    x: Tensor,  # [N_src, F]; not read, and may be empty, for "first"
    out: Tensor,  # [N_dst, F]; likewise
    aux: Tensor,  # [N_dst, F]
    ties: str,
) -> Tensor:
    """Gradient of the extremum with respect to x, ``[N_src, F]``."""
    # The gradient of x is gathered by source: the relation's columns are its rows.
    turned = graph.reverse()
    op = "spmm_extremum_backward"
    chosen = _plan(op, turned, grad, x.dtype, "max", "none", False, ties)
    return chosen.run(graph, grad, x, out, aux)


def spmm_extremum_select(
    graph: Graph,
    value: Tensor,  # [N_src, F]
    x: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: str,
) -> Tensor:
    """The transpose of the backward: each destination's share of its winners."""
    op = "spmm_extremum_select"
    chosen = _plan(op, graph, value, x.dtype, "max", "none", False, ties)
    return chosen.run(graph, value, x, out, aux)


def sddmm(graph: Graph, a: Tensor, b: Tensor, normalize: str) -> Tensor:
    """Dot products of the two ends of every edge, ``[E]`` in the caller's order.

    `normalize` scales as in :func:`spmm`: each is a part of the other's gradient.
    """
    if normalize == "dst":
        a = scaled(a, graph.rows())
    elif normalize == "src":
        b = scaled(b, graph.columns())
    dtype = torch.result_type(a, b)
    return _plan("sddmm", graph, b, dtype, "sum", "none", False).run(graph, a, b)


def _plan(
    op: str,
    graph: Graph,
    x: Tensor,  # [N, F]
    out_dtype: torch.dtype,
    reduce: str,
    normalize: str,
    weighted: bool,
    ties: str = "none",
) -> Plan:
    options = (reduce, normalize, weighted, ties)
    return find_plan(_NAMES, op, graph, x, x.size(1), out_dtype, options)


def find_plan(
    names: tuple[str, ...],
    op: str,
    graph: Graph,
    x: Tensor,
    features: int,
    out_dtype: torch.dtype,
    options: tuple[Any, ...],
) -> Plan:
    """The plan of a call, found again on its graph by what varies between calls.

    Args:
        names: Fields of `Problem` that `options` gives.
        op: The operation.
        graph: The relation.
        x: The dense operand.
        features: Its columns.
        out_dtype: Dtype of the result.
        options: Values of these fields.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (op, features, x.dtype, out_dtype, options, deterministic, pinned())
    known = graph.scratch
    found = known.get(key)
    if found is None:
        cuda = x.device.type == "cuda"
        problem = Problem(
            op=op,
            num_dst=graph.num_dst,
            num_src=graph.num_src,
            num_edges=graph.num_edges,
            features=features,
            dtype=x.dtype,
            out_dtype=out_dtype,
            index_dtype=graph.index_dtype,
            device=x.device.type,
            capability=_features.cuda_capability(x.device.index) if cuda else (0, 0),
            relation=graph.kind,
            deterministic=deterministic,
            **dict(zip(names, options, strict=True)),
        )
        found = known[key] = plan(problem)
    return found


def remember_plan(chosen: Plan) -> Plan:
    """Make it what :func:`last_plan` gives."""
    _last.plan = chosen
    return chosen


def scaled(x: Tensor, rows: Grouping) -> Tensor:
    """Rows of x over their degrees, rounded to the dtype of x once."""
    double = x.dtype == torch.float64
    inverse = rows.degree_inv(torch.float64 if double else torch.float32)
    return (x * inverse.unsqueeze(1)).to(x.dtype)
