"""The weights of edge attention: the compiled road, as `torch.library` ops.

They are the reference's, on both roads: what they cost is what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.impls.scatter_attention import kept
from pyg_tiga.impls.scatter_scores import Parts, scores_of
from pyg_tiga.ops.library import Handle, define
from pyg_tiga.relation.graph import Graph

Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def weights_of(
    graph: Graph,
    given: Given,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Weights of edges ``[E, H]`` and loops ``[L, H]``, differentiable.

    Args:
        graph: The relation.
        given: Source and destination scores, edge and loop terms.
        mask: Which edges take part.
        seed: Of dropout.
        options: Of the attention.
    """
    alpha_src, alpha_dst, term, loop_term = given
    return reference.attention_weights(
        graph,
        alpha_src,
        alpha_dst,
        edge_term=term,
        loop_term=loop_term,
        negative_slope=options.scale,
        num_loops=options.num_loops,
        edge_mask=mask,
        keep=kept(graph, seed, alpha_src.size(1), options),
        dropout=options.dropout,
    )


def _forward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    slope: float,
    num_loops: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    given = (alpha_src, alpha_dst, term, loop_term)
    options = Options(slope, num_loops, dropout)
    weights, loops = weights_of(graph, given, mask, seed, options)
    return weights.clone(), loops.clone()


def _backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    grad_loops: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    term: Tensor | None,
    loop_term: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    slope: float,
    num_loops: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    options = Options(slope, num_loops, dropout)
    operands = (alpha_dst, alpha_src, None, term, loop_term)
    row, col, _, *terms = gradients_of(
        graph, operands, mask, seed, options, (grad, grad_loops)
    )
    return col, row, *terms


def gradients_of(
    graph: Graph,
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
    grads: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Gradients of weights of any score, each in its operand's dtype.

    Args:
        graph: The relation.
        operands: Of destinations and sources, the score's parameter, edge and loop
            terms.
        mask: Which edges take part.
        seed: Of dropout.
        options: Of the attention.
        grads: Gradients of the weights ``[E, H]`` and of those of loops ``[L, H]``.

    Returns:
        One for each operand, of size 0 where there is none.
    """
    row, col, param, *given_terms = operands
    edges = reference.edges_of(graph, options.num_loops, mask)
    parts = Parts(row, col, param, edges.pick(*given_terms))
    scores, pullback = scores_of(edges, parts, options)  # [K, H]
    weight, _, _ = reference.softmax(edges, scores)
    grad = edges.pick(*grads).to(scores.dtype)  # [K, H]
    keep = kept(graph, seed, row.size(1), options)
    if keep is not None:
        grad = grad * keep.index_select(0, edges.place) * options.factor
    mean = edges.sum_to_dst(weight * grad).index_select(0, edges.dst)
    found = pullback(weight * (grad - mean))
    every = found.terms.new_zeros(graph.num_edges + options.num_loops, row.size(1))
    every = every.index_copy(0, edges.place, found.terms)
    terms = every.tensor_split([graph.num_edges])
    # Copies: parts of one tensor would be aliases.
    return tuple(
        row.new_empty(0) if x is None else value.to(x.dtype, copy=True)
        for x, value in zip(
            operands, (found.row, found.col, found.param, *terms), strict=True
        )
    )


forward_op = define("attention_weights", _forward)
backward_op = define("attention_weights_backward", _backward)


@forward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    alpha_src, num_loops = rest[0], rest[7]
    heads, dtype = alpha_src.size(1), reference.promoted(*rest[:4])
    shapes = ((index[-1].size(-1), heads), (num_loops, heads))
    return tuple(alpha_src.new_empty(shape, dtype=dtype) for shape in shapes)


@backward_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    grad_loops: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return tuple(
        rest[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in rest[:4]
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    index, *ctx.relation = inputs[:4]
    ctx.num_index, ctx.numbers = len(index), inputs[10:]
    ctx.save_for_backward(*index, *inputs[4:10])


def _vjp(ctx: Any, grad: Tensor, grad_loops: Tensor) -> tuple[Any, ...]:
    # Read once: a checkpoint forms them again for it.
    saved = ctx.saved_tensors
    index, tensors = list(saved[: ctx.num_index]), saved[ctx.num_index :]
    found = backward_op(index, *ctx.relation, grad, grad_loops, *tensors, *ctx.numbers)
    found = [
        None if x is None else value for x, value in zip(tensors, found, strict=False)
    ]
    return ([None] * ctx.num_index, None, None, None, *found, *[None] * 5)


forward_op.register_autograd(_vjp, setup_context=_setup)


def attention_weights(
    relation: Handle,
    given: Given,
    mask: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """:func:`weights_of` as one node of a compiled graph."""
    numbers = (options.scale, options.num_loops, options.dropout)
    return forward_op(*relation.args(), *given, mask, seed, *numbers)
