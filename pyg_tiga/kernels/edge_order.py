"""Rows of a few numbers, one for each edge, brought into another order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_edges"])
def take_edges(
    value_ptr,
    index_ptr,
    out_ptr,
    num_edges,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[e] = value[index[e]]: [E, HEADS]."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    m_e = o_e < num_edges
    index = tl.load(index_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    mask = m_e[:, None] & (o_h < HEADS)[None, :]
    x = tl.load(value_ptr + (index * HEADS)[:, None] + o_h[None, :], mask=mask)
    tl.store(out_ptr + (o_e * HEADS)[:, None] + o_h[None, :], x, mask=mask)
