"""Edge features in attention by dot products, without a row of H C for every edge.

With e [D] the features of an edge and P [H, C, D] their projection, PyG adds P e to key
and value of the edge. Both additions factor: <q, P e> is <P^T q, e>, with one vector
P^T q [H, D] for each destination, and sum w P e is P z with z = sum w e [H, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.ops import transformed, vector_attention, vector_library
from pyg_tiga.ops.attention import Call
from pyg_tiga.ops.edge_features import product
from pyg_tiga.ops.library import Handle
from pyg_tiga.ops.vector_attention import Inputs


class Features(NamedTuple):
    """Features of the edges and what projects them.

    Args:
        attr: ``[E, D]`` in the relation's own order.
        proj: ``[H, C, D]``.
    """

    attr: Tensor
    proj: Tensor


def features_of(
    call: Call, query: Tensor, attr: Tensor | None, proj: Tensor | None
) -> Features | None:
    """The features of a call, checked.

    Raises:
        ValueError: One without the other, or a shape, dtype or device that is wrong.
    """
    if attr is None and proj is None:
        return None
    if attr is None or proj is None:
        missing = "edge_attr" if attr is None else "edge_proj"
        raise ValueError(
            f"'edge_attr' and 'edge_proj' must be given together (got no '{missing}')"
        )
    heads, width = query.shape[1:]
    for name, x, dims in (("edge_attr", attr, 2), ("edge_proj", proj, 3)):
        if x.dim() != dims or not x.is_floating_point():
            raise ValueError(
                f"'{name}' must be a floating point tensor of {dims} dimensions (got "
                f"{x.dtype} of shape {list(x.shape)})"
            )
        if x.device != query.device:
            raise ValueError(f"'{name}' must be on {query.device} (got {x.device})")
    if attr.size(0) != call.graph.num_edges:
        raise ValueError(
            f"'edge_attr' must have one row for each of the {call.graph.num_edges} "
            f"edges (got {list(attr.shape)})"
        )
    if tuple(proj.shape) != (heads, width, attr.size(1)):
        raise ValueError(
            f"'edge_proj' must have shape {[heads, width, attr.size(1)]} (got "
            f"{list(proj.shape)})"
        )
    return Features(attr, proj)


def with_terms(call: Call, inputs: Inputs, features: Features) -> Inputs:
    """Inputs with what the features add to the scores among their terms, ``[E, H]``."""
    attr, proj = features
    dtype = reference.promoted(inputs.row, proj)
    # The scale goes into the vectors, of which there are fewer than edges.
    vectors = torch.einsum("nhc,hcd->nhd", inputs.row.to(dtype), proj.to(dtype))
    vectors = vectors * call.options.scale
    real = reference.widened(torch.promote_types(dtype, attr.dtype))
    term = product("feature_dots", call.graph, vectors, attr, real)
    if inputs.term is not None:
        term = term + inputs.term
    return inputs._replace(term=term)


def attend(call: Call, inputs: Inputs, features: Features) -> Tensor:
    """Attention whose keys and values have the projected features of the edge added."""
    dtype = reference.promoted(*inputs, *features)
    attr = _of_live_edges(call, features.attr)
    features = features._replace(attr=attr)
    out, weights = _both(call, with_terms(call, inputs, features), dtype)
    sums = product("feature_sums", call.graph, weights, attr, dtype)  # [N, H, D]
    return out + torch.einsum("nhd,hcd->nhc", sums, features.proj.to(dtype))


def _both(call: Call, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Averages of values and the weights ``[E, H]``."""
    if isinstance(call.graph, Handle):
        graph, options, mask, seed, objective = call
        given = (graph, inputs, mask, seed, options, objective, dtype)
        return vector_library.attend_with_weights(*given)
    if transformed.is_active(*inputs):
        out = vector_attention.by_reference(call, inputs)
        return out.to(dtype), vector_attention.weights(call, inputs)[0]
    return vector_attention.with_weights(call, inputs, dtype)


def _of_live_edges(call: Call, attr: Tensor) -> Tensor:
    """Features without those of masked edges, of which not even a NaN is seen."""
    if call.mask is None:
        return attr
    return attr.masked_fill(~call.mask.unsqueeze(1), 0.0)
