"""Relations, operands and formulas for tests of scores of vector operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import _philox
from pyg_tiga.impls import triton_attention, triton_attention_backward
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph
from pyg_tiga.testing import Row, make_case, row

# Hubs of `tangled` are cut into pieces.
SCHEDULE = Schedule(rows=2, edges=4, slice=16, warps=1, chunk=8)
VECTORS = ("dot", "dot_norm", "gatv2", "shared")
# Gradients handed over or formed again, and with those of terms.
HANDS_OVER, RECOMPUTES = Wanted(hands_over=True), Wanted()
BOTH = pytest.mark.parametrize(
    "wanted", [HANDS_OVER, RECOMPUTES], ids=("time", "memory")
)
EVERY = pytest.mark.parametrize("score", VECTORS)
SHAPES = [row(f"no_{what}") for what in ("edges", "nodes", "sources", "destinations")]
SHAPES += [row(name) for name in ("isolated", "duplicates")]
SCALE = {"dot": 0.4, "dot_norm": 0.3, "gatv2": 0.2}


def tangled(device: torch.device) -> Graph:
    """Nodes 0 and 1 as hubs of rows and of columns; loops, duplicates, an empty row."""
    end = torch.randint(2, 8, (20,), generator=torch.Generator().manual_seed(1))
    pairs = [(0, 1), (1, 0), (2, 2), (2, 2), (3, 4), (3, 4), (0, 0), (1, 1), (5, 3)]
    hubs = [torch.stack([end, end * 0]), torch.stack([end * 0 + 1, end])]
    edge_index = torch.cat([*hubs, torch.tensor(pairs).t()], 1)
    order = torch.randperm(
        edge_index.size(1), generator=torch.Generator().manual_seed(2)
    )
    edge_index = edge_index[:, order].to(device)
    return Graph.from_edge_index(edge_index, num_src=9, num_dst=9)


def draw(
    problem: Row | None,
    score: str,
    heads: int,
    channels: int,
    width: int = 0,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    terms: bool = False,
) -> tuple[Graph, Operands, Tensor]:
    """A relation (`tangled` without a problem), operands, and a cotangent.

    A shared score is that of GATv2 with the sources' operand as their value.
    """
    graph = tangled(device)
    if problem is not None:
        graph = make_case(problem, torch.float32, device).graph()
    generator = torch.Generator().manual_seed(3)
    width = width or channels

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    value = random(graph.num_src, heads, channels)
    col = value if score == "shared" else random(graph.num_src, heads, width)
    loops = min(graph.num_src, graph.num_dst)
    operands = Operands(
        value,
        random(graph.num_dst, heads, width),
        col,
        random(graph.num_edges, heads) if terms else None,
        random(loops, heads) if terms else None,
        param=None if score == "dot" else random(heads, width),
    )
    return graph, operands, random(graph.num_dst, heads, channels)


def options_of(score: str, graph: Graph, *, loops: bool, **options: Any) -> Options:
    """The options of a call."""
    name = "gatv2" if score == "shared" else score
    num_loops = min(graph.num_src, graph.num_dst) if loops else 0
    options.setdefault("scale", SCALE[name])
    return Options(num_loops=num_loops, score=name, **options)


def run(
    graph: Graph,
    operands: Operands,
    grad: Tensor,
    options: Options,
    wanted: Wanted,
    schedule: Schedule = SCHEDULE,
) -> tuple[State, Gradients]:
    """Forward and backward by the implementations themselves."""
    value = operands.value
    problem = Problem(
        "edge_attention",
        graph.num_dst,
        graph.num_src,
        graph.num_edges,
        value.size(1) * value.size(2),
        value.dtype,
        value.dtype,
        torch.int32,
        value.device.type,
    )
    # Implementations do without P and p of themselves.
    forward = triton_attention.ATTENTION.run
    state = forward(problem, schedule, graph, operands, options, True)
    assert state.positive is None
    backward = triton_attention_backward.ATTENTION_BACKWARD.run
    found = backward(problem, schedule, graph, grad, operands, options, state, wanted)
    return state, found


def formula(
    graph: Graph, operands: Operands, options: Options, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The result by a row for each edge, and the leaves that it was computed from."""
    shared = operands.is_shared
    names = [n for n in Operands._fields if n not in ("mask", "seed")]
    leaves = {
        name: x.to(dtype).requires_grad_()
        for name in names
        if (x := getattr(operands, name)) is not None and not (shared and name == "col")
    }
    src, dst = graph.edge_index().long()
    place = torch.arange(src.numel(), device=src.device)
    live = torch.ones_like(src, dtype=torch.bool)
    if operands.mask is not None:
        live &= operands.mask
    loops = options.num_loops
    if loops:
        live &= src != dst
    loop = torch.arange(loops, device=src.device)
    src, dst = torch.cat([src[live], loop]), torch.cat([dst[live], loop])
    place = torch.cat([place[live], loop + graph.num_edges])
    value, x_row = leaves["value"], leaves["row"][dst]
    x_col = (value if shared else leaves["col"])[src]
    if options.score == "dot":
        s = (x_row * x_col).sum(-1) * options.scale
    elif options.score == "dot_norm":
        r, c = (
            x / (x * x).sum(-1, keepdim=True).add(options.scale).sqrt()
            for x in (x_row, x_col)
        )
        s = (r * c * leaves["param"]).sum(-1)
    else:
        pre = torch.nn.functional.leaky_relu(x_row + x_col, options.scale)
        s = (pre * leaves["param"]).sum(-1)
    if "term" in leaves:
        loop_term = leaves.get("loop_term")
        if loop_term is None:
            loop_term = s.new_zeros(loops, s.size(1))
        s = s + torch.cat([leaves["term"], loop_term[:loops]])[place]
    weight = _softmax(s, dst, graph.num_dst)
    if operands.seed is not None:
        ids = graph.num_edges + loops
        keep = _philox.kept(operands.seed, ids, s.size(1), options.dropout)
        weight = weight * keep[place] * options.factor
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    out = out.index_add(0, dst, weight.unsqueeze(-1) * value[src])
    return out, list(leaves.items())


