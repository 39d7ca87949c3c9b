"""Edge features in `functional.graph_attention`, against the formula written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import _philox, functional
from pyg_tiga.functional import graph_attention, graph_attention_weights
from pyg_tiga.testing import make_case, row

HEADS, WIDTH, FEATURES = 2, 3, 4
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "loops": {"self_loops": True},
    "dropped": {"dropout": 0.4},
    "masked": {"masked": True},
    "everything": {"self_loops": True, "dropout": 0.4, "masked": True, "bias": True},
}
CHOICE = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
ROWS = pytest.mark.parametrize(
    "problem", ["self_loops", "more_sources", "isolated", "no_edges", "hub_row"]
)


class Given:
    """Operands on the edges of a row."""

    def __init__(
        self,
        problem: str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        made = row(problem)
        self.edge_index = make_case(made, device=device).edge_index
        self.size = (made.num_src, made.num_dst)
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(device, dtype).requires_grad_()

        num_src, num_dst = self.size
        num_edges = self.edge_index.size(1)
        self.leaves = [
            draw(num_dst, HEADS, WIDTH),
            draw(num_src, HEADS, WIDTH),
            draw(num_src, HEADS, WIDTH),
            draw(num_edges, FEATURES),
            draw(HEADS, WIDTH, FEATURES),
        ]
        self.grad = draw(num_dst, HEADS, WIDTH).detach()
        self.bias = draw(num_edges, HEADS).detach()
        self.mask = torch.arange(num_edges, device=device) % 4 != 1

    def options(
        self, *, masked: bool = False, bias: bool = False, **rest: Any
    ) -> dict[str, Any]:
        """Arguments of a call."""
        found = {**rest, "size": self.size}
        if rest.get("dropout"):
            found["seed"] = torch.tensor([5], device=self.edge_index.device)
        if masked:
            found["edge_mask"] = self.mask
        if bias:
            found["edge_bias"] = self.bias
        return found

    def out(self, *leaves: Tensor, **choice: Any) -> Tensor:
        """The operation."""
        query, key, value, attr, proj = leaves or self.leaves
        given = {"edge_attr": attr, "edge_proj": proj, **self.options(**choice)}
        return graph_attention(query, key, value, self.edge_index, **given)

    def dense(
        self,
        *leaves: Tensor,
        self_loops: bool = False,
        dropout: float = 0.0,
        masked: bool = False,
        bias: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The formula with a row of H C for every edge; weights of stored edges."""
        query, key, value, attr, proj = leaves or self.leaves
        source, target = self.edge_index
        num_edges, loops = source.numel(), min(self.size) if self_loops else 0
        live = torch.ones_like(source, dtype=torch.bool)
        live &= self.mask if masked else live
        live &= (source != target) if self_loops else live
        loop = torch.arange(loops, device=source.device)
        live = torch.cat([live, torch.ones_like(loop, dtype=torch.bool)])
        source, target = torch.cat([source, loop]), torch.cat([target, loop])
        edge = torch.einsum("ed,hcd->ehc", attr, proj)
        edge = torch.cat([edge, edge.new_zeros(loops, HEADS, WIDTH)])
        scores = (query[target] * (key[source] + edge)).sum(-1) * WIDTH**-0.5
        if bias:
            scores = scores + torch.cat([self.bias, self.bias.new_zeros(loops, HEADS)])
        power = scores.exp() * live.unsqueeze(1)
        total = power.new_zeros(self.size[1], HEADS).index_add(0, target, power)
        weight = power / total.clamp(min=1e-300)[target]
        if dropout:
            seed = torch.tensor([5], device=source.device)
            keep = _philox.kept(seed, num_edges + loops, HEADS, dropout)
            weight = weight * keep / (1 - dropout)
        message = weight.unsqueeze(-1) * (value[source] + edge)
        out = message.new_zeros(self.size[1], HEADS, WIDTH)
        return out.index_add(0, target, message), weight[:num_edges]


@ROWS
@CHOICE
def test_results_and_gradients(problem: str, choice: dict[str, Any]) -> None:
    given = Given(problem)
    found, (expected, weights) = given.out(**choice), given.dense(**choice)
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(found, given.leaves, given.grad)
    theirs = torch.autograd.grad(expected, given.leaves, given.grad)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)
    query, key, _, attr, proj = given.leaves
    rest = {"edge_attr": attr, "edge_proj": proj, **given.options(**choice)}
    alone = graph_attention_weights(query, key, given.edge_index, **rest)[0]
    torch.testing.assert_close(alone, weights)


