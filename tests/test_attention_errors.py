"""Additive attention: what does not fit is named, with the rule, and no kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, planner

NODES, HEADS, CHANNELS = 7, 2, 3
EDGES = torch.tensor([[0, 1, 2, 6, 4], [1, 2, 0, 3, 6]])
X = torch.randn(NODES, HEADS, CHANNELS)
ATT = torch.randn(HEADS, CHANNELS)
SCORE = torch.randn(NODES, HEADS)
SHAPES = [(1, 3), (2, 1), (3,), (2, 5), (7, 2, 3), (1, 1, 2, 3), (1, 2, 3)]
FAMILIES = pytest.mark.parametrize("family", ["scatter", "triton"])


def gat(**changed: Any) -> Tensor:
    given = {"x_src": X, "x_dst": X, "att_src": ATT, "att_dst": ATT, **changed}
    return functional.gat_attention(EDGES, **given)


@FAMILIES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["att_src", "att_dst"])
def test_vectors_of_scores(name: str, shape: tuple[int, ...], family: str) -> None:
    message = rf"'{name}' must have shape \[2, 3\] \(got \["
    with planner.pin(family), pytest.raises(ValueError, match=message):
        gat(**{name: torch.ones(shape)})


@pytest.mark.parametrize("name", ["att_src", "att_dst"])
def test_a_vector_without_dimensions(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' must have at least one dim"):
        gat(**{name: torch.tensor(1.0)})


@FAMILIES
@pytest.mark.parametrize("shape", [(7, 3, 3), (7, 1, 3), (7, 2, 1), (7, 2, 4)])
def test_heads_and_channels_of_destinations(
    shape: tuple[int, ...], family: str
) -> None:
    message = r"'x_dst' must have shape \[7, 2, 3\] \(got"
    with planner.pin(family), pytest.raises(ValueError, match=message):
        gat(x_dst=torch.ones(shape))


@pytest.mark.parametrize("name", ["x_src", "att_src", "att_dst"])
@pytest.mark.parametrize("value", [[1.0, 2.0], "a", 2.0])
def test_operands_that_are_no_tensors(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"'{name}' must be a dense tensor"):
        gat(**{name: value})


def test_a_missing_vector() -> None:
    with pytest.raises(TypeError, match=r"'att_src' must be .*\(got NoneType\)"):
        gat(att_src=None)
    for name in ("x_dst", "att_dst"):
        with pytest.raises(ValueError, match=f"given together .got no '{name}'"):
            gat(**{name: None})
    assert gat(x_dst=None, att_dst=None).shape == X.shape


CALLS = {
    "gat": (gat, "negative_slope"),
    "additive": (
        lambda **given: functional.additive_attention(EDGES, X, SCORE, SCORE, **given),
        "negative_slope",
    ),
    "additive weights": (
        lambda **given: functional.additive_attention_weights(
            EDGES, SCORE, SCORE, **given
        ),
        "negative_slope",
    ),
    "dot": (
        lambda **given: functional.graph_attention(X, X, X, EDGES, **given),
        "scale",
    ),
    "dot weights": (
        lambda **given: functional.graph_attention_weights(X, X, EDGES, **given),
        "scale",
    ),
    "gatv2": (
        lambda **given: functional.gatv2_attention(EDGES, X, X, ATT, **given),
        "negative_slope",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_options_of_the_wrong_kind(name: str) -> None:
    call, scale = CALLS[name]
    number = torch.tensor(0.5, requires_grad=True)
    for option in (scale, "dropout"):
        for value in ("x", [0.1], torch.ones(2), 1j, number):
            with pytest.raises(TypeError, match=f"'{option}' must be a number"):
                call(**{option: value})
    with pytest.raises(ValueError, match=rf"'{scale}' must be a number \(got nan\)"):
        call(**{scale: float("nan")})
    for value in ("no", 1, None, torch.tensor(True)):
        with pytest.raises(TypeError, match="'self_loops' must be True or False"):
            call(self_loops=value)
    for dropout in (0.0, 0.5):
        with pytest.raises(TypeError, match=r"'seed' must be a tensor.*\(got int\)"):
            call(dropout=dropout, seed=3)
        with pytest.raises(ValueError, match="'seed' must be one int64"):
            call(dropout=dropout, seed=torch.ones(2))


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_other_kinds(name: str) -> None:
    call, scale = CALLS[name]
    expected = call(**{scale: 2.0})
    for value in (2, torch.tensor(2.0), torch.tensor(2)):
        torch.testing.assert_close(call(**{scale: value}), expected)


@pytest.mark.parametrize(
    ("call", "name", "end"),
    [
        (lambda: gat(x_dst=X[:5]), "x_dst", "destination"),
        (lambda: gat(x_src=X[:5]), "x_src", "source"),
        (lambda: gat(x_src=X[:5], x_dst=None, att_dst=None), "x_src", "source"),
        (
            lambda: functional.additive_attention(EDGES, X, SCORE, SCORE[:5]),
            "alpha_dst",
            "destination",
        ),
        (
            lambda: functional.additive_attention(EDGES, X[:5], SCORE[:5], SCORE),
            "value",
            "source",
        ),
        (
            lambda: functional.additive_attention_weights(EDGES, SCORE[:5], SCORE),
            "alpha_src",
            "source",
        ),
        (
            lambda: functional.graph_attention(X[:5], X, X, EDGES),
            "query",
            "destination",
        ),
        (lambda: functional.graph_attention(X, X[:5], X, EDGES), "key", "source"),
        (
            lambda: functional.gatv2_attention(EDGES, X, X[:5], ATT),
            "x_dst",
            "destination",
        ),
        (lambda: functional.spmm(EDGES, X[:6, 0]), "x", "source"),
        (lambda: functional.plan_spmm(EDGES, X[:6, 0]), "x", "source"),
        (
            lambda: functional.spmm(EDGES[:, 2:3].flip(0) + 1, X[:3, 0]),
            "x",
            "destination",
        ),
    ],
)
def test_operands_with_too_few_rows(call: Any, name: str, end: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'{name}' must have a row for each {end} node .*'relation'"
    ):
        call()
