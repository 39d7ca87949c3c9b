"""Scores of nodes, <x_n, att> per head, and the gradient of `att`: a read of x each."""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import load_rows


@triton.jit(do_not_specialize=["num_nodes"])
def node_scores(
    x_ptr,
    first_att_ptr,
    second_att_ptr,
    first_ptr,
    second_ptr,
    num_nodes,
    stride_n,
    stride_h,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """first_n = <x_n, first_att>, and the same for a second vector, [N, H] each."""
    node = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_n, m_h = node < num_nodes, o_h < HEADS
    first = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    for c in tl.static_range(0, CHANNELS, BLOCK_C):
        o_c = c + tl.arange(0, BLOCK_C)
        m_c = o_c < CHANNELS
        x = load_rows(x_ptr, node, m_n, o_h, m_h, o_c, m_c, stride_n, stride_h)
        o_hc = o_h[:, None] * CHANNELS + o_c[None, :]
        m_hc = m_h[:, None] & m_c[None, :]
        att = tl.load(first_att_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
        first += tl.sum(x * att[None, :, :], axis=2)
        if SECOND:
            att = tl.load(second_att_ptr + o_hc, mask=m_hc, other=0.0).to(tl.float32)
            second += tl.sum(x * att[None, :, :], axis=2)
    o_nh = node[:, None] * HEADS + o_h[None, :]
    m_nh = m_n[:, None] & m_h[None, :]
    tl.store(first_ptr + o_nh, first, mask=m_nh)
    if SECOND:
        tl.store(second_ptr + o_nh, second, mask=m_nh)


@triton.jit(do_not_specialize=["num_nodes"])
def node_scores_backward(
    x_ptr,
    grad_first_ptr,
    grad_second_ptr,
    sums_ptr,
    num_nodes,
    stride_n,
    stride_h,
    stride_p,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums of grad_n x_n over a share of the nodes, [2, H, C], `stride_p` apart."""
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_h, m_c = o_h < HEADS, o_c < CHANNELS
    m_hc = m_h[:, None] & m_c[None, :]
    o_hc = o_h[:, None] * CHANNELS + o_c[None, :]
    size = HEADS * CHANNELS
    first = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_C], dtype=tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_C], dtype=tl.float32)
    stride = tl.num_programs(0) * BLOCK_N
    for n in range(tl.program_id(0) * BLOCK_N, num_nodes, stride):
        node = (n + tl.arange(0, BLOCK_N)).to(tl.int64)
        m_n = node < num_nodes
        x = load_rows(x_ptr, node, m_n, o_h, m_h, o_c, m_c, stride_n, stride_h)
        o_nh = node[:, None] * HEADS + o_h[None, :]
        m_nh = m_n[:, None] & m_h[None, :]
        grad = tl.load(grad_first_ptr + o_nh, mask=m_nh, other=0.0).to(tl.float32)
        first += grad[:, :, None] * x
        if SECOND:
            grad = tl.load(grad_second_ptr + o_nh, mask=m_nh, other=0.0).to(tl.float32)
            second += grad[:, :, None] * x
    p_sums = sums_ptr + tl.program_id(0).to(tl.int64) * stride_p + o_hc
    tl.store(p_sums, tl.sum(first, axis=0), mask=m_hc)
    if SECOND:
        tl.store(p_sums + size, tl.sum(second, axis=0), mask=m_hc)


@triton.jit(do_not_specialize=["programs", "others", "split"])
def sum_partials(
    sums_ptr,
    out_ptr,
    programs,
    others,
    split,
    width,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Sums over all programs of what each of them stored, [width].

    `programs` stored the first `split` numbers and `others` the rest.
    """
    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = o_w < width
    stored = tl.where(o_w < split, programs, others)
    acc = tl.zeros([BLOCK_P, BLOCK_W], dtype=tl.float32)
    for k in range(0, tl.maximum(programs, others), BLOCK_P):
        o_p = k + tl.arange(0, BLOCK_P)
        m = (o_p[:, None] < stored[None, :]) & m_w[None, :]
        acc += tl.load(
            sums_ptr + o_p[:, None] * width + o_w[None, :], mask=m, other=0.0
        )
    tl.store(out_ptr + o_w, tl.sum(acc, axis=0), mask=m_w)
