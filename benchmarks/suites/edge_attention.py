"""GATv2 and dot-product attention: their cores, and the layers around them.

Cores start from projected vectors and have no self-loops. Their gradients are those of
all vectors, and of GATv2's ``att``. Ours runs once more with ``objective="memory"``
when training. PyG runs in float32, eager wherever it fits and compiled for training on
`SMALL` graphs only: compiling takes longer than measuring. Layers train only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import ours, peers, peers_attention
from benchmarks.checks import Check, Edges
from benchmarks.edge_layers import (
    EdgeShape,
    Shape,
    label,
    prepare_edge_layer,
    prepare_gatv2_layer,
    prepare_transformer_layer,
)
from benchmarks.engine import Call, Candidate, Case, Context, TimedCase, Workload
from benchmarks.graphs import BenchGraph, real_graphs
from benchmarks.inputs import VectorInputs, draw_vectors, phase_runner
from benchmarks.records import LESS_MEMORY
from benchmarks.vector_checks import DotAttention, Gatv2Attention, core_check

SHAPES: tuple[Shape, ...] = ((1, 128), (4, 32))
SMALL = ("arxiv",)
LARGE = ("reddit", "products")
PHASES = ("forward", "train")
HALF_FORWARD = (1, 128)
REAL = ("musae_github", "soc_slashdot0902")
REAL_SHAPE = (4, 32)
EDGE_LAYERS: dict[str, tuple[EdgeShape, ...]] = {
    "arxiv": tuple(EdgeShape(*shape, 16) for shape in SHAPES),
    "mesh8": tuple(EdgeShape(*shape, dim) for dim in (16, 128) for shape in SHAPES),
}


@dataclass(frozen=True)
class Form:
    """A way to score edges.

    Args:
        op: Its name as a measured op, and that of our function in `ours`.
        vectors: Vectors of a node that it takes.
        has_att: Whether a vector of parameters follows them.
        gathers: Rows that each edge reads, by phase.
        pyg_copies: Tensors of a row per edge that PyG holds at once.
        reference: The float64 reference.
        turbo: Makes turbo_gnn's function of these.
        turbo_waits: Why turbo_gnn is not replayed, by phase.
    """

    op: str
    vectors: int
    has_att: bool
    gathers: dict[str, int]
    pyg_copies: int
    reference: type[Gatv2Attention] | type[DotAttention]
    turbo: Callable[[BenchGraph], Callable[..., Tensor]]
    turbo_waits: dict[str, str | None]


# The backward of GATv2 gathers both vectors and the cotangent, once each; that of dot
# products does too, and its forward keys beside the values.
GATV2 = Form(
    op="gatv2_attention",
    vectors=2,
    has_att=True,
    gathers={"forward": 1, "train": 4},
    pyg_copies=3,
    reference=Gatv2Attention,
    turbo=peers_attention.turbo_gatv2,
    turbo_waits=dict.fromkeys(PHASES, peers_attention.DEFAULT_STREAM),
)
DOT = Form(
    op="dot_attention",
    vectors=3,
    has_att=False,
    gathers={"forward": 2, "train": 5},
    pyg_copies=4,
    reference=DotAttention,
    turbo=peers_attention.turbo_dot,
    turbo_waits={"forward": None, "train": peers_attention.DEFAULT_STREAM},
)


def cases() -> Sequence[Case]:
    """All cases, graph by graph."""
    found: list[Case] = []
    for graph in (*SMALL, *LARGE, *real_graphs(REAL), "mesh8"):
        if graph in SMALL + LARGE:
            found += core_cases(graph)
        if graph in REAL:
            found += real_cases(graph)
        found += edge_cases(graph)
    return found


def core_cases(graph: str) -> Iterable[TimedCase]:
    """Both forms in float32, and dot products in half precision."""
    fp32, bf16 = torch.float32, torch.bfloat16
    forms = ((GATV2, fp32), (DOT, fp32), (DOT, bf16))
    kinds = [
        (form, shape, dtype, phase)
        for form, dtype in forms
        for shape in SHAPES
        for phase in PHASES
    ]
    if graph in LARGE:
        kinds.append((DOT, HALF_FORWARD, torch.float16, "forward"))
    for form, shape, dtype, phase in kinds:
        prepare = partial(prepare_core, graph=graph, form=form, shape=shape)
        width = shape[0] * shape[1]
        yield TimedCase(
            f"{graph}/{label(shape)}", form.op, phase, dtype, prepare, width
        )


def real_cases(graph: str) -> Iterable[TimedCase]:
    """Both layers without edge features."""
    makers = {
        "gatv2_conv": prepare_gatv2_layer,
        "transformer_conv": prepare_transformer_layer,
    }
    case, width = f"{graph}/{label(REAL_SHAPE)}", REAL_SHAPE[0] * REAL_SHAPE[1]
    for op, make in makers.items():
        prepare = partial(make, graph=graph, shape=REAL_SHAPE)
        yield TimedCase(case, op, "train", torch.float32, prepare, width)


def edge_cases(graph: str) -> Iterable[TimedCase]:
    """TransformerConv with edge features."""
    for shape in EDGE_LAYERS.get(graph, ()):
        yield TimedCase(
            f"{graph}/{shape.label}",
            "transformer_conv",
            "train",
            torch.float16,
            partial(prepare_edge_layer, graph=graph, shape=shape),
            shape.width,
        )


@dataclass(frozen=True)
class CoreBench:
    """What the phases of one core share."""

    graph: BenchGraph
    inputs: VectorInputs
    check: Check

    def call(self, forward: Callable[..., Tensor], phase: str) -> Call:
        """A call of a function of one set's vectors."""
        leaves = self.inputs.leaves
        run = phase_runner(
            lambda i: forward(*leaves[i]), leaves.__getitem__, self.inputs.grad, phase
        )
        return Call(run)


