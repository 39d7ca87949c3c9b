"""The compiled road: `torch.library` ops under `pyg_tiga::`.

A relation crosses an op's boundary as the tensors that define it, a layout and two
sizes (`Handle`); the op's body finds the `Graph` through the memo. What an op returns
never depends on the data of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_tiga import reference
from pyg_tiga.ops import bodies, gradients
from pyg_tiga.relation.graph import Graph

_REVERSED = ":reversed"
_RELATION = 4  # arguments of an op


@dataclass(frozen=True)
class Handle:
    """A relation as ops take it; see `Graph.handle`."""

    tensors: list[Tensor]
    layout: str
    num_src: int
    num_dst: int
    value: Tensor | None = None

    def reverse(self) -> Handle:
        """The relation with sources and destinations exchanged."""
        if self.layout.endswith(_REVERSED):
            layout = self.layout.removesuffix(_REVERSED)
        else:
            layout = self.layout + _REVERSED
        return Handle(self.tensors, layout, self.num_dst, self.num_src, self.value)

    @property
    def num_edges(self) -> int:
        """E, from the shape of the last defining tensor ([2, E] or [E])."""
        return self.tensors[-1].size(-1)

    @property
    def device(self) -> torch.device:
        """Where the relation's tensors are."""
        return self.tensors[0].device

    def graph(self) -> Graph:
        """The relation itself, through the memo."""
        return Graph.from_handle(*self.args())

    def args(self) -> tuple[list[Tensor], str, int, int]:
        """The relation's part of an op's arguments."""
        return self.tensors, self.layout, self.num_src, self.num_dst


def define(name: str, body: Callable[..., Any]) -> Any:
    """Make an op of a body, under `pyg_tiga::`."""
    # The memo's key reads storage and version of the index tensors, which a recorded
    # CUDA graph would not see change.
    return torch.library.custom_op(
        f"pyg_tiga::{name}",
        body,
        mutates_args=(),
        tags=(torch.Tag.cudagraph_unsafe,),
    )


def _spmm(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    x: Tensor,
    weight: Tensor | None,
    normalize: str,
) -> Tensor:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.spmm(graph, x, weight, normalize)


def _sddmm(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    a: Tensor,
    b: Tensor,
    normalize: str,
) -> Tensor:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.sddmm(graph, a, b, normalize)


def _extremum(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    x: Tensor,
    reduce: str,
    ties: str,
) -> tuple[Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.spmm_extremum(graph, x, reduce, ties)


def _extremum_backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: str,
) -> Tensor:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.spmm_extremum_backward(graph, grad, x, out, aux, ties)


def _extremum_select(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    value: Tensor,
    x: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: str,
) -> Tensor:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.spmm_extremum_select(graph, value, x, out, aux, ties)


