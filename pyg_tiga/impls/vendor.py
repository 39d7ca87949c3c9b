"""SpMM by `torch.sparse`: cuSPARSE on CUDA, PyTorch's own CSR kernel on the CPU."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from pyg_tiga.impls.base import FLOATS, Implementation, Limits
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.relation.graph import Graph

_DTYPES = (*FLOATS, torch.float64)


def _spmm(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None,  # [E]
) -> Tensor:
    rows = graph.rows()
    real = torch.float64 if problem.out_dtype == torch.float64 else torch.float32
    # cuSPARSE adds up bfloat16 in bfloat16.
    dtype = real if problem.device == "cuda" else problem.out_dtype
    x = x.to(dtype)
    if problem.normalize == "src":
        x = (x * graph.columns().degree_inv(real).unsqueeze(1)).to(dtype)
    out = _multiply(_csr(graph, weight, dtype), x, "sum")
    if problem.normalize == "dst":
        out = out.mul_(rows.degree_inv(real).unsqueeze(1))
    return out.to(problem.out_dtype)


def _spmm_extremum(
    problem: Problem,
    schedule: Schedule | None,
    graph: Graph,
    x: Tensor,  # [N_src, F]
) -> tuple[Tensor, Tensor]:
    out = _multiply(_csr(graph, None, x.dtype), x, f"a{problem.reduce}")
    return out, x.new_empty(0, dtype=torch.int32)


def _csr(graph: Graph, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The relation as a matrix, with ones where it has no weights."""
    graph.validate()
    rows = graph.rows()
    if weight is None:
        values = torch.ones(rows.num_edges, dtype=dtype, device=rows.ptr.device)
    else:
        values = weight.to(dtype)
        values = values if rows.perm is None else values.index_select(0, rows.perm)
    announce_beta()
    # The relation is valid by construction, and PyTorch's own check would sync.
    return torch.sparse_csr_tensor(
        rows.ptr,
        rows.index,
        values,
        (rows.num_rows, rows.num_cols),
        device=values.device,
        check_invariants=False,
    )


def _multiply(matrix: Tensor, x: Tensor, reduce: str) -> Tensor:
    # torch.sparse.mm is a matrix product to autocast, an aggregation is not.
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type == "cpu":
            return torch.sparse.mm(matrix, x, reduce)
        return torch.sparse.mm(matrix, x)


@cache
def announce_beta() -> None:
    """Let PyTorch say once, unheard, that its CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        empty = torch.zeros(1, dtype=torch.int64, device="cpu")
        values = torch.zeros(0, device="cpu")
        torch.sparse_csr_tensor(empty, empty[:0], values, (0, 0), device="cpu")


SPMM_CPU = Implementation(
    "torch_sparse_mm",
    "vendor",
    "spmm",
    Limits(devices=("cpu",), dtypes=_DTYPES),
    _spmm,
)
SPMM_EXTREMUM_CPU = Implementation(
    "torch_sparse_mm",
    "vendor",
    "spmm_extremum",
    Limits(devices=("cpu",), dtypes=_DTYPES, ties=("none",), weighted=False),
    _spmm_extremum,
)
SPMM_CUDA = Implementation(
    "cusparse",
    "vendor",
    "spmm",
    Limits(
        devices=("cuda",),
        dtypes=_DTYPES,
        deterministic=False,
    ),
    _spmm,
)
