"""Operands of public functions: their dtypes, empty ones, devices, and tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor

import pyg_tiga as tg
import pyg_tiga.nn
from pyg_tiga import functional

REDUCTIONS = ("sum", "mean", "max", "min")
NUM_NODES, NUM_EDGES = 6, 12
LAYERS = ("SAGEConv", "GATConv", "GATv2Conv", "TransformerConv")

torch.manual_seed(0)
EDGES = torch.randint(0, NUM_NODES, (2, NUM_EDGES))
X = torch.randn(NUM_NODES, 4)
WEIGHT = torch.rand(NUM_EDGES)
VALUE = torch.randn(NUM_NODES, 2, 3)
OTHER = torch.randn(NUM_NODES, 2, 3)
SCORE = torch.randn(NUM_NODES, 2)
ATT = torch.randn(2, 3)


def _of_nodes(function: Any, *rest: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda x: function(EDGES, x, *rest, **options)


# Each of one operand: what it is, and the call.
CALLS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    **{
        f"{reduce} {'weighted' if weight is not None else 'plain'}": (
            X,
            _of_nodes(functional.spmm, weight, reduce),
        )
        for reduce in REDUCTIONS
        for weight in (None, WEIGHT)
    },
    "sddmm": (X, lambda x: functional.sddmm(EDGES, x, x)),
    "additive": (VALUE, _of_nodes(functional.additive_attention, SCORE, SCORE)),
    "additive weights": (
        SCORE,
        lambda x: functional.additive_attention_weights(EDGES, x, x)[0],
    ),
    "gat": (VALUE, lambda x: functional.gat_attention(EDGES, x, x, ATT, ATT)),
    "gatv2": (VALUE, lambda x: functional.gatv2_attention(EDGES, x, x, ATT)),
    "gatv2 weights": (
        VALUE,
        lambda x: functional.gatv2_attention_weights(EDGES, x, x, ATT)[0],
    ),
    "dot": (VALUE, lambda x: functional.graph_attention(x, OTHER, x, EDGES)),
    "dot_norm": (
        VALUE,
        lambda x: functional.graph_attention(x, OTHER, x, EDGES, qk_norm=True),
    ),
    "dot weights": (
        VALUE,
        lambda x: functional.graph_attention_weights(x, OTHER, EDGES)[0],
    ),
}


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.tensor([[3], [2]]), torch.tensor([0.5, 1.75])),
        (torch.tensor([[True], [True]]), torch.tensor([0.5, 1.75])),
        (torch.tensor([[3], [2]]), torch.tensor([0.5 + 1j, 1.75])),
        (torch.tensor([[3.0], [2.0]]), torch.tensor([1j, 1.75])),
        (torch.tensor([[6e4], [2.0]], dtype=torch.float16), torch.tensor([2.0, 0.5])),
        (torch.tensor([[3.0], [2.0]]), torch.tensor([2, 5])),
        (torch.tensor([[3.0], [2.0]]).double(), torch.tensor([2.5, 5.0]).half()),
    ],
)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_features_and_weights_promote(x: Tensor, weight: Tensor, reduce: str) -> None:
    edges = torch.tensor([[0, 1], [0, 0]])
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if dtype.is_complex and reduce in ("max", "min"):
        pytest.skip("complex numbers have no order")
    out = functional.spmm(edges, x, weight, reduce)
    messages = x.to(dtype) * weight.to(dtype).unsqueeze(1)
    names = {"max": "amax", "min": "amin"}
    expected = getattr(messages, names.get(reduce, reduce))(0)
    assert out.dtype == dtype
    torch.testing.assert_close(out[0], expected)
    assert not out[1].any()


def test_products_of_edges_promote() -> None:
    edges = torch.tensor([[1], [0]])
    a, b = torch.tensor([[1, 2], [0, 0]]), torch.tensor([[0.0, 0.0], [0.5, 0.25]])
    for one, other in ((a, b), (a.flip(0), b.flip(0))):
        index = edges if one is a else edges.flip(0)
        assert functional.sddmm(index, one, other).tolist() == [1.0]
        assert functional.sddmm(index.flip(0), other, one).tolist() == [1.0]


def test_gradients_of_complex_operands() -> None:
    x = torch.randn(NUM_NODES, 2, dtype=torch.complex128, requires_grad=True)
    weight = torch.randn(NUM_EDGES, dtype=torch.complex128, requires_grad=True)

    def spmm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.spmm(EDGES, x, weight, "mean")

    def sddmm(a: Tensor, b: Tensor) -> Tensor:
        return functional.sddmm(EDGES, a, b)

    real = torch.randn(NUM_NODES, 2, dtype=torch.float64, requires_grad=True)
    for call, given in ((spmm, (x, weight)), (spmm, (real, weight)), (sddmm, (x, x))):
        assert torch.autograd.gradcheck(call, given)
        assert torch.autograd.gradgradcheck(call, given)


def test_every_part_of_a_score_promotes() -> None:
    half, att = VALUE.half(), ATT.half()
    out = functional.gat_attention(EDGES, half, OTHER, att, att)
    assert out.dtype == torch.float32
    out = functional.gat_attention(EDGES, half, half, att, ATT)
    assert out.dtype == torch.float32


@pytest.mark.parametrize("name", ["additive", "additive weights", "gat", "gatv2"])
def test_attention_of_integers_is_an_error(name: str) -> None:
    operand, call = CALLS[name]
    with pytest.raises(ValueError, match="must be a floating point tensor"):
        call(operand.long())


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 3, 4), (2, 3, 0), (2, 1, 0, 3)])
def test_batches_without_nodes_or_numbers(shape: tuple[int, ...], reduce: str) -> None:
    edges = torch.empty(2, 0, dtype=torch.long)
    x = torch.randn(shape, requires_grad=True)
    out = functional.spmm(edges, x, reduce=reduce)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device(name: str) -> None:
    operand, call = CALLS[name]
    leaf = operand.clone().requires_grad_()
    expected = call(leaf)
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    with torch.device("meta"):
        out = call(leaf)
        (found,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close((out, found), (expected, grad))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_another_default_device(name: str) -> None:
    layer = getattr(pyg_tiga.nn, name)(4, 5)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(x, EDGES).sum(), x)
    with torch.device("meta"):
        (found,) = torch.autograd.grad(layer(x, EDGES).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_nodes", [40, 90])
def test_large_attention_with_another_default_device(num_nodes: int) -> None:
    # There may be more edges than pairs of nodes.
    edges = torch.randint(0, num_nodes, (2, 3000))
    value, score = torch.randn(num_nodes, 2, 32), torch.randn(num_nodes, 2)
    leaves = [t.requires_grad_() for t in (value, score, score.clone())]
    for dtype in (torch.float32, torch.float64):
        given = [t.to(dtype) for t in leaves]
        options = {"self_loops": True, "edge_term": torch.randn(3000, 2, dtype=dtype)}
        options["edge_term"].requires_grad_()
        expected = functional.additive_attention(edges, *given, **options)
        wanted = [*leaves, options["edge_term"]]
        grads = torch.autograd.grad(expected.sum(), wanted)
        with torch.device("meta"):
            given = [t.to(dtype) for t in leaves]
            out = functional.additive_attention(edges, *given, **options)
            found = torch.autograd.grad(out.sum(), wanted)
        torch.testing.assert_close((out, *found), (expected, *grads))


@pytest.mark.parametrize("name", CALLS)
def test_tangents(name: str) -> None:
    operand, call = CALLS[name]
    x, tangent = operand.double(), torch.randn_like(operand).double()
    expected = torch.func.jvp(call, (x,), (tangent,))
    with fw.dual_level():
        found = fw.unpack_dual(call(fw.make_dual(x, tangent)))
    torch.testing.assert_close(tuple(found), expected)


def test_a_tangent_of_the_weights_alone() -> None:
    with fw.dual_level():
        weight = fw.make_dual(WEIGHT, torch.ones_like(WEIGHT))
        found = fw.unpack_dual(functional.spmm(EDGES, X, weight)).tangent
    torch.testing.assert_close(found, functional.spmm(EDGES, X))


def _ran(x: Tensor, weight: Tensor | None, reduce: str) -> str:
    functional.spmm(EDGES, x, weight, reduce)
    return functional.last_plan().explain()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("weight", [None, WEIGHT, WEIGHT.double()])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(
    "x", [X, (4 * X).int(), X.half(), torch.randn(3, NUM_NODES, 2), X[:, 0]]
)
def test_a_plan_is_of_what_runs(
    x: Tensor, reduce: str, weight: Tensor | None, grad: bool
) -> None:
    x = x.clone().requires_grad_(grad and x.is_floating_point())
    plan = functional.plan_spmm(EDGES, x, weight, reduce)
    assert plan.explain() == _ran(x, weight, reduce)


def test_a_plan_refuses_what_a_call_refuses() -> None:
    for call in (functional.spmm, functional.plan_spmm):
        with pytest.raises(ValueError, match="'weight' must have shape"):
            call(EDGES, X, WEIGHT[1:])
        with pytest.raises(ValueError, match="'flow' is for a plain 'edge_index'"):
            call(tg.Graph.from_edge_index(EDGES, 6), X, flow="target_to_source")
