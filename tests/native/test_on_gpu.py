"""Layers whose steps are replayed give what they give from Python, bit for bit."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from pyg_tiga import functional
from pyg_tiga.impls import launch
from pyg_tiga.native import build
from pyg_tiga.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv
from pyg_tiga.ops import gat_layer
from tests.native.conftest import Noted

pytestmark = pytest.mark.gpu

NODES, EDGES = 3000, 60_000
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": lambda: GATConv(64, 32, heads=4),
    "gat, dropout": lambda: GATConv(64, 8, heads=8, dropout=0.5),
    "gat, one head": lambda: GATConv(64, 64, concat=False, bias=False),
    "gatv2": lambda: GATv2Conv(64, 32, heads=4),
    "gatv2, shared": lambda: GATv2Conv(64, 16, share_weights=True, dropout=0.5),
    "transformer": lambda: TransformerConv(64, 32, heads=4),
    "transformer, gate": lambda: TransformerConv(64, 16, beta=True, dropout=0.5),
    "sage": lambda: SAGEConv(64, 64),
    "sage, sum": lambda: SAGEConv(64, 96, aggr="sum", root_weight=False),
    "sage, no bias": lambda: SAGEConv(64, 64, bias=False, normalize=True),
    "sage, bipartite": lambda: SAGEConv((64, 32), 96),
}


def edges(hubs: bool) -> Tensor:
    edge_index = torch.randint(NODES, (2, EDGES), device="cuda")
    if hubs:
        edge_index[1, : EDGES // 3] = 3
        edge_index[0, EDGES // 3 : EDGES // 2] = 5
    return edge_index


def features(layer: torch.nn.Module, dtype: torch.dtype) -> Any:
    widths = layer.in_channels
    widths = (widths,) if isinstance(widths, int) else widths
    made = [
        torch.randn(NODES, width, device="cuda", dtype=dtype, requires_grad=True)
        for width in widths
    ]
    return made[0] if len(made) == 1 else tuple(made)


def step(layer: torch.nn.Module, x: Any, edge_index: Tensor) -> list[Tensor]:
    torch.cuda.manual_seed(7)
    out = layer(x, edge_index)
    inputs = [*(x if isinstance(x, tuple) else (x,)), *layer.parameters()]
    grad = torch.ones_like(out).cumsum(0) / NODES
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def is_node(out: Tensor) -> bool:
    return not isinstance(out.grad_fn, torch.autograd.function.BackwardCFunction)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("hubs", [False, True], ids=["plain", "hubs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_steps_give_what_python_gives(
    noted: Noted, name: str, dtype: torch.dtype, hubs: bool
) -> None:
    layer = LAYERS[name]().to("cuda", dtype)
    x, edge_index = features(layer, dtype), edges(hubs)
    expected = step(layer, x, edge_index)
    assert noted.replayed == 0
    assert equal(step(layer, x, edge_index), expected)
    assert noted.recorded >= 2
    recorded, noted.replayed = noted.recorded, 0
    for _ in range(3):
        assert equal(step(layer, x, edge_index), expected)
    assert noted.recorded == recorded
    # As nodes of compiled code, they do not come to Python.
    assert noted.replayed == 0
    assert getattr(layer, "normalize", False) or is_node(layer(x, edge_index))


def test_layers_on_one_graph_do_not_share_what_differs(noted: Noted) -> None:
    edge_index, dtype = edges(True), torch.float32
    layers = [
        SAGEConv(64, 64, **options).cuda()
        for options in (
            {},
            {"bias": False},
            {"root_weight": False},
            {"bias": False, "root_weight": False},
            {"aggr": "sum"},
        )
    ]
    layers += [GATConv(64, 16, heads=4, **o).cuda() for o in ({}, {"bias": False})]
    x = features(layers[0], dtype)
    for _ in range(3):
        for layer in layers:
            theirs = type(layer)._pyg_class
            found = step(layer, x, edge_index)
            twin = copy.deepcopy(layer)
            twin.__class__ = theirs
            wide = [x.detach().double().requires_grad_()]
            expected = step(twin.double(), *wide, edge_index)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_alone(noted: Noted, weighted: bool) -> None:
    x = torch.randn(NODES, 64, device="cuda", requires_grad=True)
    edge_index = edges(True)
    weight = torch.rand(EDGES, device="cuda") if weighted else None

    def run() -> list[Tensor]:
        out = functional.spmm(edge_index, x, weight)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x])]

    expected = run()
    assert equal(run(), expected)
    assert noted.replayed == noted.recorded == 2


def test_parameters_that_lie_elsewhere(noted: Noted) -> None:
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(False)
    step(layer, x, edge_index)
    expected = step(layer, x, edge_index)
    with torch.no_grad():
        moved = torch.empty(129, device="cuda")[1:].view(1, 4, 32)
        layer.att_src.data = moved.copy_(layer.att_src)
    assert layer.att_src.data_ptr() % 16
    for one, other in zip(step(layer, x, edge_index), expected, strict=True):
        # Loads of another width may add up in another order.
        torch.testing.assert_close(one, other)


def test_a_gradient_of_other_strides(noted: Noted) -> None:
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(False)
    for _ in range(3):
        grads = [
            torch.autograd.grad(layer(x, edge_index), [x], grad)[0]
            for grad in (
                torch.ones(NODES, 128, device="cuda"),
                torch.ones(1, 1, device="cuda").expand(NODES, 128),
                torch.ones(128, NODES, device="cuda").t(),
                torch.ones(NODES, 256, device="cuda")[:, :128],
                torch.ones(NODES * 128 + 1, device="cuda")[1:].view(NODES, 128),
            )
        ]
        for grad in grads[1:]:
            # Loads of another width may add up in another order.
            torch.testing.assert_close(grad, grads[0])


def test_an_edited_output_is_formed_again(noted: Noted) -> None:
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(True)
    expected = step(layer, x, edge_index)
    for _ in range(2):
        out = layer(x, edge_index)
        grad = torch.ones_like(out).cumsum(0) / NODES
        out.mul_(0.0).add_(1.0)
        inputs = [x, *layer.parameters()]
        found = torch.autograd.grad(out, inputs, torch.zeros_like(grad))
        assert all(value.abs().sum() == 0 for value in found)
    assert equal(step(layer, x, edge_index), expected)


def test_graphs_streams_and_threads(noted: Noted) -> None:
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(True)
    for _ in range(3):
        expected = step(layer, x, edge_index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(layer, x, edge_index)
        graph = torch.cuda.CUDAGraph()
        grad = torch.ones_like(found[0]).cumsum(0) / NODES
    torch.cuda.synchronize()
    assert equal(found, expected)
    with torch.cuda.graph(graph, stream=stream):
        out = layer(x, edge_index)
        captured = [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]
    graph.replay()
    torch.cuda.synchronize()
    assert equal([captured[0].detach(), *captured[1:]], expected)

    results: list[bool] = []

    def often() -> None:
        for _ in range(10):
            out = layer(x, edge_index)
            grad = torch.ones_like(out).cumsum(0) / NODES
            found = torch.autograd.grad(out, [x, *layer.parameters()], grad)
            results.append(equal([out.detach(), *found], expected))

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


def test_who_listens_to_triton_hears_every_launch(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(False)
    for _ in range(2):
        expected = step(layer, x, edge_index)
    heard: list[Any] = []
    monkeypatch.setattr(launch._runtime(), "launch_enter_hook", heard.append)
    assert equal(step(layer, x, edge_index), expected)
    assert len(heard) >= 6


@pytest.fixture
def as_node(noted: Noted) -> tuple[GATConv, Tensor, Tensor, list[Tensor]]:
    """A layer that runs as one node, operands, and what a step of it gives."""
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(True)
    for _ in range(2):
        expected = step(layer, x, edge_index)
    assert is_node(layer(x, edge_index))
    return layer, x, edge_index, expected


AsNode = tuple[GATConv, Tensor, Tensor, list[Tensor]]


def test_gradients_of_a_node_again_and_in_batches(as_node: AsNode) -> None:
    layer, x, edge_index, expected = as_node
    inputs = [x, *layer.parameters()]
    out = layer(x, edge_index)
    grad = torch.ones_like(out).cumsum(0) / NODES
    for _ in range(2):
        found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        assert equal(list(found), expected[1:])
    batch = torch.stack([grad, 2 * grad])
    found = torch.autograd.grad(
        out, inputs, batch, retain_graph=True, is_grads_batched=True
    )
    for one, other in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(one, torch.stack([other, 2 * other]))
    twice = torch.autograd.grad(out, inputs, grad, create_graph=True)
    assert all(value.requires_grad for value in twice[:2])
    for one, other in zip(twice, expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_gradients_that_nobody_wants_of_a_node(as_node: AsNode) -> None:
    layer, x, edge_index, expected = as_node
    inputs = [x, *layer.parameters()]
    for keep in ([1], [0, 4], [2], [3], [4], [1, 2, 3]):
        for _ in range(2):
            out = layer(x, edge_index)
            grad = torch.ones_like(out).cumsum(0) / NODES
            found = torch.autograd.grad(out, [inputs[i] for i in keep], grad)
            assert equal(list(found), [expected[1 + i] for i in keep])
    for value in inputs[2:]:
        value.requires_grad_(False)
    layer(x, edge_index).sum().backward()
    assert layer.bias.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_node_in_a_checkpoint(as_node: AsNode, use_reentrant: bool) -> None:
    layer, x, edge_index, expected = as_node
    made = GATConv(64, 32, heads=4).cuda()
    made.load_state_dict(layer.state_dict())
    fresh = edge_index.clone()
    # The first forward runs from Python, and that of the backward may not.
    for _ in range(3):
        out = checkpoint(made, x, fresh, use_reentrant=use_reentrant)
        grad = torch.ones_like(out).cumsum(0) / NODES
        x.grad = None
        made.zero_grad()
        out.backward(grad)
        found = [x.grad, *[value.grad for value in made.parameters()]]
        for one, other in zip(found, expected[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_what_a_node_keeps_may_wait_on_the_host(as_node: AsNode) -> None:
    layer, x, edge_index, expected = as_node
    with torch.autograd.graph.save_on_cpu():
        out = layer(x, edge_index)
    grad = torch.ones_like(out).cumsum(0) / NODES
    found = torch.autograd.grad(out, [x, *layer.parameters()], grad)
    assert equal(list(found), expected[1:])


def test_a_node_keeps_no_more_memory_than_python(
    as_node: AsNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, edge_index, _ = as_node
    peaks = []
    for road in (gat_layer.run_as_node, lambda *args: None):
        monkeypatch.setattr(gat_layer, "run_as_node", road)
        for _ in range(2):
            step(layer, x, edge_index)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step(layer, x, edge_index)
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert peaks[0] <= peaks[1]


def test_compiled_autograd_is_refused(as_node: AsNode) -> None:
    layer, x, edge_index, _ = as_node
    out = layer(x, edge_index)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match=r"GATConvBackward.*torch\.compile"),
    ):
        out.sum().backward()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_TIGA_NATIVE", "off")
    monkeypatch.setattr(build, "_build", build._Build())
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(True)
    expected = step(layer, x, edge_index)
    assert equal(step(layer, x, edge_index), expected)
