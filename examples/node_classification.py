"""Node classification on a citation graph, through the layers of pyg_tiga.

    python examples/node_classification.py --config configs/cora_sage.yaml

Every entry of the configuration is also an option (`--model.dropout 0.3`). The data
come from `--root`, from the folder `PYG_TIGA_DATA`, or from a download; without any
of these the example trains on a synthetic graph of Cora's size, and says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal
from urllib.request import urlopen

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.seed import seed_everything
from torch_geometric.transforms import NormalizeFeatures, RandomNodeSplit
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_tiga as tg
from pyg_tiga.nn import GATConv, SAGEConv

RAW_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
DOWNLOAD_TIMEOUT = 5.0  # seconds without a byte

CORA_CLASSES = (351, 217, 418, 818, 426, 298, 180)  # nodes
CORA_EDGES = 5278  # undirected
CORA_HOMOPHILY = 0.81
CORA_FEATURES = 1433

console = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        layer: Name of the graph layer, a key of `LAYERS`.
        hidden_channels: Width between the two layers, of each head if they have heads.
        heads: Heads of the first layer, if it attends.
        dropout: Probability of dropping an input of a layer or an attention weight.
        activation: Function between the two layers.
    """

    layer: str = "sage"
    hidden_channels: int = 64
    heads: int = 8
    dropout: float = 0.5
    activation: Literal["relu", "elu"] = "relu"


@dataclass(frozen=True)
class Training:
    """How it is trained.

    Attributes:
        epochs: Number of steps, each over the whole graph.
        lr: Learning rate of Adam.
        weight_decay: Weight of the squared parameters in the loss.
    """

    epochs: int = 200
    lr: float = 0.01
    weight_decay: float = 5e-4


Layers = tuple[torch.nn.Module, torch.nn.Module]


def sage_layers(config: Model, in_channels: int, out_channels: int) -> Layers:
    hidden = config.hidden_channels
    return SAGEConv(in_channels, hidden), SAGEConv(hidden, out_channels)


def gat_layers(config: Model, in_channels: int, out_channels: int) -> Layers:
    hidden, heads, dropout = config.hidden_channels, config.heads, config.dropout
    first = GATConv(in_channels, hidden, heads, dropout=dropout)
    last = GATConv(heads * hidden, out_channels, concat=False, dropout=dropout)
    return first, last


LAYERS = {"sage": sage_layers, "gat": gat_layers}


class Net(torch.nn.Module):
    """Two graph layers with dropout before each.

    Args:
        config: Layer, widths, dropout and activation.
        in_channels: Width of the node features.
        out_channels: Number of classes.
    """

    def __init__(self, config: Model, in_channels: int, out_channels: int) -> None:
        super().__init__()
        if config.layer not in LAYERS:
            raise ValueError(
                f"'model.layer' must be one of {sorted(LAYERS)} (got {config.layer!r})"
            )
        layers = LAYERS[config.layer](config, in_channels, out_channels)
        self.dropout = config.dropout
        self.activation = getattr(F, config.activation)
        self.conv1, self.conv2 = layers

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the class scores, `[N, classes]`."""
        x = F.dropout(x, self.dropout, self.training)
        x = self.activation(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


def load_data(name: str, root: Path | None) -> Data:
    """The citation graph, or the synthetic one where it cannot be had."""
    shared = Path(os.environ.get("PYG_TIGA_DATA", ""), "planetoid")
    if root is not None and has_raw_files(root, name):
        return read_planetoid(root, name)
    if has_raw_files(shared, name):
        return read_copied(shared, name)
    root = root or Path("data", "planetoid")
    try:
        download(root, name)
    except (OSError, HTTPException) as error:
        console.print(
            f"No data for {name}: not in '--root', not in PYG_TIGA_DATA, and the "
            f"download failed ({error}). Training on a synthetic block-model graph "
            f"of Cora's size instead."
        )
        return block_model_graph()
    return read_planetoid(root, name)


def raw_files(name: str) -> list[str]:
    return [f"ind.{name.lower()}.{part}" for part in RAW_PARTS]


def has_raw_files(root: Path, name: str) -> bool:
    return all((root / name / "raw" / file).is_file() for file in raw_files(name))


def read_planetoid(root: Path, name: str) -> Data:
    return Planetoid(str(root), name, transform=NormalizeFeatures())[0]


def read_copied(root: Path, name: str) -> Data:
    """Read from a copy, because PyG writes processed files beside the raw ones."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            root / name / "raw",
            Path(folder, name, "raw"),
            copy_function=shutil.copyfile,
        )
        return read_planetoid(Path(folder), name)