def make_core(
    context: Context, graph: str, form: Form, shape: Shape, dtype: torch.dtype
) -> CoreBench:
    """Draw the operands of a core."""
    on = context.graphs.get(graph)
    inputs = draw_vectors(
        on.num_nodes,
        *shape,
        dtype,
        count=form.vectors,
        has_att=form.has_att,
        device=context.device,
        seed=context.seed,
    )
    operands = tuple(leaf.detach() for leaf in inputs.leaves[0])
    check = core_check(form.reference(Edges.of(on), operands), inputs.grad[0])
    return CoreBench(on, inputs, check)


def prepare_core(
    context: Context,
    phase: str,
    dtype: torch.dtype,
    *,
    graph: str,
    form: Form,
    shape: Shape,
) -> Workload:
    """A core: ours, turbo_gnn's, and PyG's in float32."""
    bench = context.prepared.get(
        (form.op, graph, shape, dtype),
        lambda: make_core(context, graph, form, shape, dtype),
    )
    found = [our_core(bench, form, phase)]
    if phase == "train":
        found.append(our_core(bench, form, phase, objective="memory"))
    if dtype != torch.bfloat16:
        found.append(turbo_core(bench, form, phase))
    if dtype == torch.float32:
        found += pyg_cores(bench, form, phase, compiles=graph in SMALL)
    return Workload(
        case=f"{bench.graph.name}/{label(shape)}",
        candidates=found,
        check=bench.check,
        sets=bench.inputs.sets,
        gather_bytes=bench.graph.num_edges * shape[0] * shape[1] * dtype.itemsize,
        gathers=form.gathers[phase],
    )


def our_core(
    bench: CoreBench, form: Form, phase: str, objective: str = "time"
) -> Candidate:
    """Ours, called with the plain ``edge_index``."""

    def build() -> Call:
        function = getattr(ours, form.op)
        forward = partial(function, bench.graph.edge_index, objective=objective)
        nbytes = partial(ours.relation_bytes, bench.graph)
        return Call(bench.call(forward, phase).run, nbytes)

    return Candidate("pyg_tiga", build, (LESS_MEMORY,) if objective == "memory" else ())


def turbo_core(bench: CoreBench, form: Form, phase: str) -> Candidate:
    """turbo_gnn's, with its form of the graph made before."""

    def build() -> Call:
        forward = form.turbo(bench.graph)
        nbytes = partial(peers_attention.form_bytes, bench.graph, "turbo_gnn")
        return Call(bench.call(forward, phase).run, nbytes)

    return Candidate("turbo_gnn", build, waits=form.turbo_waits[phase])


def pyg_cores(
    bench: CoreBench, form: Form, phase: str, *, compiles: bool
) -> Iterable[Candidate]:
    """PyG's layer without its projections, and compiled for training."""

    def module() -> torch.nn.Module:
        _, heads, channels = bench.inputs.grad[0].shape
        if form.has_att:
            att = bench.inputs.leaves[0][-1]
            return peers_attention.PygGatv2(bench.graph.edge_index, att)
        return peers_attention.PygDot(bench.graph.edge_index, heads, channels)

    def built(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Call:
        return bench.call(wrap(module()), phase)

    plain = partial(built, lambda layer: layer)
    yield Candidate("pyg", plain, edge_copies=form.pyg_copies)
    if compiles and phase == "train":
        yield Candidate("pyg_compiled", partial(built, peers.compiled))
