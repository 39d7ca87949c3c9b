"""Groupings in plain Python: what the tensor code must give."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from pyg_tiga.relation import Grouping

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def group(
    edges: list[tuple[int, int]], end: int, num_rows: int, num_cols: int
) -> list[list[tuple[int, int]]]:
    """For each row, its edges as (other end, edge id); bad edges are left out."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for edge_id, edge in enumerate(edges):
        row, col = edge[end], edge[1 - end]
        if 0 <= row < num_rows and 0 <= col < num_cols:
            rows[row].append((col, edge_id))
    return rows


def as_lists(grouping: Grouping) -> list[list[tuple[int, int]]]:
    """The rows of a grouping, in the same form."""
    ptr, index = grouping.ptr.tolist(), grouping.index.tolist()
    perm = (
        range(grouping.num_edges) if grouping.perm is None else grouping.perm.tolist()
    )
    return [
        [(index[p], perm[p]) for p in range(ptr[i], ptr[i + 1])]
        for i in range(grouping.num_rows)
    ]


def tensor(edges: list[tuple[int, int]], dtype: torch.dtype = torch.int64) -> Tensor:
    """Edges as an `edge_index` [2, E]."""
    return torch.tensor(edges, dtype=dtype).reshape(-1, 2).t().contiguous()


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """Edges with their numbers of nodes at either end, both possibly 0."""
    first, second = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if min(first, second) == 0:
        return [], first, second
    edge = st.tuples(st.integers(0, first - 1), st.integers(0, second - 1))
    return draw(st.lists(edge, max_size=40)), first, second