def test_derivatives_of_second_order() -> None:
    given = Given("more_sources")
    assert torch.autograd.gradgradcheck(given.out, given.leaves, fast_mode=True)


@CHOICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("small_pieces")
def test_kernels(
    choice: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    given = Given("hub_row", device, dtype)
    found = given.out(**choice)
    assert found.dtype == dtype
    ours = torch.autograd.grad(found, given.leaves, given.grad)
    assert functional.last_plan().implementation.family == "triton"
    exact = Given("hub_row", device)
    exact.bias = given.bias.double()
    wide = [x.detach().double().requires_grad_() for x in given.leaves]
    expected = exact.dense(*wide, **choice)[0]
    theirs = torch.autograd.grad(expected, wide, given.grad.double())
    most = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for x, y in zip((found, *ours), (expected, *theirs), strict=True):
        assert x.dtype == dtype
        assert (x.double() - y).norm() <= most * y.norm().clamp(min=1.0)


@pytest.mark.usefixtures("small_pieces")
def test_results_repeat(device: torch.device) -> None:
    given = Given("hub_row", device, torch.float32)

    def once() -> list[Tensor]:
        out = given.out(dropout=0.4)
        return [out, *torch.autograd.grad(out, given.leaves, given.grad)]

    first = once()
    for _ in range(3):
        assert all(map(torch.equal, first, once()))


def test_compiled_and_transformed() -> None:
    given = Given("more_sources")
    expected = given.out()
    torch._dynamo.reset()
    compiled = torch.compile(given.out, backend="aot_eager", fullgraph=True)
    found = compiled(*given.leaves)
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(found, given.leaves, given.grad)
    theirs = torch.autograd.grad(expected, given.leaves, given.grad)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)
    pulled = torch.func.vjp(given.out, *given.leaves)[1](given.grad)
    for x, y in zip(pulled, theirs, strict=True):
        torch.testing.assert_close(x, y)


def test_features_of_masked_edges_are_not_seen() -> None:
    given = Given("hub_row")
    expected = given.out(masked=True)
    with torch.no_grad():
        given.leaves[3][~given.mask] = float("nan")
    torch.testing.assert_close(given.out(masked=True), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_proj": None}, "given together"),
        ({"edge_attr": torch.zeros(3, FEATURES)}, "one row for each"),
        ({"edge_attr": torch.zeros(3)}, "of 2 dimensions"),
        ({"edge_proj": torch.zeros(HEADS, WIDTH, 9)}, "must have shape"),
        ({"edge_attr": torch.zeros(3, FEATURES, dtype=torch.int64)}, "floating point"),
        ({"edge_attr": torch.zeros(3, FEATURES, device="meta")}, "must be on cpu"),
    ],
)
def test_bad_features(change: dict[str, Any], message: str) -> None:
    given = Given("more_sources")
    query, key, value, attr, proj = given.leaves
    arguments = {"edge_attr": attr, "edge_proj": proj, "size": given.size, **change}
    with pytest.raises(ValueError, match=message):
        graph_attention(query, key, value, given.edge_index, **arguments)


@pytest.mark.parametrize("name", ["edge_attr", "edge_proj"])
@pytest.mark.parametrize("value", [[[1.0]], 2, "x", torch.ones(2, 2).to_sparse()])
def test_features_that_are_no_dense_tensors(name: str, value: Any) -> None:
    given = Given("more_sources")
    query, key, value_, attr, proj = given.leaves
    rest = {"edge_attr": attr, "edge_proj": proj, "size": given.size, name: value}
    with pytest.raises(TypeError, match=f"'{name}' must be a dense tensor"):
        graph_attention(query, key, value_, given.edge_index, **rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_have_the_dtype_to_which_operands_promote(dtype: torch.dtype) -> None:
    given = Given("more_sources")
    query, key, _, attr, proj = [x.detach().to(dtype) for x in given.leaves]
    found = graph_attention_weights(
        query, key, given.edge_index, edge_attr=attr, edge_proj=proj, size=given.size
    )
    assert [x.dtype for x in found] == [dtype, dtype]
    found = graph_attention_weights(
        query,
        key,
        given.edge_index,
        edge_attr=attr.float(),
        edge_proj=proj,
        size=given.size,
    )
    assert found[0].dtype is torch.float32


def test_values_of_another_width() -> None:
    given = Given("more_sources")
    query, key, value, attr, proj = given.leaves
    value = value.repeat(1, 1, 2)
    rest = {"edge_attr": attr, "edge_proj": proj, "size": given.size}
    with pytest.raises(ValueError, match="'value' must have the 3 channels"):
        graph_attention(query, key, value, given.edge_index, **rest)
