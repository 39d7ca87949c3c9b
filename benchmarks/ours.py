"""The measured library, called as a user calls it: with a plain ``edge_index``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.graphs import BenchGraph


def spmm(edge_index: Tensor, x: Tensor, reduce: str, **options: Any) -> Tensor:
    """Aggregate x over the edges."""
    from pyg_tiga import functional

    return functional.spmm(edge_index, x, reduce=reduce, **options)


def sage_conv(in_channels: int, out_channels: int) -> torch.nn.Module:
    """A mean SAGEConv."""
    from pyg_tiga.nn import SAGEConv

    return SAGEConv(in_channels, out_channels)


def relation_bytes(graph: BenchGraph) -> int:
    """Bytes that the memo holds for the graph."""
    from pyg_tiga.relation.memo import relation_of

    size = graph.num_nodes
    relation = relation_of(graph.edge_index, size, size, "source_to_target")
    return relation.nbytes()


def release(graph: BenchGraph) -> None:
    """Let the memo give the graph up."""
    import pyg_tiga

    pyg_tiga.forget(graph.edge_index)


def gat_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """A GATConv."""
    from pyg_tiga.nn import GATConv

    return GATConv(in_channels, out_channels, heads, **options)


def additive_attention(
    edge_index: Tensor,
    value: Tensor,  # [N, H, C]
    alpha_src: Tensor,  # [N, H]
    alpha_dst: Tensor,  # [N, H]
) -> Tensor:
    """The edge kernels of a GATConv alone, with its defaults: [N, H, C]."""
    from pyg_tiga import functional

    return functional.additive_attention(
        edge_index, value, alpha_src, alpha_dst, self_loops=True
    )


def gatv2_attention(
    edge_index: Tensor,
    x_src: Tensor,  # [N, H, C]
    x_dst: Tensor,  # [N, H, C]
    att: Tensor,  # [1, H, C]
    **options: Any,
) -> Tensor:
    """A GATv2Conv without its projections and self-loops: [N, H, C]."""
    from pyg_tiga import functional

    att = att.view(att.shape[1:])
    return functional.gatv2_attention(edge_index, x_src, x_dst, att, **options)


def dot_attention(
    edge_index: Tensor,
    query: Tensor,  # [N, H, C]
    key: Tensor,  # [N, H, C]
    value: Tensor,  # [N, H, C]
    **options: Any,
) -> Tensor:
    """A TransformerConv without its projections: [N, H, C]."""
    from pyg_tiga import functional

    return functional.graph_attention(query, key, value, edge_index, **options)


def gatv2_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """A GATv2Conv."""
    from pyg_tiga.nn import GATv2Conv

    return GATv2Conv(in_channels, out_channels, heads, **options)


def transformer_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """A TransformerConv."""
    from pyg_tiga.nn import TransformerConv

    return TransformerConv(in_channels, out_channels, heads, **options)
