"""Rows of edges in another order."""

from __future__ import annotations

import pytest
import torch

from pyg_tiga.impls.edge_order import take_edges


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 40])
def test_take_edges(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    values = torch.randn(700, heads, device=device)
    index = torch.randint(700, (1500,), device=device)
    assert torch.equal(take_edges(values, index.to(dtype)), values[index])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_take(shape: tuple[int, int], device: torch.device) -> None:
    index = torch.zeros(shape[0], dtype=torch.int32, device=device)
    assert take_edges(torch.ones(shape, device=device), index).shape == shape
