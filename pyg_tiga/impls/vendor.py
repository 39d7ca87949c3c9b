"""SpMM by `torch.sparse`: cuSPARSE on CUDA, PyTorch's own CSR kernel on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph


def _spmm(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None,  # [E]
) -> Tensor:
    rows = graph.rows()
    graph.validate()
    dtype = problem.out_dtype
    if weight is None:
        values = x.new_ones(1, dtype=dtype).expand(rows.num_edges).contiguous()
    else:
        values = weight.to(dtype)
        values = values if rows.perm is None else values.index_select(0, rows.perm)
    matrix = _csr(graph, values)
    x = x.to(dtype)
    if problem.normalize == "src":
        x = (x * graph.columns().degree_inv().unsqueeze(1)).to(dtype)
    # torch.sparse.mm is a matrix product to autocast, an aggregation is not.
    with torch.autocast(x.device.type, enabled=False):
        out = _multiply(matrix, x)
    if problem.normalize == "dst":
        out = out.mul_(rows.degree_inv().unsqueeze(1))
    return out


def _csr(graph: Graph, values: Tensor) -> Tensor:
    rows = graph.rows()
    # The relation is valid by construction, and PyTorch's own check would sync.
    return torch.sparse_csr_tensor(
        rows.ptr,
        rows.index,
        values,
        (rows.num_rows, rows.num_cols),
        check_invariants=False,
    )


def _multiply(matrix: Tensor, x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.sparse.mm(matrix, x, "sum")
    return torch.sparse.mm(matrix, x)


# Half precision would accumulate in half precision on the CPU.
SPMM_CPU = Implementation(
    "torch_sparse_mm",
    "vendor",
    "spmm",
    Limits(devices=("cpu",), dtypes=(torch.float32, torch.float64)),
    _spmm,
)
SPMM_CUDA = Implementation(
    "cusparse",
    "vendor",
    "spmm",
    Limits(
        devices=("cuda",),
        dtypes=(*FLOATS, torch.float64),
        deterministic=False,
    ),
    _spmm,
)
