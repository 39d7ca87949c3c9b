"""SAGEConv against PyG's on real graphs, with their hubs, loops and directions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.nn.sage_checks import assert_same, is_fused, pair_of_layers

AGGR = pytest.mark.parametrize("aggr", ["mean", "max"])
WIDTH = 16


def _load(folder: Path, name: str) -> dict[str, Tensor]:
    with np.load(folder / "graphs" / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def _binary_features(graph: dict[str, Tensor]) -> Tensor:
    """Rows with a one at every stored column, ``[N, F]``."""
    shape = (int(graph["num_nodes"]), int(graph["num_features"]))
    x = torch.zeros(shape)
    row = torch.arange(shape[0]).repeat_interleave(graph["x_ptr"].diff())
    x[row, graph["x_col"].long()] = 1
    return x


@AGGR
def test_cora_with_its_own_features(
    data_dir: Path, aggr: str, device: torch.device
) -> None:
    graph = _load(data_dir, "cora")
    x = _binary_features(graph).to(device)
    assert x.sum() == graph["x_col"].numel()
    ours, theirs = pair_of_layers(x.size(1), WIDTH, aggr=aggr, device=device)
    assert_same(ours, theirs, x, graph["edge_index"].long().to(device))
    assert is_fused(ours)


@AGGR
@pytest.mark.parametrize("name", ["musae_github", "soc_slashdot0902"])
def test_heavy_tails(
    data_dir: Path, name: str, aggr: str, device: torch.device
) -> None:
    graph = _load(data_dir, name)
    x = torch.randn(int(graph["num_nodes"]), WIDTH, device=device)
    ours, theirs = pair_of_layers(WIDTH, WIDTH, aggr=aggr, device=device)
    assert_same(ours, theirs, x, graph["edge_index"].long().to(device))
    assert is_fused(ours)


def test_slashdot_is_directed_and_has_loops(data_dir: Path) -> None:
    src, dst = _load(data_dir, "soc_slashdot0902")["edge_index"].long()
    assert (src == dst).any()
    forth, back = src * src.numel() + dst, dst * src.numel() + src
    assert not torch.isin(forth, back).all()
