"""Attention over the edges of each destination, with scores of two vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.functional.arguments import check_dense, check_vectors
from pyg_tiga.functional.attention_arguments import (
    check_numbers,
    check_shape,
    check_terms,
    options_of,
)
from pyg_tiga.functional.edge_features import features_of
from pyg_tiga.functional.qk_norm import check_unprojected, normalised
from pyg_tiga.functional.relations import Relation, Size, relation_for_rows
from pyg_tiga.ops import (
    attention,
    edge_attention,
    feature_attention,
    transformed,
    vector_library,
)
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.library import Handle


def graph_attention(
    query: Tensor,  # [N_dst, H, K]
    key: Tensor,  # [N_src, H_kv, K]
    value: Tensor,  # [N_src, H_kv, C]
    relation: Relation,
    *,
    edge_bias: Tensor | None = None,  # [E, H]
    loop_bias: Tensor | None = None,  # [L, H]
    edge_attr: Tensor | None = None,  # [E, D]
    edge_proj: Tensor | None = None,  # [H, K, D]
    qk_norm: bool | Tensor = False,  # [K] or [H, K]
    scale: float | None = None,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
    objective: str = "time",
) -> Tensor:
    r"""Average source values by a softmax of dot products, where the mask is a graph.

    .. math::
        \mathbf{y}_i = \sum_{e = (j \to i)} \mathrm{softmax}_i(s)_e \, \mathbf{v}_j,
        \qquad s_e = \alpha \langle \mathbf{q}_i, \mathbf{k}_j \rangle + b_e

    With features of edges, :math:`\mathbf{P} \mathbf{e}` is added to key and value of
    each edge. With `qk_norm`, queries and keys are divided by their root mean squares,

    .. math::
        s_e = \alpha \sum_k p_k
        \frac{q_{ik}}{\sqrt{\overline{\mathbf{q}_i^2} + 10^{-6}}}
        \frac{k_{jk}}{\sqrt{\overline{\mathbf{k}_j^2} + 10^{-6}}} + b_e

    From `"Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification" <https://arxiv.org/abs/2009.03509>`_.

    Args:
        query: Vectors of the destinations, ``[N_dst, H, K]``.
        key: Vectors of the sources, ``[N_src, H_kv, K]``. H is a multiple of H_kv, and
            head h reads group ``h // (H // H_kv)``; keys and values of fewer heads are
            expanded to H heads, which costs memory of N_src H (K + C).
        value: Source values, ``[N_src, H_kv, C]``.
        relation: Which source sends to which destination; see
            :mod:`pyg_tiga.functional`.
        edge_bias: Added to the scores of edges, ``[E, H]`` in the relation's own order.
        loop_bias: Added to those of the implicit loops, ``[L, H]``.
        edge_attr: Features of the edges, ``[E, D]``; implicit loops have none.
        edge_proj: What projects them, ``[H, K, D]``, with values of K channels. There
            is no tensor of E H K, but there are some of E H.
        qk_norm: Normalise queries and keys, each head for itself, where they are read:
            their normalised copies are never written. True, or the gains p of both
            norms, multiplied, ``[K]`` or ``[H, K]``, which are differentiated like
            other operands. Not together with `edge_attr` and `edge_proj`.
        scale: Factor of the dot products; ``K ** -0.5`` if absent.
        self_loops: Give each of the first L = min(N_src, N_dst) nodes one loop, in
            place of those that are stored.
        dropout: Probability of dropping a weight; the others are scaled.
        seed: One int64 on the device, which with the edge's id and the head decides
            what is dropped. Drawn from the device's generator if absent.
        edge_mask: Which edges take part, ``[E]`` bool.
        size: ``(N_src, N_dst)`` of a plain ``edge_index``.
        flow: As in PyG, for a plain ``edge_index``.
        objective: ``"time"``, or ``"memory"``: the backward keeps nothing for every
            edge, and walks the edges once more.

    Returns:
        ``[N_dst, H, C]`` in the dtype to which all that is given promotes; rows without
        edges are 0.

    Raises:
        ValueError: A shape, size, dtype, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    given = _Given(
        edge_bias, loop_bias, self_loops, dropout, seed, edge_mask, size, flow
    )
    check_vectors(query=query, key=key, value=value)
    call = _call(given, relation, query, key, "dot", _scale(scale, query), objective)
    num_src = call.graph.num_src
    _check_heads(call, query, key)
    check_shape("value", value, (num_src, key.size(1), value.size(2)), query)
    heads = query.size(1)
    inputs = Inputs(
        _expanded(value, heads),
        query,
        _expanded(key, heads),
        None,
        edge_bias,
        loop_bias,
    )
    check_unprojected(qk_norm, edge_attr=edge_attr, edge_proj=edge_proj)
    if qk_norm is not False:
        return _attend(*normalised(call, inputs, qk_norm))
    features = features_of(call, query, edge_attr, edge_proj)
    if features is None:
        return _attend(call, inputs)
    if value.size(2) != query.size(2):
        raise ValueError(
            f"'value' must have the {query.size(2)} channels of 'query' where there "
            f"are 'edge_attr' (got {value.size(2)})"
        )
    return feature_attention.attend(call, inputs, features)


