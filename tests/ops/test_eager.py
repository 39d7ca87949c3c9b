"""The eager road: when autograd is entered, what is kept, and functional transforms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional
from pyg_tiga.testing import Case, make_case, row


@pytest.fixture
def case() -> Case:
    return make_case(row("unsorted"))


def test_no_gradient_no_autograd_node(case: Case) -> None:
    assert functional.spmm(case.edge_index, case.x).grad_fn is None
    x = case.x.clone().requires_grad_()
    with torch.no_grad():
        assert functional.spmm(case.edge_index, x, reduce="max").grad_fn is None


def test_sums_keep_neither_features_nor_messages(case: Case) -> None:
    kept: list[Tensor] = []
    x = case.x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        functional.spmm(case.edge_index, x, reduce="mean")
        functional.spmm(case.edge_index, x, case.weight)
    assert {tuple(t.shape) for t in kept} == {tuple(case.weight.shape)}


def test_the_first_winner_keeps_one_integer_table(case: Case) -> None:
    kept: list[Tensor] = []
    x = case.x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        functional.spmm(case.edge_index, x, reduce="max", ties="first")
    assert sorted(t.numel() for t in kept) == [0, 0, x.numel()]


def test_a_feature_changed_before_backward_is_noticed(case: Case) -> None:
    x = case.x.clone().requires_grad_()
    hidden = x * 1.0
    out = functional.spmm(case.edge_index, hidden, reduce="max")
    hidden.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_functional_gradients_and_batches(case: Case) -> None:
    def loss(x: Tensor) -> Tensor:
        return functional.spmm(case.edge_index, x, reduce="mean").square().sum()

    x = case.x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(case.x), expected)
    batch = torch.stack([case.x, 2 * case.x])
    mapped = torch.func.vmap(lambda x: functional.spmm(case.edge_index, x))(batch)
    torch.testing.assert_close(mapped, functional.spmm(case.edge_index, batch))


def test_mixed_precision_weights_promote(case: Case) -> None:
    x = case.x.bfloat16().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    out = functional.spmm(case.edge_index, x, weight)
    assert out.dtype == torch.float32
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert (grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
