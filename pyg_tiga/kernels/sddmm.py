"""SDDMM over grouped edges: the dot product of the two ends of every edge.

For the edge e = (j -> r), out_e is the sum over f of a[r, f] b[j, f]. One value per
edge, so the pieces of a long row need no merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import load_units


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def sddmm_rows(
    a_ptr,
    b_ptr,
    out_ptr,
    ptr_ptr,
    index_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    features,
    stride_a,
    stride_b,
    SPLIT: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    u = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    row, _, start, end, _, m_row = load_units(
        u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
    )
    longest = tl.max(end - start, axis=0)
    for step in range(0, longest, BLOCK_E):
        # [BLOCK_R, BLOCK_E]
        o_e = (start + step)[:, None] + tl.arange(0, BLOCK_E)[None, :]
        m_e = o_e < end[:, None]
        j = tl.load(index_ptr + o_e, mask=m_e, other=0).to(tl.int64)
        acc = tl.zeros([BLOCK_R, BLOCK_E], dtype=tl.float32)
        for i_f in range(0, features, BLOCK_F):
            o_f = i_f + tl.arange(0, BLOCK_F)  # [BLOCK_F]
            m_f = o_f < features
            # [BLOCK_R, BLOCK_F]
            b_a = tl.load(
                a_ptr + (row * stride_a)[:, None] + o_f[None, :],
                mask=m_row[:, None] & m_f[None, :],
                other=0.0,
            ).to(tl.float32)
            # [BLOCK_R, BLOCK_E, BLOCK_F]
            b_b = tl.load(
                b_ptr + (j * stride_b)[:, :, None] + o_f[None, None, :],
                mask=m_e[:, :, None] & m_f[None, None, :],
                other=0.0,
            ).to(tl.float32)
            acc += tl.sum(b_a[:, None, :] * b_b, axis=2)
        if HAS_PERM:
            o_out = tl.load(perm_ptr + o_e, mask=m_e, other=0).to(tl.int64)
        else:
            o_out = o_e.to(tl.int64)
        tl.store(out_ptr + o_out, acc.to(out_ptr.dtype.element_ty), mask=m_e)
