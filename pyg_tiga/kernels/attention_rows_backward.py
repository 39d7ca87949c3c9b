"""Gradients of the destination's operand and of the score's parameter, by destination.

Either the gradients of the scores are `HANDED` over by `attention_columns`: they are
read as terms, where that walk left them (`perm_ptr`), and the sources' operand is
gathered. Or the scores are formed again, for which v_j is gathered, too (`SHARED`: both
are the same). The additive score needs no such pass where the forward kept P and p (see
`edge_attention`), or where the gradients of the terms are summed (`edge_sums`).

With a parameter each program walks every n-th unit, n being their number, and leaves
one share of the parameter's gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_tile import (
    CALLER,
    WALKED,
    gather,
    load_tile,
    table_of,
    walk,
)
from pyg_tiga.kernels.scores import load_param
from pyg_tiga.kernels.units import load_units


@triton.jit
def _add_handed(
    carry,
    step,
    end,
    held,
    has_loop,
    context,
    CHOICES: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Take one tile of edges, and the gradients of their scores, into a destination."""
    FUNCTIONS: tl.constexpr = CHOICES[0]
    HAS_PARAM: tl.constexpr = CHOICES[3]
    EDGES: tl.constexpr = CHOICES[5]
    TILE: tl.constexpr = CHOICES[6]
    EVEN: tl.constexpr = TILE[1]
    U: tl.constexpr = TILE[2]
    S: tl.constexpr = TILE[3]
    H: tl.constexpr = TILE[4]
    K: tl.constexpr = TILE[6]
    PTX: tl.constexpr = TILE[7]
    acc, acc_param, mix = carry
    edges, _, sources, _, target, o_h, scale = context
    b_row, _, b_param = target
    j, m_e, m_loop, _, ds, _ = load_tile(
        step, end, held, has_loop, edges, o_h, EDGES, TILE, TAIL
    )
    b_col = FUNCTIONS[0](sources, j, m_e | m_loop, EVEN, TAIL, PTX)
    b_col, ds = tl.reshape(b_col, [U, S, H, K]), tl.reshape(ds, [U, S, H])
    acc += tl.sum(FUNCTIONS[3](ds, b_row, b_col, b_param, 0.0, scale), axis=0)
    if HAS_PARAM:
        grad_param = FUNCTIONS[4](ds, b_row, b_col, b_param, 0.0, scale)
        acc_param += tl.sum(grad_param, axis=0)
    return acc, acc_param, mix


