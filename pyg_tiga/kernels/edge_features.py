"""Features of edges with vectors of their destinations, in the order of these.

With vectors a_i [H, D] of the destinations, features f_e [D] and weights w_e [H] of the
edges there are three products, each a part of the gradients of the other two:

* `feature_dots`: <a_i, f_e> for every head, [E, H];
* `feature_sums`: sum over the edges of row i of w_e f_e, [N, H, D];
* `feature_spread`: sum over the heads of w_e a_i, [E, D].

Edges stand where the caller has them; or numbers of edges, [E, H], in the order of the
destinations, and features alone where the caller has them (`perm_ptr`): what is read of
a destination is then read for all of its edges at once. What has a row for each edge
takes the edges as they come and fetches vectors of destinations, which caches hold:
rows are short, and a walk over them would take more instructions than the products.
Tiles are [E, D] and heads a loop: no axis may be summed that is shorter than the lanes
along it, which then hold its numbers several times over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import edge_ids, load_units


@triton.jit
def _targets(target_ptr, num_dst, num_edges, BLOCK_E: tl.constexpr):
    """A program's edges, which there are, destinations, which can be read: [E] each."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    m_e = o_e < num_edges
    target = tl.load(target_ptr + o_e, mask=m_e, other=-1).to(tl.int64)
    # A fault in the edges may not be reported yet.
    return o_e, m_e, target, (target >= 0) & (target < num_dst)


@triton.jit
def _load(p, m_e, o_d, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Numbers `o_d` of rows in float32, 0 where there are none: [E, D]."""
    if WIDTH % BLOCK_D == 0:
        x = tl.load(p[:, None] + o_d[None, :], mask=m_e[:, None], other=0.0)
    else:
        m = m_e[:, None] & (o_d < WIDTH)[None, :]
        x = tl.load(p[:, None] + o_d[None, :], mask=m, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _dot(p_a, p_f, b_f, m_e, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """<a, f> of one head, [E]; `b_f` is the first slice of f."""
    o_d = tl.arange(0, BLOCK_D)
    acc = _load(p_a, m_e, o_d, WIDTH, BLOCK_D) * b_f  # [E, D]
    for i_d in tl.static_range(BLOCK_D, WIDTH, BLOCK_D):
        b_a = _load(p_a, m_e, i_d + o_d, WIDTH, BLOCK_D)
        acc += b_a * _load(p_f, m_e, i_d + o_d, WIDTH, BLOCK_D)
    return tl.sum(acc, axis=1)


@triton.jit(do_not_specialize=["num_dst", "num_edges"])
def feature_dots(
    node_ptr,
    feature_ptr,
    out_ptr,
    target_ptr,
    perm_ptr,
    num_dst,
    num_edges,
    HAS_PERM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_e, m_e, target, m_t = _targets(target_ptr, num_dst, num_edges, BLOCK_E)
    p_a = node_ptr + target * (HEADS * WIDTH)  # [BLOCK_E]
    p_f = feature_ptr + edge_ids(o_e, m_e, perm_ptr, HAS_PERM) * WIDTH
    p_out = out_ptr + o_e * HEADS
    b_f = _load(p_f, m_t, tl.arange(0, BLOCK_D), WIDTH, BLOCK_D)
    for first in range(0, HEADS, UNROLL):
        # Loads of the heads that are unrolled run ahead.
        for k in tl.static_range(UNROLL):
            h = first + k
            dot = _dot(p_a + h * WIDTH, p_f, b_f, m_t, WIDTH, BLOCK_D)  # [BLOCK_E]
            tl.store(p_out + h, dot.to(out_ptr.dtype.element_ty), mask=m_e)


@triton.jit
def _weighted(p_w, p_a, o_d, m_e, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Weights times vectors of one head, [E, D]."""
    b_w = tl.load(p_w, mask=m_e, other=0.0).to(tl.float32)  # [E]
    return b_w[:, None] * _load(p_a, m_e, o_d, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["num_dst", "num_edges"])
def feature_spread(
    weight_ptr,
    node_ptr,
    out_ptr,
    more_weight_ptr,
    more_node_ptr,
    target_ptr,
    perm_ptr,
    num_dst,
    num_edges,
    HAS_PERM: tl.constexpr,
    PAIR: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The product; with `PAIR` plus that of other weights and vectors."""
    o_e, m_e, target, m_t = _targets(target_ptr, num_dst, num_edges, BLOCK_E)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    o_w, o_a = o_e * HEADS, target * (HEADS * WIDTH)  # [BLOCK_E]
    p_w, p_a = weight_ptr + o_w, node_ptr + o_a
    p_v, p_b = more_weight_ptr + o_w, more_node_ptr + o_a
    acc = tl.zeros([BLOCK_E, BLOCK_D], dtype=tl.float32)
    for first in range(0, HEADS, UNROLL):
        for k in tl.static_range(UNROLL):
            h = first + k
            acc += _weighted(p_w + h, p_a + h * WIDTH, o_d, m_t, WIDTH, BLOCK_D)
            if PAIR:
                acc += _weighted(p_v + h, p_b + h * WIDTH, o_d, m_t, WIDTH, BLOCK_D)
    edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
    p_out = out_ptr + (edge * WIDTH)[:, None] + o_d[None, :]
    mask = m_e[:, None] & (o_d < WIDTH)[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    BY_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sums; a tile is laid out as in `attention_tile`, with features per head."""
    BLOCK_E: tl.constexpr = BLOCK_U * BLOCK_S
    i_h, i_d = tl.program_id(1) * BLOCK_H, tl.program_id(2) * BLOCK_D
    o_h = i_h + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_d = i_d + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    # Every head reads the features for itself, in the threads that sum them.
    o_f = i_d + tl.arange(0, BLOCK_H * BLOCK_D) % BLOCK_D  # [BLOCK_H * BLOCK_D]
    m_h = o_h < HEADS
    m_hd = m_h[:, None] & (o_d < WIDTH)[None, :]
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, _, start, end, m_item, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            acc = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_D], dtype=tl.float32)
            for step in range(start, end, BLOCK_E):
                o_e = step + tl.arange(0, BLOCK_E)  # [BLOCK_E]
                m_e = o_e < end
                edge = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
                place = o_e.to(tl.int64) if BY_ROW else edge
                p_w = weight_ptr + (place * HEADS)[:, None] + o_h[None, :]
                m_w = m_e[:, None] & m_h[None, :]
                b_w = tl.load(p_w, mask=m_w, other=0.0).to(tl.float32)
                # Last, as it decides how the tile is laid out.
                b_f = _load(feature_ptr + edge * WIDTH, m_e, o_f, WIDTH, BLOCK_D)
                b_f = tl.reshape(b_f, [BLOCK_U, BLOCK_S, BLOCK_H, BLOCK_D])
                b_w = tl.reshape(b_w, [BLOCK_U, BLOCK_S, BLOCK_H, 1])
                acc += tl.sum(b_w * b_f, axis=0)
            total = tl.sum(acc, axis=0)  # [BLOCK_H, BLOCK_D]
            o_hd = o_h[:, None] * WIDTH + o_d[None, :]
            if SPLIT:
                p_part = part_ptr + u.to(tl.int64) * (HEADS * WIDTH) + o_hd
                if m_item:
                    tl.store(p_part, total, mask=m_hd)
            if m_item == 0:
                p_out = out_ptr + row * (HEADS * WIDTH) + o_hd
                tl.store(p_out, total.to(out_ptr.dtype.element_ty), mask=m_hd)
