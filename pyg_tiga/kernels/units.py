"""Units of work: whole short rows, and the pieces that long rows are cut into.

Every kernel that walks grouped edges takes its rows from here, so that no program is
ever longer than `chunk` edges, whatever the largest degree.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def edge_ids(o_e, m_e, perm_ptr, HAS_PERM: tl.constexpr):
    """Where the caller has the edges at these places of the grouping."""
    if HAS_PERM:
        return tl.load(perm_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    return o_e.to(tl.int64)


@triton.jit
def load_units(
    u,
    ptr_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    SPLIT: tl.constexpr,
):
    """Spans of the units `u`: (row, row's first edge, start, end, is a piece, is live).

    Units below `num_items` are pieces of long rows; the rest are rows, of which the
    long ones do nothing here. Padding (row -1, or past the last row) is empty.
    """
    if SPLIT:
        m_item = u < num_items
        row = tl.where(
            m_item, tl.load(item_row_ptr + u, mask=m_item, other=-1), u - num_items
        )
    else:
        m_item = u < 0
        row = u
    m_row = (row >= 0) & (row < num_rows)
    o_row = row.to(tl.int64)
    first = tl.load(ptr_ptr + o_row, mask=m_row, other=0)
    end = tl.load(ptr_ptr + o_row + 1, mask=m_row, other=0)
    if SPLIT:
        m_long = (end - first) > chunk
        piece = tl.load(item_start_ptr + u, mask=m_item & m_row, other=0)
        end = tl.where(m_item, tl.minimum(piece + chunk, end), end)
        start = tl.where(m_item, piece, first)
        m_row = m_row & (m_item | (m_long == 0))
        end = tl.where(m_row, end, start)
    else:
        start = first
    return o_row, first, start, end, m_item, m_row
