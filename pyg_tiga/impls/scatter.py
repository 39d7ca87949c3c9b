"""The family that runs anything, anywhere: one row per edge, then a scatter.

It uses `torch_scatter` where installed, for what that does better than PyTorch's own
scatter, and `pyg_tiga.reference` otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga import _features, reference
from pyg_tiga.impls.base import Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph


def _spmm(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None,  # [E]
) -> Tensor:
    scatter = _features.torch_scatter()
    plain = problem.normalize == "none" and weight is None
    if scatter is None or not plain or problem.dtype.itemsize < 4:
        # Half precision accumulates in float32, which torch_scatter does not do.
        return reference.spmm(graph, x, weight, problem.normalize).to(problem.out_dtype)
    graph.validate()
    rows = graph.rows()
    message = x.index_select(0, rows.index)  # [E, F]
    return scatter.segment_csr(message, rows.ptr.long(), reduce="sum")


def _spmm_extremum(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    x: Tensor,  # [N_src, F]
) -> tuple[Tensor, Tensor]:
    if problem.ties != "none":
        return reference.spmm_extremum(graph, x, problem.reduce, ties=problem.ties)
    scatter = _features.torch_scatter()
    if scatter is None:
        out, _ = reference.spmm_extremum(graph, x, problem.reduce)
        return out, _no_aux(x)
    graph.validate()
    rows = graph.rows()
    message = x.index_select(0, rows.index)  # [E, F]
    out = scatter.segment_csr(message, rows.ptr.long(), reduce=problem.reduce)
    return out, _no_aux(x)


def _spmm_extremum_backward(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    aux: Tensor,
) -> Tensor:
    return reference.spmm_extremum_backward(graph, grad, x, out, aux, problem.ties)


def _spmm_extremum_select(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    value: Tensor,  # [N_src, F]
    x: Tensor,
    out: Tensor,
    aux: Tensor,
) -> Tensor:
    return reference.spmm_extremum_select(graph, value, x, out, aux, problem.ties)


def _sddmm(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    a: Tensor,  # [N_dst, F]
    b: Tensor,  # [N_src, F]
) -> Tensor:
    return reference.sddmm(graph, a, b)


def _no_aux(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.int32)


def _implementation(op: str, run: object) -> Implementation:
    return Implementation("scatter", "scatter", op, Limits(), run)  # type: ignore[arg-type]


SPMM = _implementation("spmm", _spmm)
SPMM_EXTREMUM = _implementation("spmm_extremum", _spmm_extremum)
SPMM_EXTREMUM_BACKWARD = _implementation(
    "spmm_extremum_backward", _spmm_extremum_backward
)
SPMM_EXTREMUM_SELECT = _implementation("spmm_extremum_select", _spmm_extremum_select)
SDDMM = _implementation("sddmm", _sddmm)
