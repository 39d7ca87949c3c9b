"""Relations: which source sends to which destination, and how edges are grouped."""

from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import (
    clear,
    forget,
    handle_of,
    relation_of,
    relation_of_adj,
)
from pyg_tiga.relation.stats import CHUNKS, Stats

__all__ = [
    "CHUNKS",
    "Graph",
    "Grouping",
    "Stats",
    "WorkItems",
    "clear",
    "forget",
    "handle_of",
    "relation_of",
    "relation_of_adj",
]
