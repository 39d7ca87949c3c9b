"""Grouping edges by row: what surrounds the sort of the row ids.

`narrow` checks edges and makes the keys to sort (of edges that are sorted already, the
indices), `finish` turns the sorted keys into a grouping and its summary, and
`summarise` summarises a grouping that is there. A summary starts as zeros; its layout
is that of `pyg_tiga.relation.stats`, and its last cell says how many edges stand from
the first one with a fault to the end. Everything in it is summed or compared in
integers, so that the order of the atomics does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.relation import stats

GOOD = tl.constexpr(stats.GOOD)
LOWEST = tl.constexpr(stats.LOWEST)
TAIL = tl.constexpr(stats.TAIL)
PIECES = tl.constexpr(stats.PIECES)
SIGNATURE = tl.constexpr(stats.SIGNATURE)
FOUND = tl.constexpr(stats.FOUND)
FAULT = tl.constexpr(stats.WIDTH - 1)
THRESHOLDS = tl.constexpr(len(stats.THRESHOLDS))
BLOCK_T = tl.constexpr(64)  # The next power of two.
CHUNKS = tl.constexpr(len(stats.CHUNKS))


@triton.jit(
    do_not_specialize=[
        "num_edges", "num_rows", "num_cols", "stride_end", "stride_edge",
    ]
)  # fmt: skip
def narrow(
    edge_index_ptr,
    narrow_ptr,
    summary_ptr,
    num_edges,
    num_rows,
    num_cols,
    stride_end,
    stride_edge,
    END: tl.constexpr,
    IS_SORTED: tl.constexpr,
    IS_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check edges, and store their rows, or their other ends if they are sorted.

    An edge with a fault joins no row. That sorted edges rise is checked. `IS_DENSE`
    says that the ends of successive edges are neighbours.
    """
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_e = o_e < num_edges
    o = o_e
    if not IS_DENSE:
        o = o_e * stride_edge
    second = edge_index_ptr + stride_end.to(tl.int64)
    if END == 0:
        p_row = edge_index_ptr + o
        p_col = second + o
    else:
        p_row = second + o
        p_col = edge_index_ptr + o
    row = tl.load(p_row, mask=m_e, other=0).to(tl.int64)
    col = tl.load(p_col, mask=m_e, other=0).to(tl.int64)
    outside = (row < 0) | (row >= num_rows) | (col < 0) | (col >= num_cols)
    if IS_SORTED:
        stored = tl.where(outside, 0, col)
        m_before = m_e & (o_e > 0)
        before = tl.load(p_row - stride_edge, mask=m_before, other=0).to(tl.int64)
        outside = outside | (m_before & (row < before))
    else:
        stored = tl.where(outside, num_rows, row)
    tl.store(narrow_ptr + o_e, stored.to(narrow_ptr.dtype.element_ty), mask=m_e)
    behind = tl.max(tl.where(outside & m_e, num_edges - o_e, 0), axis=0)
    if behind > 0:
        tl.atomic_max(summary_ptr + FAULT, behind, sem="relaxed")


@triton.jit
def _first_not_below(key_ptr, row, num_edges, stride, steps):
    """Position of the first sorted key that is not below `row`, `[BLOCK_R]`."""
    low = tl.zeros_like(row)
    high = low + num_edges
    for _ in range(steps):
        middle = (low + high) >> 1
        m = low < high
        below = tl.load(key_ptr + middle * stride, mask=m, other=0).to(tl.int64) < row
        low = tl.where(m & below, middle + 1, low)
        high = tl.where(m & (below == 0), middle, high)
    return low


@triton.jit
def _add_degrees(degree, tail, pieces, longest, table_ptr):
    """Count a block of degrees, `[BLOCK_R]`, into running totals."""
    o_t = tl.arange(0, BLOCK_T)
    threshold = tl.load(table_ptr + o_t, mask=o_t < THRESHOLDS, other=0)
    shift = tl.load(table_ptr + THRESHOLDS + tl.arange(0, CHUNKS))
    threshold = threshold.to(degree.dtype)[None, :]
    shift = shift.to(degree.dtype)[None, :]
    tail += tl.sum((degree[:, None] > threshold).to(tl.int32), axis=0)
    # The arithmetic shift rounds down, so that of a negative number away from 0.
    pieces += tl.sum((-degree)[:, None] >> shift, axis=0)
    return tail, pieces, tl.maximum(longest, degree)


