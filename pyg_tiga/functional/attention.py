"""Attention over the edges of each destination."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.functional.arguments import check_scores, check_vectors
from pyg_tiga.functional.attention_arguments import (
    check_numbers,
    check_shape,
    check_terms,
    options_of,
)
from pyg_tiga.functional.relations import Relation, Size, graph_of, relation_for_rows
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.ops import (
    attention,
    attention_library,
    edge_attention,
    transformed,
    weights_library,
)
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.gat_attention import gat as run_gat
from pyg_tiga.ops.gat_layer import Weights
from pyg_tiga.ops.gat_layer import gat_layer as run_gat_layer
from pyg_tiga.ops.library import Handle


def additive_attention(
    relation: Relation,
    value: Tensor,  # [N_src, H, C]
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor,  # [N_dst, H]
    *,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [L, H]
    negative_slope: float = 0.2,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
    objective: str = "time",
) -> Tensor:
    r"""Average source values by a softmax of additive scores, as GAT does.

    .. math::
        \mathbf{y}_i = \sum_{e = (j \to i)} \mathrm{softmax}_i(s)_e \, \mathbf{v}_j,
        \qquad s_e = \mathrm{LeakyReLU}(\alpha^{src}_j + \alpha^{dst}_i + t_e)

    From `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_.

    Args:
        relation: Which source sends to which destination; see
            :mod:`pyg_tiga.functional`.
        value: Source values ``[N_src, H, C]``.
        alpha_src: Source part of the scores, ``[N_src, H]``.
        alpha_dst: Destination part of the scores, ``[N_dst, H]``.
        edge_term: Added to the scores of edges, ``[E, H]`` in the relation's own order.
        loop_term: Added to those of the implicit loops, ``[L, H]``.
        negative_slope: Slope of the LeakyReLU below 0, of any sign.
        self_loops: Give each of the first L = min(N_src, N_dst) nodes one loop, in
            place of those that are stored.
        dropout: Probability of dropping a weight; the others are scaled.
        seed: One int64 on the device, which with the edge's id and the head decides
            what is dropped. Drawn from the device's generator if absent.
        edge_mask: Which edges take part, ``[E]`` bool.
        size: ``(N_src, N_dst)`` of a plain ``edge_index``.
        flow: As in PyG, for a plain ``edge_index``.
        objective: ``"time"``, or ``"memory"``: keep less for the backward, which then
            walks the edges once more.

    Returns:
        ``[N_dst, H, C]``; rows without edges are 0.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    check_vectors(value=value)
    check_scores(alpha_src=alpha_src, alpha_dst=alpha_dst)
    ends = ("value", value.size(0)), ("alpha_dst", alpha_dst.size(0))
    related = relation_for_rows(relation, size, flow, *ends)
    options, seed = options_of(
        related, value, negative_slope, self_loops, dropout, seed, objective
    )
    _check(related, value, alpha_src, alpha_dst)
    terms = (edge_term, loop_term)
    check_terms(related, options, value, terms, edge_mask)
    inputs = Inputs(value, alpha_dst, alpha_src, None, *terms)
    call = Call(related, options, edge_mask, seed, objective)
    if isinstance(related, Handle):
        return attention_library.additive(call, inputs)
    if transformed.is_active(*inputs):
        return attention.by_reference(call, inputs)
    return edge_attention.attend(call, inputs, inputs.out_dtype())


def gat_attention(
    relation: Relation,
    x_src: Tensor,  # [N_src, H, C]
    x_dst: Tensor | None,  # [N_dst, H, C]
    att_src: Tensor,  # [H, C]
    att_dst: Tensor | None,  # [H, C]
    *,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [L, H]
    negative_slope: float = 0.2,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
    objective: str = "time",
) -> Tensor:
    r"""GAT's attention: :func:`additive_attention` with the scores of projected nodes.

    .. math::
        \alpha^{src}_j = \langle \mathbf{x}_j, \mathbf{a}_{src} \rangle, \qquad
        \alpha^{dst}_i = \langle \mathbf{x}_i, \mathbf{a}_{dst} \rangle

    Args:
        relation: See :mod:`pyg_tiga.functional`.
        x_src: Projected sources ``[N_src, H, C]``, which are the values.
        x_dst: Projected destinations ``[N_dst, H, C]``; may be the same tensor. Without
            them, and ``att_dst``, their part of the scores is 0.
        att_src: ``[H, C]``.
        att_dst: ``[H, C]``; None if and only if ``x_dst`` is.
        edge_term: As in :func:`additive_attention`, and so are all that follow.
        loop_term: Likewise.
        negative_slope: Likewise.
        self_loops: Likewise.
        dropout: Likewise.
        seed: Likewise.
        edge_mask: Likewise.
        size: Likewise.
        flow: Likewise.
        objective: Likewise.

    Returns:
        ``[N_dst, H, C]``.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    check_vectors(x_src=x_src)
    if x_dst is not None:
        check_vectors(x_dst=x_dst)
    src = ("x_src", x_src.size(0))
    dst = src if x_dst is None else ("x_dst", x_dst.size(0))
    related = relation_for_rows(relation, size, flow, src, dst)
    options, seed = options_of(
        related, x_src, negative_slope, self_loops, dropout, seed, objective
    )
    terms = (edge_term, loop_term)
    check_terms(related, options, x_src, terms, edge_mask)
    _check_gat(related, x_src, x_dst, att_src, att_dst)
    nodes = (x_src, x_dst, att_src, att_dst)
    out_dtype = reference.promoted(*nodes, *terms)
    is_compiled = isinstance(related, Handle)
    call = Call(related, options, edge_mask, seed, objective)
    if is_compiled or transformed.is_active(*nodes, *terms):
        inputs = attention.gat_inputs(call, nodes, terms)
        if not is_compiled:
            return attention.by_reference(call, inputs)
        return attention_library.additive(call, inputs)
    return run_gat(call, *nodes, *terms, out_dtype)


def gat_layer(
    relation: Relation,
    x: Tensor,  # [N, F_in]
    weights: Weights,
    *,
    negative_slope: float,
    self_loops: bool,
    size: tuple[int, int],
    flow: str,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
) -> Tensor | None:
    """GAT's layer in one step, for layers that checked their input.

    Eager calls only, of a relation of nodes with themselves.

    Returns:
        ``[N, H * C]``; None where the steps have to run one by one.
    """
    num_nodes = x.size(0)
    graph = graph_of(relation, num_nodes, size, flow)
    if not num_nodes == graph.num_dst == graph.num_src or x.device != graph.device:
        return None
    num_loops = num_nodes if self_loops else 0
    seed = seed if dropout > 0 else None
    options = Options(float(negative_slope), num_loops, float(dropout))
    return run_gat_layer(graph, x, weights, options, seed)


def additive_attention_weights(
    relation: Relation,
    alpha_src: Tensor,  # [N_src, H]
    alpha_dst: Tensor,  # [N_dst, H]
    *,
    edge_term: Tensor | None = None,  # [E, H]
    loop_term: Tensor | None = None,  # [L, H]
    negative_slope: float = 0.2,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`additive_attention` after dropout, differentiable.

    Arguments are those of :func:`additive_attention`; the same seed drops the same
    weights.

    Returns:
        ``[E, H]`` in the relation's own edge order, 0 for edges that take no part, and
        ``[L, H]`` of the implicit loops.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    check_scores(alpha_src=alpha_src, alpha_dst=alpha_dst)
    ends = ("alpha_src", alpha_src.size(0)), ("alpha_dst", alpha_dst.size(0))
    related = relation_for_rows(relation, size, flow, *ends)
    options, seed = options_of(
        related, alpha_src, negative_slope, self_loops, dropout, seed, "time"
    )
    heads = alpha_src.size(1)
    check_shape("alpha_src", alpha_src, (related.num_src, heads), alpha_src)
    check_shape("alpha_dst", alpha_dst, (related.num_dst, heads), alpha_src)
    check_terms(related, options, alpha_src, (edge_term, loop_term), edge_mask)
    given = (alpha_src, alpha_dst, edge_term, loop_term)
    run = weights_library.weights_of
    if isinstance(related, Handle):
        run = weights_library.attention_weights
    return run(related, given, edge_mask, seed, options)


def _check(related: Any, value: Tensor, alpha_src: Tensor, alpha_dst: Tensor) -> None:
    if value.dim() != 3 or value.size(0) != related.num_src:
        raise ValueError(
            f"'value' must have shape [num_src, H, C] with num_src = "
            f"{related.num_src} (got {list(value.shape)})"
        )
    heads = value.size(1)
    for name, alpha, rows in (
        ("alpha_src", alpha_src, related.num_src),
        ("alpha_dst", alpha_dst, related.num_dst),
    ):
        check_shape(name, alpha, (rows, heads), value)


def _check_gat(
    related: Any,
    x_src: Tensor,
    x_dst: Tensor | None,
    att_src: Tensor,
    att_dst: Tensor | None,
) -> None:
    """Check nodes and the vectors of their scores, which kernels read unchecked."""
    shape = tuple(x_src.shape[1:])
    check_shape("x_src", x_src, (related.num_src, *shape), x_src)
    check_numbers("att_src", att_src, shape, x_src)
    if (x_dst is None) != (att_dst is None):
        missing = "x_dst" if x_dst is None else "att_dst"
        raise ValueError(
            f"'x_dst' and 'att_dst' must be given together (got no '{missing}')"
        )
    if x_dst is not None:
        check_shape("x_dst", x_dst, (related.num_dst, *shape), x_src)
        check_numbers("att_dst", att_dst, shape, x_src)
