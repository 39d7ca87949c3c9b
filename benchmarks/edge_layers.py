"""GATv2Conv and TransformerConv as whole layers, training.

Edge features require a gradient, as embeddings of them do. The floor of a layer with
edge features is that of its core and, of these features, three readings and one writing
of the gradient: forward, by column with the gradient, and by row once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import measure, ours, peers, peers_attention
from benchmarks.checks import Check, Edges
from benchmarks.engine import Call, Candidate, Context, Workload
from benchmarks.graphs import BenchGraph
from benchmarks.inputs import Inputs, Results, phase_runner
from benchmarks.kinks import make_sums_exact
from benchmarks.vector_layer_checks import (
    GATV2,
    gatv2_conv_check,
    transformer_check,
    transformer_names,
)
from benchmarks.workloads import draw

Shape = tuple[int, int]  # heads, channels

GATV2_GATHERS, DOT_GATHERS = 4, 5  # of a training step
FEATURE_PASSES = 4
PYG_COPIES = 5  # queries, keys, values, projected features, and a sum of two of them
LOOPS_WAIT = "adding self-loops waits for the device"


@dataclass(frozen=True)
class EdgeShape:
    """Heads, channels and the width of edge features."""

    heads: int
    channels: int
    edge_dim: int

    @property
    def width(self) -> int:
        """Input and output width of the layer."""
        return self.heads * self.channels

    @property
    def label(self) -> str:
        """As it stands in a record's ``case``."""
        return f"{label((self.heads, self.channels))}-e{self.edge_dim}"


def label(shape: Shape) -> str:
    """``<heads>x<channels>``."""
    return f"{shape[0]}x{shape[1]}"


@dataclass(frozen=True)
class LayerBench:
    """A layer of PyG's with inputs, and the names of its parameters in results."""

    graph: BenchGraph
    inputs: Inputs
    parent: torch.nn.Module
    names: Sequence[str]

    def call(
        self,
        forward: Callable[..., Tensor],
        layer: torch.nn.Module,
        features: Sequence[Tensor] = (),
    ) -> Callable[[int], Results]:
        """A training step of ``forward(x)`` or ``forward(x, features)``."""
        parameters = [layer.get_parameter(name) for name in self.names]

        def operands(i: int) -> tuple[Tensor, ...]:
            more = (features[i % len(features)],) if features else ()
            return (self.inputs.x[i], *more)

        return phase_runner(
            lambda i: forward(*operands(i)),
            lambda i: (*operands(i), *parameters),
            self.inputs.grad,
            "train",
        )

    def workload(
        self,
        label: str,
        candidates: list[Candidate],
        check: Check,
        num_edges: int,
        gathers: int,
        **options: int,
    ) -> Workload:
        """The case, with the floor of its gathers."""
        x = self.inputs.x[0]
        return Workload(
            case=f"{self.graph.name}/{label}",
            candidates=candidates,
            check=check,
            sets=self.inputs.sets,
            gather_bytes=num_edges * x.size(1) * x.element_size(),
            gathers=gathers,
            **options,
        )


def our_layer(
    maker: Callable[..., torch.nn.Module],
    parent: torch.nn.Module,
    shape: Shape,
    **options: int,
) -> torch.nn.Module:
    """Our layer with the parameters of PyG's."""
    like = next(parent.parameters())
    layer = maker(shape[0] * shape[1], shape[1], shape[0], **options)
    layer.load_state_dict(parent.state_dict())
    return layer.to(like.device, like.dtype)


