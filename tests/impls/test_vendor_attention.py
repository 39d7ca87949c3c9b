"""Edge attention by embedding bags: every problem against the formula in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, planner, reference_attention
from pyg_tiga.impls import scatter_attention, vendor_attention
from pyg_tiga.impls.attention_types import Operands, Options, State, Wanted
from pyg_tiga.ops.attention import Call, attention_plan
from pyg_tiga.planner import dispatch
from pyg_tiga.problem import Problem
from pyg_tiga.relation.graph import Graph
from pyg_tiga.testing import (
    ROWS,
    Row,
    assert_accurate,
    assert_gradient_accurate,
    make_case,
    row,
)
from tests.attention_checks import (
    HUBS,
    NAMES,
    Drawn,
    check,
    draw,
    for_reference,
    run,
)

EVERY_ROW = pytest.mark.parametrize("problem", ROWS, ids=str)
OBJECTIVES = pytest.mark.parametrize("objective", ["time", "memory"])


@pytest.fixture(autouse=True)
def vendor_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only this family, however small the problem."""
    monkeypatch.setattr(vendor_attention, "FEWEST", 0)
    dispatch._plan.cache_clear()
    with planner.pin("vendor"):
        yield
    dispatch._plan.cache_clear()


def _check(graph: Graph, drawn: Drawn, grad: Tensor, **options: Any) -> list[Tensor]:
    """Hold this family to the formula in float64."""
    found = check(graph, drawn, grad, **options)
    assert functional.last_plan().implementation is vendor_attention.ATTENTION
    return found


@OBJECTIVES
@pytest.mark.parametrize("loops", [False, True])
@EVERY_ROW
def test_every_row(problem: Row, loops: bool, objective: str) -> None:
    _check(*draw(problem, 2, 4), self_loops=loops, objective=objective)


@pytest.mark.parametrize("loops", [False, True])
@EVERY_ROW
def test_terms_masks_and_dropout_of_every_row(problem: Row, loops: bool) -> None:
    graph, drawn, grad = draw(problem, 3, 4, terms=True)
    if not loops:
        del drawn["loop_term"]
    mask = torch.rand(graph.num_edges) < 0.7
    options = {"self_loops": loops, "edge_mask": mask}
    _check(graph, drawn, grad, **options)
    seed = torch.tensor([2**40 + 17])
    _check(graph, drawn, grad, **options, dropout=0.3, seed=seed)


@pytest.mark.parametrize("shape", [(4, 8), (3, 5), (1, 16), (8, 4), (2, 33), (5, 1)])
def test_heads_and_channels_of_any_size(shape: tuple[int, int]) -> None:
    _check(*draw(row("power_law"), *shape), self_loops=True)


