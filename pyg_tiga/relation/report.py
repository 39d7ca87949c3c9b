"""A relation in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyg_tiga.relation.csr import Grouping

if TYPE_CHECKING:
    from pyg_tiga.relation.graph import Graph

_MIB = 1 << 20


def explain_graph(graph: Graph, rows: Grouping | None, columns: Grouping | None) -> str:
    """Sizes, degrees, and what has been built."""
    lines = [
        f"relation {graph.kind}: {graph.num_src} -> {graph.num_dst} nodes, "
        f"{graph.num_edges} edges, {graph.device}",
        "  by destination: " + _grouping(rows),
        "  by source: " + _grouping(columns),
    ]
    if graph.value is not None:
        lines.append(f"  stored values: {list(graph.value.shape)}, {graph.value.dtype}")
    return "\n".join(lines)


def _grouping(grouping: Grouping | None) -> str:
    if grouping is None:
        return "not built"
    dtype = str(grouping.index_dtype).removeprefix("torch.")
    order = "in the caller's order" if grouping.perm is None else "sorted here"
    built = f"{order}, {dtype}, {grouping.nbytes / _MIB:.2f} MiB"
    stats = grouping.stats
    if stats is None:
        return f"{built}; degrees and index check on their way from the device"
    mean = stats.num_edges / max(stats.num_rows, 1)
    quantiles = (stats.degree_quantile(q) for q in (0.5, 0.9, 0.99))
    shown = ", ".join(map(str, quantiles))
    return (
        f"{built}; degrees: mean {mean:.1f}, 50/90/99 % of rows up to {shown}, largest "
        f"{stats.max_degree}; {stats.num_rows - stats.tail[0]} rows without edges"
    )
