"""Scores of vector operands: precision, layouts, repetition, and what is not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_tiga.impls import attention_destinations, triton_attention_backward
from pyg_tiga.impls.attention_destinations import _PARAM_UNITS
from pyg_tiga.impls.attention_types import (
    Gradients,
    Operands,
    State,
    Wanted,
)
from pyg_tiga.kernels.scores import SCORES
from pyg_tiga.relation.graph import Graph
from tests.kernels.vector_cases import (
    BOTH,
    EVERY,
    HANDS_OVER,
    RECOMPUTES,
    SCHEDULE,
    check,
    draw,
    formula,
    options_of,
    run,
)


@BOTH
@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(
    dtype: torch.dtype, score: str, wanted: Wanted, device: torch.device
) -> None:
    drawn = draw(None, score, 2, 8, device=device, dtype=dtype)
    options = options_of(score, drawn[0], loops=True)
    # What the backward reads of the result is rounded, too.
    check(*drawn, options, wanted, tolerance=4 * torch.finfo(dtype).eps)


def test_pieces_of_half_precision_are_added_in_float32(device: torch.device) -> None:
    """Every element of a hub's gradient is right to one rounding."""
    graph, operands, grad = draw(
        None, "shared", 2, 8, device=device, dtype=torch.bfloat16
    )
    options = options_of("shared", graph, loops=True)
    state, found = run(graph, operands, grad, options, HANDS_OVER)
    single = Operands(*[None if x is None else x.float() for x in operands])
    single = single._replace(col=single.value)
    call = triton_attention_backward.ATTENTION_BACKWARD.run
    rest = (options, state, HANDS_OVER)
    exact = call(None, SCHEDULE, graph, grad.float(), single, *rest)
    # One rounding, which the interpreter does towards 0.
    for name in ("value", "row"):
        got, want = getattr(found, name), getattr(exact, name)
        assert want.dtype == torch.float32
        torch.testing.assert_close(got.float(), want, rtol=2.0**-7, atol=1e-6, msg=name)
    assert torch.equal(found.param, exact.param)


@pytest.mark.parametrize("score", ["gatv2", "shared"])
def test_operands_in_any_layout(score: str, device: torch.device) -> None:
    """Rows of a wider projection, transposed features, and copies of one tensor."""
    graph, operands, grad = draw(None, score, 2, 4, device=device)
    options = options_of(score, graph, loops=False)
    before = run(graph, operands, grad, options, HANDS_OVER)
    for lay_out in (_transposed, _wide):
        value = lay_out(operands.value)
        col = value if score == "shared" else lay_out(operands.col)
        given = operands._replace(value=value, row=lay_out(operands.row), col=col)
        assert given.is_shared == (score == "shared")
        after = run(graph, given, lay_out(grad), options, HANDS_OVER)
        _assert_equal(before, after)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _wide(x: Tensor) -> Tensor:
    return torch.cat([x, x], 0).view(2, *x.shape).transpose(0, 1)[:, 1]


def test_only_the_very_tensor_is_one_operand(device: torch.device) -> None:
    """Two leaves in the same memory have a gradient each."""
    graph, operands, grad = draw(None, "shared", 2, 4, device=device)
    options = options_of("shared", graph, loops=True)
    assert operands.is_shared
    apart = operands._replace(col=operands.value.view_as(operands.value))
    assert not apart.is_shared
    whole = check(graph, operands, grad, options, HANDS_OVER)
    parts = check(graph, apart, grad, options, HANDS_OVER)
    torch.testing.assert_close(parts.value + parts.col, whole.value)


@BOTH
@EVERY
def test_bit_identical_over_runs(
    score: str, wanted: Wanted, device: torch.device
) -> None:
    graph, operands, grad = draw(None, score, 2, 4, device=device, terms=True)
    operands = operands._replace(seed=torch.tensor([5], device=device))
    options = options_of(score, graph, loops=True, dropout=0.4)
    first = run(graph, operands, grad, options, wanted)
    for _ in range(10 if device.type == "cuda" else 1):
        _assert_equal(first, run(graph, operands, grad, options, wanted))


