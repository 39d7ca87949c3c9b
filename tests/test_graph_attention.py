"""Attention with two vectors: the public functions against dense softmaxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

import pyg_tiga as tg
from pyg_tiga import functional, testing
from tests.vector_checks import FORMS, OPTIONS, Given

ROWS = pytest.mark.parametrize("row", testing.ROWS, ids=str)
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
UNSORTED = testing.row("unsorted")


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@ROWS
@EVERY_FORM
@EVERY_OPTION
def test_is_a_softmax_over_a_masked_matrix(
    row: testing.Row, form: str, options: dict[str, Any]
) -> None:
    given = Given(form, row, **options)
    expected, weights, loops = given.dense()
    out = given.out()
    close(out, expected)
    close(given.gradients(out), given.gradients(expected))
    close(given.weights(), (weights, loops))


@EVERY_FORM
@EVERY_OPTION
def test_gradients_of_weights(form: str, options: dict[str, Any]) -> None:
    given = Given(form, testing.row("self_loops"), **options)
    leaves = [x for name, x in given.leaves.items() if name != "value"]
    found, expected = given.weights(), given.dense()[1:]
    loss, truth = (
        sum((w * (2 + w.detach().cumsum(0))).sum() for w in every)
        for every in (found, expected)
    )
    close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


@EVERY_FORM
@pytest.mark.parametrize("scale", [0.0, -0.7, 1.5])
def test_any_factor_and_slope(form: str, scale: float) -> None:
    given = Given(form, UNSORTED, loops=True, biases=True)
    name = "negative_slope" if form == "gatv2" else "scale"
    out, expected = given.out(**{name: scale}), given.dense(scale=scale)
    close(out, expected[0])
    close(given.gradients(out), given.gradients(expected[0]))
    close(given.weights(**{name: scale}), expected[1:])


def test_the_derivative_at_zero_is_the_slope() -> None:
    given = Given("gatv2", testing.row("one_edge"), loops=True)
    for name in ("x_src", "x_dst"):
        given.leaves[name].data.zero_()
    given.leaves["x_src"].data[:, :, 0] = 1.0
    given.leaves["x_dst"].data[:, :, 0] = -1.0
    out = given.out()
    close(given.gradients(out), given.gradients(given.dense()[0]))


@pytest.mark.parametrize("form", ["dot", "dot_norm"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@EVERY_OPTION
def test_heads_in_groups(kv_heads: int, form: str, options: dict[str, Any]) -> None:
    given = Given(form, UNSORTED, heads=4, kv_heads=kv_heads, **options)
    out, expected = given.out(), given.dense()
    close(out, expected[0])
    close(given.gradients(out), given.gradients(expected[0]))
    close(given.weights(), expected[1:])


def test_one_tensor_in_many_places() -> None:
    x = torch.randn(24, 2, 3, dtype=torch.float64, requires_grad=True)
    edge_index = testing.make_case(UNSORTED).edge_index
    att = torch.randn(2, 3, dtype=torch.float64)
    calls = {
        "gatv2": lambda a, b, _: functional.gatv2_attention(edge_index, a, b, att),
        "dot": lambda a, b, c: functional.graph_attention(a, b, c, edge_index),
        "gatv2 weights": lambda a, b, _: functional.gatv2_attention_weights(
            edge_index, a, b, att
        )[0],
    }
    for call in calls.values():
        apart = [x.detach().clone().requires_grad_() for _ in range(3)]
        out, expected = call(x, x, x), call(*apart)
        assert torch.equal(out, expected)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, x, grad)[0]
        every = torch.autograd.grad(expected, apart, grad, materialize_grads=True)
        close(found, sum(every))


@EVERY_FORM
def test_rows_without_edges_are_zero(form: str) -> None:
    given = Given(form, testing.row("isolated"))
    out = given.out()
    reached = torch.zeros(given.size[1], dtype=torch.bool)
    reached[given.edge_index[1]] = True
    assert not reached.all()
    assert not out[~reached].any()
    assert all(g.isfinite().all() for g in given.gradients(out))


@EVERY_FORM
def test_a_mask_is_a_relation_without_these_edges(form: str) -> None:
    given = Given(form, UNSORTED, masked=True, biases=True)
    fewer = given.edge_index[:, given.mask]
    bias = given.leaves["edge_bias"]
    expected = given.out(relation=fewer, edge_mask=None, edge_bias=bias[given.mask])
    assert torch.equal(given.out(), expected)
    bias.data[~given.mask] = float("nan")
    assert torch.equal(given.out(), expected)
    weights, _ = given.weights()
    assert not weights[~given.mask].any()


@EVERY_FORM
def test_relations_of_any_kind(form: str) -> None:
    row = testing.row("more_sources")
    given = Given(form, row, biases=True, dropout=0.3)
    expected = given.out()
    edges, (num_src, num_dst) = given.edge_index, given.size
    relations = {
        "graph": tg.Graph.from_edge_index(edges, num_src=num_src, num_dst=num_dst),
        "EdgeIndex": EdgeIndex(edges, sparse_size=given.size),
    }
    for relation in relations.values():
        assert torch.equal(given.out(relation=relation), expected)
    # Sizes of an edge list are those of the tensors.
    assert torch.equal(given.out(size=None), expected)
    turned = given.out(relation=edges.flip(0), flow="target_to_source")
    assert torch.equal(turned, expected)


@EVERY_FORM
def test_dropout_has_the_right_mean(form: str) -> None:
    given = Given(form, testing.row("duplicates"), loops=True)
    expected, weights = given.out().detach(), given.weights()
    count, total, sums = 2000, torch.zeros_like(expected), [0.0, 0.0]
    with torch.no_grad():
        for seed in range(count):
            options = {"dropout": 0.3, "seed": torch.tensor([seed])}
            total += given.out(**options)
            found = given.weights(**options)
            sums = [x + y for x, y in zip(sums, found, strict=True)]
    torch.testing.assert_close(total / count, expected, rtol=0, atol=0.1)
    for found, weight in zip(sums, weights, strict=True):
        torch.testing.assert_close(found / count, weight, rtol=0, atol=0.05)


@EVERY_FORM
def test_weights_and_output_drop_the_same(form: str) -> None:
    given = Given(form, UNSORTED, loops=True, dropout=0.5)
    weights, loops = given.weights()
    value = given.leaves["x_src" if form == "gatv2" else "value"]
    src, dst = given.edge_index
    out = torch.zeros_like(given.grad)
    out = out.index_add(0, dst, weights.unsqueeze(-1) * value[src])
    close(given.out(), out + loops.unsqueeze(-1) * value)
    assert (weights == 0).any()


@EVERY_FORM
def test_seeds(form: str) -> None:
    given = Given(form, UNSORTED, dropout=0.5)
    assert torch.equal(given.out(), given.out())
    assert not torch.equal(given.out(), given.out(seed=torch.tensor([8])))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(given.out(seed=None))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], given.out(seed=None))
    # Without dropout a seed is not looked at.
    assert torch.equal(
        given.out(dropout=0.0), given.out(dropout=0.0, seed=torch.tensor([8]))
    )


@EVERY_FORM
def test_dropout_of_one_gives_zeros(form: str) -> None:
    given = Given(form, UNSORTED, loops=True, dropout=1.0)
    out = given.out()
    assert not out.any()
    assert not any(w.any() for w in given.weights())
    assert not any(g.any() for g in given.gradients(out))


@EVERY_FORM
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_objectives_change_no_value(form: str, objective: str) -> None:
    given = Given(form, UNSORTED, biases=True, loops=True)
    out = given.out(objective=objective)
    close(out, given.dense()[0])
    close(given.gradients(out), given.gradients(given.dense()[0]))


@ROWS
@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(
    row: testing.Row, form: str, dtype: torch.dtype
) -> None:
    given = Given(form, row, dtype, loops=True, biases=True)
    out = given.out()
    assert out.dtype == dtype
    double = [x.detach().double().requires_grad_() for x in given.tensors()]
    truth = given.out(*double)
    bound = torch.finfo(dtype).eps * truth.abs() * 0.51 + 1e-5
    assert ((out.double() - truth).abs() <= bound).all()
    grads = given.gradients(out)
    exact = torch.autograd.grad(truth, double, given.grad.double())
    for grad, true in zip(grads, exact, strict=True):
        assert grad.dtype == dtype
        # The backward reads the rounded result.
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        error = (grad.double() - true).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * scale).all()
    assert all(w.dtype == dtype for w in given.weights())


@EVERY_FORM
def test_dtypes_promote(form: str) -> None:
    given = Given(form, UNSORTED, torch.float32, biases=True)
    name = "x_src" if form == "gatv2" else "value"
    mixed = {n: x.bfloat16() if n == name else x for n, x in given.leaves.items()}
    out = given.out(*mixed.values())
    assert out.dtype == torch.float32
    given.gradients(out)
    mixed[name] = given.leaves[name].double()
    truth = Given(form, UNSORTED, biases=True).out()
    out = given.out(*mixed.values())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    found = given.gradients(out)
    assert all(g.dtype == torch.float32 for g in found)


@EVERY_FORM
def test_autocast_changes_nothing(form: str) -> None:
    given = Given(form, UNSORTED, torch.float32, loops=True, biases=True)
    plain = (given.out(), *given.weights(), *given.gradients(given.out()))
    with torch.autocast("cpu", torch.bfloat16):
        found = (given.out(), *given.weights(), *given.gradients(given.out()))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


@EVERY_FORM
def test_nothing_is_recorded_where_no_gradient_is_wanted(form: str) -> None:
    given = Given(form, UNSORTED)
    expected = given.out()
    with torch.no_grad():
        out = given.out()
    assert out.grad_fn is None
    assert torch.equal(out, expected)
    detached = given.out(*(x.detach() for x in given.tensors()))
    assert not detached.requires_grad


@EVERY_FORM
def test_torch_func(form: str) -> None:
    given = Given(form, testing.row("duplicates"), loops=True, biases=True)
    tensors = tuple(x.detach() for x in given.tensors())
    every = tuple(range(len(tensors)))
    expected = given.gradients(given.out())

    def loss(*tensors: Tensor) -> Tensor:
        return (given.out(*tensors) * given.grad).sum()

    found = torch.func.grad(loss, argnums=every)(*tensors)
    close(found, expected)
    batch = tuple(torch.stack([x, -x, 2 * x]) for x in tensors)
    found = torch.func.vmap(lambda *one: given.out(*one))(*batch)
    close(found, torch.stack([given.out(*one) for one in zip(*batch, strict=True)]))
    per_sample = torch.func.vmap(torch.func.grad(loss))(*batch)
    for one, grad in zip(zip(*batch, strict=True), per_sample, strict=True):
        close(torch.func.grad(loss)(*one), grad)
    weights = torch.func.vmap(lambda *one: given.weights(*one))(*batch)
    assert weights[0].shape == (3, given.num_edges, given.heads)


@EVERY_FORM
def test_an_empty_width(form: str) -> None:
    given = Given(form, UNSORTED)
    first, second = [x[..., :0] for x in given.tensors()[:2]]
    edges = given.edge_index
    if form != "gatv2":
        value, options = given.leaves["value"], {}
        if form == "dot_norm":
            options = {"qk_norm": given.leaves["qk_norm"][..., :0]}
        out = functional.graph_attention(first, second, value, edges, **options)
        assert out.shape == given.grad.shape
    else:
        att = given.leaves["att"][..., :0]
        out = functional.gatv2_attention(edges, first, second, att)
        assert out.shape == (24, 2, 0)
