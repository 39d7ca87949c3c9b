"""What all roads of edge attention share: calls, their plans, and plain formulas.

A forward keeps (m, l) of each softmax and, depending on the objective and on which
gradients are wanted, also P and p (`State`): decided here, before anything runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls import scatter_attention
from pyg_tiga.impls.attention_types import Operands, Options, State, Wanted
from pyg_tiga.ops.bodies import find_plan, remember_plan
from pyg_tiga.planner import Plan
from pyg_tiga.relation.graph import Graph

_NAMES = ("form", "heads", "objective")


class Call(NamedTuple):
    """What a call of edge attention is, beside its differentiable operands."""

    graph: Graph
    options: Options
    mask: Tensor | None
    seed: Tensor | None
    objective: str

    def drawn(self) -> tuple[Tensor | None, Tensor | None]:
        """The tensors that have no gradient; a backward must find them as they were."""
        return self.mask, self.seed

    def bare(self) -> Call:
        """The call without them."""
        return self._replace(mask=None, seed=None)


class Inputs(NamedTuple):
    """What a call can be differentiated by.

    Args:
        value: Values of the sources, ``[N_src, H, C]``.
        row: Operand of the destinations: ``[N_dst, H]`` of the additive score, else
            vectors ``[N_dst, H, K]``.
        col: Operand of the sources, likewise; None where it is the values.
        param: GATv2's ``att``, or the factors of normalised products, ``[H, K]``.
        term: Added to the scores of edges, ``[E, H]``.
        loop_term: Added to those of loops, ``[num_loops, H]``.
    """

    value: Tensor
    row: Tensor
    col: Tensor | None
    param: Tensor | None
    term: Tensor | None
    loop_term: Tensor | None

    def operands(self, mask: Tensor | None, seed: Tensor | None) -> Operands:
        """As implementations take them."""
        col = self.value if self.col is None else self.col
        terms = (self.term, self.loop_term)
        return Operands(self.value, self.row, col, *terms, mask, seed, self.param)

    def out_dtype(self) -> torch.dtype:
        """That of the result."""
        return reference.promoted(*self)


def attention_plan(op: str, call: Call, value: Tensor, out_dtype: torch.dtype) -> Plan:
    """The plan of a forward or a backward."""
    heads, channels = value.size(1), value.size(2)
    options = (call.options.score, heads, call.objective)
    # The gradient of values is gathered by source: columns are its rows.
    graph = call.graph if op == "edge_attention" else call.graph.reverse()
    return find_plan(_NAMES, op, graph, value, heads * channels, out_dtype, options)


def forward(
    call: Call, inputs: Inputs, out_dtype: torch.dtype, positive: bool = False
) -> State:
    """Run the forward; with `positive` it keeps P and p for the backward."""
    plan = attention_plan("edge_attention", call, inputs.value, out_dtype)
    remember_plan(plan)
    operands = inputs.operands(call.mask, call.seed)
    return plan.run(call.graph, operands, call.options, positive)


def keeps_positive(call: Call, wants_terms: bool) -> bool:
    """Whether a forward that may be followed by a backward keeps P and p.

    They cost a tensor of the output's size, and save a walk over the edges or a tensor
    of E H values. The latter is there anyway where gradients of terms are wanted.
    """
    return call.objective != "memory" and not wants_terms


Like = tuple[torch.Size, torch.dtype, torch.device]


def like(x: Tensor) -> Like:
    """What a tensor is, without its data."""
    return x.shape, x.dtype, x.device


def present(x: Tensor | None, of: Like) -> Tensor:
    """What was kept; zeros in place of what no wanted gradient reads."""
    if x is not None:
        return x
    shape, dtype, device = of
    # Where gradients are to be differentiated again, these start at it.
    again = torch.is_grad_enabled()
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=again)


def cast(grad: Tensor | None, operand: Tensor) -> Tensor | None:
    """A gradient in the dtype of its operand; asked first, as PyTorch is slower."""
    if grad is None or grad.dtype is operand.dtype:
        return grad
    return grad.to(operand.dtype)


def gradients(
    call: Call,
    inputs: Inputs,
    grad: Tensor,
    state: State,
    wanted: Wanted,
    share: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, each in its dtype; None where there is none.

    `share` is the gradient of the weights, where these are a result. A state without
    weights then has a result in which they are used already.
    """
    if share is not None:
        share = share.contiguous()
    operands = inputs.operands(call.mask, call.seed)._replace(share=share)
    plan = attention_plan("edge_attention_backward", call, inputs.value, grad.dtype)
    found = plan.run(call.graph, grad, operands, call.options, state, wanted)
    parts = (found.row, found.col, found.param, found.term, found.loop_term)
    return (
        found.value,
        *(cast(x, of) for x, of in zip(parts, inputs[1:], strict=True)),
    )


def gat_inputs(
    call: Call,
    nodes: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    terms: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Inputs:
    """Inputs of GAT's attention: scores are <x, att>, as PyG computes them.

    Args:
        call: The call.
        nodes: Sources and destinations, and the vectors of their scores.
        terms: Of edges and loops.
    """
    x_src, x_dst, att_src, att_dst = nodes
    col = (x_src * att_src).sum(-1)
    if x_dst is None or att_dst is None:
        row = col.new_zeros(call.graph.num_dst, col.size(1))
    else:
        row = (x_dst * att_dst).sum(-1)
    return Inputs(x_src, row, col, None, *terms)


def by_reference(call: Call, inputs: Inputs) -> Tensor:
    """The plain formula, which can be differentiated and transformed at will."""
    operands = inputs.operands(call.mask, call.seed)
    return scatter_attention.by_reference(call.graph, operands, call.options)[0]


def weights(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Weights of edges ``[E, H]`` and loops ``[L, H]``, by the plain formula.

    They take part in no sum over features: what they cost is what they return.

    Args:
        call: The call.
        inputs: Its inputs; of the values only GATv2's, its vectors, are read.
    """
    operands = inputs.operands(call.mask, call.seed)
    return scatter_attention.weights(call.graph, operands, call.options)


def aliased(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs whose gradients stop there, though one was computed from another."""
    return tuple(None if x is None else x.view_as(x) for x in inputs)


def differentiate(
    out: Tensor, inputs: tuple[Any, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of the inputs that need one, which can be differentiated again."""
    wanted = [
        x if need and x is not None else None
        for x, need in zip(inputs, needs, strict=False)
    ]
    found = iter(
        torch.autograd.grad(
            out,
            [x for x in wanted if x is not None],
            grad.to(out.dtype),
            create_graph=True,
            allow_unused=True,
        )
    )
    return [None if x is None else next(found) for x in wanted]