@triton.jit
def _add_tile(
    carry,
    step,
    end,
    held,
    has_loop,
    context,
    CHOICES: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Take one tile of edges into the sums of a destination."""
    FUNCTIONS: tl.constexpr = CHOICES[0]
    SCORE: tl.constexpr = FUNCTIONS[1]
    VECTOR: tl.constexpr = CHOICES[1]
    FACTORED: tl.constexpr = CHOICES[2]
    HAS_PARAM: tl.constexpr = CHOICES[3]
    SHARED: tl.constexpr = CHOICES[4]
    EDGES: tl.constexpr = CHOICES[5]
    TILE: tl.constexpr = CHOICES[6]
    EVEN: tl.constexpr = TILE[1]
    U: tl.constexpr = TILE[2]
    S: tl.constexpr = TILE[3]
    H: tl.constexpr = TILE[4]
    C: tl.constexpr = TILE[5]
    K: tl.constexpr = TILE[6]
    PTX: tl.constexpr = TILE[7]
    acc, acc_param, mix = carry
    edges, values, sources, state, target, o_h, scale = context
    b_m, b_il, delta = state
    b_row, b_g, b_param = target
    j, m_e, m_loop, live, term, kept = load_tile(
        step, end, held, has_loop, edges, o_h, EDGES, TILE, TAIL
    )
    m_x = m_e | m_loop
    # Numbers before features, as in `edge_attention`.
    if not SHARED:
        b_col = FUNCTIONS[0](sources, j, m_x, EVEN, TAIL, PTX)
    b_v = gather(values, j, m_x, EVEN, TAIL, PTX)
    b_v = tl.reshape(b_v, [U, S, H, C])
    if SHARED:
        b_col = b_v
    if VECTOR:
        b_col, term = tl.reshape(b_col, [U, S, H, K]), tl.reshape(term, [U, S, H])
    s, aux = SCORE(b_row, b_col, term, b_param, scale)
    w = tl.exp(tl.reshape(s, [U * S, H]) - b_m[None, :]) * b_il[None, :]
    if TAIL or EDGES[2] or EDGES[4]:
        w = tl.where(live[:, None], w, 0.0)
    b_w = w * kept
    if FACTORED:
        slope = FUNCTIONS[2](aux, scale)
        mix += tl.sum(tl.reshape(b_w * slope, [U, S, H, 1]) * b_v, axis=0)
        acc -= w * slope * delta[None, :]
    else:
        t = tl.reshape(tl.sum(b_g * b_v, axis=3), [U * S, H])
        ds = b_w * t - w * delta[None, :]
        if VECTOR:
            ds = tl.reshape(ds, [U, S, H])
            acc += tl.sum(FUNCTIONS[3](ds, b_row, b_col, b_param, aux, scale), axis=0)
            if HAS_PARAM:
                grad_param = FUNCTIONS[4](ds, b_row, b_col, b_param, aux, scale)
                acc_param += tl.sum(grad_param, axis=0)
        else:
            acc += FUNCTIONS[3](ds, b_row, b_col, b_param, aux, scale)
    return acc, acc_param, mix


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "chunk", "num_loops", "num_edges"]
)
def attention_rows_backward(
    value_ptr,
    grad_ptr,
    state_ptr,
    grad_row_ptr,
    grad_param_ptr,
    part_ptr,
    row_ptr,
    col_ptr,
    term_ptr,
    loop_term_ptr,
    mask_ptr,
    seed_ptr,
    param_ptr,
    ptr_ptr,
    index_ptr,
    perm_ptr,
    item_row_ptr,
    item_start_ptr,
    num_rows,
    num_items,
    chunk,
    num_loops,
    num_edges,
    stride_vn,
    stride_vh,
    stride_gn,
    stride_gh,
    stride_rn,
    stride_rh,
    stride_cn,
    stride_ch,
    scale,
    drop_p,
    drop_factor,
    LOAD_ROW: tl.constexpr,
    LOAD_COL: tl.constexpr,
    SCORE: tl.constexpr,
    SLOPE: tl.constexpr,
    VJP_ROW: tl.constexpr,
    VJP_PARAM: tl.constexpr,
    VECTOR: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH_V: tl.constexpr,
    PITCH_R: tl.constexpr,
    PITCH_C: tl.constexpr,
    PITCH_G: tl.constexpr,
    PTX: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_LOOP_TERM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PERM: tl.constexpr,
    SELF_LOOPS: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_PARAM: tl.constexpr,
    SHARED: tl.constexpr,
    FACTORED: tl.constexpr,
    HANDED: tl.constexpr,
    STRIDE_OR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradient of the destination's operand, and of a parameter by program."""
    BLOCK_E: tl.constexpr = BLOCK_U * BLOCK_S
    EVEN: tl.constexpr = (
        HEADS % BLOCK_H == 0 and CHANNELS == BLOCK_C and WIDTH == BLOCK_K
    )
    EDGES: tl.constexpr = (
        HAS_TERM,
        HAS_LOOP_TERM,
        HAS_MASK,
        HAS_PERM,
        SELF_LOOPS,
        DROPOUT,
        WALKED if BY_ROW else CALLER,
    )
    TILE: tl.constexpr = (HEADS, EVEN, BLOCK_U, BLOCK_S, BLOCK_H, BLOCK_C, BLOCK_K, PTX)
    FUNCTIONS: tl.constexpr = (LOAD_COL, SCORE, SLOPE, VJP_ROW, VJP_PARAM)
    CHOICES: tl.constexpr = (
        FUNCTIONS,
        VECTOR,
        FACTORED,
        HAS_PARAM,
        SHARED,
        EDGES,
        TILE,
    )
    VALUES: tl.constexpr = (PITCH_V, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    GRADS: tl.constexpr = (PITCH_G, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    SOURCES: tl.constexpr = (PITCH_C, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    TARGETS: tl.constexpr = (PITCH_R, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    # There are no slots where the rows are walked.
    pointers = (index_ptr, perm_ptr, mask_ptr, term_ptr, loop_term_ptr, index_ptr)
    i_h = tl.program_id(1)
    values = table_of(value_ptr, stride_vn, stride_vh, i_h, 0, VALUES)
    grads = table_of(grad_ptr, stride_gn, stride_gh, i_h, 0, GRADS)
    sources = table_of(col_ptr, stride_cn, stride_ch, i_h, 0, SOURCES)
    targets = table_of(row_ptr, stride_rn, stride_rh, i_h, 0, TARGETS)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_k = tl.arange(0, BLOCK_K)
    m_h, m_k = o_h < HEADS, o_k < WIDTH
    m_hk = m_h[:, None] & m_k[None, :]
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    b_param = 0.0
    acc_param = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_K], dtype=tl.float32)
    steps = BLOCK_R
    if HAS_PARAM:
        b_param = load_param(param_ptr, i_h, EVEN, HEADS, WIDTH, BLOCK_H, BLOCK_K)
        units = num_rows + num_items - tl.program_id(0)
        steps = tl.cdiv(units, tl.num_programs(0))
    for r in range(steps):
        u = tl.program_id(0) * BLOCK_R + r
        if HAS_PARAM:
            u = tl.program_id(0) + r * tl.num_programs(0)
        row, first, start, end, m_item, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            held = row.to(index_ptr.dtype.element_ty)
            has_loop = SELF_LOOPS & (row < num_loops) & (start == first)
            one = held + tl.zeros([1], dtype=held.dtype)
            b_row = LOAD_ROW(targets, one, one >= 0, EVEN, False, PTX)
            b_g, state = 0.0, (0.0, 0.0, 0.0)
            if not HANDED:
                b_g = gather(grads, one, one >= 0, EVEN, False, PTX)
                b_g = tl.reshape(b_g, [1, 1, BLOCK_H, BLOCK_C])
                p_state = state_ptr + (row * HEADS + o_h) * 4  # [BLOCK_H]
                b_m = tl.load(p_state, mask=m_h, other=0.0)
                b_il = tl.load(p_state + 1, mask=m_h, other=0.0)
                state = (b_m, b_il, tl.load(p_state + 2, mask=m_h, other=0.0))
            if VECTOR:
                b_row = tl.reshape(b_row, [1, 1, BLOCK_H, BLOCK_K])
                acc = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_K], dtype=tl.float32)
            else:
                b_row = tl.reshape(b_row, [1, BLOCK_H])
                acc = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
            carry = (
                acc,
                acc_param,
                tl.zeros([BLOCK_S, BLOCK_H, BLOCK_C], dtype=tl.float32),
            )
            edges = (pointers, num_edges, seed, (drop_p, drop_factor))
            target = (b_row, b_g, b_param)
            context = (edges, values, sources, state, target, o_h, scale)
            if HANDED:
                carry = walk(
                    carry,
                    start,
                    end,
                    held,
                    has_loop,
                    context,
                    _add_handed,
                    CHOICES,
                    BLOCK_E,
                )
            else:
                carry = walk(
                    carry,
                    start,
                    end,
                    held,
                    has_loop,
                    context,
                    _add_tile,
                    CHOICES,
                    BLOCK_E,
                )
            s_row, acc_param, s_mix = carry
            acc = tl.sum(s_row, axis=0)
            if FACTORED:
                acc += tl.sum(
                    tl.sum(s_mix, axis=0) * tl.reshape(b_g, [BLOCK_H, BLOCK_C]), axis=1
                )
            acc = tl.reshape(acc, [BLOCK_H, BLOCK_K])
            if SPLIT:
                if m_item:
                    o_p = (u.to(tl.int64) * HEADS + o_h)[:, None] * WIDTH
                    tl.store(part_ptr + o_p + o_k[None, :], acc, mask=m_hk)
            if m_item == 0:
                o_r = row * STRIDE_OR + o_h[:, None] * WIDTH + o_k[None, :]
                grad_row = acc.to(grad_row_ptr.dtype.element_ty)
                tl.store(grad_row_ptr + o_r, grad_row, mask=m_hk)
    if HAS_PARAM:
        o_u = (tl.program_id(0) * HEADS + o_h)[:, None] * WIDTH + o_k[None, :]
        tl.store(grad_param_ptr + o_u, tl.sum(acc_param, axis=0), mask=m_hk)
