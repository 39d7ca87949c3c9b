"""Attention with queries and keys that are normalised where they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga import functional, planner, testing
from tests.vector_checks import EPS, Given

SIZES = (7, 9, 2, 3)  # Destinations, sources, heads, width
FAMILIES = pytest.mark.parametrize("family", ["scatter", "triton"])
OBJECTIVES = pytest.mark.parametrize("objective", ["time", "memory"])


def drawn(
    dtype: torch.dtype = torch.float64, *, heads: int = 2, device: Any = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and edges."""
    generator = torch.Generator().manual_seed(5)
    num_dst, num_src, _, width = SIZES

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).requires_grad_()

    ends = [torch.randint(n, (30,), generator=generator) for n in (num_src, num_dst)]
    return (
        leaf(num_dst, heads, width),
        leaf(num_src, 2, width),
        leaf(num_src, 2, 4),
        torch.stack(ends).to(device),
    )


def gains(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def apart(query: Tensor, key: Tensor, gain: Tensor | None = None) -> list[Tensor]:
    """Copies of queries and keys as PyTorch normalises them."""
    first, second = (F.rms_norm(x, (x.size(-1),), eps=EPS) for x in (query, key))
    return [first if gain is None else first * gain, second]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@OBJECTIVES
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("own", ["none", "width", "every head"])
def test_is_attention_to_normalised_copies(
    own: str, heads: int, objective: str
) -> None:
    query, key, value, edges = drawn(heads=heads)
    gain = {"none": None, "width": gains(3), "every head": gains(heads, 3)}[own]
    read = [query, key, *([] if gain is None else [gain])]
    leaves = [value, *read]
    given = {"qk_norm": True if gain is None else gain, "scale": -0.7}
    out = functional.graph_attention(
        query, key, value, edges, objective=objective, **given
    )
    copies = apart(query, key, gain)
    expected = functional.graph_attention(*copies, value, edges, scale=-0.7)
    close(out, expected)
    grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    close(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
    )
    weights = functional.graph_attention_weights(query, key, edges, **given)[0]
    copies = apart(query, key, gain)
    expected = functional.graph_attention_weights(*copies, edges, scale=-0.7)[0]
    close(weights, expected)
    grad = torch.linspace(-1, 2, weights.numel(), dtype=out.dtype).view_as(weights)
    close(
        torch.autograd.grad(weights, read, grad),
        torch.autograd.grad(expected, read, grad),
    )


def test_without_it_nothing_is_normalised() -> None:
    query, key, value, edges = drawn()
    expected = functional.graph_attention(query, key, value, edges)
    out = functional.graph_attention(query, key, value, edges, qk_norm=False)
    assert torch.equal(out, expected)
    assert functional.last_plan().problem.form == "dot"


def test_lengths_do_not_matter() -> None:
    query, key, value, edges = drawn()
    expected = functional.graph_attention(query, key, value, edges, qk_norm=True)
    out = functional.graph_attention(query * 300, key * 50, value, edges, qk_norm=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@FAMILIES
@OBJECTIVES
def test_vectors_of_zeros_have_finite_gradients(family: str, objective: str) -> None:
    query, key, value, edges = drawn(torch.float32)
    with torch.no_grad():
        query[:3].zero_()
        key[::2].zero_()
    gain = gains(3, dtype=torch.float32)
    leaves = [query, key, value, gain]
    with planner.pin(family):
        out = functional.graph_attention(
            query, key, value, edges, qk_norm=gain, objective=objective
        )
        found = torch.autograd.grad(out.sin().sum(), leaves)
    assert functional.last_plan().implementation.family == family
    double = [x.detach().double().requires_grad_() for x in leaves]
    copies = apart(double[0], double[1], double[3])
    expected = functional.graph_attention(*copies, double[2], edges)
    truth = torch.autograd.grad(expected.sin().sum(), double)
    for one, other in zip((out, *found), (expected, *truth), strict=True):
        assert one.isfinite().all()
        error = (one.double() - other).abs().max()
        # Gradients by zeros are divided by sqrt(eps): some are in the thousands.
        assert error <= 1e-5 * max(1.0, float(other.detach().abs().max()))


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["gains", "none"])
def test_half_precision_rounds_results_alone(
    dtype: torch.dtype, own: bool, family: str
) -> None:
    query, key, value, edges = drawn(dtype)
    gain = gains(2, 3).detach().to(dtype).requires_grad_() if own else True
    with planner.pin(family):
        out = functional.graph_attention(query, key, value, edges, qk_norm=gain)
    weights = functional.graph_attention_weights(query, key, edges, qk_norm=gain)[0]
    assert out.dtype == weights.dtype == dtype
    double = [x.detach().double() for x in (query, key, value)]
    copies = apart(*double[:2], gain.detach().double() if own else None)
    truth = functional.graph_attention(*copies, double[2], edges)
    # The interpreter rounds towards 0.
    bound = torch.finfo(dtype).eps * truth.abs() + 1e-5
    assert ((out.double() - truth).abs() <= bound).all()
    leaves = [query, key, value, *([gain] if own else [])]
    found = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.dtype == dtype for grad in found)


