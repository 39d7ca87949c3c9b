"""What steps keep for their backwards, and that it is read once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import pyg_tiga.nn
from pyg_tiga import functional
from pyg_tiga.ops.aggregate_linear import Maps, aggregate_linear
from pyg_tiga.testing import make_case, row

LAYERS = ("SAGEConv", "GATConv", "GATv2Conv", "TransformerConv")
ATTENTION = LAYERS[1:]
NAMES = ("x", "x_dst", "left", "bias", "right")

Edit = Callable[[torch.nn.Module, Tensor], object]


def _edges() -> Tensor:
    return make_case(row("unsorted")).edge_index


def _pair(name: str, **options: Any) -> list[torch.nn.Module]:
    """Our layer and PyG's, with the same parameters."""
    torch.manual_seed(1)
    ours = getattr(pyg_tiga.nn, name)(4, 5, **options)
    theirs = getattr(pyg, name)(4, 5, **options)
    theirs.load_state_dict(ours.state_dict())
    return [ours, theirs]


def _features(edges: Tensor) -> Tensor:
    return torch.randn(int(edges.max()) + 1, 4)


def _saved_products(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    aten = torch.ops.aten
    if op in (aten.mm.default, aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_checkpoints_that_do_not_enter_autograd_again(
    name: str, weights: bool, selective: bool
) -> None:
    if weights and name not in ATTENTION:
        pytest.skip("it has no weights")
    edges, options, found = _edges(), {}, []
    x = _features(edges)
    if selective:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _saved_products
        )

    def run(layer: torch.nn.Module, leaf: Tensor) -> Tensor:
        if not weights:
            return layer(leaf, edges).sum()
        out, (_, weight) = layer(leaf, edges, return_attention_weights=True)
        return out.sum() + weight.square().sum()

    for layer in _pair(name):
        leaf = x.clone().requires_grad_()
        checkpoint(run, layer, leaf, use_reentrant=False, **options).backward()
        found.append([leaf.grad, *[p.grad for p in layer.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _edited(name: str, edit: Edit, leaf: bool, **options: Any) -> None:
    """An edit between forward and backward is for ours what it is for PyG's."""
    edges, found = _edges(), []
    x = _features(edges)
    for layer in _pair(name, **options):
        hidden = x.clone().requires_grad_(leaf) * 1.0
        out = layer(hidden, edges)
        with torch.no_grad():
            edit(layer, hidden)
        out.sum().backward()
        found.append([p.grad for p in layer.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("edit", "leaf", "options"),
    [
        (lambda layer, x: layer.lin_l.weight.mul_(2), False, {}),
        (lambda layer, x: layer.lin_l.bias.mul_(2), True, {}),
        (lambda layer, x: x.zero_(), False, {"root_weight": False}),
        (lambda layer, x: x.zero_(), True, {"root_weight": False}),
    ],
    ids=["weight", "bias", "features", "hidden features"],
)
def test_what_sage_does_not_read_may_be_edited(
    edit: Edit, leaf: bool, options: dict[str, bool]
) -> None:
    _edited("SAGEConv", edit, leaf, **options)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_bias_may_be_edited(name: str) -> None:
    def edit(layer: torch.nn.Module, x: Tensor) -> None:
        for key, value in layer.named_parameters():
            if key.endswith("bias"):
                value.mul_(2)

    _edited(name, edit, True)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_initialised_for_inference_trains(name: str) -> None:
    edges = _edges()
    layer, x = getattr(pyg_tiga.nn, name)(-1, 5), _features(edges)
    with torch.inference_mode():
        layer(x, edges)
    layer(x, edges).sum().backward()
    # PyTorch leaves what was made for inference without gradients in places.
    made = [p for p in layer.parameters() if not p.is_inference()]
    assert made
    assert all(p.grad is not None for p in made)


FROZEN = [
    ("left",),
    ("right",),
    ("x",),
    ("x_dst",),
    ("left", "right"),
    ("x", "bias"),
    ("x", "left", "right"),
]


@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
@pytest.mark.parametrize("form", ["same", "bipartite", "no root"])
def test_second_derivatives_of_what_is_not_frozen(
    form: str, frozen: tuple[str, ...]
) -> None:
    case = make_case(row("unsorted"), torch.float64)
    graph, width = case.graph(), 3
    made = {
        "x": case.x[:, :width],
        "left": torch.randn(2, width, dtype=torch.float64),
        "bias": torch.randn(2, dtype=torch.float64),
    }
    if form == "bipartite":
        made["x_dst"] = torch.randn(case.num_dst, 4, dtype=torch.float64)
    if form != "no root":
        size = (2, 4 if form == "bipartite" else width)
        made["right"] = torch.randn(size, dtype=torch.float64)
    leaves = {
        name: value.clone().requires_grad_(name not in frozen)
        for name, value in made.items()
    }

    def call(*tensors: Tensor) -> Tensor:
        given = dict(zip(leaves, tensors, strict=True))
        x = given["x"]
        x_dst = x if form == "same" else given.get("x_dst")
        maps = Maps(given["left"], given["bias"], given.get("right"))
        return aggregate_linear(graph, x, x_dst, maps, "dst")

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))
    assert torch.autograd.gradgradcheck(call, tuple(leaves.values()))


def _second(
    call: Callable[..., Tensor], given: dict[str, Tensor], frozen: str
) -> list[Tensor]:
    """First and second derivatives by all that is not frozen."""
    leaves = {
        name: value.detach().clone().requires_grad_(name not in frozen.split())
        for name, value in given.items()
    }
    wanted = [value for value in leaves.values() if value.requires_grad]
    out = call(**leaves).square().sum()
    first = torch.autograd.grad(out, wanted, create_graph=True)
    total = sum(grad.square().sum() for grad in first)
    return [*first, *torch.autograd.grad(total, wanted)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("same", [True, False], ids=["same", "bipartite"])
@pytest.mark.parametrize(
    "frozen",
    ["", "x_src", "x_dst", "att_src", "att_dst", "x_src x_dst", "att_src att_dst"],
)
def test_second_derivatives_of_scores_and_attention(frozen: str, same: bool) -> None:
    edges = _edges()
    num, shape = int(edges.max()) + 1, (2, 4)
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, *shape, generator=generator)

    given = {"x_src": draw(num), "att_src": draw(), "att_dst": draw()}
    given |= {} if same else {"x_dst": draw(num)}

    def fused(
        x_src: Tensor, att_src: Tensor, att_dst: Tensor, x_dst: Tensor | None = None
    ) -> Tensor:
        x_dst = x_src if x_dst is None else x_dst
        return functional.gat_attention(edges, x_src, x_dst, att_src, att_dst)

    def by_steps(
        x_src: Tensor, att_src: Tensor, att_dst: Tensor, x_dst: Tensor | None = None
    ) -> Tensor:
        x_dst = x_src if x_dst is None else x_dst
        scores = ((x_src * att_src).sum(-1), (x_dst * att_dst).sum(-1))
        return functional.additive_attention(edges, x_src, *scores)

    found, expected = (_second(call, given, frozen) for call in (fused, by_steps))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["additive", "dot"])
def test_values_alone_read_weights(form: str) -> None:
    edges = _edges()
    num = int(edges.max()) + 1
    value, other = torch.randn(num, 2, 3), torch.randn(num, 2, 3)

    def run(value: Tensor) -> Tensor:
        if form == "dot":
            return functional.graph_attention(other, other, value, edges)
        scores = other.sum(-1)
        return functional.additive_attention(edges, value, scores, scores)

    leaf = value.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(leaf).sum(), leaf)
    hidden = leaf * 1.0
    out = run(hidden)
    hidden.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf)[0], expected)


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_weighted_sum_keeps_the_other_operand_alone(wanted: str) -> None:
    case, kept = make_case(row("unsorted")), []
    operands = {"x": case.x.clone(), "weight": case.weight.clone()}
    operands[wanted].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        functional.spmm(case.edge_index, **operands)
    (only,) = kept
    assert only is not operands[wanted]
