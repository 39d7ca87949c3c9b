"""Attention with two vectors: derivatives, implementations, the compiled road."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from pyg_tiga import UnsupportedError, functional, planner
from pyg_tiga.impls.attention_types import Options, Wanted
from pyg_tiga.impls.base import Limits
from pyg_tiga.ops import attention, edge_attention
from pyg_tiga.ops import vector_library as library
from pyg_tiga.testing import Row, make_case, random_edges, row
from tests.vector_checks import FORMS, OPTIONS, WIDTH, Given

EVERY_FORM = pytest.mark.parametrize("form", FORMS)
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
PROBLEMS = pytest.mark.parametrize("problem", ["hub_row", "more_sources", "no_edges"])
SMALL = Row("rectangular", 4, 3, random_edges(4, 3, 7))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@EVERY_FORM
@EVERY_OPTION
def test_derivatives(form: str, options: dict[str, Any]) -> None:
    given = Given(form, SMALL, **options)
    assert gradcheck(given.out, given.tensors())
    assert gradgradcheck(given.out, given.tensors())
    weights = [x for name, x in given.leaves.items() if name != "value"]

    def of_weights(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        every = list(tensors)
        if form != "gatv2":
            every.insert(2, given.leaves["value"])
        return given.weights(*every)

    assert gradcheck(of_weights, weights)


@EVERY_FORM
def test_each_gradient_alone_can_be_differentiated_again(form: str) -> None:
    given = Given(form, SMALL, loops=True, biases=True)
    for name in given.leaves:
        leaves = {
            other: x.detach().requires_grad_(other == name)
            for other, x in given.leaves.items()
        }
        out = given.out(*leaves.values())
        (first,) = torch.autograd.grad(out.square().sum(), leaves[name])
        again = given.out(*leaves.values()).square().sum()
        (grad,) = torch.autograd.grad(again, leaves[name], create_graph=True)
        torch.testing.assert_close(grad, first)
        if grad.requires_grad:
            grad.square().sum().backward()


def test_one_tensor_twice_can_be_differentiated_again() -> None:
    edge_index = make_case(row("duplicates")).edge_index
    att = torch.randn(2, 3, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    calls = (
        lambda x: functional.gatv2_attention(edge_index, x, x, att),
        lambda x: functional.graph_attention(x, x, x, edge_index),
        lambda x: functional.graph_attention(x * 2, x, x, edge_index),
    )
    for call in calls:
        assert gradcheck(call, x)
        assert gradgradcheck(call, x)


@EVERY_FORM
def test_the_plan_names_the_score(form: str) -> None:
    given = Given(form, row("unsorted"), torch.float32)
    given.out()
    plan = functional.last_plan()
    assert (plan.problem.form, plan.problem.heads) == (form, 2)
    assert plan.implementation.name == "scatter"
    assert f"form is {form!r}, required 'additive'" in plan.explain()


@EVERY_FORM
def test_families_without_the_score_refuse_it(form: str) -> None:
    given = Given(form, row("unsorted"), torch.float32)
    with planner.pin("vendor"), pytest.raises(UnsupportedError, match=form):
        given.out()
    given.out()
    reasons = Limits(forms=("additive",)).violations(functional.last_plan().problem)
    assert reasons == [f"form is {form}, required additive"]


@EVERY_FORM
@EVERY_OPTION
def test_implementations_keep_to_their_contract(
    form: str, options: dict[str, Any]
) -> None:
    """What a backward gives where keys are the values, and where they are not."""
    given = Given(form, row("self_loops"), **options)
    graph = make_case(row("self_loops")).graph()
    made, number = given.operands()
    value = made[0]
    terms = (given.leaves.get("edge_bias"), given.leaves.get("loop_bias"))
    inputs = attention.Inputs(*made, *terms)
    operands = inputs.operands(given.mask, given.seed)
    asked = Options(number, given.num_loops, given.dropout, form)
    call = attention.Call(graph, asked, given.mask, given.seed, "time")
    wanted = Wanted(terms[0] is not None, terms[1] is not None, True)
    with torch.no_grad():
        state = attention.forward(call, inputs, value.dtype)
        plan = attention.attention_plan(
            "edge_attention_backward", call, value, given.grad.dtype
        )
        found = plan.run(graph, given.grad, operands, asked, state, wanted)
        apart = operands._replace(col=operands.col.clone())
        parts = plan.run(graph, given.grad, apart, asked, state, wanted)
    assert (found.col is None) == (form == "gatv2")
    if form == "gatv2":
        torch.testing.assert_close(found.value, parts.value + parts.col)
    assert (found.param is None) == (form == "dot")
    assert (found.term is None, found.loop_term is None) == (
        terms[0] is None,
        terms[1] is None,
    )
    expected = given.gradients(given.dense()[0])
    by_name = dict(zip(given.leaves, expected, strict=True))
    row_name = "x_dst" if form == "gatv2" else "query"
    torch.testing.assert_close(found.row, by_name[row_name])


@EVERY_FORM
def test_half_precision_gives_vectors_their_dtype(form: str) -> None:
    given = Given(form, row("unsorted"), torch.bfloat16, biases=True)
    grads = given.gradients(given.out())
    assert all(grad.dtype == torch.bfloat16 for grad in grads)


@EVERY_FORM
def test_many_gradients_at_once(form: str) -> None:
    given = Given(form, row("unsorted"), biases=True, loops=True)
    out, inputs = given.out(), given.tensors()
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    options = {"retain_graph": True}
    found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, **options)
    for i, grad in enumerate(grads):
        expected = torch.autograd.grad(out, inputs, grad, **options)
        torch.testing.assert_close([g[i] for g in found], list(expected))


@EVERY_FORM
def test_saved_tensors_that_move_and_checkpoints(form: str) -> None:
    given = Given(form, row("unsorted"), dropout=0.3)
    expected = given.gradients(given.out())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = given.out()
    torch.testing.assert_close(given.gradients(out), expected)
    out = checkpoint(given.out, *given.tensors(), use_reentrant=False)
    torch.testing.assert_close(given.gradients(out), expected)


@EVERY_FORM
def test_no_row_of_features_is_kept_for_an_edge(form: str) -> None:
    given, kept = Given(form, row("hub_row")), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or x, lambda x: x
    ):
        given.out()
    assert max(x.size(0) for x in kept) <= max(given.size)


def relation_of(given: Given) -> tuple[Any, ...]:
    return ([given.edge_index], "coo", *given.size)


def arguments(given: Given) -> tuple[Any, ...]:
    """Those of the forward op."""
    vectors, number = given.operands(scale=0.3)
    terms = (given.leaves.get("edge_bias"), given.leaves.get("loop_bias"))
    numbers = (given.form, number, given.num_loops, given.dropout)
    rest = (*terms, given.mask, given.seed, *numbers, "time")
    return (*relation_of(given), *vectors, *rest)


def detached(args: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@EVERY_FORM
@EVERY_OPTION
def test_opcheck(form: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    given = Given(form, row("more_sources"), dtype, **options)
    args = arguments(given)
    for gives_weights in (False, True):
        forward = (*args, gives_weights, dtype)
        torch.library.opcheck(library.forward_op, forward)
        state = library.forward_op(*forward)
        share = torch.ones_like(state[3]) if gives_weights else None
        read = (*args[:4], given.grad, *args[4:12], list(state), share)
        backward = (*read, *args[12:], args[8] is not None, False)
        with torch.no_grad():
            torch.library.opcheck(library.backward_op, detached(backward))


@EVERY_FORM
@EVERY_OPTION
def test_opcheck_of_weights(form: str, options: dict[str, Any]) -> None:
    given = Given(form, row("more_sources"), **options)
    value, vectors, col, param, *rest = arguments(given)[4:-1]
    args = (*relation_of(given), vectors, value if col is None else col, param, *rest)
    torch.library.opcheck(library.weights_op, args)
    grads = [torch.ones_like(x) for x in library.weights_op(*args)]
    with torch.no_grad():
        backward = detached((*args[:4], *grads, *args[4:]))
        torch.library.opcheck(library.weights_backward_op, backward)


def results(given: Given, call: Callable[..., Any]) -> list[Tensor]:
    """Outputs and gradients of a call."""
    found = call(*given.tensors())
    found = found if isinstance(found, tuple) else (found,)
    loss = sum((x * (2 + x.detach().cumsum(0))).sum() for x in found)
    grads = torch.autograd.grad(loss, given.tensors(), materialize_grads=True)
    return [*found, *grads]


def same(found: list[Tensor], expected: list[Tensor], *, exact: bool = True) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@PROBLEMS
@EVERY_FORM
@EVERY_OPTION
def test_a_compiled_call_is_the_eager_one(
    form: str, options: dict[str, Any], problem: str, dtype: torch.dtype
) -> None:
    given = Given(form, row(problem), dtype, **options)
    settings = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
    same(
        results(given, torch.compile(given.out, **settings)), results(given, given.out)
    )
    compiled = results(given, torch.compile(given.weights, **settings))
    # Gradients of weights are formulas there and autograd's here.
    exact = dtype == torch.float64
    tolerance = {} if exact else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(compiled, results(given, given.weights), **tolerance)


@EVERY_FORM
def test_inductor(form: str) -> None:
    given = Given(form, row("unsorted"), torch.float32, loops=True, biases=True)
    compiled = torch.compile(given.out, fullgraph=True)
    same(results(given, compiled), results(given, given.out), exact=False)


def test_heads_in_groups_and_one_tensor_twice() -> None:
    given = Given("dot", row("unsorted"), heads=4, kv_heads=2)
    settings = {"fullgraph": True, "backend": "aot_eager"}
    same(
        results(given, torch.compile(given.out, **settings)), results(given, given.out)
    )
    x = torch.randn(24, 2, 3, requires_grad=True)
    edges, att = given.edge_index, torch.randn(2, 3)

    def both(x: Tensor) -> Tensor:
        first = functional.gatv2_attention(edges, x, x, att)
        return first + functional.graph_attention(x, x, x, edges)

    found, expected = torch.compile(both, **settings)(x), both(x)
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), x) for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_an_op_gives_every_gradient_though_keys_are_the_values() -> None:
    given = Given("dot", row("unsorted"))
    query, x, _ = given.tensors()
    args = list(arguments(given))
    args[4:7] = [x, query, x]
    out = library.forward_op(*args, False, x.dtype)[0]
    found = torch.autograd.grad(out.square().sum(), [query, x])
    call = functional.graph_attention(query, x, x, given.edge_index, scale=0.3)
    expected = torch.autograd.grad(call.square().sum(), [query, x])
    torch.testing.assert_close(found, expected)


@EVERY_FORM
def test_other_sizes_need_no_other_graph(form: str) -> None:
    def loss(edges: Tensor, *tensors: Tensor) -> Tensor:
        if form == "gatv2":
            out = functional.gatv2_attention(edges, *tensors)
        else:
            options = {"qk_norm": tensors[3]} if form == "dot_norm" else {}
            out = functional.graph_attention(*tensors[:3], edges, **options)
        return out.square().sum()

    call = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for problem in ("unsorted", "isolated", "hub_row"):
            given = Given(form, row(problem))
            inputs = given.tensors()
            found = torch.autograd.grad(call(given.edge_index, *inputs), inputs)
            expected = torch.autograd.grad(loss(given.edge_index, *inputs), inputs)
            torch.testing.assert_close(found, expected)


@EVERY_FORM
def test_make_fx_records_a_forward_and_a_backward(form: str) -> None:
    given = Given(form, row("unsorted"))

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = given.out(*tensors)
        return torch.autograd.grad(out.square().sum(), tensors)

    traced = make_fx(step)(*given.tensors())
    ops = [str(n.target) for n in traced.graph.nodes if "pyg_tiga" in str(n.target)]
    assert ops == [
        "pyg_tiga.vector_attention.default",
        "pyg_tiga.vector_attention_backward.default",
    ]
    with torch.no_grad():
        found = traced(*given.tensors())
    torch.testing.assert_close(found, step(*given.tensors()))


@EVERY_FORM
def test_exported_programs_can_be_trained(form: str) -> None:
    given = Given(form, row("unsorted"))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, edges: Tensor, first: Tensor, *rest: Tensor) -> Tensor:
            return given.out(first * self.weight, *rest, relation=edges)

    layer, inputs = Layer(), detached((given.edge_index, *given.tensors()))
    module = torch.export.export(layer, inputs).module()
    (found,) = torch.autograd.grad(module(*inputs).sum(), module.weight)
    (expected,) = torch.autograd.grad(layer(*inputs).sum(), layer.weight)
    torch.testing.assert_close(found, expected)


def test_the_plain_formula_is_what_the_call_gives() -> None:
    given = Given("dot", row("unsorted"))
    query, key, value = given.tensors()
    graph = make_case(row("unsorted")).graph()
    options = Options(WIDTH**-0.5, score="dot")
    call = attention.Call(graph, options, None, None, "time")
    inputs = attention.Inputs(value, query, key, None, None, None)
    found = attention.by_reference(call, inputs)
    assert torch.equal(found, edge_attention.attend(call, inputs, inputs.out_dtype()))
