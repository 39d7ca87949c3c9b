r"""Edge attention on the CPU, head by head: embedding bags over the grouped edges.

The weights of one head are one vector over the edges, and its values a table that stays
in cache, so that PyTorch's weighted embedding bag is the sum over neighbours. No tensor
has a row of features, nor even of heads, for every edge. Gradients of scores come from
sums over the edges with positive pre-activation,

.. math::
    \sum_e w_e \sigma_e (\langle g_i, v_j \rangle - \delta_i)
    = \langle v_j, S_j \rangle - s_j, \qquad
    S_j = \sum_e w_e \sigma_e g_i, \quad s_j = \sum_e w_e \sigma_e \delta_i,

with the slope :math:`\sigma_e` at edge e, and not from a product for every edge: that
one is formed only where terms of edges ask for their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga.impls.attention_bags import (
    Edges,
    Heads,
    Pair,
    Summand,
    by_head,
    by_node,
    edges_of,
    heads_of,
)
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph

# Edges times channels of a head from which it is worth calls of its own.
FEWEST = 1 << 16


def _accumulator(problem: Problem) -> torch.dtype:
    """The dtype in which a problem is computed."""
    is_double = torch.float64 in (problem.dtype, problem.out_dtype)
    return torch.float64 if is_double else torch.float32


def _weights(
    edges: Edges, heads: Heads, m: Tensor, slope: float, signs: bool = True
) -> Iterator[tuple[Pair, Pair | None]]:
    """Of each head: exp(s - m), and where the pre-activation is positive."""
    for head in range(m.size(0)):
        pre = heads.pre_activations(head, edges)
        above = pre.is_positive() if signs else None
        yield pre.rectified(slope).powers(m[head], edges.dst), above


def _forward(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    graph.validate()
    edges = edges_of(graph, operands, options, by_dst=True)
    real = _accumulator(problem)
    heads = heads_of(graph, operands, options, real)
    empty = _empty_rows(edges, options)
    m = _largest_scores(edges, heads, options, empty)  # [H, N_dst]
    total = torch.empty_like(m)
    value = operands.value.to(real)
    out = value.new_empty(graph.num_dst, *value.shape[1:])
    plus = torch.empty_like(out) if positive else None
    plus_sum = torch.empty_like(m) if positive else None
    ones = value.new_ones(value.size(0))
    pairs = _weights(edges, heads, m, options.scale, positive)
    for head, (weight, above) in enumerate(pairs):
        summand = Summand.of(value[:, head], ones, heads.keeps(head, edges))
        sums, count = summand.sum(edges, weight)
        total[head] = count.masked_fill_(empty, 1.0)
        rate = total[head].reciprocal()
        factor = (rate * options.factor).unsqueeze(1)
        torch.mul(sums, factor, out=out[:, head])
        if above is not None:
            sums, count = summand.sum(edges, weight.times(above))
            torch.mul(sums, factor, out=plus[:, head])
            torch.mul(count, rate, out=plus_sum[head])
    dtype = problem.out_dtype
    return State(
        out.to(dtype),
        by_node(m),
        by_node(total),
        None if plus is None else plus.to(dtype),
        None if plus_sum is None else by_node(plus_sum),
    )


def _empty_rows(edges: Edges, options: Options) -> Tensor:
    """Destinations without edges and without a loop, ``[N_dst]`` bool."""
    empty = edges.lonely()
    empty[: options.num_loops] = False
    return empty


def _largest_scores(
    edges: Edges, heads: Heads, options: Options, empty: Tensor
) -> Tensor:
    """Largest score of each row, ``[H, N_dst]``; 0 without edges."""
    rises = options.scale >= 0 and heads.term is None and heads.loop_term is None
    if rises:
        m = _largest_by_nodes(edges, heads, options)
    else:
        m = torch.stack(
            [
                _largest_by_edges(edges, heads.pre_activations(head, edges), options)
                for head in range(heads.row.size(0))
            ]
        )
    return m.masked_fill_(empty, 0.0)


def _largest_by_nodes(edges: Edges, heads: Heads, options: Options) -> Tensor:
    """Scores rise with the source's part: the largest part gives the largest score."""
    part = edges.largest_neighbour(heads.col.t().contiguous())
    part = part.t().contiguous()  # [H, N_dst]
    loops = part[:, : heads.num_loops]
    torch.maximum(loops, heads.col[:, : heads.num_loops], out=loops)
    return F.leaky_relu(part.add_(heads.row), options.scale, inplace=True)


def _largest_by_edges(edges: Edges, pre: Pair, options: Options) -> Tensor:
    score = pre.rectified(options.scale)
    m = edges.largest(score.edge)  # [N_dst]
    loops = m[: score.loop.numel()]
    torch.maximum(loops, score.loop, out=loops)
    return m


