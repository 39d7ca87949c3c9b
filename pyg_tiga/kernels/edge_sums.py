"""Sums of edge values by destination: out_r = start_r + sum over the edges of row r.

The values stand in the order of the grouping, or where `perm_ptr` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import edge_ids, load_units


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk", "num_start"])
def edge_sums(
    value_ptr,
    start_ptr,
    out_ptr,
    part_ptr,
    ptr_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    num_start,
    width,
    SPLIT: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    u = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    o_w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)  # [BLOCK_W]
    m_w = o_w < width
    row, first, start, end, m_item, m_row = load_units(
        u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
    )
    acc = tl.zeros([BLOCK_R, BLOCK_E, BLOCK_W], dtype=tl.float32)
    longest = tl.max(end - start, axis=0)
    for step in range(0, longest, BLOCK_E):
        # [BLOCK_R, BLOCK_E]
        o_e = (start + step)[:, None] + tl.arange(0, BLOCK_E)[None, :]
        m_e = o_e < end[:, None]
        edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
        p_value = value_ptr + (edge * width)[:, :, None] + o_w[None, None, :]
        acc += tl.load(p_value, mask=m_e[:, :, None] & m_w[None, None, :], other=0.0)
    total = tl.sum(acc, axis=1)  # [BLOCK_R, BLOCK_W]
    m_out = m_row[:, None] & m_w[None, :]
    o_out = (row * width)[:, None] + o_w[None, :]
    if HAS_START:
        # Once for a row: with its first piece.
        m_start = m_out & ((row < num_start) & (start == first))[:, None]
        total += tl.load(start_ptr + o_out, mask=m_start, other=0.0)
    if SPLIT:
        o_p = (u.to(tl.int64) * width)[:, None] + o_w[None, :]
        tl.store(part_ptr + o_p, total, mask=m_out & m_item[:, None])
        m_out = m_out & (m_item == 0)[:, None]
    tl.store(out_ptr + o_out, total, mask=m_out)
