"""Products of edge features and vectors of their destinations, on both roads.

There are three (`impls.scatter_edge_features`), and each is a part of the gradients of
the other two, so that they can be differentiated again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_tiga.impls import scatter_edge_features
from pyg_tiga.ops import transformed
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.bodies import find_plan
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.ops.gradients import dtypes_of
from pyg_tiga.ops.library import Handle, define, needs_in_setup
from pyg_tiga.relation.graph import Graph

Product = Callable[[str, Any, Tensor, Tensor, torch.dtype], Tensor]


def product(
    name: str,
    relation: Graph | Handle,
    first: Tensor,
    second: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """A product of edge features, differentiable; the result has `dtype`."""
    if isinstance(relation, Handle):
        return _op(*relation.args(), first, second, name, dtype)
    if transformed.is_active(first, second):
        return scatter_edge_features.product(name, relation, first, second).to(dtype)
    if wants_grad(first, second):
        return apply_function(_Product, first, second, relation, name, dtype)
    return _body(name, relation, first, second, dtype)


def _gradients(
    name: str,
    relation: Graph | Handle,
    grad: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    dtypes: tuple[Any, Any],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both operands, by the two other products.

    Each reads the other operand, which need not be there where `dtypes` (see
    `gradients.dtypes_of`) does not ask for it.
    """
    sides = {
        "feature_dots": (
            ("feature_sums", grad, second),
            ("feature_spread", grad, first),
        ),
        "feature_sums": (
            ("feature_dots", grad, second),
            ("feature_spread", first, grad),
        ),
        "feature_spread": (
            ("feature_dots", second, grad),
            ("feature_sums", first, grad),
        ),
    }[name]
    return tuple(
        None if dtype is None else product(other, relation, *operands, dtype)
        for (other, *operands), dtype in zip(sides, dtypes, strict=True)
    )


def _body(
    name: str, graph: Graph, first: Tensor, second: Tensor, dtype: torch.dtype
) -> Tensor:
    vectors = {"feature_dots": first, "feature_spread": second}.get(name)
    shape = (first.size(1), second.size(1)) if vectors is None else vectors.shape[1:]
    features = shape[0] * shape[1]
    # The operands of the least precision decide what a kernel reads.
    given = second if name != "feature_spread" else first
    options = (shape[0],)
    plan = find_plan(("heads",), name, graph, given, features, dtype, options)
    return plan.run(graph, first, second)


def _read(
    first: Tensor, second: Tensor, dtypes: tuple[Any, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """What the gradients that are wanted read."""
    wants_first, wants_second = (dtype is not None for dtype in dtypes)
    return first if wants_second else None, second if wants_first else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        graph: Graph,
        name: str,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.graph, ctx.name = graph, name
        ctx.dtypes = dtypes_of(first, second, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*_read(first, second, ctx.dtypes))
        return _body(name, graph, first, second, dtype)

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        found = _gradients(ctx.name, ctx.graph, grad, first, second, ctx.dtypes)
        return (*found, None, None, None)


def _product(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    first: Tensor,
    second: Tensor,
    name: str,
    dtype: torch.dtype,
) -> Tensor:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return _body(name, graph, first, second, dtype)


_op = define("feature_product", _product)


@_op.register_fake
def _(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    first: Tensor,
    second: Tensor,
    name: str,
    dtype: torch.dtype,
) -> Tensor:
    heads = second.size(1) if name == "feature_spread" else first.size(1)
    width = second.size(-1)
    num_edges = index[-1].size(-1)
    shape = scatter_edge_features.shape_of(name, num_dst, num_edges, heads, width)
    return first.new_empty(shape, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, *ctx.relation = inputs[:4]
    first, second, ctx.name, _ = inputs[4:]
    ctx.dtypes = dtypes_of(first, second, needs_in_setup(ctx, index, inputs))
    ctx.save_for_backward(*_read(first, second, ctx.dtypes), *index)


def _vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    first, second, *index = ctx.saved_tensors
    relation = Handle(index, *ctx.relation)
    found = _gradients(ctx.name, relation, grad, first, second, ctx.dtypes)
    return ([None] * len(index), None, None, None, *found, None, None)


_op.register_autograd(_vjp, setup_context=_setup)