def _softmax(s: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    index = dst.unsqueeze(1).expand_as(s)
    top = s.new_full((num_dst, s.size(1)), -torch.inf)
    top = top.scatter_reduce(0, index, s.detach(), "amax")
    power = (s - top[dst]).exp()
    total = power.new_zeros(num_dst, s.size(1)).index_add(0, dst, power)
    return power / total[dst]


def check(
    graph: Graph,
    operands: Operands,
    grad: Tensor,
    options: Options,
    wanted: Wanted,
    schedule: Schedule = SCHEDULE,
    tolerance: float = 1e-5,
) -> Gradients:
    """Hold the result and all gradients to the formula in float64."""
    state, found = run(graph, operands, grad, options, wanted, schedule)
    out, leaves = formula(graph, operands, options, torch.float64)
    truth = torch.autograd.grad(
        out, [x for _, x in leaves], grad.double(), allow_unused=True
    )
    pairs = [("out", state.out, out)]
    for (name, leaf), want in zip(leaves, truth, strict=True):
        got = getattr(found, name)
        if name.endswith("term") and not getattr(wanted, name):
            assert got is None
            continue
        want = torch.zeros_like(leaf) if want is None else want
        pairs.append((name, got, want))
    finite = [float(want.detach().abs().max()) for _, _, want in pairs if want.numel()]
    scale = max([1.0, *finite])
    for name, got, want in pairs:
        assert got.shape == want.shape, name
        like = getattr(operands, {"out": "value"}.get(name, name))
        assert got.dtype == (like.dtype if like.dim() == 3 else torch.float32), name
        error = float((got - want.detach()).abs().max()) if got.numel() else 0.0
        assert error <= tolerance * scale, (name, error, scale)
    assert (found.col is None) == operands.is_shared
    assert (found.param is None) == (operands.param is None)
    return found
