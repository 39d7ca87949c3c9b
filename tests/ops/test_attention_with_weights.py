"""Attention with two vectors that gives its weights, too, differentiable by both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import planner
from pyg_tiga.functional.relations import relation_for_ops
from pyg_tiga.impls.attention_types import Operands
from pyg_tiga.ops import attention, edge_attention
from pyg_tiga.ops import vector_library as library
from pyg_tiga.ops.attention import Call, Inputs
from tests.kernels.vector_cases import VECTORS, draw, options_of

EVERY = pytest.mark.parametrize("score", VECTORS)
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "loops": {"loops": True},
    "everything": {"loops": True, "dropout": 0.4, "masked": True},
}
CHOICE = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


def make(
    score: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.float64,
    *,
    loops: bool = False,
    dropout: float = 0.0,
    masked: bool = False,
    objective: str = "time",
) -> tuple[Call, Inputs]:
    """A call and its inputs, on `tangled` edges."""
    shape = (2, 3) if score == "shared" else (2, 3, 4)
    device = torch.device(device)
    graph, operands, _ = draw(None, score, *shape, device=device, terms=loops)
    options = options_of(score, graph, loops=loops, dropout=dropout)
    seed = torch.tensor([11], device=device) if dropout else None
    mask = None
    if masked:
        mask = torch.arange(graph.num_edges, device=device) % 5 != 1
    return Call(graph, options, mask, seed, objective), leaves(operands, dtype)


def leaves(operands: Operands, dtype: torch.dtype) -> Inputs:
    """Leaves of what is given; those of a shared operand are one."""
    value, row, col, term, loop_term, _, _, param, _ = (
        None if x is None else x.detach().to(dtype).requires_grad_() for x in operands
    )
    if operands.is_shared:
        col = None
    return Inputs(value, row, col, param, term, loop_term)


def given(inputs: Inputs) -> list[Tensor]:
    """Those that are there."""
    return [x for x in inputs if x is not None]


def of(call: Call, inputs: Inputs, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Both results of a call on other tensors in the places of the inputs."""
    left = iter(tensors)
    inputs = Inputs(*[None if x is None else next(left) for x in inputs])
    return edge_attention.with_weights(call, inputs, inputs.out_dtype())


def loss(out: Tensor, weights: Tensor) -> Tensor:
    """A number that no symmetry of a softmax hides a fault from."""
    place = torch.arange(weights.numel(), device=weights.device) % 7
    return out.sin().sum() + (weights.flatten() * (place + 1)).square().sum()


@EVERY
@CHOICE
def test_derivatives(score: str, choice: dict[str, Any]) -> None:
    call, inputs = make(score, "cpu", **choice)
    tensors = given(inputs)
    run = lambda *tensors: of(call, inputs, *tensors)  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


@EVERY
@CHOICE
def test_both_results_are_those_of_each_alone(
    score: str, choice: dict[str, Any]
) -> None:
    call, inputs = make(score, "cpu", **choice)
    out, weights = of(call, inputs, *given(inputs))
    torch.testing.assert_close(
        out, edge_attention.attend(call, inputs, inputs.out_dtype())
    )
    torch.testing.assert_close(weights, attention.weights(call, inputs)[0])


@EVERY
@CHOICE
@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.usefixtures("small_pieces")
def test_kernels(
    score: str, choice: dict[str, Any], objective: str, device: torch.device
) -> None:
    made = {**choice, "objective": objective}
    call, inputs = make(score, device, torch.float32, **made)
    tensors = given(inputs)
    results = of(call, inputs, *tensors)
    found = (*results, *torch.autograd.grad(loss(*results), tensors))
    wide = [x.detach().double().requires_grad_() for x in tensors]
    with planner.pin("scatter"):
        results = of(call, inputs, *wide)
        expected = (*results, *torch.autograd.grad(loss(*results), wide))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-4)


@EVERY
@pytest.mark.usefixtures("small_pieces")
def test_half_precision_keeps_weights_in_float32(
    score: str, device: torch.device
) -> None:
    call, inputs = make(score, device, torch.bfloat16)
    out, weights = of(call, inputs, *given(inputs))
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    wide = [x.detach().double() for x in given(inputs)]
    with planner.pin("scatter"):
        expected = of(call, inputs, *wide)[1]
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)


@EVERY
def test_one_node_of_a_compiled_graph(score: str) -> None:
    call, inputs = make(score, "cpu", dropout=0.4)
    tensors, graph = given(inputs), call.graph
    index = graph.edge_index()
    expected = of(call, inputs, *tensors)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        left = iter(tensors)
        again = Inputs(*[None if x is None else next(left) for x in inputs])
        sizes = (graph.num_src, graph.num_dst)
        related = relation_for_ops(index, sizes[0], sizes, "source_to_target")
        made = call._replace(graph=related)
        return library.attend_with_weights(made, again, torch.float64)

    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    grads = torch.autograd.grad(loss(*found), tensors)
    wanted = torch.autograd.grad(loss(*expected), tensors)
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_batches_of_gradients() -> None:
    call, inputs = make("dot", "cpu")
    tensors = given(inputs)
    results = of(call, inputs, *tensors)
    grads = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]
    found = torch.autograd.grad(
        results, tensors, grads, is_grads_batched=True, retain_graph=True
    )
    for i in range(3):
        one = [x[i] for x in grads]
        expected = torch.autograd.grad(results, tensors, one, retain_graph=True)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[i], y)