def _weighted_extremum(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    x: Tensor,
    weight: Tensor,
    reduce: str,
    ties: str,
) -> tuple[Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return bodies.weighted_extremum(graph, x, weight, reduce, ties)


def _weighted_extremum_backward(
    index: Sequence[Tensor],
    layout: str,
    num_src: int,
    num_dst: int,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    aux: Tensor,
    ties: str,
) -> tuple[Tensor, Tensor]:
    graph = Graph.from_handle(index, layout, num_src, num_dst)
    return reference.weighted_extremum_backward(graph, grad, x, weight, out, aux, ties)


spmm_op = define("spmm", _spmm)
sddmm_op = define("sddmm", _sddmm)
extremum_op = define("spmm_extremum", _extremum)
extremum_backward_op = define("spmm_extremum_backward", _extremum_backward)
extremum_select_op = define("spmm_extremum_select", _extremum_select)
weighted_extremum_op = define("weighted_extremum", _weighted_extremum)
weighted_extremum_backward_op = define(
    "weighted_extremum_backward", _weighted_extremum_backward
)


@spmm_op.register_fake
def _(index, layout, num_src, num_dst, x, weight, normalize):  # type: ignore[no-untyped-def]
    dtype = x.dtype if weight is None else torch.result_type(x, weight)
    return x.new_empty(num_dst, x.size(1), dtype=dtype)


@sddmm_op.register_fake
def _(index, layout, num_src, num_dst, a, b, normalize):  # type: ignore[no-untyped-def]
    return a.new_empty(index[-1].size(-1), dtype=torch.result_type(a, b))


@extremum_op.register_fake
def _(index, layout, num_src, num_dst, x, reduce, ties):  # type: ignore[no-untyped-def]
    out = x.new_empty(num_dst, x.size(1))
    return out, x.new_empty(out.shape if ties != "none" else 0, dtype=torch.int32)


@extremum_backward_op.register_fake
def _(index, layout, num_src, num_dst, grad, x, out, aux, ties):  # type: ignore[no-untyped-def]
    return grad.new_empty(num_src, grad.size(1), dtype=x.dtype)


@extremum_select_op.register_fake
def _(index, layout, num_src, num_dst, value, x, out, aux, ties):  # type: ignore[no-untyped-def]
    return value.new_empty(num_dst, value.size(1), dtype=x.dtype)


@weighted_extremum_op.register_fake
def _(index, layout, num_src, num_dst, x, weight, reduce, ties):  # type: ignore[no-untyped-def]
    out = x.new_empty(num_dst, x.size(1), dtype=torch.result_type(x, weight))
    return out, torch.empty_like(out, dtype=torch.int32)


@weighted_extremum_backward_op.register_fake
def _(index, layout, num_src, num_dst, grad, x, weight, out, aux, ties):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep_relation(ctx: Any, index: Sequence[Tensor], *rest: Any) -> None:
    ctx.layout, ctx.num_src, ctx.num_dst = rest


def _relation(ctx: Any, index: Sequence[Tensor]) -> Handle:
    return Handle(list(index), ctx.layout, ctx.num_src, ctx.num_dst)


def needs_in_setup(
    ctx: Any, index: Sequence[Tensor], inputs: tuple[Any, ...]
) -> tuple[bool, ...]:
    """Which of the two arguments behind the relation want a gradient, in an op's setup.

    There PyTorch counts the tensors of a list one by one, and in the backward the list;
    an argument of its own comes last.
    """
    needs = ctx.needs_input_grad
    first = _RELATION
    if len(needs) > len(inputs) + 1:
        first += len(index) - 1
    return tuple(needs[first : first + 2])


def _grads(index: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    """Gradients of an op's arguments: none for the relation's four."""
    return ([None] * len(index), None, None, None, *rest)


def _spmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, *relation, x, weight, ctx.normalize = inputs
    _keep_relation(ctx, index, *relation)
    wants_x, wants_weight = needs_in_setup(ctx, index, inputs)
    ctx.dtypes = gradients.dtypes_of(x, weight, (wants_x, wants_weight))
    ctx.save_for_backward(
        x if wants_weight else None, weight if wants_x else None, *index
    )


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, *index = ctx.saved_tensors
    found = gradients.spmm(
        LIBRARY, _relation(ctx, index), grad, x, weight, ctx.normalize, ctx.dtypes
    )
    return _grads(index, *found, None)


def _sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, *relation, a, b, ctx.normalize = inputs
    _keep_relation(ctx, index, *relation)
    wants_a, wants_b = needs_in_setup(ctx, index, inputs)
    ctx.dtypes = gradients.dtypes_of(a, b, (wants_a, wants_b))
    ctx.save_for_backward(a if wants_b else None, b if wants_a else None, *index)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, *index = ctx.saved_tensors
    relation = _relation(ctx, index)
    found = gradients.sddmm(LIBRARY, relation, grad, a, b, ctx.normalize, ctx.dtypes)
    return _grads(index, *found, None)


def _extremum_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    index, *relation, x, _, ctx.ties = inputs
    out, aux = output
    _keep_relation(ctx, index, *relation)
    split = ctx.ties == "split"
    nothing = x.new_empty(0)
    ctx.save_for_backward(
        x if split else nothing, out if split else nothing, aux, *index
    )


def _extremum_vjp(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    x, out, aux, *index = ctx.saved_tensors
    relation = _relation(ctx, index)
    grad_x = LIBRARY.extremum_backward(relation, grad, x, out, aux, ctx.ties)
    return _grads(index, grad_x, None, None)


def _weighted_extremum_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    index, *relation, x, weight, _, ctx.ties = inputs
    _keep_relation(ctx, index, *relation)
    ctx.save_for_backward(x, weight, *output, *index)


def _weighted_extremum_vjp(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, out, aux, *index = ctx.saved_tensors
    args = _relation(ctx, index).args()
    saved = (x, weight, out, aux)
    found = weighted_extremum_backward_op(*args, grad, *saved, ctx.ties)
    return _grads(index, *found, None, None)


def _transpose_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    index, *relation, _, x, out, aux, ctx.ties = inputs
    _keep_relation(ctx, index, *relation)
    ctx.save_for_backward(x, out, aux, *index)


def _extremum_backward_vjp(ctx: Any, value: Tensor) -> tuple[Any, ...]:
    x, out, aux, *index = ctx.saved_tensors
    relation = _relation(ctx, index)
    selected = LIBRARY.extremum_select(relation, value, x, out, aux, ctx.ties)
    return _grads(index, selected, None, None, None, None)


def _extremum_select_vjp(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, out, aux, *index = ctx.saved_tensors
    relation = _relation(ctx, index)
    found = LIBRARY.extremum_backward(relation, grad, x, out, aux, ctx.ties)
    return _grads(index, found, None, None, None, None)


spmm_op.register_autograd(_spmm_backward, setup_context=_spmm_setup)
sddmm_op.register_autograd(_sddmm_backward, setup_context=_sddmm_setup)
extremum_op.register_autograd(_extremum_vjp, setup_context=_extremum_setup)
weighted_extremum_op.register_autograd(
    _weighted_extremum_vjp, setup_context=_weighted_extremum_setup
)
extremum_backward_op.register_autograd(
    _extremum_backward_vjp, setup_context=_transpose_setup
)
extremum_select_op.register_autograd(
    _extremum_select_vjp, setup_context=_transpose_setup
)


class _Library:
    """The road's differentiable functions; `relation` is a `Handle`."""

    @staticmethod
    def spmm(
        relation: Handle, x: Tensor, weight: Tensor | None, normalize: str
    ) -> Tensor:
        return spmm_op(*relation.args(), x, weight, normalize)

    @staticmethod
    def sddmm(relation: Handle, a: Tensor, b: Tensor, normalize: str) -> Tensor:
        return sddmm_op(*relation.args(), a, b, normalize)

    @staticmethod
    def extremum(relation: Handle, x: Tensor, reduce: str, ties: str) -> Tensor:
        wanted = torch.is_grad_enabled() and x.requires_grad
        return extremum_op(*relation.args(), x, reduce, ties if wanted else "none")[0]

    @staticmethod
    def weighted_extremum(
        relation: Handle, x: Tensor, weight: Tensor, reduce: str, ties: str
    ) -> Tensor:
        return weighted_extremum_op(*relation.args(), x, weight, reduce, ties)[0]

    @staticmethod
    def extremum_backward(
        relation: Handle, grad: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        return extremum_backward_op(*relation.args(), grad, x, out, aux, ties)

    @staticmethod
    def extremum_select(
        relation: Handle, value: Tensor, x: Tensor, out: Tensor, aux: Tensor, ties: str
    ) -> Tensor:
        return extremum_select_op(*relation.args(), value, x, out, aux, ties)


LIBRARY = _Library()
