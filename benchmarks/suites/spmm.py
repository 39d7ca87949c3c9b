"""Sum against cuSPARSE, and max aggregation in both forms of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import peers
from benchmarks.engine import Call, Candidate, Case, Context, TimedCase, Workload
from benchmarks.graphs import real_graphs
from benchmarks.workloads import aggregation, draw, ours_spmm, pyg_spmm

NAMED = ("arxiv", "reddit", "products")
REAL = ("musae_github", "soc_slashdot0902")
WIDTHS = (16, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16)
PHASES = ("forward", "train")
MAX_WIDTH = 128


def cases() -> Sequence[Case]:
    """All cases, graph by graph."""
    found: list[Case] = []
    for graph in NAMED + real_graphs(REAL):
        found += [
            TimedCase(
                f"{graph}/F{width}",
                "spmm",
                phase,
                dtype,
                partial(prepare_sum, graph=graph, width=width),
                in_channels=width,
            )
            for width in WIDTHS
            for dtype in DTYPES
            for phase in PHASES
        ]
        found += [max_case(graph, phase) for phase in PHASES]
    return found


def max_case(graph: str, phase: str) -> TimedCase:
    """Max aggregation on a graph, fp32."""
    return TimedCase(
        f"{graph}/F{MAX_WIDTH}",
        "max_aggregate",
        phase,
        torch.float32,
        partial(prepare_max, graph=graph, width=MAX_WIDTH),
        in_channels=MAX_WIDTH,
    )


def prepare_sum(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, width: int
) -> Workload:
    """Ours and cuSPARSE, sum."""
    on = context.graphs.get(graph)
    inputs = draw(context, on, width, dtype, phase)

    def cusparse() -> Call:
        run, nbytes = peers.cusparse_sum(on, inputs, phase)
        return Call(run, lambda: nbytes)

    found = [ours_spmm(on, inputs, phase, "sum"), Candidate("cusparse", cusparse)]
    return aggregation(on, inputs, phase, "sum", found)


def prepare_max(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, width: int
) -> Workload:
    """Ours (both gradients when training) and PyG, max."""
    on = context.graphs.get(graph)
    inputs = draw(context, on, width, dtype, phase, distinct=True)
    make = partial(ours_spmm, on, inputs, phase, "max")
    if phase == "forward":
        found = [make()]
    else:
        found = [
            make(tag="deterministic", ties="split"),
            make(tag="winner scatter", ties="first"),
        ]
    found.append(pyg_spmm(on, inputs, phase, "max"))
    return aggregation(on, inputs, phase, "max", found)
