"""Cases of `compile_matrix` for the edge-attention template."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pyg_tiga.kernels import (
    attention_columns,
    attention_merge,
    attention_rows_backward,
    attention_state,
    edge_attention,
    edge_features,
    edge_order,
    edge_sums,
    edge_weights,
    node_scores,
)
from pyg_tiga.kernels.scores import SCORES

# Types that do not follow from an argument's name.
TYPES = {
    "mask_ptr": "*u8",
    "seed_ptr": "*i64",
    "scale": "fp32",
    "drop_p": "fp32",
    "drop_factor": "fp32",
    **dict.fromkeys(
        (
            "m_ptr",
            "l_ptr",
            "state_ptr",
            "positive_sum_ptr",
            "part_ptr",
            "sums_ptr",
            "score_ptr",
            "share_ptr",
            "part_m_ptr",
            "part_l_ptr",
            "part_positive_ptr",
            "part_sum_ptr",
            "part_col_ptr",
            "grad_row_ptr",
            "grad_col_ptr",
            "grad_term_ptr",
            "grad_loop_term_ptr",
            "grad_param_ptr",
            "row_ptr",
            "col_ptr",
            "start_ptr",
            "grad_first_ptr",
            "grad_second_ptr",
        ),
        "*fp32",
    ),
}
_TILE = {"BLOCK_H": 4, "BLOCK_C": 32}
_SHAPE = {"HEADS": 4, "CHANNELS": 32}
_WALK = {
    **_SHAPE,
    **_TILE,
    "WIDTH": 1,
    "BLOCK_R": 1,
    "BLOCK_U": 4,
    "BLOCK_S": 2,
    "BLOCK_K": 1,
}


def cases(make: Callable[..., Any], dtype: str, index: str) -> Iterator[Any]:
    """Every kernel of the template, plain and with all that it can take."""
    for full in (False, True):
        edges = {
            "SPLIT": True,
            "HAS_TERM": full,
            "HAS_LOOP_TERM": full,
            "HAS_MASK": full,
            "HAS_PERM": True,
            "SELF_LOOPS": True,
            "DROPOUT": full,
            "BY_ROW": False,
            **_pitches(3 * 128 * (not full), 4 * (not full)),
            "PTX": True,
            "HAS_PARAM": False,
            "SHARED": False,
        }
        flags = {**_score("load_row", "load_col", "score"), **edges}
        kernel = edge_attention.attention_rows
        kept = {"SAVE_POSITIVE": full, "HAS_BIAS": full, "SAVE_SCORES": False}
        yield make(kernel, {**flags, **kept, **_WALK}, dtype, index)
        flags |= _score("slope", "vjp_col", "vjp_term")
        flags |= dict.fromkeys(("GRAD_TERM", "GRAD_LOOP_TERM", "HAS_SHARE"), full)
        flags |= {"FACTORED": not full, "ATT_SRC": True, "ATT_DST": not full}
        flags |= {"STRIDE_OV": 128, "STRIDE_OC": 4, "PITCH_G": 128 * (not full)}
        yield make(
            attention_columns.attention_columns, {**flags, **_WALK}, dtype, index
        )
    flags = {**_score("load_row", "load_col", "score", "slope"), **edges}
    flags |= {**_score("vjp_row", "vjp_param"), **_WALK}
    kernel = attention_rows_backward.attention_rows_backward
    for factored in (False, True):
        flags |= {"FACTORED": factored, "HANDED": False, "STRIDE_OR": 4, "PITCH_G": 0}
        yield make(kernel, flags, dtype, index)
    yield from _around(make, dtype, index)
    for name, width, full in (("dot", 16, True), ("gatv2", 32, False)):
        yield from _vectors(make, dtype, index, name, width, full)
    # Its gradients that are handed over are formed as those that are not.
    yield from itertools.islice(_vectors(make, dtype, index, "dot_norm", 16, True), 3)


def _pitches(value: int, operand: int) -> dict[str, int]:
    """Distances of rows that are compiled in."""
    return {"PITCH_V": value, "PITCH_R": operand, "PITCH_C": operand}


def _vectors(
    make: Callable[..., Any], dtype: str, index: str, name: str, width: int, full: bool
) -> Iterator[Any]:
    """A score of vectors; without all that it can take, values are its operand."""
    score, shared = SCORES[name], not full
    edges = dict.fromkeys(("HAS_TERM", "HAS_LOOP_TERM", "HAS_MASK", "DROPOUT"), full)
    edges |= dict.fromkeys(("SPLIT", "HAS_PERM", "SELF_LOOPS"), True)
    edges["BY_ROW"] = full
    edges |= {
        "PTX": True,
        **_pitches(3 * 4 * width * shared, 3 * 4 * width * shared),
        "HAS_PARAM": score.has_param,
        "SHARED": shared,
    }
    edges |= {**_WALK, "WIDTH": width, "BLOCK_K": width}
    # Operands and their gradients.
    names = ("row_ptr", "col_ptr", "param_ptr", "grad_row_ptr", "grad_col_ptr")
    types = dict.fromkeys(names, f"*{dtype}")
    rest = (dtype, index, 1, "", types)
    flags = {**edges, **_score("load_row", "load_col", "score", score=name)}
    kernel = edge_attention.attention_rows
    kept = {"SAVE_POSITIVE": False, "HAS_BIAS": False, "SAVE_SCORES": full}
    yield make(kernel, {**flags, **kept}, *rest)
    flags |= {"FACTORED": False, **_score("slope", score=name)}
    # Gradients as operands: columns of one matrix, or matrices of their own.
    pitch = 4 * width if shared else 3 * 4 * width
    flags |= {"PITCH_G": 128}
    made = _score("vjp_col", "vjp_term", score=name)
    made |= dict.fromkeys(("ATT_SRC", "ATT_DST"), False)
    made |= {"GRAD_TERM": True, "GRAD_LOOP_TERM": True, "HAS_SHARE": full}
    made |= {"STRIDE_OV": pitch, "STRIDE_OC": pitch}
    yield make(attention_columns.attention_columns, {**flags, **made}, *rest)
    flags |= {"STRIDE_OR": pitch, **_score("vjp_row", "vjp_param", score=name)}
    kernel = attention_rows_backward.attention_rows_backward
    yield make(kernel, {**flags, "HANDED": False}, *rest)
    terms = {"term_ptr": "*fp32", "loop_term_ptr": "*fp32"}
    read = {"HAS_TERM": True, "HAS_LOOP_TERM": True, "HAS_PERM": True}
    read |= {"HAS_MASK": False, "DROPOUT": False, "HANDED": True}
    yield make(kernel, {**flags, **read}, *rest[:-1], {**types, **terms})


def _around(make: Callable[..., Any], dtype: str, index: str) -> Iterator[Any]:
    """Merges, sums, and what runs once per node."""
    flags = {"SAVE_POSITIVE": True, "HAS_BIAS": True, "BLOCK_P": 8, **_SHAPE, **_TILE}
    yield make(attention_merge.attention_merge, flags, dtype, index)
    flags = {"ATT_SRC": True, "ATT_DST": True, "BLOCK_P": 8, **_TILE, "BLOCK_K": 1}
    flags |= {**_SHAPE, "WIDTH": 1, "STRIDE_OV": 128, "STRIDE_OC": 4}
    yield make(attention_merge.columns_merge, flags, dtype, index)
    flags |= {"ATT_SRC": False, "ATT_DST": False, "WIDTH": 0}
    yield make(attention_merge.columns_merge, flags, dtype, index)
    for full in (False, True):
        flags = dict.fromkeys(
            ("HAS_ROW", "HAS_POSITIVE", "HAS_BIAS", "GRAD_BIAS"), full
        )
        flags |= {**_SHAPE, "BLOCK_N": 8, **_TILE}
        yield make(attention_state.attention_prepare, flags, dtype, index, 2)
    blocks = {"BLOCK_R": 4, "BLOCK_E": 32, "BLOCK_W": 4}
    flags = {"SPLIT": True, "HAS_START": True, "HAS_PERM": True, **blocks}
    yield make(edge_sums.edge_sums, flags, "fp32", index)
    yield from _features(make, dtype, index)
    flags = {"SECOND": True, "BLOCK_N": 8, **_SHAPE, **_TILE}
    yield make(node_scores.node_scores, flags, dtype, index, 4)
    yield make(node_scores.node_scores_backward, flags, dtype, index, 8)
    flags = {"BLOCK_P": 512, "BLOCK_W": 16}
    yield make(node_scores.sum_partials, flags, "fp32", index, 8)


def _features(make: Callable[..., Any], dtype: str, index: str) -> Iterator[Any]:
    """Weights of edges, and their products with features."""
    heads = {"HEADS": 4, "BLOCK_E": 256, "BLOCK_H": 4}
    flags = {**heads, "HAS_RANK": True, "DROPOUT": True, "BY_ROW": True}
    types = {"target_ptr": f"*{index}", "rank_ptr": f"*{index}"}
    made = ("fp32", index, 4, "", types)
    yield make(edge_weights.edge_weights, flags, *made)
    yield make(edge_order.take_edges, heads, *made)
    types |= {"weight_ptr": "*fp32", "more_weight_ptr": "*fp32"}
    made = (dtype, index, 1, "", types)
    for width in (16, 200):
        shape = {"HEADS": 4, "WIDTH": width, "BLOCK_D": min(width, 128)}
        by_edge = {**shape, "UNROLL": 4, "BLOCK_E": 8, "HAS_PERM": True}
        yield make(edge_features.feature_dots, by_edge, *made)
        pair = {**by_edge, "PAIR": width == 16}
        yield make(edge_features.feature_spread, pair, *made)
        by_row = {**shape, "SPLIT": True, "HAS_PERM": True, "BLOCK_R": 2}
        by_row |= {"BY_ROW": True}
        blocks = {"BLOCK_U": 4, "BLOCK_S": 2, "BLOCK_H": 64 // min(width, 64)}
        yield make(edge_features.feature_sums, {**by_row, **blocks}, *made)


def _score(*names: str, score: str = "additive") -> dict[str, Any]:
    functions = SCORES[score]
    found = {name.upper(): getattr(functions, name) for name in names}
    return {**found, "VECTOR": functions.vector}
