"""What the kernels of the edge-attention template share about one tile of edges."""

from __future__ import annotations

import triton
import triton.language as tl

# Rounds of Philox; 7 pass every statistical test that its authors know of, 10 are their
# margin for other uses than dropout.
ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_factor(seed, edge_id, o_h, p, factor):
    """`factor` (1 / (1 - p)) where an edge and head are kept, 0 where dropped: [E, H].

    The counter is (edge id in 64 bits, head): every kernel that meets the edge draws
    the same number, whatever the grouping and the tile.
    """
    low = (edge_id & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = (edge_id >> 32).to(tl.uint32)[:, None]
    head = o_h.to(tl.uint32)[None, :]
    zero = (low + head) * 0
    random, _, _, _ = tl.philox(
        seed, low + zero, high + zero, head + zero, zero, ROUNDS
    )
    uniform = (random >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(uniform >= p, factor, 0.0)


@triton.jit
def load_rows(ptr, idx, m_x, o_h, m_h, o_c, m_c, stride_n, stride_h):
    """Features [X, H, C] in float32, 0 where masked."""
    p = ptr + (idx * stride_n)[:, None, None] + (o_h * stride_h)[None, :, None]
    m = m_x[:, None, None] & m_h[None, :, None] & m_c[None, None, :]
    return tl.load(p + o_c[None, None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_edges(
    step,
    end,
    held,
    index_ptr,
    perm_ptr,
    mask_ptr,
    SELF_LOOPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PERM: tl.constexpr,
    NEEDS_ID: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Other ends, ids and liveness of the edges from `step` on, [E] each."""
    o_e = step + tl.arange(0, BLOCK_E)
    m_e = o_e < end
    other = tl.load(index_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    edge_id = o_e.to(tl.int64)
    if NEEDS_ID and HAS_PERM:
        edge_id = tl.load(perm_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    if SELF_LOOPS:
        m_e = m_e & (other != held)
    if HAS_MASK:
        m_e = m_e & (tl.load(mask_ptr + edge_id, mask=m_e, other=0) != 0)
    return other, edge_id, m_e


@triton.jit
def load_term(ptr, idx, m_x, o_h, m_h, heads):
    """An additive term [X, H] of edges or loops."""
    p = ptr + (idx * heads)[:, None] + o_h[None, :]
    m = m_x[:, None] & m_h[None, :]
    return tl.load(p, mask=m, other=0.0).to(tl.float32)