def graph_attention_weights(
    query: Tensor,  # [N_dst, H, K]
    key: Tensor,  # [N_src, H_kv, K]
    relation: Relation,
    *,
    edge_bias: Tensor | None = None,  # [E, H]
    loop_bias: Tensor | None = None,  # [L, H]
    edge_attr: Tensor | None = None,  # [E, D]
    edge_proj: Tensor | None = None,  # [H, K, D]
    qk_norm: bool | Tensor = False,  # [K] or [H, K]
    scale: float | None = None,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`graph_attention` after dropout, differentiable.

    Arguments are those of :func:`graph_attention`; the same seed drops the same
    weights.

    Returns:
        ``[E, H]`` in the relation's own edge order, 0 for edges that take no part, and
        ``[L, H]`` of the implicit loops.

    Raises:
        ValueError: A shape, size, dtype, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    given = _Given(
        edge_bias, loop_bias, self_loops, dropout, seed, edge_mask, size, flow
    )
    check_vectors(query=query, key=key)
    call = _call(given, relation, query, key, "dot", _scale(scale, query), "time")
    _check_heads(call, query, key)
    key = _expanded(key, query.size(1))
    inputs = Inputs(key, query, None, None, edge_bias, loop_bias)
    check_unprojected(qk_norm, edge_attr=edge_attr, edge_proj=edge_proj)
    if qk_norm is not False:
        return _weights(*normalised(call, inputs, qk_norm))
    features = features_of(call, query, edge_attr, edge_proj)
    if features is None:
        return _weights(call, inputs)
    dtype = reference.promoted(*inputs, *features)
    return _weights(call, feature_attention.with_terms(call, inputs, features), dtype)


def gatv2_attention(
    relation: Relation,
    x_src: Tensor,  # [N_src, H, C]
    x_dst: Tensor,  # [N_dst, H, C]
    att: Tensor,  # [H, C]
    *,
    edge_bias: Tensor | None = None,  # [E, H]
    loop_bias: Tensor | None = None,  # [L, H]
    negative_slope: float = 0.2,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
    objective: str = "time",
) -> Tensor:
    r"""Average projected sources by a softmax of GATv2's scores.

    .. math::
        \mathbf{y}_i = \sum_{e = (j \to i)} \mathrm{softmax}_i(s)_e \, \mathbf{x}_j,
        \qquad s_e = \langle \mathbf{a}, \mathrm{LeakyReLU}(\mathbf{x}^{dst}_i +
        \mathbf{x}^{src}_j) \rangle + b_e

    From `"How Attentive are Graph Attention Networks?"
    <https://arxiv.org/abs/2105.14491>`_.

    Args:
        relation: See :mod:`pyg_tiga.functional`.
        x_src: Projected sources ``[N_src, H, C]``, which are the values.
        x_dst: Projected destinations ``[N_dst, H, C]``; may be the same tensor.
        att: ``[H, C]``.
        edge_bias: As in :func:`graph_attention`, and so are all that follow.
        loop_bias: Likewise.
        negative_slope: Slope of the LeakyReLU below 0, of any sign, and its derivative
            at 0.
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
        ValueError: A shape, size, dtype, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    given = _Given(
        edge_bias, loop_bias, self_loops, dropout, seed, edge_mask, size, flow
    )
    check_vectors(x_src=x_src, x_dst=x_dst)
    call = _call(given, relation, x_dst, x_src, "gatv2", negative_slope, objective)
    _check_gatv2(call, x_src, x_dst, att)
    return _attend(call, Inputs(x_src, x_dst, None, att, edge_bias, loop_bias))


def gatv2_attention_weights(
    relation: Relation,
    x_src: Tensor,  # [N_src, H, C]
    x_dst: Tensor,  # [N_dst, H, C]
    att: Tensor,  # [H, C]
    *,
    edge_bias: Tensor | None = None,  # [E, H]
    loop_bias: Tensor | None = None,  # [L, H]
    negative_slope: float = 0.2,
    self_loops: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,  # [1]
    edge_mask: Tensor | None = None,  # [E]
    size: Size = None,
    flow: str = "source_to_target",
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`gatv2_attention` after dropout, differentiable.

    Arguments are those of :func:`gatv2_attention`; the same seed drops the same
    weights.

    Returns:
        As :func:`graph_attention_weights`.

    Raises:
        ValueError: A shape, size, dtype, device, option or index that does not fit.
        TypeError: A relation, operand or option of the wrong type.
    """
    given = _Given(
        edge_bias, loop_bias, self_loops, dropout, seed, edge_mask, size, flow
    )
    check_vectors(x_src=x_src, x_dst=x_dst)
    call = _call(given, relation, x_dst, x_src, "gatv2", negative_slope, "time")
    _check_gatv2(call, x_src, x_dst, att)
    return _weights(call, Inputs(x_src, x_dst, None, att, edge_bias, loop_bias))


class _Given(NamedTuple):
    """Options that all of these functions take."""

    edge_bias: Tensor | None
    loop_bias: Tensor | None
    self_loops: bool
    dropout: float
    seed: Tensor | None
    edge_mask: Tensor | None
    size: Size
    flow: str


def _call(
    given: _Given,
    relation: Relation,
    row: Tensor,
    col: Tensor,
    score: str,
    scale: float,
    objective: str,
) -> Call:
    """The call, of which the options are checked; under a tracer of a `Handle`."""
    names = ("key", "query") if score == "dot" else ("x_src", "x_dst")
    ends = (names[0], col.size(0)), (names[1], row.size(0))
    related = relation_for_rows(relation, given.size, given.flow, *ends)
    numbers = (scale, given.self_loops, given.dropout)
    options, seed = options_of(related, row, *numbers, given.seed, objective, score)
    biases, names = (given.edge_bias, given.loop_bias), ("edge_bias", "loop_bias")
    check_terms(related, options, row, biases, given.edge_mask, names)
    return Call(related, options, given.edge_mask, seed, objective)


def _scale(scale: float | None, query: Tensor) -> float:
    return max(query.size(2), 1) ** -0.5 if scale is None else scale


def _expanded(x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values, each as often as there are queries that read it."""
    kv_heads = x.size(1)
    return x if kv_heads == heads else x.repeat_interleave(heads // kv_heads, dim=1)


def _attend(call: Call, inputs: Inputs, dtype: torch.dtype | None = None) -> Tensor:
    """The result, in a dtype, or in that to which the inputs promote."""
    dtype = inputs.out_dtype() if dtype is None else dtype
    if isinstance(call.graph, Handle):
        return vector_library.attend(call, inputs, dtype)
    if transformed.is_active(*inputs):
        return attention.by_reference(call, inputs).to(dtype)
    return edge_attention.attend(call, inputs, dtype)


def _weights(
    call: Call, inputs: Inputs, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    if isinstance(call.graph, Handle):
        weights, loops = vector_library.attention_weights(call, inputs)
    else:
        weights, loops = attention.weights(call, inputs)
    if dtype is None:
        return weights, loops
    return weights.to(dtype), loops.to(dtype)


def _check_heads(call: Call, query: Tensor, key: Tensor) -> None:
    """Check queries and keys, of which there may be fewer heads."""
    heads, width = query.shape[1:]
    kv_heads = key.size(1)
    check_shape("query", query, (call.graph.num_dst, heads, width), query)
    check_shape("key", key, (call.graph.num_src, kv_heads, width), query)
    if kv_heads != heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ValueError(
            f"'query' must have a multiple of the {kv_heads} heads of 'key' (got "
            f"{heads})"
        )


def _check_gatv2(call: Call, x_src: Tensor, x_dst: Tensor, att: Tensor) -> None:
    check_dense("att", att)
    shape = tuple(x_src.shape[1:])
    check_shape("x_src", x_src, (call.graph.num_src, *shape), x_dst)
    check_shape("x_dst", x_dst, (call.graph.num_dst, *shape), x_dst)
    check_numbers("att", att, shape, x_dst)
