"""Handles: what carries a relation across the boundary of an op."""

from __future__ import annotations

from torch import Tensor

from pyg_tiga.relation.edges import COO, COO_BY_COL, COO_BY_ROW, CSR

# The tensors that define edges, their layout, and the numbers of sources and
# destinations.
Handle = tuple[list[Tensor], str, int, int]

_REVERSED = ":reversed"
# The end that holds the destinations: edge_index[1], but the rows of a CSR structure.
_DST_END = {COO: 1, COO_BY_ROW: 1, COO_BY_COL: 1, CSR: 0}
LAYOUTS = {
    name + suffix: (name, end if suffix == "" else 1 - end)
    for name, end in _DST_END.items()
    for suffix in ("", _REVERSED)
}
_NAMES = {parts: name for name, parts in LAYOUTS.items()}


def layout_of(base: str, dst_end: int) -> str:
    """The layout string of a handle."""
    return _NAMES[base, dst_end]
