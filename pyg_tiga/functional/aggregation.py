"""Aggregation over the edges of each destination, and products over edges."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.functional.arguments import check_dense, check_device
from pyg_tiga.functional.relations import (
    Relation,
    Size,
    graph_for_plan,
    graph_of,
    is_traced,
    of_rows,
    relation_for_ops,
    relation_for_rows,
)
from pyg_tiga.ops import bodies, transformed
from pyg_tiga.ops.aggregate_linear import Maps
from pyg_tiga.ops.aggregate_linear import aggregate_linear as run_aggregate_linear
from pyg_tiga.ops.eager import EAGER, wants_grad
from pyg_tiga.ops.library import LIBRARY, Handle
from pyg_tiga.ops.transformed import TRANSFORMED
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.inputs import INDEX_DTYPES

_SUMS = {"sum": "none", "add": "none", "mean": "dst"}
_EXTREMA = ("max", "min")
_TIES = ("split", "first")
_UNSUMMED = (torch.uint16, torch.uint32, torch.uint64)


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
            With another relation it must be that one's own.
        flow: As in PyG, for a plain ``edge_index``: other relations know their
            destinations.
        ties: Who gets the gradient where several edges reach a maximum: ``"split"``
            among them evenly, as PyTorch's ``scatter_reduce``, or the ``"first"``.

    Returns:
        ``[..., N_dst, F]`` in the dtype of ``x``, promoted with that of ``weight``.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation or operand of the wrong type.
        UnsupportedError: A pinned implementation refuses the problem.
    """
    call = _prepared(relation, x, weight, reduce, size, flow, ties, False)
    road = _road(call.related, call.x, call.weight)
    out = _aggregate(road, call, reduce, ties)
    if call.lead is not None:
        lead, features = call.lead
        out = out.view(out.size(0), *lead, features).movedim(0, -2).contiguous()
    return out.squeeze(1) if call.is_vector else out


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
        ``[E]`` in the relation's own edge order, in the dtype to which both promote.

    Raises:
        ValueError: A shape, size, device, option or index that does not fit.
        TypeError: A relation or operand of the wrong type.
    """
    for name, value in (("a", a), ("b", b)):
        check_dense(name, value)
        if value.dim() != 2:
            raise ValueError(
                f"'{name}' must have shape [nodes, F] (got {list(value.shape)})"
            )
    related = relation_for_rows(
        relation, None, flow, ("b", b.size(0)), ("a", a.size(0))
    )
    shapes = (("b", b, "num_src"), ("a", a, "num_dst"))
    for name, value, rows in shapes:
        shape = [getattr(related, rows), b.size(1)]
        if list(value.shape) != shape:
            raise ValueError(
                f"'{name}' must have shape [{rows}, F] = {shape} (got "
                f"{list(value.shape)})"
            )
    check_device("b", b, related.device, "the relation")
    check_device("a", a, b.device, "'b'")
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    return _road(related, a, b).sddmm(related, a, b, "none")


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
        ValueError: A shape or device that does not fit, malformed pointers, or an index
            outside of [0, N_src).
        TypeError: An operand of the wrong type.
    """
    check_dense("x", x)
    _check_csr(crow, col, val)
    num_src = x.size(0) if x.dim() == 1 else x.size(-2)
    if is_traced(crow):
        return spmm(Handle([crow, col], "csr", num_src, crow.size(0) - 1), x, val)
    try:
        return spmm(Graph.from_csr(crow, col, num_src=num_src), x, val)
    except ValueError as error:
        # Pointers are checked with the rest of a relation, which has its own name.
        raise ValueError(str(error).replace("'rowptr'", "'crow'")) from None


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
    call = _prepared(relation, x, weight, reduce, size, flow, ties, True)
    graph, x, weight = call.related, call.x, call.weight
    if reduce in _SUMS:
        return bodies.spmm_plan(graph, x, weight, _SUMS[reduce])
    if weight is not None:
        return bodies.extremum_plan(graph, x, reduce, ties, weighted=True)
    return bodies.extremum_plan(graph, x, reduce, ties if wants_grad(x) else "none")


