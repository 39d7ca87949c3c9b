"""SpMM over grouped edges: out_r = s_r * sum over the edges e of row r of w_e c_j x_j.

`spmm_rows` gives every program `BLOCK_R` units of work (see `units`). `spmm_merge` adds
the pieces of each long row in fixed order, which keeps results bit-identical from run
to run without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import load_units


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def spmm_rows(
    x_ptr,
    out_ptr,
    partial_ptr,
    ptr_ptr,
    index_ptr,
    weight_ptr,
    row_scale_ptr,
    col_scale_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    features,
    stride_x,
    stride_out,
    SPLIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COL_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # The feature slice is the outer grid axis: slice after slice of x stays in L2.
    u = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    m_f = o_f < features
    row, _, start, end, m_item, m_row = load_units(
        u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
    )
    # [BLOCK_R, BLOCK_E, BLOCK_F]
    acc = tl.zeros([BLOCK_R, BLOCK_E, BLOCK_F], dtype=tl.float32)
    longest = tl.max(end - start, axis=0)
    for step in range(0, longest, BLOCK_E):
        # [BLOCK_R, BLOCK_E]
        o_e = (start + step)[:, None] + tl.arange(0, BLOCK_E)[None, :]
        m_e = o_e < end[:, None]
        j = tl.load(
            index_ptr + o_e, mask=m_e, other=0, eviction_policy="evict_first"
        ).to(tl.int64)
        # [BLOCK_R, BLOCK_E, BLOCK_F]
        b_x = tl.load(
            x_ptr + (j * stride_x)[:, :, None] + o_f[None, None, :],
            mask=m_e[:, :, None] & m_f[None, None, :],
            other=0.0,
        ).to(tl.float32)
        if HAS_WEIGHT:
            w = tl.load(
                weight_ptr + o_e, mask=m_e, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            if HAS_COL_SCALE:
                w = w * tl.load(col_scale_ptr + j, mask=m_e, other=0.0)
            b_x = b_x * w[:, :, None]
        elif HAS_COL_SCALE:
            b_x = b_x * tl.load(col_scale_ptr + j, mask=m_e, other=0.0)[:, :, None]
        acc += b_x
    total = tl.sum(acc, axis=1)  # [BLOCK_R, BLOCK_F]
    m_out = m_row[:, None] & m_f[None, :]
    if SPLIT:
        o_p = u.to(tl.int64) * features
        tl.store(
            partial_ptr + o_p[:, None] + o_f[None, :],
            total,
            mask=m_out & m_item[:, None],
        )
        m_out = m_out & (m_item == 0)[:, None]
    if HAS_ROW_SCALE:
        s = tl.load(row_scale_ptr + row, mask=m_row, other=0.0)
        total = total * s[:, None]
    p_out = out_ptr + (row * stride_out)[:, None] + o_f[None, :]
    tl.store(p_out, total.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def spmm_merge(
    partial_ptr,
    out_ptr,
    row_scale_ptr,
    hub_row_ptr,
    hub_ptr_ptr,
    features,
    stride_out,
    HAS_ROW_SCALE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    i_hub = tl.program_id(0)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    m_f = o_f < features
    row = tl.load(hub_row_ptr + i_hub).to(tl.int64)
    if row >= 0:
        first = tl.load(hub_ptr_ptr + i_hub)
        last = tl.load(hub_ptr_ptr + i_hub + 1)
        acc = tl.zeros([BLOCK_K, BLOCK_F], dtype=tl.float32)
        for k in range(first, last, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            p = partial_ptr + o_k.to(tl.int64)[:, None] * features + o_f[None, :]
            acc += tl.load(p, mask=(o_k < last)[:, None] & m_f[None, :], other=0.0)
        total = tl.sum(acc, axis=0)  # [BLOCK_F]
        if HAS_ROW_SCALE:
            total = total * tl.load(row_scale_ptr + row)
        p_out = out_ptr + row * stride_out + o_f
        tl.store(p_out, total.to(out_ptr.dtype.element_ty), mask=m_f)
