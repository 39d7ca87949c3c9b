"""What edge features add to attention scores: one number per edge and head.

``(W e) · a`` is ``e · (W^T a)``, so that the features are never projected to all heads
and channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils.loop import compute_loop_attr

from pyg_tiga.nn._inputs import is_autocast_on
from pyg_tiga.nn._linear import is_plain
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.inputs import plain

__all__: list[str] = []


def can_fold(lin: torch.nn.Module) -> bool:
    """Whether a map of edge features may be folded into the attention vector."""
    # A lazy map waits in a hook for its first input.
    return is_plain(lin) or (type(lin) is Linear and _is_lazy(lin))


def edge_terms(
    edge_attr: Tensor,  # [E, D] or [E]
    loop_attr: Tensor | None,  # [L, D] or [L]
    lin: torch.nn.Module,
    att: Tensor,  # [1, H, C]
) -> tuple[Tensor, Tensor | None]:
    """Terms of the scores of edges ``[E, H]`` and of self-loops ``[L, H]``."""
    if _is_lazy(lin):
        lin(_as_matrix(edge_attr)[:0])
    heads, channels = att.size(1), att.size(2)
    weight = lin.weight.view(heads, channels, -1)
    folded = (weight * att.view(heads, channels, 1)).sum(1).t()  # [D, H]
    device = edge_attr.device.type
    if not is_autocast_on(device):
        return _term(edge_attr, folded), _term(loop_attr, folded)
    # Under autocast PyG's scores are float32.
    with torch.autocast(device, enabled=False):
        return _term(edge_attr, folded), _term(loop_attr, folded)


def loop_features(
    edge_index: Any,
    edge_attr: Tensor,  # [E, D] or [E]
    fill_value: Any,
    num_loops: int,
) -> Tensor:
    """Features of the self-loops, ``[L, D]`` or ``[L]``, by PyG's own rules.

    Stored loops are reduced into a row of their own, so that nothing waits for the
    device to count them. As in PyG, the reduction is over ``edge_index[1]`` whatever
    the flow.
    """
    if not isinstance(fill_value, str):
        return compute_loop_attr(edge_index, edge_attr, num_loops, False, fill_value)
    if isinstance(edge_index, Graph):
        first, second = edge_index.ends()
    else:
        first, second = plain(edge_index)[0]
    # Out of range indices must not be followed; the attention reports them.
    target = second.long().clamp(0, num_loops)
    target = target.masked_fill(first == second, num_loops)  # [E]
    ends = (None, target)
    loops = compute_loop_attr(ends, edge_attr, num_loops + 1, False, fill_value)
    return loops[:num_loops]


def _is_lazy(lin: torch.nn.Module) -> bool:
    return isinstance(lin._parameters.get("weight"), UninitializedParameter)


def _as_matrix(edge_attr: Tensor) -> Tensor:
    return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr


def _term(edge_attr: Tensor | None, folded: Tensor) -> Tensor | None:
    if edge_attr is None:
        return None
    return _as_matrix(edge_attr).to(folded.dtype) @ folded