def _backward(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    grad: Tensor,  # [N_dst, H, C]
    operands: Operands,
    options: Options,
    state: State,
    wanted: Wanted,
) -> Gradients:
    graph.validate()
    real = _accumulator(problem)
    heads = heads_of(graph, operands, options, real)
    value = operands.value.to(real)
    call = _Call(graph, operands, options, heads, value, by_head(state.m, real))
    grad, out = grad.to(real), state.out.to(real)
    delta = (grad * out).sum(-1)  # [N_dst, H]
    rate = state.total.to(real).reciprocal()
    scaled = grad * (rate * options.factor).unsqueeze(-1)
    delta_scaled = by_head(delta * rate, real)
    grad_value, col = _by_source(call, scaled, delta_scaled)
    term, loop_term = None, None
    if wanted.term or wanted.loop_term:
        row, term, loop_term = _by_edge(call, scaled, delta_scaled)
    else:
        plus, plus_sum = state.positive, state.positive_sum
        if plus is None or plus_sum is None:
            plus, plus_sum = _positive_sums(call, rate)
        row = (grad * plus).sum(-1).sub_(delta * plus_sum).mul_(1.0 - options.scale)
    return Gradients(
        grad_value.to(operands.value.dtype),
        row,
        col,
        term if wanted.term else None,
        loop_term if wanted.loop_term else None,
    )


class _Call(NamedTuple):
    """What every pass of a backward reads."""

    graph: Graph
    operands: Operands
    options: Options
    heads: Heads
    value: Tensor  # [N_src, H, C]
    m: Tensor  # [H, N_dst]

    def edges(self, by_dst: bool) -> Edges:
        return edges_of(self.graph, self.operands, self.options, by_dst)

    def weights(self, edges: Edges) -> Iterator[tuple[Pair, Pair | None]]:
        return _weights(edges, self.heads, self.m, self.options.scale)


def _by_source(
    call: _Call,
    grad: Tensor,  # [N_dst, H, C]
    delta: Tensor,  # [H, N_dst]
) -> tuple[Tensor, Tensor]:
    """Gradients of values ``[N_src, H, C]`` and of the sources' scores."""
    edges, slope = call.edges(by_dst=False), call.options.scale
    value = call.value
    found = torch.empty_like(value, memory_format=torch.contiguous_format)
    col = torch.empty_like(call.heads.col)
    for head, (weight, above) in enumerate(call.weights(edges)):
        keeps = call.heads.keeps(head, edges)
        summand = Summand.of(grad[:, head], delta[head], keeps)
        every, every_delta = summand.sum(edges, weight)
        found[:, head] = every
        plus, plus_delta = summand.sum(edges, weight.times(above))
        sloped = torch.lerp(plus, every, slope)
        product = (sloped * value[:, head]).sum(-1)
        torch.sub(product, torch.lerp(plus_delta, every_delta, slope), out=col[head])
    return found, by_node(col)


def _positive_sums(call: _Call, rate: Tensor) -> tuple[Tensor, Tensor]:
    """P and p of `State`, which the forward did not keep."""
    edges, value = call.edges(by_dst=True), call.value
    plus = value.new_empty(edges.num_rows, *value.shape[1:])
    plus_sum = torch.empty_like(call.m)
    ones = value.new_ones(value.size(0))
    for head, (weight, above) in enumerate(call.weights(edges)):
        keeps = call.heads.keeps(head, edges)
        summand = Summand.of(value[:, head], ones, keeps)
        plus[:, head], plus_sum[head] = summand.sum(edges, weight.times(above))
    plus.mul_((rate * call.options.factor).unsqueeze(-1))
    return plus, by_node(plus_sum).mul_(rate)


def _by_edge(
    call: _Call,
    grad: Tensor,  # [N_dst, H, C]
    delta: Tensor,  # [H, N_dst]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the destinations' scores, of the terms and of the loops' terms."""
    edges, heads = call.edges(by_dst=True), call.heads
    value, slope = call.value, call.options.scale
    row = torch.empty_like(delta)
    term = delta.new_zeros(delta.size(0), call.graph.num_edges)
    loop_term = delta.new_empty(delta.size(0), heads.num_loops)
    ones = value.new_ones(value.size(0), 1)
    for head, (weight, above) in enumerate(call.weights(edges)):
        product = _products(edges, grad[:, head], value[:, head], heads.num_loops)
        keeps = heads.keeps(head, edges)
        if keeps is not None:
            product = product.times(keeps)
        product = product.minus(delta[head], edges.dst)
        found = product.times(weight).sloped(above, slope)
        row[head] = edges.sum(ones, found).squeeze(1)
        edges.to_caller(found.edge, out=term[head])
        loop_term[head] = found.loop
    return by_node(row), by_node(term), by_node(loop_term)


def _products(edges: Edges, grad: Tensor, value: Tensor, num_loops: int) -> Pair:
    """<g_i, v_j> of one head."""
    loop = (grad[:num_loops] * value[:num_loops]).sum(-1)
    return Pair(edges.products(grad, value), loop)


def _unfit(problem: Problem) -> list[str]:
    reasons = []
    per_head = problem.num_edges * (problem.features // max(problem.heads, 1))
    if per_head < FEWEST:
        reasons.append(
            f"edges times channels are {per_head}, required at least {FEWEST}"
        )
    if problem.form != "additive":
        reasons.append(f"form is {problem.form!r}, required 'additive'")
    return reasons


_LIMITS = Limits(devices=("cpu",), dtypes=(*FLOATS, torch.float64))
ATTENTION = Implementation(
    "embedding_bag", "vendor", "edge_attention", _LIMITS, _forward, _unfit
)
ATTENTION_BACKWARD = Implementation(
    "embedding_bag", "vendor", "edge_attention_backward", _LIMITS, _backward, _unfit
)