@triton.jit
def _store_degrees(tail, pieces, longest, summary_ptr):
    o_t = tl.arange(0, BLOCK_T)
    m_t = (o_t < THRESHOLDS) & (tail > 0)
    count = tail.to(tl.int64)
    tl.atomic_add(summary_ptr + TAIL + o_t, count, mask=m_t, sem="relaxed")
    o_c = tl.arange(0, CHUNKS)
    p_pieces = summary_ptr + PIECES + o_c
    tl.atomic_add(p_pieces, pieces, mask=pieces < 0, sem="relaxed")
    lowest = -tl.max(longest, axis=0).to(tl.int64)
    tl.atomic_min(summary_ptr + LOWEST, lowest, sem="relaxed")


@triton.jit
def _load_other(other_ptr, edge, stride, num_cols, mask):
    """Other ends of edges; 0 where they are out of range."""
    other = tl.load(other_ptr + edge * stride, mask=mask, other=0).to(tl.int64)
    return tl.where((other < 0) | (other >= num_cols), 0, other)


@triton.jit
def _add_signature(one, other, dtype: tl.constexpr, summary_ptr):
    """Add to the checksum: neighbours in a sample of the indices, multiplied."""
    product = tl.mul(one.to(dtype), other.to(dtype), sanitize_overflow=False)
    total = tl.sum(product.to(tl.int64), axis=0)
    tl.atomic_add(summary_ptr + SIGNATURE, total, sem="relaxed")


