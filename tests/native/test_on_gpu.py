"""Layers whose steps are replayed give what they give from Python, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional
from pyg_tiga.impls import launch
from pyg_tiga.impls.replay import Replay
from pyg_tiga.native import build
from pyg_tiga.nn import GATConv, SAGEConv

pytestmark = pytest.mark.gpu

NODES, EDGES = 3000, 60_000
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": lambda: GATConv(64, 32, heads=4),
    "gat, dropout": lambda: GATConv(64, 8, heads=8, dropout=0.5),
    "gat, one head": lambda: GATConv(64, 64, concat=False, bias=False),
    "sage": lambda: SAGEConv(64, 64),
    "sage, sum": lambda: SAGEConv(64, 96, aggr="sum", root_weight=False),
    "sage, no bias": lambda: SAGEConv(64, 64, bias=False, normalize=True),
    "sage, bipartite": lambda: SAGEConv((64, 32), 96),
}


class Noted:
    """What replays did."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Replays at work, and counted."""
    found = Noted()
    monkeypatch.setenv("PYG_TIGA_NATIVE", "wait")
    assert build.wait(), "nothing was compiled"
    record, call = Replay._record, Replay.__call__

    def noting(replay: Replay, *args: Any) -> None:
        record(replay, *args)
        assert replay._steps is not None, "not recorded"
        found.recorded += 1

    def calling(replay: Replay, *tensors: Any) -> Any:
        found.replayed += replay._steps is not None
        return call(replay, *tensors)

    monkeypatch.setattr(Replay, "_record", noting)
    monkeypatch.setattr(Replay, "__call__", calling)
    return found


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
    recorded = noted.recorded
    assert recorded >= 2
    assert noted.replayed == 0
    for _ in range(3):
        assert equal(step(layer, x, edge_index), expected)
    assert noted.recorded == recorded
    assert noted.replayed == 3 * recorded


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


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_TIGA_NATIVE", "off")
    monkeypatch.setattr(build, "_build", build._Build())
    layer = GATConv(64, 32, heads=4).cuda()
    x, edge_index = features(layer, torch.float32), edges(True)
    expected = step(layer, x, edge_index)
    assert equal(step(layer, x, edge_index), expected)
