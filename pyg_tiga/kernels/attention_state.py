"""What the backward of edge attention needs of each destination, packed once."""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import load_rows


@triton.jit(do_not_specialize=["num_rows"])
def attention_prepare(
    grad_ptr,
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    state_ptr,
    grad_row_ptr,
    num_rows,
    heads,
    channels,
    stride_gn,
    stride_gh,
    scale,
    HAS_POSITIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Pack (m, 1 / l, delta) per row and head; the additive score's gradient by row."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_r, m_h = row < num_rows, o_h < heads
    m_rh = m_r[:, None] & m_h[None, :]
    o_rh = row[:, None] * heads + o_h[None, :]  # [BLOCK_N, BLOCK_H]
    delta = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    plus = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    for c in range(0, channels, BLOCK_C):
        o_c = c + tl.arange(0, BLOCK_C)
        m_c = o_c < channels
        g = load_rows(grad_ptr, row, m_r, o_h, m_h, o_c, m_c, stride_gn, stride_gh)
        x = load_rows(out_ptr, row, m_r, o_h, m_h, o_c, m_c, heads * channels, channels)
        delta += tl.sum(g * x, axis=2)
        if HAS_POSITIVE:
            x = load_rows(
                positive_ptr, row, m_r, o_h, m_h, o_c, m_c, heads * channels, channels
            )
            plus += tl.sum(g * x, axis=2)
    b_m = tl.load(m_ptr + o_rh, mask=m_rh, other=0.0)
    b_l = tl.load(l_ptr + o_rh, mask=m_rh, other=1.0)
    tl.store(state_ptr + o_rh * 4, b_m, mask=m_rh)
    tl.store(state_ptr + o_rh * 4 + 1, 1.0 / b_l, mask=m_rh)
    tl.store(state_ptr + o_rh * 4 + 2, delta, mask=m_rh)
    if HAS_POSITIVE:
        b_sum = tl.load(positive_sum_ptr + o_rh, mask=m_rh, other=0.0)
        grad_row = (1.0 - scale) * (plus - delta * b_sum)
        tl.store(grad_row_ptr + o_rh, grad_row, mask=m_rh)


@triton.jit
def load_state(ptr, idx, m_x, o_h, m_h, heads):
    """What `attention_prepare` packed: m, 1 / l and delta, [X, H] each."""
    p = ptr + ((idx * heads)[:, None] + o_h[None, :]) * 4
    m = m_x[:, None] & m_h[None, :]
    return (
        tl.load(p, mask=m, other=0.0),
        tl.load(p + 1, mask=m, other=0.0),
        tl.load(p + 2, mask=m, other=0.0),
    )
