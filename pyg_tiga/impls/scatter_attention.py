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
from pyg_tiga.impls.scatter_scores import Parts, scores_of, sum_to
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


def by_reference(
    graph: Graph, operands: Operands, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain formula, which can be differentiated and transformed at will.

    Returns:
        The result, and largest scores and sums of the softmax of each row.
    """
    value, row, col, term, loop_term, mask, seed, param = operands[:8]
    shared = {
        "edge_term": term,
        "loop_term": loop_term,
        "num_loops": options.num_loops,
        "edge_mask": mask,
        "keep": kept(graph, seed, value.size(1), options),
        "dropout": options.dropout,
    }
    if options.score == "additive":
        slope = options.scale
        return reference.additive_attention(
            graph, value, col, row, negative_slope=slope, **shared
        )
    return reference.vector_attention(
        graph,
        value,
        row,
        col,
        param,
        scale=options.scale,
        normed=options.score == "dot_norm",
        **shared,
    )


def weights(
    graph: Graph, operands: Operands, options: Options
) -> tuple[Tensor, Tensor]:
    """Weights of edges ``[E, H]`` and loops ``[L, H]`` of scores of vectors.

    By the plain formula, which can be differentiated and transformed at will.
    """
    return reference.vector_attention_weights(
        graph,
        operands.row,
        operands.col,
        operands.param,
        scale=options.scale,
        normed=options.score == "dot_norm",
        edge_term=operands.term,
        loop_term=operands.loop_term,
        num_loops=options.num_loops,
        edge_mask=operands.mask,
        keep=kept(graph, operands.seed, operands.row.size(1), options),
        dropout=options.dropout,
    )


def _forward(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    operands: Operands,
    options: Options,
    positive: bool,
) -> State:
    out, m, total = by_reference(graph, operands, options)
    state = State(out.to(problem.out_dtype), m, total, None, None)
    if not options.gives_weights:
        return state
    # In the accumulator, as kernels leave them.
    row, col = (x.to(reference.widened(x.dtype)) for x in operands[1:3])
    operands = operands._replace(row=row, col=col)
    return state._replace(weights=weights(graph, operands, options)[0])


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
    parts = Parts(operands.row, operands.col, operands.param, terms)
    scores, pullback = scores_of(edges, parts, options)  # [K, H]
    real = scores.dtype
    weight = (scores - state.m.to(real).index_select(0, edges.dst)).exp()
    weight = weight / state.total.to(real).index_select(0, edges.dst)
    keep = kept(graph, operands.seed, operands.value.size(1), options)
    dropped = weight
    if keep is not None:
        factor = keep.index_select(0, edges.place).to(real) * options.factor
        dropped = weight * factor
    real = torch.promote_types(real, operands.value.dtype)
    grad = grad.to(real)
    delta = (grad * state.out.to(real)).sum(-1)  # [N_dst, H]
    share = edges.pick(operands.share, None)  # [K, H]
    if share is not None and state.weights is not None:
        delta = delta + edges.sum_to_dst(dropped * share.to(real))
    gathered = grad.index_select(0, edges.dst)  # [K, H, C]
    value = operands.value.to(real).index_select(0, edges.src)
    # In place: rows of features for every edge are what this takes its time with.
    product = value.mul_(gathered).sum(-1)  # [K, H]
    if share is not None:
        product = product + share
    if keep is not None:
        product = product * factor
    found = pullback(weight * (product - delta.index_select(0, edges.dst)))
    messages = gathered.mul_(dropped.unsqueeze(-1))  # [K, H, C]
    grad_value = sum_to(messages, edges.src, graph.num_src)
    is_value = operands.col is operands.value
    if is_value:
        grad_value += found.col
    every = found.terms.new_zeros(
        graph.num_edges + options.num_loops, found.terms.size(1)
    )
    every = every.index_copy(0, edges.place, found.terms)
    return Gradients(
        grad_value.to(operands.value.dtype),
        _as_operand(found.row, operands.row),
        None if is_value else _as_operand(found.col, operands.col),
        every[: graph.num_edges].clone() if wanted.term else None,
        every[graph.num_edges :].clone() if wanted.loop_term else None,
        found.param,
    )


def _as_operand(grad: Tensor, operand: Tensor) -> Tensor:
    """Gradients of vectors in their dtype; those of scores stay in the accumulator."""
    return grad.to(operand.dtype) if operand.dim() == 3 else grad


ATTENTION = Implementation("scatter", "scatter", "edge_attention", Limits(), _forward)
ATTENTION_BACKWARD = Implementation(
    "scatter", "scatter", "edge_attention_backward", Limits(), _backward
)
