"""Weights of edges from their scores, once the softmax of each row is known.

w_e = kept_e exp(s_e - m_i) / l_i. Scores are read in the order of the destinations, and
weights are written where the caller has the edges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import dropout_factor
from pyg_tiga.kernels.units import edge_ids, load_units


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def edge_weights(
    score_ptr,
    m_ptr,
    l_ptr,
    seed_ptr,
    out_ptr,
    ptr_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    drop_p,
    drop_factor,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_PERM: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    m_h = o_h < HEADS
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, _, start, end, _, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            o_row = row * HEADS + o_h
            b_m = tl.load(m_ptr + o_row, mask=m_h, other=0.0)
            b_l = tl.load(l_ptr + o_row, mask=m_h, other=1.0)
            for step in range(start, end, BLOCK_E):
                o_e = (step + tl.arange(0, BLOCK_E)).to(tl.int64)  # [BLOCK_E]
                m_e = o_e < end
                edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
                mask = m_e[:, None] & m_h[None, :]
                p_s = score_ptr + (o_e * HEADS)[:, None] + o_h[None, :]
                s = tl.load(p_s, mask=mask, other=0.0)
                w = tl.exp(s - b_m[None, :]) / b_l[None, :]
                if DROPOUT:
                    w *= dropout_factor(seed, edge, o_h, drop_p, drop_factor)
                p_out = out_ptr + (edge * HEADS)[:, None] + o_h[None, :]
                tl.store(p_out, w, mask=mask)
