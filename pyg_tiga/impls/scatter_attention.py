"""Edge attention that runs anywhere: one row per edge, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga import _philox
from pyg_tiga import reference_attention as reference
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    Options,
    State,
    Wanted,
)
from pyg_tiga.impls.base import Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph


def kept(
    graph: Graph, seed: Tensor | None, heads: int, options: Options
) -> Tensor | None:
    """Which weights dropout keeps, ``[E + num_loops, H]``; None without dropout."""
    if seed is None or options.dropout == 0:
        return None
    ids = graph.num_edges + options.num_loops
    return _philox.kept(seed, ids, heads, options.dropout)


def _forward(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    out, m, total = reference.additive_attention(
        graph,
        operands.value,
        operands.col,
        operands.row,
        edge_term=operands.term,
        loop_term=operands.loop_term,
        negative_slope=options.scale,
        num_loops=options.num_loops,
        edge_mask=operands.mask,
        keep=kept(graph, operands.seed, operands.value.size(1), options),
        dropout=options.dropout,
    )
    return State(out.to(problem.out_dtype), m, total, None, None)


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
    """The formulas of the kernels, with a row for every edge."""
    edges = reference.edges_of(graph, options.num_loops, operands.mask)
    terms = edges.pick(operands.term, operands.loop_term)
    pre = reference.pre_activations(edges, operands.col, operands.row, terms)  # [K, H]
    real = pre.dtype
    scores = torch.where(pre > 0, pre, pre * options.scale)
    weight = (scores - state.m.to(real).index_select(0, edges.dst)).exp()
    weight = weight / state.total.to(real).index_select(0, edges.dst)
    keep = kept(graph, operands.seed, operands.value.size(1), options)
    dropped = weight
    if keep is not None:
        factor = keep.index_select(0, edges.place) * options.factor
        dropped = weight * factor
    real = torch.promote_types(real, operands.value.dtype)
    grad = grad.to(real)
    delta = (grad * state.out.to(real)).sum(-1)  # [N_dst, H]
    gathered = grad.index_select(0, edges.dst)  # [K, H, C]
    value = operands.value.to(real).index_select(0, edges.src)
    # In place: rows of features for every edge are what this takes its time with.
    product = value.mul_(gathered).sum(-1)  # [K, H]
    if keep is not None:
        product = product * factor
    grad_pre = weight * (product - delta.index_select(0, edges.dst))
    grad_pre = torch.where(pre > 0, grad_pre, grad_pre * options.scale)
    messages = gathered.mul_(dropped.unsqueeze(-1))  # [K, H, C]
    grad_value = _sum(messages, edges.src, graph.num_src)
    every = grad_pre.new_zeros(graph.num_edges + options.num_loops, grad_pre.size(1))
    every = every.index_copy(0, edges.place, grad_pre)
    return Gradients(
        grad_value.to(operands.value.dtype),
        _sum(grad_pre, edges.dst, graph.num_dst),
        _sum(grad_pre, edges.src, graph.num_src),
        every[: graph.num_edges].clone() if wanted.term else None,
        every[graph.num_edges :].clone() if wanted.loop_term else None,
    )


def _sum(value: Tensor, index: Tensor, size: int) -> Tensor:
    return value.new_zeros(size, *value.shape[1:]).index_add_(0, index, value)


ATTENTION = Implementation("scatter", "scatter", "edge_attention", Limits(), _forward)
ATTENTION_BACKWARD = Implementation(
    "scatter", "scatter", "edge_attention_backward", Limits(), _backward
)
