"""Gradient of the destination's operand of edge attention, by a pass over its edges.

It gathers v_j once more. The additive score needs no such pass where the forward kept P
and p (see `edge_attention`), or where the gradients of the terms are there to be summed
(`edge_sums`).
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
def attention_rows_backward(
    value_ptr,
    grad_ptr,
    state_ptr,
    grad_row_ptr,
    grad_param_ptr,
    part_ptr,
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
    VJP_ROW: tl.constexpr,
    VJP_PARAM: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_LOOP_TERM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PERM: tl.constexpr,
    SELF_LOOPS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_PARAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradient of the destination's operand, and of a parameter by unit of work."""
    NEEDS_ID: tl.constexpr = HAS_TERM or HAS_MASK or DROPOUT
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c, o_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    m_h, m_c, m_k = o_h < heads, o_c < channels, o_k < width
    m_hk = m_h[:, None] & m_k[None, :]
    one = tl.zeros([1], dtype=tl.int64)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, first, start, end, m_item, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            held = row + one  # [1]
            m_x = held >= 0
            b_row = LOAD_ROW(
                row_ptr, held, m_x, o_h, m_h, o_k, m_k, stride_rn, stride_rh
            )
            b_g = load_rows(
                grad_ptr, held, m_x, o_h, m_h, o_c, m_c, stride_gn, stride_gh
            )
            b_m, b_il, delta = load_state(state_ptr, held, m_x, o_h, m_h, heads)
            acc = tl.zeros([BLOCK_H, BLOCK_K], dtype=tl.float32)
            acc_param = tl.zeros([BLOCK_H, BLOCK_K], dtype=tl.float32)
            if SELF_LOOPS:
                if (row < num_loops) & (start == first):
                    b_col = LOAD_COL(
                        col_ptr, held, m_x, o_h, m_h, o_k, m_k, stride_cn, stride_ch
                    )
                    term = tl.zeros([1, BLOCK_H], dtype=tl.float32)
                    if HAS_LOOP_TERM:
                        term = load_term(loop_term_ptr, held, m_x, o_h, m_h, heads)
                    s, aux = SCORE(b_row, b_col, term, scale)
                    b_v = load_rows(
                        value_ptr, held, m_x, o_h, m_h, o_c, m_c, stride_vn, stride_vh
                    )
                    t = tl.sum(b_g * b_v, axis=2)
                    if DROPOUT:
                        t = t * dropout_factor(
                            seed, held + num_edges, o_h, drop_p, drop_factor
                        )
                    ds = tl.exp(s - b_m) * b_il * (t - delta)
                    acc = tl.sum(VJP_ROW(ds, b_row, b_col, aux, scale), axis=0)
                    if HAS_PARAM:
                        acc_param = tl.sum(
                            VJP_PARAM(ds, b_row, b_col, aux, scale), axis=0
                        )
            for step in range(start, end, BLOCK_E):
                j, edge_id, m_e = load_edges(
                    step,
                    end,
                    row,
                    index_ptr,
                    perm_ptr,
                    mask_ptr,
                    SELF_LOOPS,
                    HAS_MASK,
                    HAS_PERM,
                    NEEDS_ID,
                    BLOCK_E,
                )
                b_col = LOAD_COL(
                    col_ptr, j, m_e, o_h, m_h, o_k, m_k, stride_cn, stride_ch
                )
                b_v = load_rows(
                    value_ptr, j, m_e, o_h, m_h, o_c, m_c, stride_vn, stride_vh
                )
                term = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
                if HAS_TERM:
                    term = load_term(term_ptr, edge_id, m_e, o_h, m_h, heads)
                s, aux = SCORE(b_row, b_col, term, scale)
                t = tl.sum(b_g * b_v, axis=2)
                if DROPOUT:
                    t = t * dropout_factor(seed, edge_id, o_h, drop_p, drop_factor)
                ds = tl.where(m_e[:, None], tl.exp(s - b_m) * b_il * (t - delta), 0.0)
                acc += tl.sum(VJP_ROW(ds, b_row, b_col, aux, scale), axis=0)
                if HAS_PARAM:
                    acc_param += tl.sum(VJP_PARAM(ds, b_row, b_col, aux, scale), axis=0)
            if HAS_PARAM:
                o_u = (u.to(tl.int64) * heads + o_h)[:, None] * width + o_k[None, :]
                tl.store(grad_param_ptr + o_u, acc_param, mask=m_hk)
            if SPLIT:
                if m_item:
                    o_p = (u.to(tl.int64) * heads + o_h)[:, None] * width
                    tl.store(part_ptr + o_p + o_k[None, :], acc, mask=m_hk)
            if m_item == 0:
                o_r = (row * heads + o_h)[:, None] * width + o_k[None, :]
                grad_row = acc.to(grad_row_ptr.dtype.element_ty)
                tl.store(grad_row_ptr + o_r, grad_row, mask=m_hk)
