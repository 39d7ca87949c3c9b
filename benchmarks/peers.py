"""The peers, each prepared outside of what is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, SAGEConv, SimpleConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from benchmarks.graphs import BenchGraph
from benchmarks.inputs import Inputs, Results


class PeerMissing(ImportError):
    """A peer that cannot run here; the message says why."""


def pyg_aggregation(reduce: str) -> torch.nn.Module:
    """PyG's own road from a plain ``edge_index`` to an aggregate."""
    return SimpleConv(aggr=reduce)


def pyg_sage_conv(in_channels: int, out_channels: int) -> torch.nn.Module:
    """PyG's mean SAGEConv."""
    return SAGEConv(in_channels, out_channels)


def pyg_gat_conv(
    in_channels: int, out_channels: int, heads: int, **options: Any
) -> torch.nn.Module:
    """PyG's GATConv."""
    return GATConv(in_channels, out_channels, heads, **options)


def with_loops(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The edges that GATConv makes of them in each call: its own self-loops last."""
    bare, _ = remove_self_loops(edge_index)
    return add_self_loops(bare, num_nodes=num_nodes)[0]  # [2, E + N]


def share_parameters(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Make the parameters of ``other`` those of a module of the same form."""
    for name, parameter in other.named_parameters():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameter)


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    """A module under ``torch.compile``, from an empty compile cache in memory."""
    torch.compiler.reset()
    return torch.compile(module, dynamic=False)


def csr_matrix(graph: BenchGraph, dtype: torch.dtype, *, by: int) -> Tensor:
    """The graph as a CSR tensor of ones with int32 indices."""
    pointer, other = graph.compressed(by)
    values = torch.ones(graph.num_edges, dtype=dtype, device=graph.device)
    size = (graph.num_nodes, graph.num_nodes)
    return torch.sparse_csr_tensor(pointer, other, values, size, check_invariants=False)


def cusparse_sum(
    graph: BenchGraph, inputs: Inputs, phase: str
) -> tuple[Callable[[int], Results], int]:
    """cuSPARSE's sum, both directions prepared once; the call and its bytes.

    The backward is the bare product with the transpose, without autograd's cost.
    """
    if graph.device.type != "cuda":
        raise PeerMissing("cuSPARSE needs a CUDA device")
    return sparse_sum(graph, inputs, phase)


def sparse_sum(
    graph: BenchGraph, inputs: Inputs, phase: str
) -> tuple[Callable[[int], Results], int]:
    """The same through ``torch.sparse`` on any device."""
    dtype = inputs.x[0].dtype
    forward = csr_matrix(graph, dtype, by=1)
    if phase == "forward":
        return _without_grad(lambda i: (forward @ inputs.x[i],)), _nbytes(forward)
    backward = csr_matrix(graph, dtype, by=0)

    def train(i: int) -> Results:
        return forward @ inputs.x[i], backward @ inputs.grad[i]

    return _without_grad(train), _nbytes(forward) + _nbytes(backward)


def _without_grad(call: Callable[[int], Results]) -> Callable[[int], Results]:
    return torch.no_grad()(call)


def _nbytes(matrix: Tensor) -> int:
    parts = (matrix.crow_indices(), matrix.col_indices(), matrix.values())
    return sum(part.nbytes for part in parts)
