"""Attention with two vectors: what does not fit is named, with the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyg_tiga import testing
from tests.vector_checks import CHANNELS, WIDTH, Given


def _bad(form: str, **changed: Any) -> Any:
    """A call with other tensors or options than those that fit."""
    given = Given(form, testing.row("more_sources"), torch.float32)
    tensors = [changed.pop(name, x) for name, x in given.leaves.items()]
    given.out(*tensors, **changed)


DOT_ERRORS = {
    "query rows": (
        {"query": torch.ones(7, 2, WIDTH)},
        r"'query' must have shape \[8, 2, 3\] \(got \[7, 2, 3\]\)",
    ),
    "query dims": (
        {"query": torch.ones(8, 2)},
        r"'query' must be a floating point tensor \[nodes, heads, channels\] "
        r"\(got torch.float32 of shape \[8, 2\]\)",
    ),
    "query dtype": (
        {"query": torch.ones(8, 2, WIDTH, dtype=torch.int64)},
        r"'query' must be a floating point .* \(got torch.int64 of shape",
    ),
    "key width": (
        {"key": torch.ones(35, 2, 5)},
        r"'key' must have shape \[35, 2, 3\] \(got \[35, 2, 5\]\)",
    ),
    "key rows": (
        {"key": torch.ones(36, 2, WIDTH)},
        r"'key' must have shape \[35, 2, 3\] \(got \[36, 2, 3\]\)",
    ),
    "key heads": (
        {"key": torch.ones(35, 3, WIDTH)},
        r"'query' must have a multiple of the 3 heads of 'key' \(got 2\)",
    ),
    "no key heads": (
        {"key": torch.ones(35, 0, WIDTH)},
        r"'query' must have a multiple of the 0 heads of 'key' \(got 2\)",
    ),
    "value heads": (
        {"value": torch.ones(35, 1, CHANNELS)},
        r"'value' must have shape \[35, 2, 4\] \(got \[35, 1, 4\]\)",
    ),
    "value device": (
        {"value": torch.ones(35, 2, CHANNELS, device="meta")},
        r"'value' must be on cpu \(got meta\)",
    ),
}
GATV2_ERRORS = {
    "source rows": (
        {"x_src": torch.ones(34, 2, CHANNELS)},
        r"'x_src' must have shape \[35, 2, 4\] \(got \[34, 2, 4\]\)",
    ),
    "destination width": (
        {"x_dst": torch.ones(8, 2, 5)},
        r"'x_dst' must have shape \[8, 2, 4\] \(got \[8, 2, 5\]\)",
    ),
    "source dims": (
        {"x_src": torch.ones(35, 8)},
        r"'x_src' must be a floating point tensor \[nodes, heads, channels\]",
    ),
    "att": (
        {"att": torch.ones(1, 2, CHANNELS)},
        r"'att' must have shape \[2, 4\] \(got \[1, 2, 4\]\)",
    ),
    "att of integers": (
        {"att": torch.ones(2, CHANNELS, dtype=torch.int64)},
        r"'att' must be a floating point tensor \(got 'torch.int64'\)",
    ),
}
COMMON_ERRORS = {
    "edge_bias": (
        {"edge_bias": torch.ones(120)},
        r"'edge_bias' must have shape \[120, 2\] \(got \[120\]\)",
    ),
    "loop_bias": (
        {"loop_bias": torch.ones(8, 2)},
        r"'loop_bias' must have shape \[0, 2\] \(got \[8, 2\]\)",
    ),
    "edge_mask": (
        {"edge_mask": torch.ones(120)},
        r"'edge_mask' must be bool \(got torch.float32\)",
    ),
    "dropout": ({"dropout": 1.5}, r"'dropout' must be from 0 to 1 \(got 1.5\)"),
    "objective": (
        {"objective": "speed"},
        r"'objective' must be one of 'time', 'memory' \(got 'speed'\)",
    ),
    "seed": (
        {"seed": torch.zeros(2, dtype=torch.int64), "dropout": 0.5},
        r"'seed' must be one int64 on cpu \(got torch.int64 of shape \[2\] on cpu\)",
    ),
    "size": ({"size": (35,)}, r"'size' must be a pair .* \(got \(35,\)\)"),
    "a negative size": ({"size": (-1, 8)}, r"'size\[0\]' must not be negative"),
    "a vast size": ({"size": (35, 10**20)}, r"'size\[1\]' must be below 2 \*\* 63"),
    "complex biases": (
        {"edge_bias": torch.ones(120, 2, dtype=torch.complex64)},
        r"'edge_bias' must be a floating point tensor \(got 'torch.complex64'\)",
    ),
    "biases of integers": (
        {"loop_bias": torch.ones(8, 2, dtype=torch.int64), "self_loops": True},
        r"'loop_bias' must be a floating point tensor \(got 'torch.int64'\)",
    ),
}
ERRORS = [
    pytest.param(form, *error, id=f"{form}-{name}")
    for form, own in (("dot", DOT_ERRORS), ("gatv2", GATV2_ERRORS))
    for name, error in {**own, **COMMON_ERRORS}.items()
]


@pytest.mark.parametrize(("form", "changed", "message"), ERRORS)
def test_errors(form: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _bad(form, **dict(changed))


def test_errors_of_weights() -> None:
    given = Given("dot", testing.row("more_sources"))
    query, key, _ = given.tensors()
    with pytest.raises(ValueError, match="'key' must have shape"):
        given.weights(query, key[:, :, :2], given.leaves["value"])
    given = Given("gatv2", testing.row("more_sources"))
    with pytest.raises(ValueError, match="'att' must have shape"):
        given.weights(*given.tensors()[:2], given.leaves["att"][:1])


def test_an_index_out_of_range() -> None:
    given = Given("dot", testing.row("more_sources"))
    edges = given.edge_index.clone()
    edges[0, 0] = 35
    with pytest.raises(ValueError, match="35"):
        given.out(relation=edges)