def test_gains_of_another_dtype_promote() -> None:
    query, key, value, edges = drawn(torch.bfloat16)
    given = (query, key, value, edges)
    gain = gains(3, dtype=torch.float32)
    out = functional.graph_attention(*given, qk_norm=gain)
    assert out.dtype == torch.float32
    assert torch.autograd.grad(out.sum(), gain)[0].dtype == torch.float32
    out = functional.graph_attention(*given, qk_norm=gain.bfloat16())
    assert out.dtype == torch.bfloat16


@FAMILIES
def test_bit_identical_over_runs(family: str) -> None:
    given = Given("dot_norm", testing.row("unsorted"), torch.float32, biases=True)
    with planner.pin(family):
        runs = [(out := given.out(), *given.gradients(out)) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("qk_norm", [True, "gains"])
def test_compiled(qk_norm: bool | str) -> None:
    query, key, value, edges = drawn()
    gain = gains(3)
    leaves = [query, key, value, *([] if qk_norm is True else [gain])]

    def run(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        option = own[0] if own else True
        return functional.graph_attention(query, key, value, edges, qk_norm=option)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*leaves), run(*leaves)
    assert torch.equal(out, expected)
    found, wanted = (
        torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)
    )
    close(found, wanted)


ERRORS = {
    "shape": (
        {"qk_norm": torch.ones(2, 4)},
        r"'qk_norm' must be a floating point tensor of shape \[3\] or \[2, 3\] "
        r"\(got torch.float32 of shape \[2, 4\]\)",
    ),
    "one number a head": ({"qk_norm": torch.ones(2)}, r"\(got .* of shape \[2\]\)"),
    "dimensions": ({"qk_norm": torch.ones(1, 2, 3)}, r"of shape \[1, 2, 3\]\)"),
    "dtype": (
        {"qk_norm": torch.ones(3, dtype=torch.int64)},
        r"\(got torch.int64 of shape \[3\]\)",
    ),
    "device": (
        {"qk_norm": torch.ones(3, device="meta")},
        r"'qk_norm' must be on cpu \(got meta\)",
    ),
    "features": (
        {
            "qk_norm": True,
            "edge_attr": torch.ones(30, 5),
            "edge_proj": torch.ones(2, 3, 5),
        },
        "'edge_attr' and 'edge_proj' must be absent where 'qk_norm' is given, .* "
        r"\(got 'edge_attr' and 'edge_proj'\)",
    ),
    "one of the features": (
        {"qk_norm": torch.ones(3), "edge_proj": torch.ones(2, 3, 5)},
        r"must be absent where 'qk_norm' is given, .* \(got 'edge_proj'\)",
    ),
}


@pytest.mark.parametrize(("changed", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(changed: dict[str, Any], message: str) -> None:
    query, key, value, edges = drawn(torch.float32)
    with pytest.raises(ValueError, match=message):
        functional.graph_attention(query, key, value, edges, **changed)
    with pytest.raises(ValueError, match=message):
        functional.graph_attention_weights(query, key, edges, **changed)


@pytest.mark.parametrize("qk_norm", [None, 1, 0, "rms", [1.0, 1.0, 1.0]])
def test_what_is_no_choice(qk_norm: Any) -> None:
    query, key, value, edges = drawn(torch.float32)
    message = (
        r"'qk_norm' must be True, False or a tensor "
        rf"\(got {type(qk_norm).__name__}\)"
    )
    with pytest.raises(TypeError, match=message):
        functional.graph_attention(query, key, value, edges, qk_norm=qk_norm)
    with pytest.raises(TypeError, match=message):
        functional.graph_attention_weights(query, key, edges, qk_norm=qk_norm)
