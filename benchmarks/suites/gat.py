"""GATConv as a whole layer, its edge kernels alone, CPU, and training on Cora."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import accuracy, measure, ours, peers
from benchmarks.attention_checks import GAT, attention_check, gat_check
from benchmarks.checks import Check, Edges
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
from benchmarks.inputs import (
    AttentionInputs,
    Inputs,
    Results,
    draw_attention,
    phase_runner,
    runner,
)
from benchmarks.kinks import keep_off_kink
from benchmarks.records import Record
from benchmarks.workloads import draw

Shape = tuple[int, int]  # heads, channels

SHAPES: tuple[Shape, ...] = ((4, 32), (8, 8), (1, 64))
LARGE_SHAPES: tuple[Shape, ...] = ((4, 32), (8, 8))
REAL = ("musae_github", "soc_slashdot0902")
LARGE = ("reddit", "products")
LAYERS = (("arxiv", SHAPES), *((graph, LARGE_SHAPES) for graph in LARGE))
REAL_SHAPES = ((4, 32),)
CORES = ("arxiv", *LARGE)
CORE_KINDS = (
    *((shape, torch.float32) for shape in SHAPES),
    ((4, 32), torch.bfloat16),
)
LAYER_PHASES = ("forward", "train")
CORE_PHASES = ("forward", "backward", "train")
CPU_CASE = ("arxiv", (8, 8))
CPU_ROUNDS = 4
# PyG's message and the gathered values it comes from; training keeps these values and
# has the gradients of both.
PYG_COPIES = {"forward": 2, "train": 3}
WAITS = "adding self-loops waits for the device"


def cases() -> Sequence[Case]:
    """All cases: graph by graph, then those that measure in their own way."""
    found: list[Case] = []
    layers = dict(LAYERS)
    layers |= dict.fromkeys(real_graphs(REAL), REAL_SHAPES)
    for graph, shapes in layers.items():
        found += [
            _case(graph, shape, "gat_conv", phase, torch.float32)
            for shape in shapes
            for phase in LAYER_PHASES
        ]
        if graph in CORES:
            found += [
                _case(graph, shape, "gat_attention", phase, dtype)
                for shape, dtype in CORE_KINDS
                for phase in CORE_PHASES
            ]
    recipe = accuracy.GAT
    return [
        *found,
        CustomCase(f"{CPU_CASE[0]}/{label(CPU_CASE[1])}", "gat_conv", "cpu", cpu),
        CustomCase(recipe.case, recipe.op, "optimizer", cora_step),
        CustomCase(recipe.case, recipe.op, accuracy.NOTE, cora_accuracy),
    ]


def label(shape: Shape) -> str:
    """``<heads>x<channels>``."""
    return f"{shape[0]}x{shape[1]}"


def _case(
    graph: str, shape: Shape, op: str, phase: str, dtype: torch.dtype
) -> TimedCase:
    prepare = prepare_layer if op == "gat_conv" else prepare_core
    return TimedCase(
        f"{graph}/{label(shape)}",
        op,
        phase,
        dtype,
        partial(prepare, graph=graph, shape=shape),
        in_channels=shape[0] * shape[1],
    )


@dataclass(frozen=True)
class Bench:
    """What the phases of one layer share."""

    graph: BenchGraph
    looped: Tensor  # [2, E + N], as PyG makes it of the graph in each call
    inputs: Inputs
    parent: torch.nn.Module
    check: Check

    def layer_call(
        self, layer: torch.nn.Module, edge_index: Tensor, phase: str
    ) -> Callable[[int], Results]:
        """One call of a layer on input set i, with gradients when training."""
        parameters = [layer.get_parameter(name) for name in GAT]
        return runner(lambda x: layer(x, edge_index), self.inputs, phase, parameters)


def make_bench(context: Context, graph: str, shape: Shape) -> Bench:
    """Draw the inputs of a layer, and its parameters."""
    on, width = context.graphs.get(graph), shape[0] * shape[1]
    inputs = draw(context, on, width, torch.float32, "train")
    looped = peers.with_loops(on.edge_index, on.num_nodes)
    torch.manual_seed(context.seed)
    parent = peers.pyg_gat_conv(width, shape[1], shape[0]).to(context.device)
    # The reference keeps its own: on the CPU the module moves.
    named = {name: each.detach().clone() for name, each in parent.named_parameters()}
    for x in inputs.x:
        keep_off_kink(x, named)
    edges = Edges(*looped, on.num_nodes)
    check = gat_check(edges, inputs.x[0], inputs.grad[0], named)
    return Bench(on, looped, inputs, parent, check)


def prepare_layer(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, shape: Shape
) -> Workload:
    """The whole layer: ours, PyG's, and PyG's compiled, which is given the loops.

    PyG's is compiled where its messages leave room, and for training only: compiling
    takes longer than measuring.
    """
    bench = context.prepared.get(
        ("gat_conv", graph, shape), lambda: make_bench(context, graph, shape)
    )
    on, plain, looped = bench.graph, bench.graph.edge_index, bench.looped

    def call(make: Callable[[], torch.nn.Module], edges: Tensor) -> Call:
        return Call(bench.layer_call(make(), edges, phase))

    def our_call() -> Call:
        run = bench.layer_call(our_layer(bench.parent, shape), plain, phase)
        return Call(run, partial(ours.relation_bytes, on))

    found = [
        Candidate("pyg_tiga", our_call),
        Candidate(
            "pyg",
            lambda: call(lambda: bench.parent, plain),
            edge_copies=PYG_COPIES[phase],
            waits=WAITS,
        ),
    ]
    if phase == "train" and graph not in LARGE:
        make = partial(compiled_layer, bench.parent, shape)
        found.append(Candidate("pyg_compiled", lambda: call(make, looped)))
    return Workload(
        case=f"{on.name}/{label(shape)}",
        candidates=found,
        check=bench.check,
        sets=bench.inputs.sets,
        gather_bytes=looped.size(1) * shape[0] * shape[1] * dtype.itemsize,
        gathers=1 if phase == "forward" else 2,
        loops=on.num_nodes,
    )


def our_layer(parent: torch.nn.Module, shape: Shape) -> torch.nn.Module:
    """Our layer with the parameters of PyG's."""
    device = next(parent.parameters()).device
    layer = ours.gat_conv(shape[0] * shape[1], shape[1], shape[0]).to(device)
    layer.load_state_dict(parent.state_dict())
    return layer


