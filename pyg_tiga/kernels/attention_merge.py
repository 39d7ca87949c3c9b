"""What ends a walk of edge attention: a stored row, and the merge of long ones."""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import load_rows


@triton.jit
def safe_maximum(m):
    """A maximum to subtract: 0 where nothing was seen, as -inf - -inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def store_row(
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    bias_ptr,
    row,
    empty,
    b_m,
    b_l,
    acc,
    positive,
    b_sum,
    o_h,
    o_c,
    m_h,
    m_hc,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SAVE_POSITIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Normalise and store a finished row; an empty one gets 0, m = 0 and l = 1.

    Scores that are all -inf give NaN, as in PyTorch's softmax. The bias [H, C] is added
    to the result alone.
    """
    b_m = safe_maximum(b_m)
    b_l = tl.where(empty, 1.0, b_l)
    o_r = row * HEADS + o_h  # [BLOCK_H]
    o_rc = o_r[:, None] * CHANNELS + o_c[None, :]  # [BLOCK_H, BLOCK_C]
    out = acc / b_l[:, None]
    if HAS_BIAS:
        p_bias = bias_ptr + o_h[:, None] * CHANNELS + o_c[None, :]
        out += tl.load(p_bias, mask=m_hc, other=0.0).to(tl.float32)
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
    bias_ptr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SAVE_POSITIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the pieces of each long row, `BLOCK_P` at a time and in fixed order."""
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_h = o_h < HEADS
    m_hc = m_h[:, None] & (o_c < CHANNELS)[None, :]
    row = tl.load(hub_row_ptr + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        first = tl.load(hub_ptr_ptr + tl.program_id(0))
        last = tl.load(hub_ptr_ptr + tl.program_id(0) + 1)
        b_m = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
        b_l = tl.zeros([BLOCK_H], dtype=tl.float32)
        lost = tl.zeros([BLOCK_H], dtype=tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
        positive = tl.zeros([BLOCK_H, BLOCK_C], dtype=tl.float32)
        for k in range(first, last, BLOCK_P):
            o_p = k + tl.arange(0, BLOCK_P)  # [BLOCK_P]
            m_p = o_p < last
            o_ph = o_p.to(tl.int64)[:, None] * HEADS + o_h[None, :]
            m_ph = m_p[:, None] & m_h[None, :]
            m_x = tl.load(part_m_ptr + o_ph, mask=m_ph, other=float("-inf"))
            new_m = tl.maximum(b_m, tl.max(m_x, axis=0))
            safe = safe_maximum(new_m)
            weight = tl.exp(m_x - safe[None, :])  # [BLOCK_P, BLOCK_H]
            decay = tl.exp(b_m - safe)
            l_x = tl.load(part_l_ptr + o_ph, mask=m_ph, other=0.0)
            lost += tl.sum(tl.where(m_x == float("-inf"), l_x, 0.0), axis=0)
            b_l = b_l * decay + tl.sum(weight * l_x, axis=0)
            b_m = new_m
            o_pc = o_ph[:, :, None] * CHANNELS + o_c[None, None, :]
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
            bias_ptr,
            row,
            (b_m == float("-inf")) & (lost == 0),
            b_m,
            b_l,
            acc,
            positive,
            b_sum,
            o_h,
            o_c,
            m_h,
            m_hc,
            HEADS,
            CHANNELS,
            SAVE_POSITIVE,
            HAS_BIAS,
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
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDES: tl.constexpr,
    ATT_SRC: tl.constexpr,
    ATT_DST: tl.constexpr,
):
    """Store a finished source; `STRIDES` are those of rows of both gradients.

    With `ATT_SRC` the operand is <v_j, att_src>, and its gradient flows on into that of
    v_j; with `ATT_DST` so does that of the node as a destination.
    """
    m_hc = m_h[:, None] & m_c[None, :]
    o_hc = o_h[:, None] * CHANNELS + o_c[None, :]
    if ATT_SRC:
        att = tl.load(att_src_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
        acc += tl.sum(acc_col, axis=1)[:, None] * att
    if ATT_DST:
        att = tl.load(att_dst_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
        grad_row = tl.load(grad_row_ptr + col * HEADS + o_h, mask=m_h, other=0.0)
        acc += grad_row[:, None] * att
    p_v = grad_value_ptr + col * STRIDES[0] + o_hc
    tl.store(p_v, acc.to(grad_value_ptr.dtype.element_ty), mask=m_hc)
    p_c = grad_col_ptr + col * STRIDES[1] + o_h[:, None] * WIDTH + o_k[None, :]
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
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE_OV: tl.constexpr,
    STRIDE_OC: tl.constexpr,
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
    m_h, m_c, m_k = o_h < HEADS, o_c < CHANNELS, o_k < WIDTH
    col = tl.load(hub_row_ptr + tl.program_id(0)).to(tl.int64)
    if col >= 0:
        first = tl.load(hub_ptr_ptr + tl.program_id(0))
        last = tl.load(hub_ptr_ptr + tl.program_id(0) + 1)
        acc = tl.zeros([BLOCK_P, BLOCK_H, BLOCK_C], dtype=tl.float32)
        acc_col = tl.zeros([BLOCK_P, BLOCK_H, BLOCK_K], dtype=tl.float32)
        for k in range(first, last, BLOCK_P):
            o_p = (k + tl.arange(0, BLOCK_P)).to(tl.int64)
            m_p = o_p < last
            n = HEADS * CHANNELS
            acc += load_rows(part_ptr, o_p, m_p, o_h, m_h, o_c, m_c, n, CHANNELS)
            n = HEADS * WIDTH
            acc_col += load_rows(part_col_ptr, o_p, m_p, o_h, m_h, o_k, m_k, n, WIDTH)
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
            HEADS,
            CHANNELS,
            WIDTH,
            (STRIDE_OV, STRIDE_OC),
            ATT_SRC,
            ATT_DST,
        )
