"""Edges that calls and graphs share: whose edits are counted, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyg_tiga.relation import inputs
from pyg_tiga.relation.cache import CACHE, Entry, Key, key_of
from pyg_tiga.relation.edges import CSR, Edges
from pyg_tiga.relation.inputs import Parts
from pyg_tiga.relation.origin import origin_with


def count_edits(
    tensors: Sequence[Tensor], layout: str
) -> tuple[Sequence[Tensor], bool]:
    """The tensors that define edges, and whether all their edits are counted now."""
    is_counted = True
    if len(tensors) > (2 if layout == CSR else 1):
        origin, tensors = origin_with(tensors[0]), tensors[1:]
        if origin is None:
            is_counted = False
        else:
            origin.count_edits(tensors[0])
    for tensor in tensors:
        if tensor.is_inference():
            is_counted = False
    return tensors, is_counted


def share(parts: Parts) -> Edges:
    """The edges of these tensors that someone holds already, or new ones."""
    if not any(tensor.is_inference() for tensor in parts.tensors):
        known = CACHE.find_alive(key_of(parts.tensors, parts.layout, parts.sizes))
        if known is not None:
            return known
    edges = Edges(parts.tensors, parts.layout, parts.sizes, parts.dst_end)
    CACHE.watch(edges)
    return edges


def remember(parts: Parts, key: Key) -> Entry:
    """Make an entry of the memo, with one grouping built and so the indices checked."""
    with CACHE.building:
        entry = CACHE.find(key)
        if entry is not None:
            return entry
        inputs.check_parts(parts)
        edges = share(parts)
        edges.grouping(parts.dst_end)
        return CACHE.keep(edges)