class _Call(NamedTuple):
    """Operands of an aggregation as the ops take them."""

    related: Any  # A `Graph`, or under a tracer a `Handle`.
    x: Tensor  # [N_src, F]
    weight: Tensor | None  # [E], of the dtype of x
    lead: tuple[tuple[int, ...], int] | None  # Leading sizes and F of a batch.
    is_vector: bool  # Of one column.


def _prepared(
    relation: Relation,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    size: Size,
    flow: str,
    ties: str,
    plans: bool,
) -> _Call:
    """Check what :func:`spmm` is given and bring it into one form."""
    check_dense("x", x)
    if weight is not None:
        check_dense("weight", weight)
    _check_options(reduce, ties)
    is_vector = x.dim() == 1
    x = x.unsqueeze(1) if is_vector else x
    find = graph_for_plan if plans else relation_for_ops
    try:
        related = find(relation, x.size(-2), size, flow)
    except ValueError as error:
        raise of_rows(error, size, *(("x", x.size(-2)),) * 2) from None
    weight = related.value if weight is None else weight
    _check_operands(related, x, weight)
    x, weight = _promoted(x, weight, reduce)
    if x.dim() == 2:
        return _Call(related, x, weight, None, is_vector)
    # A batch of features on one graph is one wider feature: [B, N, F] -> [N, B F].
    lead, features = tuple(x.shape[:-2]), x.size(-1)
    wide = x.movedim(-2, 0).reshape(x.size(-2), math.prod(lead) * features)
    return _Call(related, wide, weight, (lead, features), False)


def _promoted(
    x: Tensor, weight: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor | None]:
    """Both in the dtype of the result."""
    dtype = x.dtype
    if weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    if reduce == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        # As PyTorch divides integers.
        dtype = torch.get_default_dtype()
    if dtype.is_complex and reduce in _EXTREMA:
        raise ValueError(
            f"'reduce' must be 'sum', 'add' or 'mean' for complex numbers, which have "
            f"no order (got {reduce!r} of {dtype})"
        )
    if dtype in _UNSUMMED:
        raise TypeError(
            f"'x' must have a dtype that PyTorch computes in (got {dtype}). Call "
            f"'x.long()'"
        )
    return x.to(dtype), None if weight is None else weight.to(dtype)


def _aggregate(road: Any, call: _Call, reduce: str, ties: str) -> Tensor:
    related, x, weight = call.related, call.x, call.weight
    if reduce in _SUMS:
        return road.spmm(related, x, weight, _SUMS[reduce])
    if weight is None:
        return road.extremum(related, x, reduce, ties)
    return road.weighted_extremum(related, x, weight, reduce, ties)


def _check_csr(crow: Any, col: Any, val: Any) -> None:
    """Check the parts of a matrix by the names that :func:`spmm_csr` gives them."""
    for name, value in (("crow", crow), ("col", col)):
        check_dense(name, value)
        if value.dtype not in INDEX_DTYPES:
            raise TypeError(f"'{name}' must hold integers (got {value.dtype})")
        if value.dim() != 1:
            raise ValueError(
                f"'{name}' must have one dimension (got {list(value.shape)})"
            )
    if crow.numel() == 0:
        raise ValueError("'crow' must have one entry more than rows (got none)")
    check_device("col", col, crow.device, "'crow'")
    if val is None:
        return
    check_dense("val", val)
    if val.dim() != 1 or val.size(0) != col.size(0):
        raise ValueError(
            f"'val' must have shape [num_edges] = [{col.size(0)}], as 'col' (got "
            f"{list(val.shape)})"
        )
    check_device("val", val, crow.device, "'crow'")


def _road(related: Any, *operands: Tensor | None) -> Any:
    """The functions to call on a relation."""
    if isinstance(related, Handle):
        return LIBRARY
    return TRANSFORMED if transformed.is_active(*operands) else EAGER


def _check_options(reduce: str, ties: str) -> None:
    if not isinstance(reduce, str) or reduce not in (*_SUMS, *_EXTREMA):
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
    check_device("x", x, related.device, "the relation")
    if weight is None:
        return
    if weight.dim() != 1 or weight.size(0) != related.num_edges:
        raise ValueError(
            f"'weight' must have shape [num_edges] = [{related.num_edges}] "
            f"(got {list(weight.shape)})"
        )
    check_device("weight", weight, x.device, "'x'")
