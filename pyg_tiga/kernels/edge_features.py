"""Features of edges with vectors of their destinations, in the order of these.

With vectors a_i [H, D] of the destinations, features f_e [D] and weights w_e [H] of the
edges there are three products, each a part of the gradients of the other two:

* `feature_dots`: <a_i, f_e> for every head, [E, H];
* `feature_sums`: sum over the edges of row i of w_e f_e, [N, H, D];
* `feature_spread`: sum over the heads of w_e a_i, [E, D].

Edges are read and written where the caller has them; nothing of a source is gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import edge_ids, load_units


@triton.jit
def _load_vectors(p_a, m_a, i_d, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Numbers `i_d` and on of a destination's vectors in float32, [H, D]."""
    o_d = i_d + tl.arange(0, BLOCK_D)
    mask = m_a[:, None] & (o_d < WIDTH)[None, :]
    return tl.load(p_a[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def feature_dots(
    node_ptr,
    feature_ptr,
    out_ptr,
    ptr_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    m_h = o_h < HEADS
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, _, start, end, _, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            p_a = node_ptr + (row * HEADS + o_h) * WIDTH  # [BLOCK_H]
            # Read once where a block holds it.
            b_a = _load_vectors(p_a, m_h, 0, WIDTH, BLOCK_D)
            for step in range(start, end, BLOCK_E):
                o_e = step + tl.arange(0, BLOCK_E)  # [BLOCK_E]
                m_e = o_e < end
                edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
                acc = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
                for i_d in tl.static_range(0, WIDTH, BLOCK_D):
                    o_d = i_d + tl.arange(0, BLOCK_D)  # [BLOCK_D]
                    m_d = o_d < WIDTH
                    if WIDTH > BLOCK_D:
                        b_a = _load_vectors(p_a, m_h, i_d, WIDTH, BLOCK_D)
                    p_f = feature_ptr + (edge * WIDTH)[:, None] + o_d[None, :]
                    m_f = m_e[:, None] & m_d[None, :]
                    b_f = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
                    acc += tl.sum(b_a[None, :, :] * b_f[:, None, :], axis=2)
                p_out = out_ptr + (edge * HEADS)[:, None] + o_h[None, :]
                acc = acc.to(out_ptr.dtype.element_ty)
                tl.store(p_out, acc, mask=m_e[:, None] & m_h[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def feature_sums(
    weight_ptr,
    feature_ptr,
    out_ptr,
    part_ptr,
    ptr_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    m_h, m_d = o_h < HEADS, o_d < WIDTH
    m_hd = m_h[:, None] & m_d[None, :]
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, _, start, end, m_item, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
            for step in range(start, end, BLOCK_E):
                o_e = step + tl.arange(0, BLOCK_E)  # [BLOCK_E]
                m_e = o_e < end
                edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
                p_w = weight_ptr + (edge * HEADS)[:, None] + o_h[None, :]
                m_w = m_e[:, None] & m_h[None, :]
                b_w = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
                p_f = feature_ptr + (edge * WIDTH)[:, None] + o_d[None, :]
                m_f = m_e[:, None] & m_d[None, :]
                b_f = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
                acc += tl.sum(b_w[:, :, None] * b_f[:, None, :], axis=0)
            o_hd = o_h[:, None] * WIDTH + o_d[None, :]
            if SPLIT:
                p_part = part_ptr + u.to(tl.int64) * (HEADS * WIDTH) + o_hd
                if m_item:
                    tl.store(p_part, acc, mask=m_hd)
            if m_item == 0:
                p_out = out_ptr + row * (HEADS * WIDTH) + o_hd
                tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_hd)


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def feature_spread(
    weight_ptr,
    node_ptr,
    out_ptr,
    ptr_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    m_d = o_d < WIDTH
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, _, start, end, _, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            for step in range(start, end, BLOCK_E):
                o_e = step + tl.arange(0, BLOCK_E)  # [BLOCK_E]
                m_e = o_e < end
                edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
                acc = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
                for i_h in tl.static_range(0, HEADS, BLOCK_H):
                    o_h = i_h + tl.arange(0, BLOCK_H)  # [BLOCK_H]
                    m_h = o_h < HEADS
                    p_a = (
                        node_ptr + ((row * HEADS + o_h) * WIDTH)[:, None] + o_d[None, :]
                    )
                    m_a = m_h[:, None] & m_d[None, :]
                    b_a = tl.load(p_a, mask=m_a, other=0.0).to(tl.float32)
                    p_w = weight_ptr + (edge * HEADS)[:, None] + o_h[None, :]
                    m_w = m_e[:, None] & m_h[None, :]
                    b_w = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
                    acc += tl.sum(b_w[:, :, None] * b_a[None, :, :], axis=1)
                p_out = out_ptr + (edge * WIDTH)[:, None] + o_d[None, :]
                acc = acc.to(out_ptr.dtype.element_ty)
                tl.store(p_out, acc, mask=m_e[:, None] & m_d[None, :])