def download(root: Path, name: str) -> None:
    """Fetch the raw files with a short timeout, where PyG's own would wait long."""
    console.print(f"Downloading {name} to {root} ...")
    folder = root / name / "raw"
    for file in raw_files(name):
        with urlopen(f"{Planetoid.url}/{file}", timeout=DOWNLOAD_TIMEOUT) as response:
            content = response.read()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)


def block_model_graph(seed: int = 0) -> Data:
    """A random graph with Cora's classes, density, homophily and feature width."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = torch.tensor(CORA_CLASSES)
        edge_index = stochastic_blockmodel_graph(sizes, edge_probabilities(sizes))
        y = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        data = Data(x=bag_of_words(y), edge_index=edge_index, y=y)
        split = RandomNodeSplit(
            "random", num_train_per_class=20, num_val=500, num_test=1000
        )
        return NormalizeFeatures()(split(data))


def edge_probabilities(sizes: Tensor) -> Tensor:
    """Probabilities that give Cora's number of edges and its homophily."""
    pairs = torch.outer(sizes, sizes) / 2
    inside = pairs.diagonal().sum()
    outside = pairs.sum() - inside
    probs = torch.full_like(pairs, (1 - CORA_HOMOPHILY) * CORA_EDGES / float(outside))
    return probs.fill_diagonal_(CORA_HOMOPHILY * CORA_EDGES / float(inside))


def bag_of_words(y: Tensor) -> Tensor:
    """Binary features, about 18 a node as in Cora, with words that a class prefers."""
    frequency = torch.rand(len(CORA_CLASSES), CORA_FEATURES) ** 4
    frequency *= 18 / frequency.sum(dim=1, keepdim=True)
    return torch.bernoulli(frequency.clamp(max=1)[y])


def train(model: Net, data: Data, config: Training) -> float:
    """Train and return the test accuracy at the best validation accuracy."""
    optimizer = torch.optim.Adam(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    best_val, test_at_best = -1.0, 0.0
    with progress_bar() as bar:
        task = bar.add_task("training", total=config.epochs, loss=0.0, val=0.0)
        for _ in range(config.epochs):
            loss = train_step(model, data, optimizer)
            val, test = evaluate(model, data)
            if val > best_val:
                best_val, test_at_best = val, test
            bar.update(task, advance=1, loss=loss, val=val)
    return test_at_best


def train_step(model: Net, data: Data, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: Net, data: Data) -> tuple[float, float]:
    model.eval()
    correct = (model(data.x, data.edge_index).argmax(dim=-1) == data.y).float()
    return float(correct[data.val_mask].mean()), float(correct[data.test_mask].mean())


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("validation {task.fields[val]:.1%}"),
        console=console,
    )


def main(
    model: Model,
    training: Training,
    dataset: str = "Cora",
    root: Path | None = None,
    seed: int = 0,
    device: str | None = None,
) -> float:
    """Train a node classifier and show its test accuracy and the plan that ran.

    Args:
        model: What is trained.
        training: How it is trained.
        dataset: Cora, CiteSeer or PubMed.
        root: Folder for PyG's Planetoid data set.
        seed: Seed of the parameters and of dropout.
        device: Device to train on; the GPU where there is one.

    Returns:
        The test accuracy, between 0 and 1.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data(dataset, root).to(device)
    seed_everything(seed)
    net = Net(model, data.num_features, int(data.y.max()) + 1).to(device)
    accuracy = train(net, data, training)
    console.print(f"test accuracy {accuracy:.1%}\n")
    for name, layer in net.named_children():
        console.print(f"{name}: {tg.explain(layer)}\n", markup=False)
    return accuracy


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
