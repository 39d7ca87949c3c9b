"""SAGEConv as a whole layer, its aggregation alone, host time, CPU, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import accuracy, measure, ours, peers
from benchmarks.checks import SAGE, sage_check
from benchmarks.engine import (
    Call,
    Candidate,
    Case,
    Context,
    CustomCase,
    TimedCase,
    Workload,
    cpu_record,
    identity,
    timing_fields,
)
from benchmarks.graphs import BenchGraph, real_graphs
from benchmarks.inputs import Inputs, Results, runner
from benchmarks.records import Record
from benchmarks.workloads import aggregation, draw, ours_spmm, pyg_spmm

NAMED = (("arxiv", 128), ("reddit", 128), ("products", 64))
REAL = ("musae_github", "soc_slashdot0902")
REAL_WIDTH = 128
PHASES = ("forward", "train")
CPU_GRAPH = ("arxiv", 128)
CPU_SHARE = 5  # a CPU step is long: so many budgets for its timing
HOST_GRAPH = ("tiny", 32)


def cases() -> Sequence[Case]:
    """All cases: graph by graph, then those that measure in their own way."""
    found: list[Case] = []
    ops = (("sage_conv", prepare_layer), ("sage_aggregate", prepare_mean))
    for graph, width in (*NAMED, *((name, REAL_WIDTH) for name in real_graphs(REAL))):
        for op, prepare in ops:
            found += [
                TimedCase(
                    f"{graph}/F{width}",
                    op,
                    phase,
                    torch.float32,
                    partial(prepare, graph=graph, width=width),
                    in_channels=width,
                )
                for phase in PHASES
            ]
    found.append(CustomCase(_named(HOST_GRAPH), "sage_conv", "host", measure_host))
    found.append(CustomCase(_named(CPU_GRAPH), "sage_conv", "cpu", measure_cpu))
    recipe = accuracy.SAGE
    found.append(CustomCase(recipe.case, recipe.op, accuracy.NOTE, measure_accuracy))
    return found


def _named(graph: tuple[str, int]) -> str:
    return f"{graph[0]}/F{graph[1]}"


def prepare_mean(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, width: int
) -> Workload:
    """Mean aggregation alone, ours and PyG's."""
    on = context.graphs.get(graph)
    inputs = draw(context, on, width, dtype, phase)
    found = [ours_spmm(on, inputs, phase, "mean"), pyg_spmm(on, inputs, phase, "mean")]
    return aggregation(on, inputs, phase, "mean", found)


def prepare_layer(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, width: int
) -> Workload:
    """The whole layer: ours, PyG's, and PyG's compiled (training only)."""
    on = context.graphs.get(graph)
    inputs = draw(context, on, width, dtype, phase)
    parent = pyg_layer(width, context)
    make = partial(_candidate, on, inputs, phase)
    found = [
        make("pyg_tiga", partial(our_layer, parent), partial(ours.relation_bytes, on)),
        make("pyg", lambda: parent),
    ]
    if phase == "train":
        found.append(make("pyg_compiled", lambda: peers.compiled(parent)))
    named = dict(parent.named_parameters())
    return Workload(
        case=f"{on.name}/F{width}",
        candidates=found,
        check=sage_check(on, inputs.x[0], inputs.grad[0], named, phase=phase),
        sets=inputs.sets,
        gather_bytes=on.num_edges * width * dtype.itemsize,
        gathers=1 if phase == "forward" else 2,
    )


def pyg_layer(width: int, context: Context) -> torch.nn.Module:
    """PyG's layer with seeded parameters."""
    torch.manual_seed(context.seed)
    return peers.pyg_sage_conv(width, width).to(context.device)


def our_layer(parent: torch.nn.Module) -> torch.nn.Module:
    """Our layer with the parameters of PyG's."""
    weight = parent.get_parameter(SAGE[0])
    layer = ours.sage_conv(weight.size(1), weight.size(0)).to(weight.device)
    layer.load_state_dict(parent.state_dict())
    return layer


def _candidate(
    on: BenchGraph,
    inputs: Inputs,
    phase: str,
    impl: str,
    make: Callable[[], torch.nn.Module],
    relation_bytes: Callable[[], int] | None = None,
) -> Candidate:
    def build() -> Call:
        return Call(layer_call(on, inputs, phase, make()), relation_bytes)

    return Candidate(impl, build)


def layer_call(
    on: BenchGraph, inputs: Inputs, phase: str, layer: torch.nn.Module
) -> Callable[[int], Results]:
    """One call of a layer on input set i, with gradients when training."""
    parameters = [layer.get_parameter(name) for name in SAGE]
    return runner(lambda x: layer(x, on.edge_index), inputs, phase, parameters)


def measure_host(context: Context) -> list[Record]:
    """Host time of a warm layer call beyond its two projections, gradients on."""
    name, width = HOST_GRAPH
    on = context.graphs.get(name)
    x = draw(context, on, width, torch.float32, "train").x[0]
    parent = pyg_layer(width, context)
    layers = {"pyg_tiga": our_layer(parent), "pyg": parent}
    pairs = [
        (partial(layer, x, on.edge_index), _both(layer, x)) for layer in layers.values()
    ]
    found = measure.host_overheads(pairs, context.device)
    cell = identity(context, f"{on.name}/F{width}", "sage_conv", "forward", width)
    return [
        Record(
            **cell,
            **timing_fields(host.beyond),
            impl=impl,
            note="host",
            extra={"call_us": host.call * 1e3, "projections_us": host.part * 1e3},
        )
        for impl, host in zip(layers, found, strict=True)
    ]


def _both(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: (layer.lin_l(x), layer.lin_r(x))


def measure_cpu(context: Context) -> list[Record]:
    """The layer on the CPU, ours and PyG's in turns."""
    name, width = CPU_GRAPH
    on = context.graphs.get(name)
    records = []
    for phase in PHASES:
        records += _measure_cpu_phase(context, on, width, phase)
    return records


def _measure_cpu_phase(
    context: Context, on: BenchGraph, width: int, phase: str
) -> list[Record]:
    inputs = draw(context, on, width, torch.float32, phase)
    parent = pyg_layer(width, context)
    named = {name: each.clone() for name, each in parent.named_parameters()}
    check = sage_check(on, inputs.x[0], inputs.grad[0], named, phase=phase)
    here, there, parent = on.to("cpu"), inputs.to("cpu"), parent.to("cpu")
    layers = {"pyg_tiga": our_layer(parent), "pyg": parent}
    runs = {i: layer_call(here, there, phase, each) for i, each in layers.items()}
    errors = [check(run(0)) for run in runs.values()]
    budget = CPU_SHARE * context.budget_s
    timings = measure.time_interleaved(list(runs.values()), budget_s=budget)
    ours.release(here)
    cell = identity(context, f"{on.name}/F{width}", "sage_conv", phase, width)
    found = zip(runs, errors, timings, strict=True)
    return [cpu_record({**cell, "impl": impl}, e, t) for impl, e, t in found]


def measure_accuracy(context: Context) -> list[Record]:
    """Cora's accuracies, paired by seed."""
    data, recipe = accuracy.load_cora(context.device), accuracy.SAGE
    mine = accuracy.Trainer(recipe, ours.sage_conv, data)
    other = accuracy.Trainer(recipe, peers.pyg_sage_conv, data)
    return accuracy.measure_pairs(context, recipe, data, mine, other)
