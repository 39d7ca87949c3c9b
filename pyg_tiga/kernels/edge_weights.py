"""Weights of edges from their scores, once the softmax of each row is known.

w_e = kept_e exp(s_e - m_i) / l_i. Scores stand in the order of the destinations.
Weights are written in the caller's order, each score fetched from its place
(`rank_ptr`), or in that of the scores (`BY_ROW`), where dropout needs the caller's ids
(`rank_ptr`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import dropout_factor
from pyg_tiga.kernels.units import edge_ids


@triton.jit(do_not_specialize=["num_rows", "num_edges"])
def edge_weights(
    score_ptr,
    m_ptr,
    l_ptr,
    seed_ptr,
    out_ptr,
    target_ptr,
    rank_ptr,
    ptr_ptr,
    num_rows,
    num_edges,
    drop_p,
    drop_factor,
    HEADS: tl.constexpr,
    HAS_RANK: tl.constexpr,
    BY_ROW: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    m_e, m_h = o_e < num_edges, o_h < HEADS
    other = edge_ids(o_e, m_e, rank_ptr, HAS_RANK)
    if BY_ROW:
        rank, edge = o_e, other
    else:
        rank, edge = other, o_e
    target = tl.load(target_ptr + o_e, mask=m_e, other=-1).to(tl.int64)
    # Edges with a fault that is not reported yet stand behind the last row; nobody
    # wrote their scores.
    live = rank < tl.load(ptr_ptr + num_rows)
    live = live & (target >= 0) & (target < num_rows)
    mask = live[:, None] & m_h[None, :]
    o_row = (target * HEADS)[:, None] + o_h[None, :]
    s = tl.load(
        score_ptr + (rank * HEADS)[:, None] + o_h[None, :],
        mask=mask,
        other=float("-inf"),
    )
    b_m = tl.load(m_ptr + o_row, mask=mask, other=0.0)
    b_l = tl.load(l_ptr + o_row, mask=mask, other=1.0)
    w = tl.exp(s - b_m) / b_l
    if DROPOUT:
        seed = tl.load(seed_ptr)
        w *= dropout_factor(seed, edge, o_h, drop_p, drop_factor)
    p_out = out_ptr + (o_e * HEADS)[:, None] + o_h[None, :]
    tl.store(p_out, w, mask=m_e[:, None] & m_h[None, :])