@triton.jit
def _sample(i, index_ptr, summary_ptr, num_edges, step, BLOCK: tl.constexpr):
    """Sign a part of a sample of the indices."""
    o_e = (i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * step  # [BLOCK]
    m_e = o_e + step < num_edges
    one = tl.load(index_ptr + o_e, mask=m_e, other=0)
    other = tl.load(index_ptr + o_e + step, mask=m_e, other=0)
    _add_signature(one, other, index_ptr.dtype.element_ty, summary_ptr)


@triton.jit
def _sample_ordered(
    i, order_ptr, other_ptr, summary_ptr, num_edges, num_cols, stride, step,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sign a part of a sample of indices that are not gathered yet."""
    o_e = (i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * step  # [BLOCK]
    m_e = o_e + step < num_edges
    here = tl.load(order_ptr + o_e, mask=m_e, other=0)
    there = tl.load(order_ptr + o_e + step, mask=m_e, other=0)
    one = _load_other(other_ptr, here, stride, num_cols, m_e)
    other = _load_other(other_ptr, there, stride, num_cols, m_e)
    _add_signature(one, other, dtype, summary_ptr)


@triton.jit
def _find_rows(
    i, key_ptr, ptr_ptr, summary_ptr, table_ptr,
    num_edges, num_rows, stride, steps, row_blocks, row_programs,
    IS_SORTED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Find where each row starts among the keys, and count degrees."""
    tail = tl.zeros([BLOCK_T], dtype=tl.int32)
    pieces = tl.zeros([CHUNKS], dtype=tl.int64)
    longest = tl.zeros([BLOCK_R], dtype=ptr_ptr.dtype.element_ty)
    fault = tl.load(summary_ptr + FAULT)
    row = i.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    for _ in range(i, row_blocks, row_programs):
        start = _first_not_below(key_ptr, row, num_edges, stride, steps)
        end = _first_not_below(key_ptr, row + 1, num_edges, stride, steps)
        good = start
        if IS_SORTED:
            # No sort moved what is wrong out of the way: there are no rows then.
            start = tl.where(fault > 0, 0, start)
            end = tl.where(fault > 0, 0, end)
            good = tl.where(fault > 0, -1, good)
        m_row = row < num_rows
        start = start.to(ptr_ptr.dtype.element_ty)
        tl.store(ptr_ptr + row, start, mask=row <= num_rows)
        # The end of the last row is the number of edges without fault.
        p_good = summary_ptr + GOOD + (row - num_rows)
        tl.store(p_good, good, mask=row == num_rows)
        degree = tl.where(m_row, end.to(start.dtype) - start, 0)
        tail, pieces, longest = _add_degrees(degree, tail, pieces, longest, table_ptr)
        row += row_programs.to(tl.int64) * BLOCK_R
    _store_degrees(tail, pieces, longest, summary_ptr)


@triton.jit
def _locate(edge_index_ptr, summary_ptr, num_edges, stride_end, stride_edge):
    """Store position and ends of the first edge with a fault."""
    fault = tl.load(summary_ptr + FAULT)
    if fault > 0:
        place = num_edges - fault
        p_end = edge_index_ptr + place * stride_edge
        first = tl.load(p_end).to(tl.int64)
        second = tl.load(p_end + stride_end.to(tl.int64)).to(tl.int64)
        tl.store(summary_ptr + FOUND, place)
        tl.store(summary_ptr + FOUND + 1, first)
        tl.store(summary_ptr + FOUND + 2, second)


@triton.jit
def _gather(
    i, order_ptr, other_ptr, perm_ptr, index_ptr, num_edges, num_cols, stride,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Narrow the order, and bring the other ends into it."""
    o_e = i.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    m_e = o_e < num_edges
    edge = tl.load(order_ptr + o_e, mask=m_e, other=0, eviction_policy="evict_first")
    tl.store(perm_ptr + o_e, edge.to(perm_ptr.dtype.element_ty), mask=m_e)
    other = _load_other(other_ptr, edge, stride, num_cols, m_e)
    tl.store(index_ptr + o_e, other.to(index_ptr.dtype.element_ty), mask=m_e)


@triton.jit(
    do_not_specialize=[
        "num_edges", "num_rows", "num_cols", "stride_end", "stride_edge", "stride_key",
        "steps", "sample_step", "row_blocks", "row_programs", "sample_programs",
    ]
)  # fmt: skip
def finish(
    edge_index_ptr,
    key_ptr,
    order_ptr,
    perm_ptr,
    index_ptr,
    ptr_ptr,
    summary_ptr,
    table_ptr,
    num_edges,
    num_rows,
    num_cols,
    stride_end,
    stride_edge,
    stride_key,
    steps,
    sample_step,
    row_blocks,
    row_programs,
    sample_programs,
    END: tl.constexpr,
    IS_SORTED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Make a grouping of sorted keys and their order, and fill its summary.

    The first programs find the rows, so that this waits behind no gather; the next ones
    sample the indices; the others, of which sorted edges need none, gather them.
    """
    i = tl.program_id(0)
    other_ptr = edge_index_ptr
    if END == 0:
        other_ptr = edge_index_ptr + stride_end.to(tl.int64)
    if i < row_programs:
        if i == 0:
            _locate(edge_index_ptr, summary_ptr, num_edges, stride_end, stride_edge)
        _find_rows(
            i, key_ptr, ptr_ptr, summary_ptr, table_ptr,
            num_edges, num_rows, stride_key, steps, row_blocks, row_programs,
            IS_SORTED, BLOCK_R,
        )  # fmt: skip
    elif IS_SORTED:
        first = row_programs
        _sample(i - first, index_ptr, summary_ptr, num_edges, sample_step, BLOCK_S)
    elif i < row_programs + sample_programs:
        _sample_ordered(
            i - row_programs, order_ptr, other_ptr, summary_ptr,
            num_edges, num_cols, stride_edge, sample_step,
            index_ptr.dtype.element_ty, BLOCK_S,
        )  # fmt: skip
    else:
        _gather(
            i - row_programs - sample_programs,
            order_ptr, other_ptr, perm_ptr, index_ptr,
            num_edges, num_cols, stride_edge, BLOCK_E,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_edges", "num_rows", "sample_step", "row_blocks", "row_programs",
    ]
)  # fmt: skip
def summarise(
    ptr_ptr,
    index_ptr,
    good_ptr,
    summary_ptr,
    table_ptr,
    num_edges,
    num_rows,
    sample_step,
    row_blocks,
    row_programs,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fill the summary of a grouping."""
    i = tl.program_id(0)
    if i < row_programs:
        if i == 0:
            tl.store(summary_ptr + GOOD, tl.load(good_ptr).to(tl.int64))
        tail = tl.zeros([BLOCK_T], dtype=tl.int32)
        pieces = tl.zeros([CHUNKS], dtype=tl.int64)
        longest = tl.zeros([BLOCK_R], dtype=ptr_ptr.dtype.element_ty)
        row = i.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        for _ in range(i, row_blocks, row_programs):
            m_row = row < num_rows
            start = tl.load(ptr_ptr + row, mask=m_row, other=0)
            degree = tl.load(ptr_ptr + row + 1, mask=m_row, other=0) - start
            tail, pieces, longest = _add_degrees(
                degree, tail, pieces, longest, table_ptr
            )
            row += row_programs.to(tl.int64) * BLOCK_R
        _store_degrees(tail, pieces, longest, summary_ptr)
    else:
        first = row_programs
        _sample(i - first, index_ptr, summary_ptr, num_edges, sample_step, BLOCK_S)
