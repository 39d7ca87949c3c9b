"""Grouping edges by row: what surrounds the sort of the row ids.

`narrow` makes the keys to sort, `finish` turns the sorted keys into a grouping and its
summary, and `summarise` summarises a grouping that is there. A summary starts as zeros;
its layout is that of `pyg_tiga.relation.stats`, and its last cell says how many edges
stand from the first one with a fault to the end. Everything in it is summed or compared
in integers, so that the order of the atomics does not matter.
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


@triton.jit(do_not_specialize=["num_edges", "num_rows", "num_cols", "stride_end", "stride_edge"])
def narrow(
    edge_index_ptr,
    key_ptr,
    other_ptr,
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
    """Split edges into row and other end; one with a fault joins no row.

    Sorted edges need no key; that they rise is checked. `IS_DENSE` says that the ends of
    successive edges are neighbours.
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
    tl.store(
        other_ptr + o_e,
        tl.where(outside, 0, col).to(other_ptr.dtype.element_ty),
        mask=m_e,
    )
    if IS_SORTED:
        m_before = m_e & (o_e > 0)
        before = tl.load(p_row - stride_edge, mask=m_before, other=0).to(tl.int64)
        outside = outside | (m_before & (row < before))
    else:
        key = tl.where(outside, num_rows, row)
        tl.store(key_ptr + o_e, key.to(key_ptr.dtype.element_ty), mask=m_e)
    behind = tl.max(tl.where(outside & m_e, num_edges - o_e, 0), axis=0)
    if behind > 0:
        tl.atomic_max(summary_ptr + FAULT, behind, sem="relaxed")


@triton.jit
def _first_not_below(key_ptr, row, num_edges, stride, steps):
    """Position of the first sorted key that is not below `row`, which is `[BLOCK_R]`."""
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
def _sign(
    i, order_ptr, index_ptr, summary_ptr, num_edges, step,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to the checksum: neighbours in a sample of the indices, multiplied."""
    o_e = (i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)) * step  # [BLOCK]
    m_e = o_e + step < num_edges
    here = o_e
    there = o_e + step
    if HAS_ORDER:
        here = tl.load(order_ptr + here, mask=m_e, other=0)
        there = tl.load(order_ptr + there, mask=m_e, other=0)
    one = tl.load(index_ptr + here, mask=m_e, other=0)
    other = tl.load(index_ptr + there, mask=m_e, other=0)
    product = tl.mul(one, other, sanitize_overflow=False).to(tl.int64)
    tl.atomic_add(summary_ptr + SIGNATURE, tl.sum(product, axis=0), sem="relaxed")


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
    i, order_ptr, other_ptr, perm_ptr, index_ptr, num_edges, BLOCK_E: tl.constexpr
):
    """Narrow the order, and bring the other ends into it."""
    o_e = i.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    m_e = o_e < num_edges
    edge = tl.load(order_ptr + o_e, mask=m_e, other=0, eviction_policy="evict_first")
    tl.store(perm_ptr + o_e, edge.to(perm_ptr.dtype.element_ty), mask=m_e)
    tl.store(index_ptr + o_e, tl.load(other_ptr + edge, mask=m_e, other=0), mask=m_e)


@triton.jit(
    do_not_specialize=[
        "num_edges", "num_rows", "stride_end", "stride_edge", "stride_key", "steps",
        "sample_step", "row_blocks", "row_programs", "sample_programs",
    ]
)  # fmt: skip
def finish(
    edge_index_ptr,
    key_ptr,
    order_ptr,
    other_ptr,
    perm_ptr,
    index_ptr,
    ptr_ptr,
    summary_ptr,
    table_ptr,
    num_edges,
    num_rows,
    stride_end,
    stride_edge,
    stride_key,
    steps,
    sample_step,
    row_blocks,
    row_programs,
    sample_programs,
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
    if i < row_programs:
        if i == 0:
            _locate(edge_index_ptr, summary_ptr, num_edges, stride_end, stride_edge)
        _find_rows(
            i, key_ptr, ptr_ptr, summary_ptr, table_ptr,
            num_edges, num_rows, stride_key, steps, row_blocks, row_programs,
            IS_SORTED, BLOCK_R,
        )  # fmt: skip
    elif i < row_programs + sample_programs:
        _sign(
            i - row_programs, order_ptr, other_ptr, summary_ptr, num_edges, sample_step,
            not IS_SORTED, BLOCK_S,
        )  # fmt: skip
    else:
        if not IS_SORTED:
            first = row_programs + sample_programs
            _gather(
                i - first, order_ptr, other_ptr, perm_ptr, index_ptr, num_edges, BLOCK_E
            )


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
        _sign(
            i - row_programs, index_ptr, index_ptr, summary_ptr, num_edges, sample_step,
            False, BLOCK_S,
        )  # fmt: skip
