"""Edge attention as a node of compiled code gives what Python gives, bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional
from pyg_tiga.ops import attention_run
from tests.native.conftest import Noted
from tests.native.test_on_gpu import EDGES, NODES, edges, equal, is_node

pytestmark = pytest.mark.gpu

HEADS, CHANNELS = 4, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"objective": "memory"},
    "dropout, loops": {"dropout": 0.4, "self_loops": True},
    "mask": {"mask": True},
    "terms": {"terms": True},
    "terms, loops, memory": {"terms": True, "self_loops": True, "objective": "memory"},
}
SCORES = ("additive", "dot", "dot_norm", "gatv2")


class Attention:
    """A call of one of the functions, its leaves, and the gradient of its result."""

    def __init__(self, score: str, dtype: torch.dtype, **options: Any) -> None:
        self.score, self.edge_index = score, edges(True)
        terms, mask = options.pop("terms", False), options.pop("mask", False)
        self.options = options
        shape = (NODES, HEADS, CHANNELS)
        shapes = {
            "additive": (shape, shape[:2], shape[:2]),
            "dot": (shape, shape, shape),
            "dot_norm": (shape, shape, shape, shape[1:]),
            "gatv2": (shape, shape, shape[1:]),
        }[score]
        draw = lambda shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
        self.leaves = [draw(shape).requires_grad_() for shape in shapes]
        self.terms = [draw((EDGES, HEADS)).requires_grad_()] if terms else []
        if mask:
            self.options["edge_mask"] = torch.rand(EDGES, device="cuda") < 0.7
        if "dropout" in options:
            self.options["seed"] = torch.tensor([7], device="cuda")
        self.grad = draw(shape)

    def __call__(self) -> Tensor:
        """The result."""
        names = {"additive": "edge_term"}
        names = [names.get(self.score, "edge_bias")] if self.terms else []
        options = {**self.options, **dict(zip(names, self.terms, strict=True))}
        if self.score.startswith("dot"):
            tensors, gains = self.leaves[:3], self.leaves[3:]
            options |= dict(zip(("qk_norm",), gains, strict=False))
            return functional.graph_attention(*tensors, self.edge_index, **options)
        run = functional.gatv2_attention
        if self.score == "additive":
            run = functional.additive_attention
        return run(self.edge_index, *self.leaves, **options)

    def step(self, **options: Any) -> list[Tensor]:
        """The result and all gradients."""
        out, inputs = self(), [*self.leaves, *self.terms]
        found = torch.autograd.grad(out, inputs, self.grad, **options)
        return [out.detach(), *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_steps_give_what_python_gives(
    noted: Noted, score: str, options: str, dtype: torch.dtype
) -> None:
    call = Attention(score, dtype, **OPTIONS[options])
    expected = call.step()
    assert equal(call.step(), expected)
    assert noted.recorded == 2
    noted.replayed = 0
    for _ in range(2):
        assert equal(call.step(), expected)
    assert (noted.recorded, noted.replayed) == (2, 0)
    assert is_node(call())
    with torch.no_grad():
        assert torch.equal(call(), expected[0])


@pytest.fixture(params=SCORES)
def call(request: pytest.FixtureRequest, noted: Noted) -> Attention:
    """A call that runs as a node."""
    made = Attention(request.param, torch.float32)
    for _ in range(2):
        made.step()
    assert is_node(made())
    return made


def test_gradients_again_and_in_batches(call: Attention) -> None:
    expected = call.step()
    for one, other in zip(call.step(create_graph=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    out = call()
    grads = torch.stack([call.grad, 2 * call.grad])
    found = torch.autograd.grad(out, call.leaves, grads, is_grads_batched=True)
    for one, other in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(one, torch.stack([other, 2 * other]))


def test_gradients_that_nobody_wants(call: Attention) -> None:
    expected = call.step()
    for keep in ([0], [1], [2], [0, 1]):
        for _ in range(2):
            leaves = [call.leaves[i] for i in keep]
            found = torch.autograd.grad(call(), leaves, call.grad)
            assert equal(list(found), [expected[1 + i] for i in keep])
    for leaf in call.leaves[1:]:
        leaf.requires_grad_(False)
    for _ in range(2):
        (found,) = torch.autograd.grad(call(), call.leaves[:1], call.grad)
        torch.testing.assert_close(found, expected[1])


def test_gradients_of_other_strides(call: Attention) -> None:
    expected = call.step()[1:]
    wide = call.grad.new_zeros(NODES, 2 * HEADS, CHANNELS)
    every = (
        wide[:, :HEADS].copy_(call.grad),
        wide[:, ::2].copy_(call.grad),
        call.grad.transpose(0, 1).contiguous().transpose(0, 1),
        call.grad.transpose(1, 2).contiguous().transpose(1, 2),
    )
    for grad in every:
        grad.copy_(call.grad)
        for _ in range(2):
            found = torch.autograd.grad(call(), call.leaves, grad)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_edited_result_is_formed_again(call: Attention) -> None:
    expected = call.step()[1:]
    for _ in range(2):
        out = call()
        # Its gradient is that of the result as it was.
        out.mul_(2.0)
        found = torch.autograd.grad(out, call.leaves, call.grad / 2)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_edited_inputs_are_an_error(call: Attention) -> None:
    # Gains are multiplied first, and nothing reads them afterwards.
    for leaf in call.leaves[:3]:
        out = call()
        with torch.no_grad():
            leaf.add_(0.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, call.leaves, call.grad)


def test_an_edited_mask_is_an_error(noted: Noted) -> None:
    call = Attention("dot", torch.float32, mask=True)
    for _ in range(3):
        out = call()
        torch.autograd.grad(out, call.leaves, call.grad)
    out = call()
    call.options["edge_mask"].logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, call.leaves, call.grad)


def test_keys_that_are_the_values(noted: Noted) -> None:
    call = Attention("dot", torch.float32)
    call.leaves[2] = call.leaves[1]
    wanted = call.leaves[:2]
    for _ in range(3):
        found = torch.autograd.grad(call(), wanted, call.grad)
    apart = [*wanted, wanted[1].detach().clone().requires_grad_()]
    call.leaves = apart
    expected = torch.autograd.grad(call(), apart, call.grad)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        found[1], expected[1] + expected[2], rtol=1e-4, atol=1e-4
    )


def test_a_node_keeps_no_more_memory_than_python(
    call: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = []
    for road in (attention_run.run_as_node, lambda *args: None):
        monkeypatch.setattr(attention_run, "run_as_node", road)
        for _ in range(2):
            call.step()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        call.step()
        peaks.append(torch.cuda.max_memory_allocated() - base)
    assert peaks[0] <= peaks[1]
