"""What the backward of edge attention needs of each destination, packed once."""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import gather, load_rows


@triton.jit(do_not_specialize=["num_rows"])
def attention_prepare(
    grad_ptr,
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    row_ptr,
    state_ptr,
    grad_row_ptr,
    bias_ptr,
    sums_ptr,
    num_rows,
    stride_gn,
    stride_gh,
    stride_rn,
    stride_rh,
    stride_p,
    offset_p,
    scale,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_POSITIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GRAD_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Pack (m, 1 / l, delta, operand); the additive score's gradient by row.

    The destination's operand is packed with `HAS_ROW`, where it is a number per head.

    With `HAS_BIAS`, `out` holds a bias [H, C] that is no part of the attention. With
    `GRAD_BIAS`, whose sums need all channels in a block, each program also stores the
    sum of its rows' gradients, `stride_p` apart and from `offset_p` on.
    """
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < HEADS
    total = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_C], dtype=tl.float32)
    step = tl.num_programs(0) * BLOCK_N
    for n in range(tl.program_id(0) * BLOCK_N, num_rows, step):
        row = (n + tl.arange(0, BLOCK_N)).to(tl.int64)
        m_r = row < num_rows
        m_rh = m_r[:, None] & m_h[None, :]
        o_rh = row[:, None] * HEADS + o_h[None, :]  # [BLOCK_N, BLOCK_H]
        delta = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
        plus = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
        for c in tl.static_range(0, CHANNELS, BLOCK_C):
            o_c = c + tl.arange(0, BLOCK_C)
            m_c = o_c < CHANNELS
            g = load_rows(grad_ptr, row, m_r, o_h, m_h, o_c, m_c, stride_gn, stride_gh)
            x = load_rows(
                out_ptr, row, m_r, o_h, m_h, o_c, m_c, HEADS * CHANNELS, CHANNELS
            )
            if HAS_BIAS:
                p_bias = bias_ptr + o_h[:, None] * CHANNELS + o_c[None, :]
                m_hc = m_h[:, None] & m_c[None, :]
                bias = tl.load(p_bias, mask=m_hc, other=0.0).to(tl.float32)
                x -= bias[None, :, :]
            if GRAD_BIAS:
                total += g
            delta += tl.sum(g * x, axis=2)
            if HAS_POSITIVE:
                x = load_rows(
                    positive_ptr,
                    row,
                    m_r,
                    o_h,
                    m_h,
                    o_c,
                    m_c,
                    HEADS * CHANNELS,
                    CHANNELS,
                )
                plus += tl.sum(g * x, axis=2)
        b_m = tl.load(m_ptr + o_rh, mask=m_rh, other=0.0)
        b_l = tl.load(l_ptr + o_rh, mask=m_rh, other=1.0)
        b_row = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
        if HAS_ROW:
            p_row = row_ptr + row[:, None] * stride_rn + o_h[None, :] * stride_rh
            b_row = tl.load(p_row, mask=m_rh, other=0.0).to(tl.float32)
        # One store of 16 bytes for each row and head.
        packed = tl.join(tl.join(b_m, delta), tl.join(1.0 / b_l, b_row))
        packed = tl.reshape(packed, [BLOCK_N, BLOCK_H * 4])
        o_s = tl.program_id(1) * (BLOCK_H * 4) + tl.arange(0, BLOCK_H * 4)
        m_s = m_r[:, None] & (o_s < HEADS * 4)[None, :]
        p_s = state_ptr + (row * (HEADS * 4))[:, None] + o_s[None, :]
        tl.store(p_s, packed, mask=m_s)
        if HAS_POSITIVE:
            b_sum = tl.load(positive_sum_ptr + o_rh, mask=m_rh, other=0.0)
            grad_row = (1.0 - scale) * (plus - delta * b_sum)
            tl.store(grad_row_ptr + o_rh, grad_row, mask=m_rh)
    if GRAD_BIAS:
        o_c = tl.arange(0, BLOCK_C)
        o_hc = o_h[:, None] * CHANNELS + o_c[None, :]
        m_hc = m_h[:, None] & (o_c < CHANNELS)[None, :]
        p_sums = sums_ptr + tl.program_id(0).to(tl.int64) * stride_p + offset_p + o_hc
        tl.store(p_sums, tl.sum(total, axis=0), mask=m_hc)


@triton.jit
def load_state(
    ptr,
    idx,
    m_x,
    HEADS: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """What `attention_prepare` packed: m, 1 / l, delta and the operand, [E, H] each."""
    # Four numbers to each head.
    o = tl.program_id(1) * (BLOCK_H * 4) + tl.arange(0, BLOCK_H * 4)
    x = gather((ptr, o, o < HEADS * 4, HEADS * 4), idx, m_x, EVEN, MASKED, False)
    even, odd = tl.split(tl.reshape(x, [BLOCK_E, BLOCK_H, 2, 2]))
    b_m, delta = tl.split(even)
    b_il, b_row = tl.split(odd)
    return b_m, b_il, delta, b_row
