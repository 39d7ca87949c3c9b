"""What the suites share: inputs, candidates and workloads of an aggregation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import ours, peers
from benchmarks.checks import spmm_check
from benchmarks.engine import Call, Candidate, Context, Workload
from benchmarks.graphs import BenchGraph
from benchmarks.inputs import Inputs, draw_inputs, runner


def draw(
    context: Context,
    graph: BenchGraph,
    width: int,
    dtype: torch.dtype,
    phase: str,
    *,
    distinct: bool = False,
) -> Inputs:
    """The inputs of a case on this context's device."""
    return draw_inputs(
        graph.num_nodes,
        width,
        dtype,
        phase=phase,
        device=context.device,
        seed=context.seed,
        distinct=distinct,
    )


def ours_spmm(
    graph: BenchGraph,
    inputs: Inputs,
    phase: str,
    reduce: str,
    *,
    tag: str | None = None,
    **options: Any,
) -> Candidate:
    """Our aggregation, called with the plain ``edge_index``."""

    def build() -> Call:
        forward = lambda x: ours.spmm(  # noqa: E731
            graph.edge_index, x, reduce, **options
        )
        nbytes = partial(ours.relation_bytes, graph)
        return Call(runner(forward, inputs, phase), nbytes)

    return Candidate("pyg_tiga", build, (tag,) if tag else ())


def pyg_spmm(graph: BenchGraph, inputs: Inputs, phase: str, reduce: str) -> Candidate:
    """PyG's aggregation, eager."""

    def build() -> Call:
        module = peers.pyg_aggregation(reduce)
        forward = lambda x: module(x, graph.edge_index)  # noqa: E731
        return Call(runner(forward, inputs, phase))

    return Candidate("pyg", build)


def aggregation(
    graph: BenchGraph,
    inputs: Inputs,
    phase: str,
    reduce: str,
    candidates: list[Candidate],
) -> Workload:
    """An aggregation with its check and floor.

    The floor of training is two gathers, and of a maximum one: its backward need
    move no more than a row per winner.
    """
    x, grad = inputs.x[0], inputs.grad[0]
    width = x.size(1)
    return Workload(
        case=f"{graph.name}/F{width}",
        candidates=candidates,
        check=spmm_check(graph, x, grad, phase=phase, reduce=reduce),
        sets=inputs.sets,
        gather_bytes=graph.num_edges * width * x.element_size(),
        gathers=1 if phase == "forward" or reduce == "max" else 2,
    )
