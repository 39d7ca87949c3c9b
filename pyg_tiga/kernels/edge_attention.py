"""Edge attention by destination: softmax over incoming edges, whatever the score.

out_i = sum over edges (j -> i) of w_ij v_j with w the softmax of the scores. The
kernels take a score as functions (`scores.Score`). Each program walks `BLOCK_R` units
(short rows, or pieces of long ones) and keeps, per head, the running maximum m, the sum
l of exp(s - m) and the weighted sum of values. Self-loops are not stored: a row's comes
after its edges, and stored i -> i edges are skipped.

`SAVE_POSITIVE` also accumulates P = sum of w v and p = sum of w over the edges with
positive `aux`, from which the additive score's backward knows the destination's
gradient without another pass over the edges (the softmax's derivatives sum to 0 in each
row).

`SHARED` values are the sources' operand, too, and are gathered once. `SAVE_SCORES`
writes the scores of the edges, -inf where they take no part, from which `edge_weights`
makes the weights once the sums of the rows are known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_merge import safe_maximum, store_row
from pyg_tiga.kernels.attention_tile import (
    CALLER,
    WALKED,
    gather,
    load_tile,
    table_of,
    walk,
    with_sign,
)
from pyg_tiga.kernels.scores import load_param
from pyg_tiga.kernels.units import load_units


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
    """Take one tile of edges into a row's maximum, sums and weighted values."""
    LOAD_COL: tl.constexpr = CHOICES[0]
    SCORE: tl.constexpr = CHOICES[1]
    VECTOR: tl.constexpr = CHOICES[2]
    SAVE_POSITIVE: tl.constexpr = CHOICES[3]
    SHARED: tl.constexpr = CHOICES[4]
    EDGES: tl.constexpr = CHOICES[5]
    TILE: tl.constexpr = CHOICES[6]
    SAVE_SCORES: tl.constexpr = CHOICES[7]
    HEADS: tl.constexpr = TILE[0]
    EVEN: tl.constexpr = TILE[1]
    U: tl.constexpr = TILE[2]
    S: tl.constexpr = TILE[3]
    H: tl.constexpr = TILE[4]
    C: tl.constexpr = TILE[5]
    K: tl.constexpr = TILE[6]
    PTX: tl.constexpr = TILE[7]
    b_m, b_l, seen, acc, b_sum, positive = carry
    edges, values, sources, b_row, b_param, o_h, scale, score_ptr = context
    j, m_e, m_loop, live, term, kept = load_tile(
        step, end, held, has_loop, edges, o_h, EDGES, TILE, TAIL
    )
    m_x = m_e | m_loop
    # The scores come first: what stands in few numbers must not be laid out like the
    # values, and the compiler lays out by the load that it meets last.
    if not SHARED:
        b_col = LOAD_COL(sources, j, m_x, EVEN, TAIL, PTX)
    b_v = gather(values, j, m_x, EVEN, TAIL, PTX)
    b_v = tl.reshape(b_v, [U, S, H, C])
    if SHARED:
        b_col = b_v
    if VECTOR:
        b_col, term = tl.reshape(b_col, [U, S, H, K]), tl.reshape(term, [U, S, H])
    s, aux = SCORE(b_row, b_col, term, b_param, scale)
    s, aux = tl.reshape(s, [U * S, H]), tl.reshape(aux, [U * S, H])
    if TAIL or EDGES[2] or EDGES[4]:
        s = tl.where(live[:, None], s, float("-inf"))
        seen += live.to(tl.int32)
    else:
        seen += 1
    if SAVE_SCORES:
        o_e = (step + tl.arange(0, U * S)).to(tl.int64)
        p_s = score_ptr + (o_e * HEADS)[:, None] + o_h[None, :]
        tl.store(p_s, s, mask=m_e[:, None] & (o_h < HEADS)[None, :])
    s = tl.reshape(s, [U, S, H])
    new_m = tl.maximum(b_m, tl.max(s, axis=0))  # [S, H]
    safe = safe_maximum(new_m)
    decay = tl.exp(b_m - safe)
    b_p = tl.exp(s - safe[None, :, :])  # [U, S, H]
    b_l = b_l * decay + tl.sum(b_p, axis=0)
    b_w = b_p * tl.reshape(kept, [U, S, H])
    if SAVE_POSITIVE:
        aux = tl.reshape(aux, [U, S, H])
        b_sum = b_sum * decay + tl.sum(tl.where(aux > 0, b_p, 0.0), axis=0)
        b_w = with_sign(b_w, aux)
        above = tl.where(b_w > 0, b_w, 0.0)
        positive = positive * decay[:, :, None] + tl.sum(above * b_v, axis=0)
        b_w = tl.abs(b_w)
    else:
        b_w = b_w[:, :, :, None]
    acc = acc * decay[:, :, None] + tl.sum(b_w * b_v, axis=0)
    return new_m, b_l, seen, acc, b_sum, positive


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "chunk", "num_loops", "num_edges"]
)
def attention_rows(
    value_ptr,
    out_ptr,
    m_ptr,
    l_ptr,
    positive_ptr,
    positive_sum_ptr,
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    part_positive_ptr,
    part_sum_ptr,
    score_ptr,
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
    bias_ptr,
    num_rows,
    num_items,
    chunk,
    num_loops,
    num_edges,
    stride_vn,
    stride_vh,
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
    VECTOR: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH_V: tl.constexpr,
    PITCH_R: tl.constexpr,
    PITCH_C: tl.constexpr,
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
    SAVE_POSITIVE: tl.constexpr,
    SAVE_SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    BLOCK_E: tl.constexpr = BLOCK_U * BLOCK_S
    EVEN: tl.constexpr = (
        HEADS % BLOCK_H == 0 and CHANNELS % BLOCK_C == 0 and WIDTH == BLOCK_K
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
    CHOICES: tl.constexpr = (
        LOAD_COL,
        SCORE,
        VECTOR,
        SAVE_POSITIVE,
        SHARED,
        EDGES,
        TILE,
        SAVE_SCORES,
    )
    VALUES: tl.constexpr = (PITCH_V, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    SOURCES: tl.constexpr = (PITCH_C, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    TARGETS: tl.constexpr = (PITCH_R, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    # There are no slots where the rows are walked.
    pointers = (index_ptr, perm_ptr, mask_ptr, term_ptr, loop_term_ptr, index_ptr)
    i_h, i_c = tl.program_id(1), tl.program_id(2)
    values = table_of(value_ptr, stride_vn, stride_vh, i_h, i_c, VALUES)
    sources = table_of(col_ptr, stride_cn, stride_ch, i_h, 0, SOURCES)
    targets = table_of(row_ptr, stride_rn, stride_rh, i_h, 0, TARGETS)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    m_h, m_c = o_h < HEADS, o_c < CHANNELS
    m_hc = m_h[:, None] & m_c[None, :]  # [BLOCK_H, BLOCK_C]
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    b_param = 0.0
    if HAS_PARAM:
        b_param = load_param(param_ptr, i_h, EVEN, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        row, first, start, end, m_item, m_row = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_row:
            held = row.to(index_ptr.dtype.element_ty)
            has_loop = SELF_LOOPS & (row < num_loops) & (start == first)
            one = held + tl.zeros([1], dtype=held.dtype)
            b_row = LOAD_ROW(targets, one, one >= 0, EVEN, False, PTX)
            if VECTOR:
                b_row = tl.reshape(b_row, [1, 1, BLOCK_H, BLOCK_K])
            else:
                b_row = tl.reshape(b_row, [1, BLOCK_H])
            carry = (
                tl.full([BLOCK_S, BLOCK_H], float("-inf"), dtype=tl.float32),
                tl.zeros([BLOCK_S, BLOCK_H], dtype=tl.float32),
                tl.zeros([BLOCK_E], dtype=tl.int32),
                tl.zeros([BLOCK_S, BLOCK_H, BLOCK_C], dtype=tl.float32),
                tl.zeros([BLOCK_S, BLOCK_H], dtype=tl.float32),
                tl.zeros([BLOCK_S, BLOCK_H, BLOCK_C], dtype=tl.float32),
            )
            edges = (pointers, num_edges, seed, (drop_p, drop_factor))
            context = (
                edges,
                values,
                sources,
                b_row,
                b_param,
                o_h,
                scale,
                score_ptr,
            )
            carry = walk(
                carry, start, end, held, has_loop, context, _add_tile, CHOICES, BLOCK_E
            )
            s_m, s_l, seen, s_acc, s_sum, s_positive = carry
            b_m = tl.max(s_m, axis=0)  # [BLOCK_H]
            weight = tl.exp(s_m - safe_maximum(b_m)[None, :])  # [BLOCK_S, BLOCK_H]
            b_l = tl.sum(s_l * weight, axis=0)
            acc = tl.sum(s_acc * weight[:, :, None], axis=0)
            b_sum = tl.sum(s_sum * weight, axis=0)
            positive = tl.sum(s_positive * weight[:, :, None], axis=0)
            empty = tl.sum(seen, axis=0) == 0
            if SPLIT:
                if m_item:
                    o_p = u.to(tl.int64) * HEADS + o_h  # [BLOCK_H]
                    o_pc = o_p[:, None] * CHANNELS + o_c[None, :]
                    tl.store(part_ptr + o_pc, acc, mask=m_hc)
                    if SAVE_POSITIVE:
                        tl.store(part_positive_ptr + o_pc, positive, mask=m_hc)
                    if tl.program_id(2) == 0:
                        # A piece whose scores are all -inf is not an empty one: its
                        # sum of 1 has no weight beside other pieces, and tells.
                        lost = (b_m == float("-inf")) & (empty == 0)
                        tl.store(part_m_ptr + o_p, b_m, mask=m_h)
                        tl.store(part_l_ptr + o_p, tl.where(lost, 1.0, b_l), mask=m_h)
                        if SAVE_POSITIVE:
                            tl.store(part_sum_ptr + o_p, b_sum, mask=m_h)
            if m_item == 0:
                store_row(
                    out_ptr,
                    m_ptr,
                    l_ptr,
                    positive_ptr,
                    positive_sum_ptr,
                    bias_ptr,
                    row,
                    empty,
                    b_m,
                    b_l,
                    acc,
                    positive,
                    b_sum,
                    o_h,
                    o_c,
                    m_h,
                    m_hc,
                    HEADS,
                    CHANNELS,
                    SAVE_POSITIVE,
                    HAS_BIAS,
                )