def _assert_equal(one: tuple[State, Gradients], other: tuple[State, Gradients]) -> None:
    for a, b in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_the_parameter_needs_few_shares(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More units than programs: each program walks several."""
    graph, operands, grad = draw(None, "shared", 2, 4, device=device)
    options = options_of("shared", graph, loops=True)
    for programs in (1, 3):
        monkeypatch.setattr(attention_destinations, "_PARAM_PROGRAMS", programs)
        graph.scratch.clear()
        check(graph, operands, grad, options, HANDS_OVER)
        check(graph, operands, grad, options, RECOMPUTES)
    assert _PARAM_UNITS > 1


@BOTH
@EVERY
def test_scores_of_minus_infinity(
    score: str, wanted: Wanted, device: torch.device
) -> None:
    """No weight beside other scores, NaN alone, and 0 where there is no edge at all."""
    graph, operands, grad = draw(None, score, 2, 4, device=device, terms=True)
    options = options_of(score, graph, loops=False)
    target = graph.edge_index()[1].long()
    lost = target.bincount(minlength=graph.num_dst).argmax()
    others = (target != lost).nonzero().flatten()
    term = operands.term.clone()
    term[others[::3]] = -torch.inf
    term[target == lost] = -torch.inf
    mask = torch.ones_like(target, dtype=torch.bool)
    empty = int(target[others[1]])
    mask[target == empty] = False
    operands = operands._replace(term=term, loop_term=None, mask=mask)
    state, found = run(graph, operands, grad, options, wanted)
    truth, leaves = formula(graph, operands, options, torch.float64)
    assert bool(state.out[lost].isnan().all())
    assert bool((state.out[empty] == 0).all())
    torch.testing.assert_close(
        state.out.double(), truth, equal_nan=True, rtol=1e-5, atol=1e-5
    )
    want = torch.autograd.grad(truth, dict(leaves)["row"], grad.double())[0]
    there = torch.arange(graph.num_dst, device=device) != lost
    torch.testing.assert_close(
        found.row[there].double(), want[there], rtol=1e-5, atol=1e-5
    )


@BOTH
def test_masked_edges_of_lost_rows_reach_no_source(
    wanted: Wanted, device: torch.device
) -> None:
    """The NaN of a row is not seen across an edge that takes no part."""
    edge_index = torch.tensor([[0, 1, 1], [0, 0, 1]], device=device)
    graph = Graph.from_edge_index(edge_index, num_src=2, num_dst=2)
    value, operand = torch.randn(2, 1, 4, device=device), torch.randn(2, 1, 4)
    operand = operand.to(device)
    term = torch.tensor([[-torch.inf], [0.0], [0.0]], device=device)
    mask = torch.tensor([True, False, True], device=device)
    operands = Operands(value, operand, operand.clone(), term, mask=mask)
    options = options_of("dot", graph, loops=False)
    _, found = run(graph, operands, value, options, wanted)
    assert bool(found.col[0].isnan().all())
    assert bool(found.col[1].isfinite().all())


@EVERY
@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (0, 0, 4), (3, 3, 0)])
def test_nothing_to_attend_to(
    sizes: tuple[int, int, int], score: str, device: torch.device
) -> None:
    num_src, num_dst, channels = sizes
    edge_index = torch.zeros(2, 0, dtype=torch.long, device=device)
    graph = Graph.from_edge_index(edge_index, num_src=num_src, num_dst=num_dst)
    value = torch.randn(num_src, 2, channels, device=device)
    width = channels if score == "shared" else 4
    col = value if score == "shared" else torch.randn(num_src, 2, width, device=device)
    operands = Operands(value, torch.randn(num_dst, 2, width, device=device), col)
    if score != "dot":
        operands = operands._replace(param=torch.randn(2, width, device=device))
    grad = torch.randn(num_dst, 2, channels, device=device)
    options = options_of(score, graph, loops=False)
    for wanted in (HANDS_OVER, Wanted(True, True, False)):
        state, found = run(graph, operands, grad, options, wanted)
        assert state.out.shape == grad.shape
        results = [found.value, found.row, found.col, found.param]
        given = [value, operands.row, None if operands.is_shared else col]
        for got, operand in zip(results, [*given, operands.param], strict=True):
            assert (got is None) == (operand is None)
            assert got is None or got.shape == operand.shape
            assert got is None or bool((got == 0).all())


def test_scores_say_what_they_take() -> None:
    vectors = [name for name, score in SCORES.items() if score.vector]
    assert vectors == ["dot", "dot_norm", "gatv2"]
    parameters = [name for name, score in SCORES.items() if score.has_param]
    assert parameters == ["dot_norm", "gatv2"]
