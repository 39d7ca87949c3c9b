"""Scores of vector operands, by the template, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from pyg_tiga.impls.attention_types import (
    Wanted,
)
from pyg_tiga.problem import Schedule
from pyg_tiga.testing import Row
from tests.kernels.vector_cases import (
    BOTH,
    EVERY,
    HANDS_OVER,
    RECOMPUTES,
    SHAPES,
    check,
    draw,
    options_of,
)


@BOTH
@EVERY
@pytest.mark.parametrize("problem", SHAPES, ids=str)
def test_every_row(
    problem: Row, score: str, wanted: Wanted, device: torch.device
) -> None:
    graph, operands, grad = draw(problem, score, 2, 4, device=device)
    options = options_of(score, graph, loops=problem.square)
    check(graph, operands, grad, options, wanted)


@BOTH
@pytest.mark.parametrize(
    ("score", "sizes"),
    [
        ("shared", (3, 5, 5)),
        ("shared", (1, 33, 33)),
        ("gatv2", (3, 5, 5)),
        ("dot", (1, 1, 1)),
        ("dot", (2, 4, 8)),
        ("dot", (1, 7, 2)),
        ("dot", (3, 6, 1)),
        ("dot_norm", (1, 1, 1)),
        ("dot_norm", (3, 5, 6)),
    ],
)
def test_heads_channels_and_widths_of_any_size(
    score: str, sizes: tuple[int, int, int], wanted: Wanted, device: torch.device
) -> None:
    graph, operands, grad = draw(None, score, *sizes, device=device)
    check(graph, operands, grad, options_of(score, graph, loops=True), wanted)


@pytest.mark.parametrize("score", ["dot", "dot_norm", "shared"])
@pytest.mark.parametrize(("edges", "columns"), [(1, 64), (4, 8), (32, 64)])
def test_tiles_of_any_size(
    edges: int, columns: int, score: str, device: torch.device
) -> None:
    schedule = Schedule(rows=1, edges=edges, slice=columns, warps=1, chunk=8)
    graph, operands, grad = draw(None, score, 3, 6, device=device)
    options = options_of(score, graph, loops=True)
    for wanted in (HANDS_OVER, RECOMPUTES):
        check(graph, operands, grad, options, wanted, schedule)


@pytest.mark.parametrize("score", ["dot", "dot_norm", "shared"])
def test_more_channels_than_a_program_holds(score: str, device: torch.device) -> None:
    """Slices of values, each of which needs the whole operand."""
    schedule = Schedule(rows=1, edges=4, slice=512, warps=1, chunk=8)
    graph, operands, grad = draw(None, score, 1, 300, device=device)
    options = options_of(score, graph, loops=False, scale=0.1)
    check(graph, operands, grad, options, HANDS_OVER, schedule)


@EVERY
@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(True, True, True),
        Wanted(True, True, False),
        Wanted(False, True, False),
        Wanted(False, False, True),
        Wanted(False, False, False),
    ],
    ids=lambda wanted: "".join("ft"[flag] for flag in wanted),
)
def test_terms(wanted: Wanted, score: str, device: torch.device) -> None:
    graph, operands, grad = draw(None, score, 2, 4, device=device, terms=True)
    options = options_of(score, graph, loops=True)
    check(graph, operands, grad, options, wanted)
    operands = operands._replace(loop_term=None)
    wanted = wanted._replace(loop_term=False)
    check(graph, operands, grad, options, wanted)
    check(graph, operands, grad, options._replace(num_loops=0), wanted)


@BOTH
@EVERY
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_and_masks(
    p: float, score: str, wanted: Wanted, device: torch.device
) -> None:
    graph, operands, grad = draw(None, score, 3, 4, device=device, terms=True)
    operands = operands._replace(
        mask=torch.rand(graph.num_edges, device=device) < 0.7,
        seed=torch.tensor([2**40 + 17], device=device),
    )
    options = options_of(score, graph, loops=True, dropout=p)
    check(graph, operands, grad, options, wanted)
    if p < 1.0:
        wanted = Wanted(True, True, wanted.hands_over)
        check(graph, operands, grad, options, wanted)


@BOTH
@pytest.mark.parametrize("slope", [0.0, -0.5, 1.5])
def test_slopes(slope: float, wanted: Wanted, device: torch.device) -> None:
    graph, operands, grad = draw(None, "shared", 2, 4, device=device)
    options = options_of("shared", graph, loops=True, scale=slope)
    check(graph, operands, grad, options, wanted)


@BOTH
def test_gradient_at_zero_is_the_slope(wanted: Wanted, device: torch.device) -> None:
    graph, operands, grad = draw(None, "gatv2", 2, 4, device=device)
    operands = operands._replace(
        row=operands.row.zero_(), col=operands.col[..., :1].mul(0).expand(-1, -1, 4)
    )
    check(graph, operands, grad, options_of("gatv2", graph, loops=True), wanted)
