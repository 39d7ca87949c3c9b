"""Public functions on tensors and relations.

A relation is anything that says which source sends to which destination: a
:class:`pyg_tiga.Graph`, a plain ``edge_index``, a PyG ``EdgeIndex`` or
``SparseTensor``, or a torch sparse tensor (the last two as PyG's ``adj_t``: rows are
destinations).
"""

from pyg_tiga.functional.aggregation import plan_spmm, sddmm, spmm, spmm_csr
from pyg_tiga.functional.attention import (
    additive_attention,
    additive_attention_weights,
    gat_attention,
)
from pyg_tiga.functional.graph_attention import (
    gatv2_attention,
    gatv2_attention_weights,
    graph_attention,
    graph_attention_weights,
)
from pyg_tiga.ops.bodies import last_plan

__all__ = [
    "additive_attention",
    "additive_attention_weights",
    "gat_attention",
    "gatv2_attention",
    "gatv2_attention_weights",
    "graph_attention",
    "graph_attention_weights",
    "last_plan",
    "plan_spmm",
    "sddmm",
    "spmm",
    "spmm_csr",
]
