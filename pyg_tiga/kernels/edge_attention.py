"""Edge attention by destination: softmax over incoming edges, whatever the score.

out_i = sum over edges (j -> i) of w_ij v_j with w the softmax of the scores. The
kernels take a score as functions (`scores.Score`). Each program walks `BLOCK_R` units
(short rows, or pieces of long ones) and keeps, per head, the running maximum m, the sum
l of exp(s - m) and the weighted sum of values. Self-loops are not stored: a row starts
from its diagonal term, and stored i -> i edges are skipped.

`SAVE_POSITIVE` also accumulates P = sum of w v and p = sum of w over the edges with
positive `aux`, from which the additive score's backward knows the destination's
gradient without another pass over the edges (the softmax's derivatives sum to 0 in each
row).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import (
    dropout_factor,
    load_edges,
    load_rows,
    load_term,
)
from pyg_tiga.kernels.units import load_units


@triton.jit
def _safe(m):
    """A maximum to subtract: 0 where nothing was seen, as -inf - -inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "chunk", "num_loops", "num_edges"]
)
def attention_rows(
    value_ptr,
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    part_positive_ptr,
    part_sum_ptr,
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
    SPLIT: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_LOOP_TERM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PERM: tl.constexpr,
    SELF_LOOPS: tl.constexpr,
    DROPOUT: tl.constexpr,
    SAVE_POSITIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NEEDS_ID: tl.constexpr = HAS_TERM or HAS_MASK or DROPOUT
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    o_k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    m_h, m_c, m_k = o_h < heads, o_c < channels, o_k < width
    m_hc = m_h[:, None] & m_c[None, :]  # [BLOCK_H, BLOCK_C]
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
            b_row = LOAD_ROW(
                row_ptr, held, held >= 0, o_h, m_h, o_k, m_k, stride_rn, stride_rh
            )
            b_m = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
            b_l = tl.zeros([BLOCK_H], dtype=tl.float32)
            acc = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
            b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
            positive = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
            if SELF_LOOPS:
                if (row < num_loops) & (start == first):
                    m_x = held >= 0
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
                    kept = tl.full([1, BLOCK_H], 1.0, dtype=tl.float32)
                    if DROPOUT:
                        kept = dropout_factor(
                            seed, held + num_edges, o_h, drop_p, drop_factor
                        )
                    b_m = tl.sum(s, axis=0)
                    # A score of -inf or NaN is as PyTorch's softmax has it: NaN.
                    b_l = tl.exp(b_m - b_m)
                    acc = tl.sum(kept[:, :, None] * b_v, axis=0)
                    if SAVE_POSITIVE:
                        plus = tl.sum((aux > 0).to(tl.float32), axis=0)  # [BLOCK_H]
                        b_sum = plus
                        positive = plus[:, None] * acc
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
                s, aux = SCORE(b_row, b_col, term, scale)  # [BLOCK_E, BLOCK_H]
                s = tl.where(m_e[:, None], s, float("-inf"))
                new_m = tl.maximum(b_m, tl.max(s, axis=0))
                safe = _safe(new_m)
                b_p = tl.exp(s - safe[None, :])
                decay = tl.exp(b_m - safe)
                b_l = b_l * decay + tl.sum(b_p, axis=0)
                b_m = new_m
                b_w = b_p
                if DROPOUT:
                    b_w = b_p * dropout_factor(seed, edge_id, o_h, drop_p, drop_factor)
                acc = acc * decay[:, None] + tl.sum(b_w[:, :, None] * b_v, axis=0)
                if SAVE_POSITIVE:
                    b_w = tl.where(aux > 0, b_w, 0.0)
                    b_p = tl.where(aux > 0, b_p, 0.0)
                    positive = positive * decay[:, None]
                    positive += tl.sum(b_w[:, :, None] * b_v, axis=0)
                    b_sum = b_sum * decay + tl.sum(b_p, axis=0)
            if SPLIT:
                if m_item:
                    o_p = u.to(tl.int64) * heads + o_h  # [BLOCK_H]
                    o_pc = o_p[:, None] * channels + o_c[None, :]
                    tl.store(part_ptr + o_pc, acc, mask=m_hc)
                    if SAVE_POSITIVE:
                        tl.store(part_positive_ptr + o_pc, positive, mask=m_hc)
                    if tl.program_id(2) == 0:
                        tl.store(part_m_ptr + o_p, b_m, mask=m_h)
                        tl.store(part_l_ptr + o_p, b_l, mask=m_h)
                        if SAVE_POSITIVE:
                            tl.store(part_sum_ptr + o_p, b_sum, mask=m_h)
            if m_item == 0:
                store_row(
                    out_ptr,
                    m_ptr,
                    l_ptr,
                    positive_ptr,
                    positive_sum_ptr,
                    row,
                    b_m,
                    b_l,
                    acc,
                    positive,
                    b_sum,
                    o_h,
                    o_c,
                    m_h,
                    m_hc,
                    heads,
                    channels,
                    SAVE_POSITIVE,
                )


@triton.jit
def store_row(
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    row,
    b_m,
    b_l,
    acc,
    positive,
    b_sum,
    o_h,
    o_c,
    m_h,
    m_hc,
    heads,
    channels,
    SAVE_POSITIVE: tl.constexpr,
):
    """Normalise and store a finished row; one without edges gets 0, m = 0 and l = 1."""
    empty = b_m == float("-inf")
    b_m = tl.where(empty, 0.0, b_m)
    b_l = tl.where(empty, 1.0, b_l)
    o_r = row * heads + o_h  # [BLOCK_H]
    o_rc = o_r[:, None] * channels + o_c[None, :]  # [BLOCK_H, BLOCK_C]
    out = acc / b_l[:, None]
    tl.store(out_ptr + o_rc, out.to(out_ptr.dtype.element_ty), mask=m_hc)
    if SAVE_POSITIVE:
        positive = positive / b_l[:, None]
        kept = positive.to(positive_ptr.dtype.element_ty)
        tl.store(positive_ptr + o_rc, kept, mask=m_hc)
    if tl.program_id(2) == 0:
        tl.store(m_ptr + o_r, b_m, mask=m_h)
        tl.store(l_ptr + o_r, b_l, mask=m_h)
        if SAVE_POSITIVE:
            tl.store(positive_sum_ptr + o_r, b_sum / b_l, mask=m_h)


@triton.jit
def attention_merge(
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    part_positive_ptr,
    part_sum_ptr,
    hub_row_ptr,
    hub_ptr_ptr,
    heads,
    channels,
    SAVE_POSITIVE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the pieces of each long row, `BLOCK_P` at a time and in fixed order."""
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_h = o_h < heads
    m_hc = m_h[:, None] & (o_c < channels)[None, :]
    row = tl.load(hub_row_ptr + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        first = tl.load(hub_ptr_ptr + tl.program_id(0))
        last = tl.load(hub_ptr_ptr + tl.program_id(0) + 1)
        b_m = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
        b_l = tl.zeros([BLOCK_H], dtype=tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
        positive = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
        for k in range(first, last, BLOCK_P):
            o_p = k + tl.arange(0, BLOCK_P)  # [BLOCK_P]
            m_p = o_p < last
            o_ph = o_p.to(tl.int64)[:, None] * heads + o_h[None, :]
            m_ph = m_p[:, None] & m_h[None, :]
            m_x = tl.load(part_m_ptr + o_ph, mask=m_ph, other=float("-inf"))
            new_m = tl.maximum(b_m, tl.max(m_x, axis=0))
            safe = _safe(new_m)
            weight = tl.exp(m_x - safe[None, :])  # [BLOCK_P, BLOCK_H]
            decay = tl.exp(b_m - safe)
            l_x = tl.load(part_l_ptr + o_ph, mask=m_ph, other=0.0)
            b_l = b_l * decay + tl.sum(weight * l_x, axis=0)
            b_m = new_m
            o_pc = o_ph[:, :, None] * channels + o_c[None, None, :]
            m_pc = m_p[:, None, None] & m_hc[None, :, :]
            x = tl.load(part_ptr + o_pc, mask=m_pc, other=0.0)
            acc = acc * decay[:, None] + tl.sum(weight[:, :, None] * x, axis=0)
            if SAVE_POSITIVE:
                x = tl.load(part_positive_ptr + o_pc, mask=m_pc, other=0.0)
                positive = positive * decay[:, None]
                positive += tl.sum(weight[:, :, None] * x, axis=0)
                x_sum = tl.load(part_sum_ptr + o_ph, mask=m_ph, other=0.0)
                b_sum = b_sum * decay + tl.sum(weight * x_sum, axis=0)
        store_row(
            out_ptr,
            m_ptr,
            l_ptr,
            positive_ptr,
            positive_sum_ptr,
            row,
            b_m,
            b_l,
            acc,
            positive,
            b_sum,
            o_h,
            o_c,
            m_h,
            m_hc,
            heads,
            channels,
            SAVE_POSITIVE,
        )