def compiled_layer(parent: torch.nn.Module, shape: Shape) -> torch.nn.Module:
    """PyG's layer without its own loops, compiled; it shares the parameters."""
    bare = peers.pyg_gat_conv(
        shape[0] * shape[1], shape[1], shape[0], add_self_loops=False
    )
    peers.share_parameters(bare, parent)
    return peers.compiled(bare)


@dataclass(frozen=True)
class CoreBench:
    """What the phases of the edge kernels share."""

    graph: BenchGraph
    num_edges: int  # loops among them
    inputs: AttentionInputs
    check: Check


def make_core(
    context: Context, graph: str, shape: Shape, dtype: torch.dtype
) -> CoreBench:
    """Draw the operands of the edge kernels."""
    on = context.graphs.get(graph)
    inputs = draw_attention(
        on.num_nodes, *shape, dtype, device=context.device, seed=context.seed
    )
    edges = Edges(*peers.with_loops(on.edge_index, on.num_nodes), on.num_nodes)
    check = attention_check(edges, inputs.leaves(0), inputs.grad[0])
    return CoreBench(on, edges.target.numel(), inputs, check)


def prepare_core(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, shape: Shape
) -> Workload:
    """Our edge kernels alone, beside the floor of their gathers."""
    bench = context.prepared.get(
        ("gat_attention", graph, shape, dtype),
        lambda: make_core(context, graph, shape, dtype),
    )
    on, inputs = bench.graph, bench.inputs

    def build() -> Call:
        forward = lambda i: ours.additive_attention(  # noqa: E731
            on.edge_index, *inputs.leaves(i)
        )
        run = phase_runner(forward, inputs.leaves, inputs.grad, phase)
        return Call(run, partial(ours.relation_bytes, on))

    return Workload(
        case=f"{on.name}/{label(shape)}",
        candidates=[Candidate("pyg_tiga", build)],
        check=bench.check,
        sets=inputs.sets,
        gather_bytes=bench.num_edges * shape[0] * shape[1] * dtype.itemsize,
        gathers=2 if phase == "train" else 1,
        loops=on.num_nodes,
    )


def cpu(context: Context) -> list[Record]:
    """The layer on the CPU, ours and PyG's in turns; the check warms them up."""
    graph, shape = CPU_CASE
    bench = make_bench(context, graph, shape)
    here = bench.graph.to("cpu")
    parent, inputs = bench.parent.to("cpu"), bench.inputs.to("cpu")
    there = Bench(here, here.edge_index, inputs, parent, bench.check)
    layers = {"pyg_tiga": our_layer(parent, shape), "pyg": parent}
    records = []
    for phase in LAYER_PHASES:
        calls = [there.layer_call(x, here.edge_index, phase) for x in layers.values()]
        errors = [bench.check(call(0)) for call in calls]
        timings = measure.time_interleaved(
            calls, budget_s=context.budget_s, warm_up=0, least=CPU_ROUNDS
        )
        case, width = f"{bench.graph.name}/{label(shape)}", shape[0] * shape[1]
        cell = identity(context, case, "gat_conv", phase, width)
        for impl, error, timing in zip(layers, errors, timings, strict=True):
            records.append(cpu_record({**cell, "impl": impl}, error, timing))
    ours.release(here)
    return records


def cora_step(context: Context) -> list[Record]:
    """A training step with its optimizer on Cora, as a user makes it, in turns."""
    data, recipe = accuracy.load_cora(context.device), accuracy.GAT
    makers = {"pyg_tiga": ours.gat_conv, "pyg": peers.pyg_gat_conv}
    steps = []
    for layer in makers.values():
        torch.manual_seed(context.seed)
        net = recipe.build(layer, data.x.size(1), data.num_classes).to(context.device)
        optimizer = recipe.optimizer(net)
        step = accuracy.training_step(net, optimizer, data, data.edge_index)
        steps.append(lambda i, step=step: step())
    timings = measure.time_in_turns(steps, context.device)
    cell = identity(context, recipe.case, recipe.op, "train", data.x.size(1))
    return [
        Record(**cell, **timing_fields(timing), impl=impl, note="optimizer")
        for impl, timing in zip(makers, timings, strict=True)
    ]


def cora_accuracy(context: Context) -> list[Record]:
    """Accuracies paired by seed; PyG's layer is given the loops it would add."""
    data, recipe = accuracy.load_cora(context.device), accuracy.GAT
    looped = peers.with_loops(data.edge_index, data.x.size(0))
    bare = partial(peers.pyg_gat_conv, add_self_loops=False)
    mine = accuracy.Trainer(recipe, ours.gat_conv, data)
    other = accuracy.Trainer(recipe, bare, data, looped)
    return accuracy.measure_pairs(context, recipe, data, mine, other)
