"""Cora's test accuracy through our SAGEConv and PyG's, paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import ours, peers
from benchmarks.engine import Context, identity
from benchmarks.graphs import data_file
from benchmarks.records import Record

HIDDEN = 16
CASE = f"cora/F{HIDDEN}"
SEEDS = range(20)
EPOCHS = 200
DROPOUT, LEARNING_RATE, WEIGHT_DECAY = 0.5, 0.01, 5e-4
T_95 = 2.093  # Student's t for 20 pairs
TRAIN, VAL, TEST = 0, 1, 2


@dataclass(frozen=True)
class Cora:
    """The citation graph with its public split."""

    x: Tensor  # [N, 1433], rows summing to 1
    y: Tensor  # [N]
    split: Tensor  # [N]
    edge_index: Tensor  # [2, E]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.y.max()) + 1


def load_cora(device: torch.device) -> Cora:
    """Read ``cora.npz`` from ``PYG_TIGA_DATA``.

    Raises:
        FileNotFoundError: If it is not there.
    """
    path = data_file("cora")
    if path is None:
        raise FileNotFoundError("PYG_TIGA_DATA holds no 'graphs/cora.npz'")
    with np.load(path, allow_pickle=False) as stored:
        pointer, column = stored["x_ptr"], stored["x_col"].astype(np.int64)
        shape = int(stored["num_nodes"]), int(stored["num_features"])
        x = np.zeros(shape, np.float32)
        x[np.repeat(np.arange(len(x)), np.diff(pointer)), column] = 1.0
        x /= x.sum(1, keepdims=True).clip(min=1.0)
        arrays = (x, stored["y"], stored["split"], stored["edge_index"])
        x, y, split, edges = (torch.from_numpy(part).to(device) for part in arrays)
    return Cora(x, y.long(), split, edges.long())


class Net(torch.nn.Module):
    """Two SAGE layers with dropout, as in PyG's citation examples."""

    def __init__(
        self, layer: Callable[[int, int], torch.nn.Module], widths: Sequence[int]
    ) -> None:
        super().__init__()
        self.first = layer(widths[0], widths[1])
        self.second = layer(widths[1], widths[2])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Class scores ``[N, C]``."""
        x = F.dropout(x, DROPOUT, self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, DROPOUT, self.training)
        return self.second(x, edge_index)


def train(
    layer: Callable[[int, int], torch.nn.Module],
    data: Cora,
    seed: int,
    epochs: int = EPOCHS,
) -> Tensor:
    """Train from one seed; the test accuracy at the best validation, in percent.

    The choice of the epoch stays on the device, so that no epoch waits for it.
    """
    torch.manual_seed(seed)
    net = Net(layer, (data.x.size(1), HIDDEN, data.num_classes)).to(data.x.device)
    optimizer = torch.optim.Adam(
        [
            {"params": net.first.parameters(), "weight_decay": WEIGHT_DECAY},
            {"params": net.second.parameters(), "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        fused=data.x.is_cuda,
    )
    masks = [data.split == part for part in (VAL, TEST)]
    rows = (data.split == TRAIN).nonzero().flatten()
    best = torch.full((2,), -1.0, device=data.x.device)
    for _ in range(epochs):
        _step(net, optimizer, data, rows)
        accuracy = _accuracies(net, data, masks)
        best = torch.where(accuracy[0] > best[0], accuracy, best)
    return best[1]


def _step(net: Net, optimizer: torch.optim.Optimizer, data: Cora, rows: Tensor) -> None:
    net.train()
    optimizer.zero_grad()
    F.cross_entropy(net(data.x, data.edge_index)[rows], data.y[rows]).backward()
    optimizer.step()


@torch.no_grad()
def _accuracies(net: Net, data: Cora, masks: Sequence[Tensor]) -> Tensor:
    net.eval()
    right = net(data.x, data.edge_index).argmax(1) == data.y
    return torch.stack([100 * (right & m).sum() / m.sum() for m in masks])


def paired(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Mean of ``first`` and of the paired differences with its 95 % interval."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    reach = T_95 * statistics.stdev(differences) / math.sqrt(count)
    return {
        "accuracy": statistics.fmean(first),
        "diff": mean,
        "diff_low": mean - reach,
        "diff_high": mean + reach,
    }


def measure(context: Context) -> list[Record]:
    """Records of both accuracies; ours carries the paired difference in points."""
    data = load_cora(context.device)
    makers = {"pyg_tiga": ours.sage_conv, "pyg": peers.pyg_sage_conv}
    found = {
        impl: torch.stack([train(layer, data, seed) for seed in SEEDS]).tolist()
        for impl, layer in makers.items()
    }
    extra = {
        "pyg_tiga": paired(found["pyg_tiga"], found["pyg"]),
        "pyg": {"accuracy": statistics.fmean(found["pyg"])},
    }
    cell = identity(context, CASE, "sage_conv", "train", data.x.size(1))
    return [
        Record(**cell, impl=impl, note="accuracy", extra=figures)
        for impl, figures in extra.items()
    ]
