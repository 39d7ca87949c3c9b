"""The suites by name; each lists its cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.engine import Case
from benchmarks.suites import edge_attention, gat, sage, spmm

SUITES: dict[str, Callable[[], Sequence[Case]]] = {
    "spmm": spmm.cases,
    "sage": sage.cases,
    "gat": gat.cases,
    "edge_attention": edge_attention.cases,
}
