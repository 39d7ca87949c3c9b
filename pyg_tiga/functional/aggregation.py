"""Aggregation over the edges of each destination, and products over edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.functional.relations import (
    Relation,
    Size,
    graph_of,
    is_traced,
    relation_for_ops,
)
from pyg_tiga.ops import bodies, transformed
from pyg_tiga.ops.aggregate_linear import Maps
from pyg_tiga.ops.aggregate_linear import aggregate_linear as run_aggregate_linear
from pyg_tiga.ops.eager import EAGER
from pyg_tiga.ops.library import LIBRARY, Handle
from pyg_tiga.ops.transformed import TRANSFORMED
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph

_SUMS = {"sum": "none", "add": "none", "mean": "dst"}
_EXTREMA = ("max", "min")
_TIES = ("split", "first")


def spmm(
    relation: Relation,
    x: Tensor,  # [..., N_src, F]
    weight: Tensor | None = None,  # [E]
    reduce: str = "sum",
    *,
    size: Size = None,
    flow: str = "source_to_target",
    ties: str = "split",
) -> Tensor:
    r"""Aggregate source features over the edges of each destination.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j \to i)} w_e \, \mathbf{x}_j

    Nothing with one row per edge is formed where a fused kernel runs; see
    :func:`plan_spmm`. Half-precision inputs accumulate in float32.

    Args:
        relation: Which source sends to which destination; see
            :mod:`pyg_tiga.functional`.
        x: Source features ``[..., N_src, F]``, or ``[N_src]`` for one column.
        weight: Edge weights ``[E]`` in the relation's own edge order. Stored values of
            a sparse relation are used where none are given.
        reduce: ``"sum"`` (or ``"add"``), ``"mean"`` (over the number of edges, also
            with weights), ``"max"`` or ``"min"``. Rows without edges give 0.
        size: ``(N_src, N_dst)`` of a plain ``edge_index``; by default both are N_src.
        flow: As in PyG, for a plain ``edge_index``.
        ties: Who gets the gradient where several edges reach a maximum: ``"split"``
            among them evenly, as PyTorch's ``scatter_reduce``, or the ``"first"``.

    Returns:
        ``[..., N_dst, F]`` in the dtype of ``x``, promoted with that of ``weight``.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation or operand of the wrong type.
        UnsupportedError: A pinned implementation refuses the problem.
    """
    _check_dense("x", x)
    if weight is not None:
        _check_dense("weight", weight)
    if reduce == "mean" and not (x.is_floating_point() or x.is_complex()):
        # As PyTorch divides integers.
        x = x.to(torch.get_default_dtype())
    if x.dim() == 1:
        out = spmm(
            relation, x.unsqueeze(1), weight, reduce, size=size, flow=flow, ties=ties
        )
        return out.squeeze(1)
    _check_options(reduce, ties)
    related = relation_for_ops(relation, x.size(-2), size, flow)
    call = _road(related)
    weight = related.value if weight is None else weight
    _check_operands(related, x, weight)
    if x.dim() == 2:
        return _aggregate(call, related, x, weight, reduce, ties)
    # A batch of features on one graph is one wider feature: [B, N, F] -> [N, B F].
    lead = x.shape[:-2]
    wide = x.movedim(-2, 0).reshape(x.size(-2), -1)
    out = _aggregate(call, related, wide, weight, reduce, ties)
    return out.view(out.size(0), *lead, x.size(-1)).movedim(0, -2).contiguous()


def aggregate_linear(
    relation: Relation,
    x: Tensor,  # [N_src, F_in]
    x_dst: Tensor | None,  # [N_dst, F_dst]
    maps: Maps,
    reduce: str,
    size: Size = None,
    flow: str = "source_to_target",
) -> Tensor:
    """A sum or mean and the linear maps behind it, for layers that checked their input.

    Eager calls only; all operands are matrices of one dtype. Size and flow are for
    relations that do not know them.

    Returns:
        ``[N_dst, F_out]``.
    """
    graph = graph_of(relation, x.size(0), size, flow)
    return run_aggregate_linear(graph, x, x_dst, maps, _SUMS[reduce])


def sddmm(
    relation: Relation,
    a: Tensor,  # [N_dst, F]
    b: Tensor,  # [N_src, F]
    *,
    flow: str = "source_to_target",
) -> Tensor:
    r"""Dot product of the two ends of every edge (sampled dense-dense product).

    .. math::
        s_e = \sum_f a_{if} \, b_{jf} \quad \text{for } e = (j \to i)

    Args:
        relation: Which source sends to which destination; see
            :mod:`pyg_tiga.functional`.
        a: Destination features ``[N_dst, F]``.
        b: Source features ``[N_src, F]``.
        flow: As in PyG, for a plain ``edge_index``.

    Returns:
        ``[E]`` in the relation's own edge order.

    Raises:
        ValueError: A shape, size, device or index that does not fit.
    """
    size = (b.size(0), a.size(0))
    related = relation_for_ops(relation, b.size(-2), size, flow)
    call = _road(related)
    _check_operands(related, b, None)
    if a.dim() != 2 or a.size(0) != related.num_dst or a.size(1) != b.size(1):
        raise ValueError(
            f"'a' must have shape [num_dst, F] = [{related.num_dst}, {b.size(1)}] "
            f"(got {list(a.shape)})"
        )
    if a.device != b.device:
        raise ValueError(
            f"'a' and 'b' must be on one device (got {a.device} and {b.device})"
        )
    return call.sddmm(related, a, b, "none")


def spmm_csr(
    crow: Tensor,  # [N + 1]
    col: Tensor,  # [E]
    val: Tensor | None,  # [E]
    x: Tensor,  # [N_src, F]
) -> Tensor:
    """Product of a CSR matrix with a dense one; rows are destinations. CPU and CUDA.

    Args:
        crow: Row pointers ``[N_dst + 1]``.
        col: Source of each edge, ``[E]``.
        val: Edge values ``[E]``; ``None`` stands for ones.
        x: Dense operand ``[N_src, F]``.

    Returns:
        ``[N_dst, F]``.

    Raises:
        ValueError: Malformed pointers, or an index outside of [0, N_src).
    """
    _check_dense("x", x)
    num_src = x.size(0) if x.dim() == 1 else x.size(-2)
    if is_traced(crow):
        return spmm(Handle([crow, col], "csr", num_src, crow.size(0) - 1), x, val)
    return spmm(Graph.from_csr(crow, col, num_src=num_src), x, val)


def plan_spmm(
    relation: Relation,
    x: Tensor,  # [N_src, F]
    weight: Tensor | None = None,  # [E]
    reduce: str = "sum",
    *,
    size: Size = None,
    flow: str = "source_to_target",
    ties: str = "split",
) -> Plan:
    """The plan that :func:`spmm` would run, without running it."""
    _check_options(reduce, ties)
    _check_dense("x", x)
    x = x.unsqueeze(1) if x.dim() == 1 else x
    graph = graph_of(relation, x.size(-2), size, flow)
    weight = graph.value if weight is None else weight
    if reduce in _SUMS:
        return bodies.spmm_plan(graph, x, weight, _SUMS[reduce])
    wanted = ties if torch.is_grad_enabled() and x.requires_grad else "none"
    return bodies.extremum_plan(graph, x, reduce, wanted, weight is not None)


def _aggregate(
    call: Any, related: Any, x: Tensor, weight: Tensor | None, reduce: str, ties: str
) -> Tensor:
    if reduce in _SUMS:
        return call.spmm(related, x, weight, _SUMS[reduce])
    if weight is None:
        return call.extremum(related, x, reduce, ties)
    graph = related.graph() if isinstance(related, Handle) else related
    return bodies.weighted_extremum(graph, x, weight, reduce, ties)


def _check_dense(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise TypeError(f"'{name}' must be a dense tensor (got {type(value).__name__})")
    if value.dim() == 0:
        raise ValueError(f"'{name}' must have at least one dimension (got none)")


def _road(related: Any) -> Any:
    """The functions to call on a relation."""
    if isinstance(related, Handle):
        return LIBRARY
    return TRANSFORMED if transformed.is_active() else EAGER


def _check_options(reduce: str, ties: str) -> None:
    if reduce not in _SUMS and reduce not in _EXTREMA:
        allowed = ", ".join(repr(name) for name in (*_SUMS, *_EXTREMA))
        raise ValueError(f"'reduce' must be one of {allowed} (got {reduce!r})")
    if ties not in _TIES:
        raise ValueError(f"'ties' must be 'split' or 'first' (got {ties!r})")


def _check_operands(related: Any, x: Tensor, weight: Tensor | None) -> None:
    if x.dim() < 2 or x.size(-2) != related.num_src:
        raise ValueError(
            f"'x' must have shape [..., num_src, F] with num_src = {related.num_src} "
            f"(got {list(x.shape)})"
        )
    if x.device != related.device:
        raise ValueError(
            f"'x' and the relation must be on one device (got {x.device} and "
            f"{related.device})"
        )
    if weight is None:
        return
    if weight.dim() != 1 or weight.size(0) != related.num_edges:
        raise ValueError(
            f"'weight' must have shape [num_edges] = [{related.num_edges}] "
            f"(got {list(weight.shape)})"
        )
    if weight.device != x.device:
        raise ValueError(
            f"'weight' and 'x' must be on one device (got {weight.device} and "
            f"{x.device})"
        )
