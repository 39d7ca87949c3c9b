"""Gradients of edge attention by source.

With g_i the gradient of row i, kept_e the dropout factor, t_e = kept_e <g_i, v_j> and
delta_i = <g_i, out_i>, the gradient of a score is ds_e = w_e (t_e - delta_i).
`attention_columns` walks the edges of each source: it gathers g_i and sums the
gradients of v_j and of the source's operand. With `GRAD_TERM` it also writes those of
the scores' terms, in the order of the grouping by destination (`slot`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_state import load_state
from pyg_tiga.kernels.attention_tile import (
    dropout_factor,
    load_edges,
    load_rows,
    load_term,
)
from pyg_tiga.kernels.units import load_units


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "chunk", "num_loops", "num_edges"]
)
def attention_columns(
    value_ptr,
    grad_ptr,
    state_ptr,
    grad_value_ptr,
    grad_col_ptr,
    grad_term_ptr,
    grad_loop_term_ptr,
    part_ptr,
    part_col_ptr,
    row_ptr,
    col_ptr,
    term_ptr,
    loop_term_ptr,
    mask_ptr,
    seed_ptr,
    ptr_ptr,
    index_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    slot_ptr,
    att_src_ptr,
    att_dst_ptr,
    grad_row_ptr,
    num_rows,
    num_items,
    chunk,
    num_loops,
    num_edges,
    heads,
    channels,
    width,
    stride_vn,
    stride_vh,
    stride_gn,
    stride_gh,
    stride_rn,
    stride_rh,
    stride_cn,
    stride_ch,
    scale,
    drop_p,
    drop_factor,
    LOAD_ROW: tl.constexpr,
    LOAD_COL: tl.constexpr,
    SCORE: tl.constexpr,
    VJP_COL: tl.constexpr,
    VJP_TERM: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_LOOP_TERM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PERM: tl.constexpr,
    SELF_LOOPS: tl.constexpr,
    DROPOUT: tl.constexpr,
    GRAD_TERM: tl.constexpr,
    GRAD_LOOP_TERM: tl.constexpr,
    ATT_SRC: tl.constexpr,
    ATT_DST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NEEDS_ID: tl.constexpr = HAS_TERM or HAS_MASK or DROPOUT
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_c = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    o_k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    m_h, m_c, m_k = o_h < heads, o_c < channels, o_k < width
    m_hc = m_h[:, None] & m_c[None, :]
    m_hk = m_h[:, None] & m_k[None, :]
    one = tl.zeros([1], dtype=tl.int64)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        col, first, start, end, m_item, m_col = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_col:
            held = col + one  # [1]
            m_x = held >= 0
            b_col = LOAD_COL(
                col_ptr, held, m_x, o_h, m_h, o_k, m_k, stride_cn, stride_ch
            )
            b_v = load_rows(
                value_ptr, held, m_x, o_h, m_h, o_c, m_c, stride_vn, stride_vh
            )
            acc = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
            acc_col = tl.zeros([BLOCK_H, BLOCK_K], dtype=tl.float32)
            if SELF_LOOPS:
                if (col < num_loops) & (start == first):
                    b_row = LOAD_ROW(
                        row_ptr, held, m_x, o_h, m_h, o_k, m_k, stride_rn, stride_rh
                    )
                    term = tl.zeros([1, BLOCK_H], dtype=tl.float32)
                    if HAS_LOOP_TERM:
                        term = load_term(loop_term_ptr, held, m_x, o_h, m_h, heads)
                    s, aux = SCORE(b_row, b_col, term, scale)
                    b_m, b_il, delta = load_state(state_ptr, held, m_x, o_h, m_h, heads)
                    b_g = load_rows(
                        grad_ptr, held, m_x, o_h, m_h, o_c, m_c, stride_gn, stride_gh
                    )
                    w = tl.exp(s - b_m) * b_il  # [1, BLOCK_H]
                    kept = tl.full([1, BLOCK_H], 1.0, dtype=tl.float32)
                    if DROPOUT:
                        kept = dropout_factor(
                            seed, held + num_edges, o_h, drop_p, drop_factor
                        )
                    acc = tl.sum((w * kept)[:, :, None] * b_g, axis=0)
                    ds = w * (kept * tl.sum(b_g * b_v, axis=2) - delta)
                    acc_col = tl.sum(VJP_COL(ds, b_row, b_col, aux, scale), axis=0)
                    if GRAD_LOOP_TERM:
                        p_t = grad_loop_term_ptr + (held * heads)[:, None]
                        tl.store(
                            p_t + o_h[None, :],
                            VJP_TERM(ds, aux, scale),
                            mask=m_h[None, :],
                        )
            for step in range(start, end, BLOCK_E):
                i, edge_id, m_e = load_edges(
                    step,
                    end,
                    col,
                    index_ptr,
                    perm_ptr,
                    mask_ptr,
                    SELF_LOOPS,
                    HAS_MASK,
                    HAS_PERM,
                    NEEDS_ID,
                    BLOCK_E,
                )
                b_g = load_rows(
                    grad_ptr, i, m_e, o_h, m_h, o_c, m_c, stride_gn, stride_gh
                )
                b_row = LOAD_ROW(
                    row_ptr, i, m_e, o_h, m_h, o_k, m_k, stride_rn, stride_rh
                )
                b_m, b_il, delta = load_state(state_ptr, i, m_e, o_h, m_h, heads)
                term = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
                if HAS_TERM:
                    term = load_term(term_ptr, edge_id, m_e, o_h, m_h, heads)
                s, aux = SCORE(b_row, b_col, term, scale)
                # Masked edges have 1 / l = 0 but may overflow: they must not be read.
                w = tl.where(m_e[:, None], tl.exp(s - b_m) * b_il, 0.0)
                t = tl.sum(b_g * b_v, axis=2)  # [BLOCK_E, BLOCK_H]
                b_w = w
                if DROPOUT:
                    kept = dropout_factor(seed, edge_id, o_h, drop_p, drop_factor)
                    b_w = w * kept
                    t = t * kept
                acc += tl.sum(b_w[:, :, None] * b_g, axis=0)
                ds = w * (t - delta)
                acc_col += tl.sum(VJP_COL(ds, b_row, b_col, aux, scale), axis=0)
                if GRAD_TERM:
                    # Edges that are masked or stored loops get their 0 here, too.
                    o_e = step + tl.arange(0, BLOCK_E)
                    slot = tl.load(slot_ptr + o_e, mask=o_e < end, other=0).to(tl.int64)
                    p_t = grad_term_ptr + (slot * heads)[:, None] + o_h[None, :]
                    b_t = tl.where(m_e[:, None], VJP_TERM(ds, aux, scale), 0.0)
                    tl.store(p_t, b_t, mask=(o_e < end)[:, None] & m_h[None, :])
            if SPLIT:
                if m_item:
                    o_p = u.to(tl.int64) * heads + o_h  # [BLOCK_H]
                    p_v = part_ptr + o_p[:, None] * channels + o_c[None, :]
                    tl.store(p_v, acc, mask=m_hc)
                    p_c = part_col_ptr + o_p[:, None] * width + o_k[None, :]
                    tl.store(p_c, acc_col, mask=m_hk)
            if m_item == 0:
                store_column(
                    grad_value_ptr,
                    grad_col_ptr,
                    att_src_ptr,
                    att_dst_ptr,
                    grad_row_ptr,
                    col,
                    acc,
                    acc_col,
                    o_h,
                    o_c,
                    o_k,
                    m_h,
                    m_c,
                    m_k,
                    heads,
                    channels,
                    width,
                    ATT_SRC,
                    ATT_DST,
                )


@triton.jit
def store_column(
    grad_value_ptr,
    grad_col_ptr,
    att_src_ptr,
    att_dst_ptr,
    grad_row_ptr,
    col,
    acc,
    acc_col,
    o_h,
    o_c,
    o_k,
    m_h,
    m_c,
    m_k,
    heads,
    channels,
    width,
    ATT_SRC: tl.constexpr,
    ATT_DST: tl.constexpr,
):
    """Store a finished source.

    With `ATT_SRC` the operand is <v_j, att_src>, and its gradient flows on into that of
    v_j; with `ATT_DST` so does that of the node as a destination.
    """
    m_hc = m_h[:, None] & m_c[None, :]
    o_hc = o_h[:, None] * channels + o_c[None, :]
    if ATT_SRC:
        att = tl.load(att_src_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
        acc += tl.sum(acc_col, axis=1)[:, None] * att
    if ATT_DST:
        att = tl.load(att_dst_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
        grad_row = tl.load(grad_row_ptr + col * heads + o_h, mask=m_h, other=0.0)
        acc += grad_row[:, None] * att
    p_v = grad_value_ptr + (col * heads) * channels + o_hc
    tl.store(p_v, acc.to(grad_value_ptr.dtype.element_ty), mask=m_hc)
    p_c = grad_col_ptr + (col * heads + o_h)[:, None] * width + o_k[None, :]
    grad_col = acc_col.to(grad_col_ptr.dtype.element_ty)
    tl.store(p_c, grad_col, mask=m_h[:, None] & m_k[None, :])


@triton.jit
def columns_merge(
    part_ptr,
    part_col_ptr,
    grad_value_ptr,
    grad_col_ptr,
    att_src_ptr,
    att_dst_ptr,
    grad_row_ptr,
    hub_row_ptr,
    hub_ptr_ptr,
    heads,
    channels,
    width,
    ATT_SRC: tl.constexpr,
    ATT_DST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add up the pieces of each long column, in fixed order."""
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c, o_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    m_h, m_c, m_k = o_h < heads, o_c < channels, o_k < width
    col = tl.load(hub_row_ptr + tl.program_id(0)).to(tl.int64)
    if col >= 0:
        first = tl.load(hub_ptr_ptr + tl.program_id(0))
        last = tl.load(hub_ptr_ptr + tl.program_id(0) + 1)
        acc = tl.zeros([BLOCK_P, BLOCK_H, BLOCK_C], dtype=tl.float32)
        acc_col = tl.zeros([BLOCK_P, BLOCK_H, BLOCK_K], dtype=tl.float32)
        for k in range(first, last, BLOCK_P):
            o_p = (k + tl.arange(0, BLOCK_P)).to(tl.int64)
            m_p = o_p < last
            n = heads * channels
            acc += load_rows(part_ptr, o_p, m_p, o_h, m_h, o_c, m_c, n, channels)
            n = heads * width
            acc_col += load_rows(part_col_ptr, o_p, m_p, o_h, m_h, o_k, m_k, n, width)
        store_column(
            grad_value_ptr,
            grad_col_ptr,
            att_src_ptr,
            att_dst_ptr,
            grad_row_ptr,
            col,
            tl.sum(acc, axis=0),
            tl.sum(acc_col, axis=0),
            o_h,
            o_c,
            o_k,
            m_h,
            m_c,
            m_k,
            heads,
            channels,
            width,
            ATT_SRC,
            ATT_DST,
        )
