"""Cora's test accuracy through our layers and PyG's, paired by seed."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import measure
from benchmarks.engine import FAILURES, Context, identity
from benchmarks.graphs import data_file
from benchmarks.records import Record

SEEDS = range(20)
EPOCHS = 200
T_95 = 2.093  # Student's t for 20 pairs
TRAIN, VAL, TEST = 0, 1, 2
NOTE = "accuracy"
log = logging.getLogger("benchmarks")

Layer = Callable[..., torch.nn.Module]


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


@dataclass(frozen=True)
class Recipe:
    """A network of PyG's citation examples with its hyperparameters.

    Args:
        case: The case of its records.
        op: The op of its records.
        build: Makes the network from a layer, the input width and the classes.
        learning_rate: Adam's.
        weight_decay: Of each layer: a layer's parameters form a group.
    """

    case: str
    op: str
    build: Callable[[Layer, int, int], torch.nn.Module]
    learning_rate: float
    weight_decay: tuple[float, float]

    def optimizer(
        self, net: torch.nn.Module, *, capturable: bool = False
    ) -> torch.optim.Optimizer:
        """Adam as the example has it; ``capturable`` also fuses it."""
        groups = [
            {"params": list(layer.parameters()), "weight_decay": decay}
            for layer, decay in zip(net.children(), self.weight_decay, strict=True)
        ]
        kind = {"capturable": True, "fused": True} if capturable else {}
        return torch.optim.Adam(groups, lr=self.learning_rate, **kind)


class SageNet(torch.nn.Module):
    """Two SAGE layers with dropout."""

    HIDDEN, DROPOUT = 16, 0.5

    def __init__(self, layer: Layer, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = layer(in_channels, self.HIDDEN)
        self.second = layer(self.HIDDEN, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Class scores ``[N, C]``."""
        x = F.dropout(x, self.DROPOUT, self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, self.DROPOUT, self.training)
        return self.second(x, edge_index)


class GatNet(torch.nn.Module):
    """PyG's example ``gat.py``: 8 heads of 8, then one head of the classes."""

    HEADS, HIDDEN, DROPOUT = 8, 8, 0.6

    def __init__(self, layer: Layer, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = layer(in_channels, self.HIDDEN, self.HEADS, dropout=self.DROPOUT)
        self.second = layer(
            self.HIDDEN * self.HEADS,
            num_classes,
            1,
            concat=False,
            dropout=self.DROPOUT,
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Class scores ``[N, C]``."""
        x = F.dropout(x, self.DROPOUT, self.training)
        x = F.elu(self.first(x, edge_index))
        x = F.dropout(x, self.DROPOUT, self.training)
        return self.second(x, edge_index)


SAGE = Recipe("cora/F16", "sage_conv", SageNet, 0.01, (5e-4, 0.0))
GAT = Recipe("cora/8x8", "gat_conv", GatNet, 0.005, (5e-4, 5e-4))


def training_step(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Cora,
    edge_index: Tensor,
) -> Callable[[], None]:
    """One step on the training nodes, optimizer and all."""
    rows = (data.split == TRAIN).nonzero().flatten()
    labels = data.y[rows]

    def step() -> None:
        net.train()
        optimizer.zero_grad()
        F.cross_entropy(net(data.x, edge_index)[rows], labels).backward()
        optimizer.step()

    return step


class Trainer:
    """Trains one network from many seeds.

    On a GPU one epoch is captured in a CUDA graph and replayed, for either side: the
    numbers are the same and no epoch waits for the host. The choice of the best epoch
    stays on the device for the same reason.

    Args:
        recipe: The network and its hyperparameters.
        layer: Its layer.
        data: The graph.
        edge_index: Its edges as this layer takes them.
    """

    def __init__(
        self, recipe: Recipe, layer: Layer, data: Cora, edge_index: Tensor | None = None
    ) -> None:
        on_gpu = data.x.is_cuda
        self._make = lambda: recipe.build(layer, data.x.size(1), data.num_classes)
        self._data = data
        self._edges = data.edge_index if edge_index is None else edge_index
        self._net = self._make().to(data.x.device)
        self._optimizer = recipe.optimizer(self._net, capturable=on_gpu)
        self._masks = [data.split == part for part in (VAL, TEST)]
        self._best = torch.full((2,), -1.0, device=data.x.device)
        self._step = training_step(self._net, self._optimizer, data, self._edges)
        self._epoch = self._captured() if on_gpu else self._plain_epoch

    def accuracy(self, seed: int, epochs: int = EPOCHS) -> float:
        """The test accuracy at the best validation, in percent."""
        torch.manual_seed(seed)
        self._net.load_state_dict(self._make().state_dict())
        for state in self._optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        self._best.fill_(-1.0)
        for _ in range(epochs):
            self._epoch()
        return float(self._best[1])

    def _plain_epoch(self) -> None:
        self._step()
        accuracy = self._accuracies()
        better = accuracy[0] > self._best[0]
        self._best.copy_(torch.where(better, accuracy, self._best))

    @torch.no_grad()
    def _accuracies(self) -> Tensor:
        self._net.eval()
        right = self._net(self._data.x, self._edges).argmax(1) == self._data.y
        return torch.stack([100 * (right & m).sum() / m.sum() for m in self._masks])

    def _captured(self) -> Callable[[], None]:
        try:
            graph = measure.capture(self._plain_epoch, warm_up=self._warm_up)
        except FAILURES as failure:
            log.warning("training runs uncaptured", exc_info=failure)
            return self._plain_epoch
        return graph.replay

    def _warm_up(self) -> None:
        for _ in range(3):
            self._plain_epoch()


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


def measure_pairs(
    context: Context, recipe: Recipe, data: Cora, ours: Trainer, peer: Trainer
) -> list[Record]:
    """Records of both accuracies; ours carries the paired difference in points."""
    mine, other = ([each.accuracy(seed) for seed in SEEDS] for each in (ours, peer))
    figures = {
        "pyg_tiga": paired(mine, other),
        "pyg": {"accuracy": statistics.fmean(other)},
    }
    cell = identity(context, recipe.case, recipe.op, "train", data.x.size(1))
    return [
        Record(**cell, impl=impl, note=NOTE, extra=extra)
        for impl, extra in figures.items()
    ]
