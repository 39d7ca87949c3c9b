"""Max and min over grouped edges, with what the backward needs, and the backward.

The kernels compute maxima; a minimum is the maximum of the negated values (`SIGN` is
-1). `SAVE` says what is kept for the gradient: 0 nothing, 1 the number of edges that
tie for the extremum, plus one where it is 0 (the gradient is split into that many
shares; see `pyg_tiga.reference`), 2 the place within its row of the first of them (it
takes the whole gradient).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.units import load_units

# Larger than every place in a row; stands for "no winner" while minima are taken.
NO_EDGE = tl.constexpr(2**31 - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fold(value, aux, AXIS: tl.constexpr, SAVE: tl.constexpr):
    """The largest value along an axis, with the ties' count or the first's place."""
    best = tl.reduce(value, AXIS, _larger)
    b_best = tl.expand_dims(best, AXIS)
    if SAVE == 1:
        kept = tl.sum(tl.where(value == b_best, aux, 0), axis=AXIS)
    elif SAVE == 2:
        wins = (value == b_best) | (value != value)
        kept = tl.min(tl.where(wins, aux, NO_EDGE), axis=AXIS)
    else:
        kept = tl.max(aux, axis=AXIS)
    return best, kept


@triton.jit
def _store(
    out_ptr, aux_ptr, o, best, aux, filled, mask, SIGN: tl.constexpr, SAVE: tl.constexpr
):
    """Store extrema and what goes with them; rows without edges get 0 and no winner."""
    value = tl.where(filled, best * SIGN, 0.0)
    tl.store(out_ptr + o, value.to(out_ptr.dtype.element_ty), mask=mask)
    if SAVE == 1:
        aux += (value == 0).to(tl.int32)
    elif SAVE == 2:
        # Where nothing is larger than -inf, the first edge of the row is the first.
        aux = tl.where(aux == NO_EDGE, tl.where(filled, 0, -1), aux)
    if SAVE > 0:
        tl.store(aux_ptr + o, aux, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def extremum_rows(
    x_ptr,
    out_ptr,
    aux_ptr,
    partial_ptr,
    partial_aux_ptr,
    ptr_ptr,
    index_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    features,
    stride_x,
    SPLIT: tl.constexpr,
    SIGN: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    u = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    m_f = o_f < features
    row, first, start, end, m_item, m_row = load_units(
        u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
    )
    # [BLOCK_R, BLOCK_E, BLOCK_F]
    acc = tl.full([BLOCK_R, BLOCK_E, BLOCK_F], float("-inf"), dtype=tl.float32)
    aux = tl.full(
        [BLOCK_R, BLOCK_E, BLOCK_F], NO_EDGE if SAVE == 2 else 0, dtype=tl.int32
    )
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
        b_x = tl.where(m_e[:, :, None], b_x * SIGN, float("-inf"))
        if SAVE == 1:
            ties = aux + ((b_x == acc) & m_e[:, :, None]).to(tl.int32)
            aux = tl.where(b_x > acc, 1, ties)
        elif SAVE == 2:
            place = (o_e - first[:, None]).to(tl.int32)[:, :, None]
            aux = tl.where(b_x > acc, place, aux)
        acc = _larger(acc, b_x)
    if SAVE == 2:
        # NaN beats nothing above, to keep the loop short; rows that hold one are rare.
        m_nan = tl.reshape(acc != acc, [BLOCK_R * BLOCK_E * BLOCK_F])
        if tl.max(m_nan.to(tl.int32), axis=0) > 0:
            aux = tl.where(acc != acc, NO_EDGE, aux)
            for step in range(0, longest, BLOCK_E):
                o_e = (start + step)[:, None] + tl.arange(0, BLOCK_E)[None, :]
                m_e = o_e < end[:, None]
                j = tl.load(index_ptr + o_e, mask=m_e, other=0).to(tl.int64)
                b_x = tl.load(
                    x_ptr + (j * stride_x)[:, :, None] + o_f[None, None, :],
                    mask=m_e[:, :, None] & m_f[None, None, :],
                    other=0.0,
                ).to(tl.float32)
                place = (o_e - first[:, None]).to(tl.int32)[:, :, None]
                aux = tl.where(b_x != b_x, tl.minimum(aux, place), aux)
    best, kept = _fold(acc, aux, 1, SAVE)  # [BLOCK_R, BLOCK_F]
    m_out = m_row[:, None] & m_f[None, :]
    if SPLIT:
        o_p = (u.to(tl.int64) * features)[:, None] + o_f[None, :]
        m_p = m_out & m_item[:, None]
        tl.store(partial_ptr + o_p, best, mask=m_p)
        if SAVE > 0:
            tl.store(partial_aux_ptr + o_p, kept, mask=m_p)
        m_out = m_out & (m_item == 0)[:, None]
    filled = (end > start)[:, None]
    o_out = (row * features)[:, None] + o_f[None, :]
    _store(out_ptr, aux_ptr, o_out, best, kept, filled, m_out, SIGN, SAVE)


@triton.jit
def extremum_merge(
    partial_ptr,
    partial_aux_ptr,
    out_ptr,
    aux_ptr,
    hub_row_ptr,
    hub_ptr_ptr,
    features,
    SIGN: tl.constexpr,
    SAVE: tl.constexpr,
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
        acc = tl.full([BLOCK_K, BLOCK_F], float("-inf"), dtype=tl.float32)
        aux = tl.full([BLOCK_K, BLOCK_F], NO_EDGE if SAVE == 2 else 0, dtype=tl.int32)
        for k in range(first, last, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)  # [BLOCK_K]
            m_k = (o_k < last)[:, None] & m_f[None, :]
            o_p = o_k.to(tl.int64)[:, None] * features + o_f[None, :]
            value = tl.load(partial_ptr + o_p, mask=m_k, other=float("-inf"))
            if SAVE == 1:
                ties = tl.load(partial_aux_ptr + o_p, mask=m_k, other=0)
                ties = tl.where(value == acc, aux + ties, aux)
                aux = tl.where(
                    value > acc,
                    tl.load(partial_aux_ptr + o_p, mask=m_k, other=0),
                    ties,
                )
            elif SAVE == 2:
                place = tl.load(partial_aux_ptr + o_p, mask=m_k, other=NO_EDGE)
                beats = (value > acc) | ((value != value) & (acc == acc))
                beats = beats | ((aux == NO_EDGE) & m_k)
                aux = tl.where(beats, place, aux)
            acc = _larger(acc, value)
        best, kept = _fold(acc, aux, 0, SAVE)  # [BLOCK_F]
        _store(out_ptr, aux_ptr, row * features + o_f, best, kept, m_f, m_f, SIGN, SAVE)


@triton.jit(do_not_specialize=["num_rows", "num_items", "chunk"])
def extremum_columns(
    grad_ptr,
    x_ptr,
    out_ptr,
    aux_ptr,
    grad_x_ptr,
    partial_ptr,
    ptr_ptr,
    index_ptr,
    slot_ptr,
    rowptr_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    features,
    stride_grad,
    stride_x,
    SPLIT: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Gradient of x by source: sum the gradients of the rows where this source wins.

    `grad` comes divided by the number of ties where they are split.
    """
    u = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    m_f = o_f < features
    col, _, start, end, m_item, m_col = load_units(
        u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
    )
    m_out = m_col[:, None] & m_f[None, :]  # [BLOCK_R, BLOCK_F]
    if SAVE == 1:
        p_x = x_ptr + (col * stride_x)[:, None] + o_f[None, :]
        b_x = tl.load(p_x, mask=m_out, other=0.0).to(tl.float32)
    # [BLOCK_R, BLOCK_E, BLOCK_F]
    acc = tl.zeros([BLOCK_R, BLOCK_E, BLOCK_F], dtype=tl.float32)
    longest = tl.max(end - start, axis=0)
    for step in range(0, longest, BLOCK_E):
        # [BLOCK_R, BLOCK_E]
        o_e = (start + step)[:, None] + tl.arange(0, BLOCK_E)[None, :]
        m_e = o_e < end[:, None]
        i = tl.load(index_ptr + o_e, mask=m_e, other=0).to(tl.int64)
        m_i = m_e[:, :, None] & m_f[None, None, :]
        o_i = (i * features)[:, :, None] + o_f[None, None, :]
        if SAVE == 1:
            b_o = tl.load(out_ptr + o_i, mask=m_i, other=0.0).to(tl.float32)
            wins = b_o == b_x[:, None, :]
            # A NaN extremum has no share to give: as in PyTorch, it gives NaN.
            acc += tl.where(b_o != b_o, b_o, 0.0)
        else:
            place = tl.load(slot_ptr + o_e, mask=m_e, other=0) - tl.load(
                rowptr_ptr + i, mask=m_e, other=0
            )
            wins = tl.load(aux_ptr + o_i, mask=m_i, other=-1) == place[:, :, None]
        b_g = tl.load(
            grad_ptr + (i * stride_grad)[:, :, None] + o_f[None, None, :],
            mask=m_i & wins,
            other=0.0,
        )
        acc += b_g.to(tl.float32)
    total = tl.sum(acc, axis=1)  # [BLOCK_R, BLOCK_F]
    if SPLIT:
        o_p = (u.to(tl.int64) * features)[:, None] + o_f[None, :]
        tl.store(partial_ptr + o_p, total, mask=m_out & m_item[:, None])
        m_out = m_out & (m_item == 0)[:, None]
    o_x = (col * features)[:, None] + o_f[None, :]
    tl.store(grad_x_ptr + o_x, total.to(grad_x_ptr.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows"])
def extremum_scatter(
    grad_ptr,
    aux_ptr,
    grad_x_ptr,
    rowptr_ptr,
    index_ptr,
    num_rows,
    features,
    stride_grad,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Add each row's gradient to the sources that won: O(N F), in no fixed order."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # [BLOCK_F]
    m = (row < num_rows)[:, None] & (o_f < features)[None, :]  # [BLOCK_R, BLOCK_F]
    o = (row * features)[:, None] + o_f[None, :]
    place = tl.load(aux_ptr + o, mask=m, other=-1)
    m = m & (place >= 0)
    first = tl.load(rowptr_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
    j = tl.load(index_ptr + first[:, None] + place, mask=m, other=0).to(tl.int64)
    b_g = tl.load(grad_ptr + (row * stride_grad)[:, None] + o_f[None, :], mask=m)
    tl.atomic_add(
        grad_x_ptr + j * features + o_f[None, :],
        b_g.to(tl.float32),
        mask=m,
        sem="relaxed",
    )