@OBJECTIVES
@pytest.mark.parametrize("slope", [0.2, 0.0, -0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", HUBS)
def test_slopes(name: str, slope: float, objective: str) -> None:
    inputs = draw(row(name), 2, 4)
    options = {"negative_slope": slope, "objective": objective}
    _check(*inputs, **options)
    _check(*inputs, **options, self_loops=True)
    _check(*draw(row(name), 2, 4, terms=True), **options, self_loops=True)


@pytest.mark.parametrize("given", ["edge_term", "loop_term"])
def test_terms_of_edges_or_of_loops_alone(given: str) -> None:
    graph, drawn, grad = draw(row("self_loops"), 2, 4, terms=True)
    drawn = {name: x for name, x in drawn.items() if name in (*NAMES[:3], given)}
    _check(graph, drawn, grad, self_loops=True)


@OBJECTIVES
@pytest.mark.parametrize(
    ("name", "p"), [*((name, 0.3) for name in HUBS), ("hub_row", 1.0)]
)
def test_dropout_without_terms(name: str, p: float, objective: str) -> None:
    seed = torch.tensor([5])
    inputs = draw(row(name), 3, 4)
    _check(*inputs, self_loops=True, dropout=p, seed=seed, objective=objective)


def test_no_edge_may_take_part() -> None:
    graph, drawn, grad = draw(row("hub_row"), 2, 4)
    mask = torch.zeros(graph.num_edges, dtype=torch.bool)
    found = _check(graph, drawn, grad, edge_mask=mask)
    assert not any(x.any() for x in found)
    _check(graph, drawn, grad, edge_mask=mask, self_loops=True)


def test_what_takes_no_part_may_be_nan() -> None:
    graph, drawn, grad = draw(row("self_loops"), 2, 4, terms=True)
    src, dst = graph.ends()
    mask = src != 2
    drawn["value"][2] = drawn["alpha_src"][2] = torch.nan
    drawn["edge_term"][(src == dst) | ~mask] = torch.nan
    drawn["loop_term"][2] = 0.0
    options = {"self_loops": True, "edge_mask": mask}
    found = run(functional.additive_attention, graph, drawn, grad, **options)
    given = for_reference(graph, drawn, options)
    reference = reference_attention.additive_attention
    truth = run(reference, graph, drawn, grad, **given)
    for got, want in zip(found, truth, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_gradient_at_zero_pre_activation_is_the_slope() -> None:
    graph, drawn, grad = draw(row("unsorted"), 2, 4)
    drawn["alpha_src"].zero_()
    drawn["alpha_dst"].zero_()
    for objective in ("time", "memory"):
        _check(graph, drawn, grad, self_loops=True, objective=objective)


def test_large_scores_keep_their_digits() -> None:
    graph, drawn, grad = draw(row("hub_row"), 2, 4)
    drawn["alpha_src"] += 3000.0
    _check(graph, drawn, grad, self_loops=True)


@OBJECTIVES
def test_bit_identical_from_run_to_run(objective: str) -> None:
    inputs = draw(row("power_law"), 2, 4, terms=True)
    options = {"self_loops": True, "dropout": 0.4, "seed": torch.tensor([5])}
    call = functional.additive_attention
    runs = [run(call, *inputs, **options, objective=objective) for _ in range(5)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, runs[0], strict=True))


def test_dropout_is_that_of_the_scatter_family() -> None:
    inputs = draw(row("hub_column"), 2, 4)
    options = {"self_loops": True, "dropout": 0.5, "seed": torch.tensor([7])}
    found = run(functional.additive_attention, *inputs, **options)
    with planner.pin("scatter"):
        truth = run(functional.additive_attention, *inputs, **options)
    for got, want in zip(found, truth, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    graph, drawn, grad = draw(row("power_law"), 2, 8)
    drawn = {name: x.to(dtype) for name, x in drawn.items()}
    found = run(functional.additive_attention, graph, drawn, grad, self_loops=True)
    reference = reference_attention.additive_attention
    plain = run(reference, graph, drawn, grad, num_loops=40)
    double = {name: x.double() for name, x in drawn.items()}
    truth = run(reference, graph, double, grad.to(dtype).double(), num_loops=40)
    assert_accurate(found[0], plain[0], truth[0])
    assert_gradient_accurate(found[1], plain[1], truth[1])
    for got, want in zip(found[2:], truth[2:], strict=True):
        assert got.dtype == dtype
        error = float((got.double() - want).abs().max() / want.abs().max())
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_values(dtype: torch.dtype) -> None:
    graph, drawn, grad = draw(row("power_law"), 2, 8)
    drawn["value"] = drawn["value"].to(dtype)
    found = run(functional.additive_attention, graph, drawn, grad, self_loops=True)
    reference = reference_attention.additive_attention
    plain = run(reference, graph, drawn, grad, num_loops=40)
    double = {name: x.double() for name, x in drawn.items()}
    truth = run(reference, graph, double, grad.double(), num_loops=40)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
    assert_accurate(found[0], plain[0], truth[0])
    assert_gradient_accurate(found[1], plain[1], truth[1])


@pytest.mark.parametrize("problem", [row(name) for name in HUBS], ids=str)
@pytest.mark.parametrize("terms", [False, True])
def test_float64_stays_float64(problem: Row, terms: bool) -> None:
    graph, drawn, grad = draw(problem, 2, 4, terms=terms)
    drawn = {name: x.double() for name, x in drawn.items()}
    options = {"self_loops": True, "dropout": 0.3, "seed": torch.tensor([3])}
    found = _check(graph, drawn, grad.double(), **options)
    truth = run(
        reference_attention.additive_attention,
        graph,
        drawn,
        grad.double(),
        **for_reference(graph, drawn, options),
    )
    for got, want in zip(found, truth, strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_float64_scores_of_float32_values() -> None:
    graph, drawn, grad = draw(row("power_law"), 2, 4)
    drawn["alpha_dst"] = drawn["alpha_dst"].double()
    found = run(functional.additive_attention, graph, drawn, grad)
    reference = reference_attention.additive_attention
    truth = run(reference, graph, drawn, grad)
    for got, want in zip(found, truth, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_refusal_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_attention, "FEWEST", 601)
    graph, drawn, _ = draw(row("unsorted"), 2, 4)
    call = Call(graph, Options(0.2, score="dot"), None, None, "time")
    with planner.pin(None):
        value = drawn["value"].to(torch.float8_e5m2)
        plan = attention_plan("edge_attention", call, value, torch.float32)
    allowed = "required float32 or bfloat16 or float16 or float64"
    assert vendor_attention.ATTENTION.why_not(plan.problem) == [
        f"dtype is float8_e5m2, {allowed}",
        "edges times channels are 600, required at least 601",
        "form is 'dot', required 'additive'",
    ]
    assert plan.implementation is scatter_attention.ATTENTION


def test_the_table_prefers_it_on_the_cpu() -> None:
    graph, drawn, _ = draw(row("unsorted"), 2, 4)
    call = Call(graph, Options(0.2), None, None, "time")
    with planner.pin(None):
        for op in ("edge_attention", "edge_attention_backward"):
            plan = attention_plan(op, call, drawn["value"], torch.float32)
            assert isinstance(plan.problem, Problem)
            assert plan.implementation.name == "embedding_bag"
            assert "vendor" in plan.explain()


def test_the_state_is_that_of_the_reference() -> None:
    graph, drawn, _ = draw(row("power_law"), 2, 4, terms=True)
    operands = Operands(
        drawn["value"], drawn["alpha_dst"], drawn["alpha_src"], drawn["edge_term"]
    )
    states = [_state(graph, operands, options=Options(0.2), positive=True)]
    operands = operands._replace(term=None)
    states.append(_state(graph, operands, Options(0.2), positive=True))
    for state, term in zip(states, (drawn["edge_term"], None), strict=True):
        out, m, total = reference_attention.additive_attention(
            graph, *list(drawn.values())[:3], edge_term=term
        )
        assert torch.equal(state.m, m)
        torch.testing.assert_close(state.total, total)
        torch.testing.assert_close(state.out, out)
        assert state.positive.shape == out.shape
        assert (state.positive_sum <= 1.0 + 1e-6).all()


def _state(graph: Graph, operands: Operands, options: Options, positive: bool) -> State:
    call = Call(graph, options, None, None, "time")
    plan = attention_plan("edge_attention", call, operands.value, torch.float32)
    return plan.run(graph, operands, options, positive)


@pytest.mark.parametrize("term", [False, True])
@pytest.mark.parametrize("loop_term", [False, True])
def test_only_wanted_gradients_are_formed(term: bool, loop_term: bool) -> None:
    graph, drawn, grad = draw(row("self_loops"), 2, 4, terms=True)
    value, src, dst, edge, loop = drawn.values()
    operands = Operands(value, dst, src, edge, loop)
    call = Call(graph, Options(0.2, graph.num_dst), None, None, "time")
    state = _state(graph, operands, call.options, positive=False)
    plan = attention_plan("edge_attention_backward", call, value, torch.float32)
    found = plan.run(
        graph, grad, operands, call.options, state, Wanted(term, loop_term)
    )
    assert (found.term is not None, found.loop_term is not None) == (term, loop_term)
    every = plan.run(graph, grad, operands, call.options, state, Wanted(True, True))
    torch.testing.assert_close(found.row, every.row, rtol=1e-4, atol=1e-5)


def test_no_warning_reaches_the_user_and_autocast_changes_nothing() -> None:
    inputs = draw(row("power_law"), 2, 4, terms=True)
    call = functional.additive_attention
    plain = run(call, *inputs, self_loops=True)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        found = run(call, *inputs, self_loops=True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_deterministic_mode_is_served() -> None:
    inputs = draw(row("power_law"), 2, 4, terms=True)
    torch.use_deterministic_algorithms(True)
    try:
        _check(*inputs, self_loops=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_csr_relation_has_no_permutation() -> None:
    base = make_case(row("self_loops"), torch.float32).graph().rows()
    graph = Graph.from_csr(base.ptr, base.index)
    _, drawn, grad = draw(row("self_loops"), 2, 4, terms=True)
    _check(graph, drawn, grad, self_loops=True)
    mask = torch.rand(graph.num_edges) < 0.5
    _check(graph.reverse(), drawn, grad, edge_mask=mask, self_loops=True)
