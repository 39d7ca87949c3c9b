"""Gradients of edge attention by source.

With g_i the gradient of row i, kept_e the dropout factor, t_e = kept_e <g_i, v_j> and
delta_i = <g_i, out_i>, the gradient of a score is ds_e = w_e (t_e - delta_i).
`attention_columns` walks the edges of each source: it gathers g_i and sums the
gradients of v_j and of the source's operand. With `GRAD_TERM` it also writes those of
the scores' terms, in the order of this walk: whoever reads them in another looks for
them, as numbers of some edges read out of order cost less than written so.

`FACTORED` needs no t_e: where the operand is a number and the score has a slope f_e in
it, its gradient is sum f_e ds_e = <v_j, sum f_e w_e kept_e g_i> - sum f_e w_e delta_i,
whose first sum costs as much as that of v_j's gradient and no sum over channels. As f_e
has one value above 0 and one below, it follows from the sum over the edges above 0.

Where weights are a result, too, `HAS_SHARE` adds to t_e kept times the gradient of the
weight itself, and delta_i has the sum of these, each times its weight.

`SHARED` values are the sources' operand, too, and get the sum of both gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyg_tiga.kernels.attention_merge import store_column
from pyg_tiga.kernels.attention_state import load_state
from pyg_tiga.kernels.attention_tile import (
    CALLER,
    SLOTTED,
    gather,
    load_tile,
    table_of,
    term_places,
    walk,
    with_sign,
)
from pyg_tiga.kernels.scores import load_param
from pyg_tiga.kernels.units import edge_ids, load_units


@triton.jit
def _load_share(
    share_ptr,
    edges,
    step,
    m_e,
    o_h,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Gradients of the weights of a tile, [E, H]; 0 for a loop, which gives none."""
    HAS_PERM: tl.constexpr = EDGES[3]
    PLACE: tl.constexpr = EDGES[6]
    pointers, _, _, _ = edges
    _, perm_ptr, _, _, _, slot_ptr = pointers
    o_e = step + tl.arange(0, E)
    edge_id = o_e.to(tl.int64)
    if PLACE == CALLER:
        edge_id = edge_ids(o_e, m_e, perm_ptr, HAS_PERM)
    place = term_places(o_e, edge_id, m_e, slot_ptr, PLACE)
    p_s = share_ptr + (place * HEADS)[:, None] + o_h[None, :]
    return tl.load(p_s, mask=m_e[:, None] & (o_h < HEADS)[None, :], other=0.0)


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
    """Take one tile of edges into the sums of a source."""
    FUNCTIONS: tl.constexpr = CHOICES[0]
    SCORE: tl.constexpr = FUNCTIONS[1]
    VECTOR: tl.constexpr = CHOICES[1]
    FACTORED: tl.constexpr = CHOICES[2]
    GRAD_TERM: tl.constexpr = CHOICES[3]
    GRAD_LOOP_TERM: tl.constexpr = CHOICES[4]
    SHARED: tl.constexpr = CHOICES[5]
    EDGES: tl.constexpr = CHOICES[6]
    TILE: tl.constexpr = CHOICES[7]
    HAS_SHARE: tl.constexpr = CHOICES[8]
    HEADS: tl.constexpr = TILE[0]
    EVEN: tl.constexpr = TILE[1]
    U: tl.constexpr = TILE[2]
    S: tl.constexpr = TILE[3]
    H: tl.constexpr = TILE[4]
    C: tl.constexpr = TILE[5]
    K: tl.constexpr = TILE[6]
    PTX: tl.constexpr = TILE[7]
    acc, mix, acc_col = carry
    edges, grads, targets, state_ptr, source, o_h, scale, outputs, share_ptr = context
    b_col, b_v, b_param = source
    i, m_e, m_loop, live, term, kept = load_tile(
        step, end, held, has_loop, edges, o_h, EDGES, TILE, TAIL
    )
    m_x = m_e | m_loop
    # Numbers before features, as in `edge_attention`.
    b_m, b_il, delta, b_row = load_state(state_ptr, i, m_x, HEADS, EVEN, TAIL, U * S, H)
    if VECTOR:
        b_row = FUNCTIONS[0](targets, i, m_x, EVEN, TAIL, PTX)
        b_row, term = tl.reshape(b_row, [U, S, H, K]), tl.reshape(term, [U, S, H])
    b_g = gather(grads, i, m_x, EVEN, TAIL, PTX)
    b_g = tl.reshape(b_g, [U, S, H, C])
    s, aux = SCORE(b_row, b_col, term, b_param, scale)
    w = tl.exp(tl.reshape(s, [U * S, H]) - b_m) * b_il
    if TAIL or EDGES[2] or EDGES[4]:
        # Masked edges have 1 / l = 0 but may overflow: they must not be read.
        w = tl.where(live[:, None], w, 0.0)
    b_w = w * kept
    if FACTORED:
        acc_col -= w * tl.reshape(FUNCTIONS[2](aux, scale), [U * S, H]) * delta
        b_w = with_sign(tl.reshape(b_w, [U, S, H]), tl.reshape(aux, [U, S, H]))
        acc += tl.sum(tl.abs(b_w) * b_g, axis=0)
        mix += tl.sum(tl.where(b_w > 0, b_w, 0.0) * b_g, axis=0)
    else:
        acc += tl.sum(tl.reshape(b_w, [U, S, H, 1]) * b_g, axis=0)
        t = tl.reshape(tl.sum(b_g * b_v, axis=3), [U * S, H])
        if HAS_SHARE:
            t += _load_share(share_ptr, edges, step, m_e, o_h, HEADS, U * S, EDGES)
        ds = w * (kept * t - delta)
        if VECTOR:
            if TAIL or EDGES[2] or EDGES[4]:
                # 0 also beside a delta that is not finite.
                ds = tl.where(live[:, None], ds, 0.0)
            b_ds = tl.reshape(ds, [U, S, H])
            grad_col = FUNCTIONS[3](b_ds, b_row, b_col, b_param, aux, scale)
            if SHARED:
                acc += tl.sum(grad_col, axis=0)
            else:
                acc_col += tl.sum(grad_col, axis=0)
            aux = tl.reshape(aux, [U * S, H])
        else:
            acc_col += FUNCTIONS[3](ds, b_row, b_col, b_param, aux, scale)
        if GRAD_TERM or GRAD_LOOP_TERM:
            grad_term_ptr, grad_loop_term_ptr = outputs
            b_t = FUNCTIONS[4](ds, aux, scale)
            m_h = o_h < HEADS
            if TAIL or EDGES[2] or EDGES[4]:
                # Edges that are masked or stored loops get their 0 here, too.
                b_t = tl.where(live[:, None], b_t, 0.0)
        if GRAD_TERM:
            o_e = (step + tl.arange(0, U * S)).to(tl.int64)
            p_t = (grad_term_ptr + o_h)[None, :] + (o_e * HEADS)[:, None]
            if TAIL:
                tl.store(p_t, b_t, mask=m_e[:, None] & m_h[None, :])
            elif EVEN:
                tl.store(p_t, b_t)
            else:
                tl.store(p_t, b_t, mask=m_h[None, :])
        if GRAD_LOOP_TERM and TAIL:
            o_i = i.to(tl.int64) * HEADS
            p_t = (grad_loop_term_ptr + o_h)[None, :] + o_i[:, None]
            tl.store(p_t, b_t, mask=m_loop[:, None] & m_h[None, :])
    return acc, mix, acc_col


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "chunk", "num_loops", "num_edges"]
)
def attention_columns(
    value_ptr,
    grad_ptr,
    state_ptr,
    grad_value_ptr,
    grad_col_ptr,
    grad_term_ptr,
    grad_loop_term_ptr,
    part_ptr,
    part_col_ptr,
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
    slot_ptr,
    share_ptr,
    att_src_ptr,
    att_dst_ptr,
    grad_row_ptr,
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
    VJP_COL: tl.constexpr,
    VJP_TERM: tl.constexpr,
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
    GRAD_TERM: tl.constexpr,
    GRAD_LOOP_TERM: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    STRIDE_OV: tl.constexpr,
    STRIDE_OC: tl.constexpr,
    ATT_SRC: tl.constexpr,
    ATT_DST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
        SLOTTED if BY_ROW else CALLER,
    )
    TILE: tl.constexpr = (HEADS, EVEN, BLOCK_U, BLOCK_S, BLOCK_H, BLOCK_C, BLOCK_K, PTX)
    FUNCTIONS: tl.constexpr = (LOAD_ROW, SCORE, SLOPE, VJP_COL, VJP_TERM)
    CHOICES: tl.constexpr = (
        FUNCTIONS,
        VECTOR,
        FACTORED,
        GRAD_TERM,
        GRAD_LOOP_TERM,
        SHARED,
        EDGES,
        TILE,
        HAS_SHARE,
    )
    VALUES: tl.constexpr = (PITCH_V, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    GRADS: tl.constexpr = (PITCH_G, HEADS, CHANNELS, BLOCK_H, BLOCK_C)
    SOURCES: tl.constexpr = (PITCH_C, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    TARGETS: tl.constexpr = (PITCH_R, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    pointers = (index_ptr, perm_ptr, mask_ptr, term_ptr, loop_term_ptr, slot_ptr)
    i_h = tl.program_id(1)
    values = table_of(value_ptr, stride_vn, stride_vh, i_h, 0, VALUES)
    grads = table_of(grad_ptr, stride_gn, stride_gh, i_h, 0, GRADS)
    sources = table_of(col_ptr, stride_cn, stride_ch, i_h, 0, SOURCES)
    targets = table_of(row_ptr, stride_rn, stride_rh, i_h, 0, TARGETS)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    o_c = tl.arange(0, BLOCK_C)  # [BLOCK_C]
    o_k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    m_h, m_c, m_k = o_h < HEADS, o_c < CHANNELS, o_k < WIDTH
    if SHARED:
        m_k = o_k < 0  # There is no gradient of an operand to be stored.
    m_hc = m_h[:, None] & m_c[None, :]
    m_hk = m_h[:, None] & m_k[None, :]
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    b_param = 0.0
    if HAS_PARAM:
        b_param = load_param(param_ptr, i_h, EVEN, HEADS, WIDTH, BLOCK_H, BLOCK_K)
    for r in range(BLOCK_R):
        u = tl.program_id(0) * BLOCK_R + r
        col, first, start, end, m_item, m_col = load_units(
            u, ptr_ptr, item_row_ptr, item_start_ptr, num_rows, num_items, chunk, SPLIT
        )
        if m_col:
            held = col.to(index_ptr.dtype.element_ty)
            has_loop = SELF_LOOPS & (col < num_loops) & (start == first)
            one = held + tl.zeros([1], dtype=held.dtype)
            if not SHARED:
                b_col = LOAD_COL(sources, one, one >= 0, EVEN, False, PTX)
            b_v = gather(values, one, one >= 0, EVEN, False, PTX)
            b_v = tl.reshape(b_v, [1, 1, BLOCK_H, BLOCK_C])
            if SHARED:
                b_col = b_v
            if VECTOR:
                b_col = tl.reshape(b_col, [1, 1, BLOCK_H, BLOCK_K])
                acc_col = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_K], dtype=tl.float32)
            else:
                b_col = tl.reshape(b_col, [1, BLOCK_H])
                acc_col = tl.zeros([BLOCK_E, BLOCK_H], dtype=tl.float32)
            carry = (
                tl.zeros([BLOCK_S, BLOCK_H, BLOCK_C], dtype=tl.float32),
                tl.zeros([BLOCK_S, BLOCK_H, BLOCK_C], dtype=tl.float32),
                acc_col,
            )
            edges = (pointers, num_edges, seed, (drop_p, drop_factor))
            outputs = (grad_term_ptr, grad_loop_term_ptr)
            source = (b_col, b_v, b_param)
            context = (
                edges,
                grads,
                targets,
                state_ptr,
                source,
                o_h,
                scale,
                outputs,
                share_ptr,
            )
            carry = walk(
                carry, start, end, held, has_loop, context, _add_tile, CHOICES, BLOCK_E
            )
            s_acc, s_mix, s_col = carry
            acc = tl.sum(s_acc, axis=0)  # [BLOCK_H, BLOCK_C]
            acc_col = tl.sum(s_col, axis=0)
            if FACTORED:
                one = tl.full([1, 1], 1.0, dtype=tl.float32)
                upper, lower = SLOPE(one, scale), SLOPE(-one, scale)
                mix = lower * acc + (upper - lower) * tl.sum(s_mix, axis=0)
                acc_col += tl.sum(mix * tl.reshape(b_v, [BLOCK_H, BLOCK_C]), axis=1)
            acc_col = tl.reshape(acc_col, [BLOCK_H, BLOCK_K])
            if SPLIT:
                if m_item:
                    o_p = u.to(tl.int64) * HEADS + o_h  # [BLOCK_H]
                    p_v = part_ptr + o_p[:, None] * CHANNELS + o_c[None, :]
                    tl.store(p_v, acc, mask=m_hc)
                    p_c = part_col_ptr + o_p[:, None] * WIDTH + o_k[None, :]
                    tl.store(p_c, acc_col, mask=m_hk)
            if m_item == 0:
                store_column(
                    grad_value_ptr,
                    grad_col_ptr,
                    att_src_ptr,
                    att_dst_ptr,
                    grad_row_ptr,
                    col,
                    acc,
                    acc_col,
                    o_h,
                    o_c,
                    o_k,
                    m_h,
                    m_c,
                    m_k,
                    HEADS,
                    CHANNELS,
                    WIDTH,
                    (STRIDE_OV, STRIDE_OC),
                    ATT_SRC,
                    ATT_DST,
                )
