"""What the kernels of the edge-attention template share about one tile of edges.

A tile holds `BLOCK_E` edges of one row. Numbers per edge and head stand in [E, H], each
in one thread; features are gathered as [E, H * C], whole lines at a time, and seen as
[U, S, H, C] with E = U * S: the S edges that one load instruction of a warp covers, U
times. Sums over U stay inside a thread, and those over S wait until the row is done.

A walk over edges is written once (`walk`) and so is what all walks load (`load_tile`).
What belongs together goes in tuples:

* `EDGES`: HAS_TERM, HAS_LOOP_TERM, HAS_MASK, HAS_PERM, SELF_LOOPS, DROPOUT, and where
  terms stand: `CALLER`, `WALKED` or `SLOTTED`;
* `TILE`: HEADS, EVEN, BLOCK_U, BLOCK_S, BLOCK_H, BLOCK_C, BLOCK_K, PTX;
* `edges`: pointers to the other ends, ids, mask, terms, loop terms and slots, then the
  number of edges, the seed and what dropout does, (p, 1 / (1 - p)).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rounds of Philox; 7 pass every statistical test that its authors know of, 10 are their
# margin for other uses than dropout.
ROUNDS = tl.constexpr(7)
# Terms of edges stand where the caller has the edges, in the order of the walk, or
# where slots say.
CALLER, WALKED, SLOTTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def table_of(ptr, stride_n, stride_h, i_h, i_c, LAYOUT: tl.constexpr):
    """A table of node rows [HEADS, N], of which a slice [H, C] is read.

    That is its pointer, offsets of the columns and which of them exist, [H * C], the
    distance of its rows. `LAYOUT` is (PITCH, HEADS, N, H, C); with a `PITCH` above 0
    this is that distance, and heads follow one another: strides are known.
    """
    PITCH: tl.constexpr = LAYOUT[0]
    HEADS: tl.constexpr = LAYOUT[1]
    N: tl.constexpr = LAYOUT[2]
    H: tl.constexpr = LAYOUT[3]
    C: tl.constexpr = LAYOUT[4]
    o = tl.arange(0, H * C)
    head, channel = i_h * H + o // C, i_c * C + o % C
    m_f = (head < HEADS) & (channel < N)
    if PITCH > 0:
        return ptr, head * N + channel, m_f, PITCH
    return ptr, head * stride_h + channel, m_f, stride_n


@triton.jit
def _widen(x, PTX: tl.constexpr):
    """To float32; with `PTX` in the one instruction that a bfloat16 needs.

    The compiler takes three for two of them: it moves the upper half of a register down
    before it shifts it up again.
    """
    if PTX and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(tl.float32)


@triton.jit
def gather(
    table, idx, m_x, EVEN: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr
):
    """The slice of rows `idx` of a table (see `table_of`) in float32, [X, F].

    0 where masked.
    """
    ptr, o_f, m_f, stride = table
    p = (ptr + o_f)[None, :] + (idx.to(tl.int64) * stride)[:, None]
    if MASKED:
        if EVEN:
            x = tl.load(p, mask=m_x[:, None], other=0.0)
        else:
            x = tl.load(p, mask=m_x[:, None] & m_f[None, :], other=0.0)
    elif EVEN:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=m_f[None, :], other=0.0)
    return _widen(x, PTX)


@triton.jit
def with_sign(weight, aux):
    """Weights >= 0, negated where `aux` is not above 0: [..., 1].

    From [E, H] to the threads that hold features is a way through shared memory, which
    a weight and the side it is on then take as one number.
    """
    return tl.where(aux > 0, weight, -weight)[:, :, :, None]


@triton.jit
def walk(
    carry,
    start,
    end,
    held,
    has_loop,
    context,
    STEP: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Fold the edges from `start` to `end` and the row's loop into `carry`.

    `STEP` takes one tile: full ones without masks, then what is left of the row.
    """
    full = start + (end - start) // BLOCK_E * BLOCK_E
    for step in range(start, full, BLOCK_E):
        carry = STEP(carry, step, end, held, has_loop, context, CHOICES, False)
    if full < end + has_loop:
        carry = STEP(carry, full, end, held, has_loop, context, CHOICES, True)
    return carry


@triton.jit
def term_places(o_e, edge_id, m_e, slot_ptr, PLACE: tl.constexpr):
    """Where the terms of edges stand, `edge_id` being their ids: [E]."""
    if PLACE == CALLER:
        return edge_id
    if PLACE == SLOTTED:
        return tl.load(slot_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    return o_e.to(tl.int64)


@triton.jit
def load_tile(
    step,
    end,
    held,
    has_loop,
    edges,
    o_h,
    EDGES: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One tile of edges: other ends, which are stored, a loop, take part; terms, kept.

    The first four are [E]; the scores' terms, 0 where there are none, and what dropout
    leaves of a weight are [E, H]. Without `TAIL` all of the tile is stored. With it the
    row's implicit loop, if it has one, comes after its last edge.
    """
    HAS_TERM: tl.constexpr = EDGES[0]
    HAS_LOOP_TERM: tl.constexpr = EDGES[1]
    HAS_MASK: tl.constexpr = EDGES[2]
    HAS_PERM: tl.constexpr = EDGES[3]
    SELF_LOOPS: tl.constexpr = EDGES[4]
    DROPOUT: tl.constexpr = EDGES[5]
    PLACE: tl.constexpr = EDGES[6]
    HEADS: tl.constexpr = TILE[0]
    BLOCK_E: tl.constexpr = TILE[2] * TILE[3]
    BLOCK_H: tl.constexpr = TILE[4]
    pointers, num_edges, seed, dropping = edges
    index_ptr, perm_ptr, mask_ptr, term_ptr, loop_term_ptr, slot_ptr = pointers
    o_e = step + tl.arange(0, BLOCK_E)
    m_e = o_e < end
    p_e = index_ptr + step + tl.arange(0, BLOCK_E)
    if TAIL:
        other = tl.load(p_e, mask=m_e, other=0)
    else:
        other = tl.load(p_e)
    edge_id = o_e.to(tl.int64)
    if HAS_PERM and ((HAS_TERM and PLACE == CALLER) or HAS_MASK or DROPOUT):
        edge_id = tl.load(perm_ptr + o_e, mask=m_e, other=0).to(tl.int64)
    live = m_e
    if SELF_LOOPS:
        live = live & (other != held)
    if HAS_MASK:
        live = live & (tl.load(mask_ptr + edge_id, mask=m_e, other=0) != 0)
    m_loop = (o_e == end) & has_loop
    if SELF_LOOPS and TAIL:
        other = tl.where(m_loop, held, other)
        edge_id = tl.where(m_loop, held.to(tl.int64) + num_edges, edge_id)
        live = live | m_loop
    m_h = o_h < HEADS
    term = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
    if HAS_TERM:
        place = term_places(o_e, edge_id, m_e, slot_ptr, PLACE)
        p = term_ptr + (place * HEADS)[:, None] + o_h[None, :]
        term = tl.load(p, mask=m_e[:, None] & m_h[None, :], other=0.0).to(tl.float32)
    if HAS_LOOP_TERM and TAIL:
        p = loop_term_ptr + held.to(tl.int64) * HEADS + o_h[None, :]
        m = m_loop[:, None] & m_h[None, :]
        term += tl.load(p, mask=m, other=0.0).to(tl.float32)
    kept = tl.full([BLOCK_E, BLOCK_H], 1.0, dtype=tl.float32)
    if DROPOUT:
        p, factor = dropping
        kept = dropout_factor(seed, edge_id, o_h, p, factor)
    return other, m_e, m_loop, live, term, kept
