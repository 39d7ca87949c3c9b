"""Arguments of attention with edge features."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.functional.arguments import check_dense
from pyg_tiga.ops.attention import Call
from pyg_tiga.ops.feature_attention import Features


def features_of(
    call: Call, query: Tensor, attr: Tensor | None, proj: Tensor | None
) -> Features | None:
    """The features of a call, checked.

    Raises:
        TypeError: One is no dense tensor.
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
        check_dense(name, x)
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