def frozen(parent: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters for a reference, which keeps its own."""
    return {name: each.detach().clone() for name, each in parent.named_parameters()}


def prepare_gatv2_layer(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, shape: Shape
) -> Workload:
    """GATv2Conv with its self-loops, which the compiled peer is given."""
    on, width = context.graphs.get(graph), shape[0] * shape[1]
    inputs = draw(context, on, width, dtype, phase)
    torch.manual_seed(context.seed)
    make = partial(peers_attention.pyg_gatv2_conv, width, shape[1], shape[0])
    parent = make().to(context.device)
    for x in inputs.x:
        make_sums_exact(x, dict(parent.named_parameters()))
    looped = peers.with_loops(on.edge_index, on.num_nodes)
    bench = LayerBench(on, inputs, parent, GATV2)

    def our_call() -> Call:
        layer = our_layer(ours.gatv2_conv, parent, shape)
        run = bench.call(lambda x: layer(x, on.edge_index), layer)
        return Call(run, partial(ours.relation_bytes, on))

    def compiled() -> Call:
        bare = make(add_self_loops=False)
        peers.share_parameters(bare, parent)
        layer = peers.compiled(bare)
        return Call(bench.call(lambda x: layer(x, looped), parent))

    def pyg() -> Call:
        return Call(bench.call(lambda x: parent(x, on.edge_index), parent))

    found = [
        Candidate("pyg_tiga", our_call),
        Candidate("pyg", pyg, waits=LOOPS_WAIT),
        Candidate("pyg_compiled", compiled),
    ]
    edges = Edges(*looped, on.num_nodes)
    check = gatv2_conv_check(edges, inputs.x[0], inputs.grad[0], frozen(parent))
    return bench.workload(
        label(shape),
        found,
        check,
        looped.size(1),
        GATV2_GATHERS,
        loops=on.num_nodes,
    )


def prepare_transformer_layer(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, shape: Shape
) -> Workload:
    """TransformerConv without edge features."""
    on, width = context.graphs.get(graph), shape[0] * shape[1]
    inputs = draw(context, on, width, dtype, phase)
    torch.manual_seed(context.seed)
    parent = peers_attention.pyg_transformer_conv(width, shape[1], shape[0])
    parent = parent.to(context.device)
    bench = LayerBench(on, inputs, parent, transformer_names(has_edges=False))

    def our_call() -> Call:
        layer = our_layer(ours.transformer_conv, parent, shape)
        run = bench.call(lambda x: layer(x, on.edge_index), layer)
        return Call(run, partial(ours.relation_bytes, on))

    def pyg(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Call:
        layer = wrap(parent)
        return Call(bench.call(lambda x: layer(x, on.edge_index), parent))

    found = [
        Candidate("pyg_tiga", our_call),
        Candidate("pyg", partial(pyg, lambda layer: layer)),
        Candidate("pyg_compiled", partial(pyg, peers.compiled)),
    ]
    check = transformer_check(
        Edges.of(on), inputs.x[0], None, inputs.grad[0], frozen(parent), shape[0]
    )
    return bench.workload(label(shape), found, check, on.num_edges, DOT_GATHERS)


def prepare_edge_layer(
    context: Context, phase: str, dtype: torch.dtype, *, graph: str, shape: EdgeShape
) -> Workload:
    """TransformerConv with edge features: ours, anemoi's attention, and PyG's."""
    on, pair = context.graphs.get(graph), (shape.heads, shape.channels)
    inputs = draw(context, on, shape.width, dtype, phase)
    features = draw_features(context, on, shape.edge_dim, dtype, inputs.sets)
    torch.manual_seed(context.seed)
    parent = peers_attention.pyg_transformer_conv(
        shape.width, *pair[::-1], edge_dim=shape.edge_dim
    ).to(context.device, dtype)
    bench = LayerBench(on, inputs, parent, transformer_names(has_edges=True))

    def our_call() -> Call:
        layer = our_layer(ours.transformer_conv, parent, pair, edge_dim=shape.edge_dim)
        forward = lambda x, e: layer(x, on.edge_index, e)  # noqa: E731
        nbytes = partial(ours.relation_bytes, on)
        return Call(bench.call(forward, layer, features), nbytes)

    def pyg(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Call:
        layer = wrap(parent)
        forward = lambda x, e: layer(x, on.edge_index, e)  # noqa: E731
        return Call(bench.call(forward, parent, features))

    found = [
        Candidate("pyg_tiga", our_call),
        Candidate("anemoi", partial(anemoi_call, bench, features)),
        Candidate("pyg", partial(pyg, lambda layer: layer), edge_copies=PYG_COPIES),
        Candidate("pyg_compiled", partial(pyg, peers.compiled)),
    ]
    check = transformer_check(
        Edges.of(on),
        inputs.x[0],
        features[0],
        inputs.grad[0],
        frozen(parent),
        shape.heads,
    )
    return bench.workload(
        shape.label,
        found,
        check,
        on.num_edges,
        DOT_GATHERS,
        more_bytes=FEATURE_PASSES * features[0].nbytes,
    )


def anemoi_call(bench: LayerBench, features: Sequence[Tensor]) -> Call:
    """Anemoi's attention in the layer; its order of the edges is made beforehand."""
    layer = peers_attention.AnemoiConv(bench.parent, bench.graph)
    arranged = [layer.arranged(each) for each in features]
    nbytes = partial(peers_attention.form_bytes, bench.graph, "anemoi")

    def restore(results: Results) -> Results:
        out, of_x, of_features, *others = results
        return (out, of_x, layer.restored(of_features), *others)

    return Call(bench.call(layer, bench.parent, arranged), nbytes, restore)


def draw_features(
    context: Context, graph: BenchGraph, width: int, dtype: torch.dtype, sets: int
) -> list[Tensor]:
    """Edge features ``[E, F]`` that require gradients; one is enough beyond L2."""
    generator = torch.Generator(device=context.device).manual_seed(context.seed + 1)
    shape, nbytes = (graph.num_edges, width), graph.num_edges * width * dtype.itemsize
    if measure.input_sets(nbytes, context.device) == 1:
        sets = 1

    def drawn() -> Tensor:
        found = torch.randn(shape, generator=generator, device=context.device)
        return found.to(dtype).requires_grad_()

    return [drawn() for _ in range(sets)]
