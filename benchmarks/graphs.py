"""The named graphs: synthetic ones with a published size and tail, and real ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TAIL_EXPONENT = -0.75
DRAW_CHUNK = 1 << 24
MESH_REACH = 32
TUNING_SEEDS = (0, 1, 2)
REPORT_SEED = 7


@dataclass(frozen=True)
class GraphSpec:
    """Size and shape of a synthetic graph.

    Args:
        kind: ``tail``, ``uniform``, ``hub`` or ``mesh``.
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        largest: Largest expected degree (``tail``) or the degree of a hub row.
        hubs: Number of hub rows.
    """

    kind: str
    num_nodes: int
    num_edges: int
    largest: int = 0
    hubs: int = 0

    def scaled(self, scale: float) -> GraphSpec:
        """The same shape at a fraction of the size."""
        if scale == 1.0:
            return self
        return GraphSpec(
            self.kind,
            max(int(self.num_nodes * scale), 16),
            max(int(self.num_edges * scale), 64),
            max(int(self.largest * scale), 1) if self.largest else 0,
            self.hubs,
        )


SPECS = {
    "arxiv": GraphSpec("tail", 169_343, 2_315_598, 13_161),
    "reddit": GraphSpec("tail", 232_965, 114_615_892, 21_657),
    "products": GraphSpec("tail", 2_449_029, 123_718_280, 17_481),
    "er200k": GraphSpec("uniform", 200_000, 3_200_000),
    "hub5k": GraphSpec("hub", 200_000, 220_000, 5_000, hubs=4),
    "hub12k": GraphSpec("hub", 200_000, 220_000, 12_000, hubs=2),
    "mesh8": GraphSpec("mesh", 500_000, 4_000_000, 8),
    "tiny": GraphSpec("uniform", 256, 2_048),
}


@dataclass
class BenchGraph:
    """One graph of a run, with the vendor's form of it built on demand.

    Args:
        name: The name of the graph, as it stands in a record's ``case``.
        edge_index: Sources and destinations, int64 ``[2, E]``, unsorted.
        num_nodes: Number of nodes.
    """

    name: str
    edge_index: Tensor  # [2, E]
    num_nodes: int
    _compressed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _forms: dict[str, Any] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.size(1)

    @property
    def device(self) -> torch.device:
        """Where the edges are."""
        return self.edge_index.device

    def compressed(self, by: int) -> tuple[Tensor, Tensor]:
        """Int32 (pointer, other end): rows are destinations (1) or sources (0)."""
        if by not in self._compressed:
            keys, order = torch.sort(self.edge_index[by].int(), stable=True)
            pointer = torch._convert_indices_from_coo_to_csr(
                keys, self.num_nodes, out_int32=True
            )
            self._compressed[by] = pointer, self.edge_index[1 - by].int()[order]
        return self._compressed[by]

    def form(self, peer: str, make: Callable[[], Any]) -> Any:
        """A peer's own form of the graph, made once."""
        if peer not in self._forms:
            self._forms[peer] = make()
        return self._forms[peer]

    def to(self, device: torch.device | str) -> BenchGraph:
        """The same graph on another device."""
        return BenchGraph(self.name, self.edge_index.to(device), self.num_nodes)


def tail_weights(
    num_nodes: int, num_edges: int, largest: float, device: torch.device | str
) -> Tensor:
    """Weights (i + m)^-0.75 by rank, whose largest expected degree is ``largest``."""
    rank = torch.arange(1, num_nodes + 1, dtype=torch.float64, device=device)

    def weights(log_shift: float) -> Tensor:
        return (rank + (math.exp(log_shift) - 1.0)) ** TAIL_EXPONENT

    low, high = -20.0, math.log(num_nodes) + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        found = weights(middle)
        expected = num_edges * float(found[0] / found.sum())
        low, high = (middle, high) if expected > largest else (low, middle)
    return weights((low + high) / 2)  # [N]


def make_graph(
    name: str, *, seed: int, device: torch.device | str, scale: float = 1.0
) -> BenchGraph:
    """Draw a named synthetic graph on ``device``; a scale below 1 is for tests."""
    spec = SPECS[name].scaled(scale)
    generator = torch.Generator(device=device).manual_seed(seed)
    edge_index = _DRAW[spec.kind](spec, generator)
    label = name if scale == 1.0 else f"{name}@{scale:g}"
    return BenchGraph(label, edge_index, spec.num_nodes)


def _draw_tail(spec: GraphSpec, generator: torch.Generator) -> Tensor:
    device = generator.device
    weights = tail_weights(spec.num_nodes, spec.num_edges, spec.largest, device)
    cumulative = weights.cumsum(0)
    cumulative /= cumulative[-1].clone()
    names = torch.randperm(spec.num_nodes, generator=generator, device=device)
    edge_index = torch.empty(2, spec.num_edges, dtype=torch.long, device=device)
    for end in edge_index:
        for part in end.split(DRAW_CHUNK):
            part.copy_(names[_draw_ranks(cumulative, part.numel(), generator)])
    return edge_index  # [2, E]


def _draw_ranks(cumulative: Tensor, count: int, generator: torch.Generator) -> Tensor:
    # torch.multinomial stops at 2^24 categories and is slow; a search is neither.
    uniform = torch.rand(
        count, dtype=torch.float64, device=generator.device, generator=generator
    )
    ranks = torch.searchsorted(cumulative, uniform, right=True)
    return ranks.clamp_(max=cumulative.numel() - 1)  # [count]


def _draw_uniform(spec: GraphSpec, generator: torch.Generator) -> Tensor:
    return torch.randint(
        spec.num_nodes,
        (2, spec.num_edges),
        generator=generator,
        device=generator.device,
    )  # [2, E]


def _draw_hub(spec: GraphSpec, generator: torch.Generator) -> Tensor:
    device = generator.device
    edge_index = _draw_uniform(spec, generator)
    names = torch.randperm(spec.num_nodes, generator=generator, device=device)
    hub_edges = min(spec.hubs * spec.largest, spec.num_edges)
    ranks = spec.hubs + torch.randint(
        spec.num_nodes - spec.hubs,
        (spec.num_edges,),
        generator=generator,
        device=device,
    )
    ranks[:hub_edges] = torch.arange(hub_edges, device=device) % spec.hubs
    edge_index[1] = names[ranks]
    return _shuffle(edge_index, generator)


def _draw_mesh(spec: GraphSpec, generator: torch.Generator) -> Tensor:
    device = generator.device
    per_row = spec.num_edges // spec.num_nodes
    row = torch.arange(spec.num_nodes, device=device).repeat_interleave(per_row)
    reach = torch.randint(
        1, MESH_REACH + 1, (row.numel(),), generator=generator, device=device
    )
    sign = torch.randint(2, (row.numel(),), generator=generator, device=device) * 2 - 1
    col = (row + reach * sign) % spec.num_nodes
    return _shuffle(torch.stack([col, row]), generator)


def _shuffle(edge_index: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(
        edge_index.size(1), generator=generator, device=edge_index.device
    )
    return edge_index[:, order]


_DRAW: dict[str, Callable[[GraphSpec, torch.Generator], Tensor]] = {
    "tail": _draw_tail,
    "uniform": _draw_uniform,
    "hub": _draw_hub,
    "mesh": _draw_mesh,
}


def data_file(name: str) -> Path | None:
    """The stored graph of that name under ``PYG_TIGA_DATA``, if there is one."""
    root = os.environ.get("PYG_TIGA_DATA")
    if not root:
        return None
    for path in (Path(root) / "graphs", Path(root)):
        if (path / f"{name}.npz").is_file():
            return path / f"{name}.npz"
    return None


def real_graphs(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the names that ``PYG_TIGA_DATA`` holds."""
    return tuple(name for name in names if data_file(name))


def load_graph(name: str, *, device: torch.device | str) -> BenchGraph:
    """Load a real graph.

    Raises:
        FileNotFoundError: If ``PYG_TIGA_DATA`` does not hold it.
    """
    path = data_file(name)
    if path is None:
        raise FileNotFoundError(
            f"graph '{name}' is neither a named graph ({', '.join(SPECS)}) nor "
            f"'graphs/{name}.npz' under PYG_TIGA_DATA"
        )
    with np.load(path, allow_pickle=False) as stored:
        edge_index = torch.from_numpy(stored["edge_index"]).to(device).long()
        return BenchGraph(name, edge_index, int(stored["num_nodes"]))


class GraphStore:
    """Hands out graphs by name and holds one at a time.

    Args:
        device: Where graphs are drawn.
        seed: Seed of the synthetic ones.
        scale: Fraction of their size.
        release: Called with a graph that is given up for another.
    """

    def __init__(
        self,
        device: torch.device,
        seed: int,
        scale: float = 1.0,
        release: Callable[[BenchGraph], None] = lambda graph: None,
    ) -> None:
        self.device, self.seed, self.scale = device, seed, scale
        self._release = release
        self._held: tuple[str, BenchGraph] | None = None

    def get(self, name: str) -> BenchGraph:
        """The graph of that name, drawn or loaded if it is not the held one."""
        if self._held is None or self._held[0] != name:
            self.clear()
            self._held = name, self._make(name)
        return self._held[1]

    def clear(self) -> None:
        """Give up the held graph."""
        if self._held is not None:
            self._release(self._held[1])
            self._held = None

    def _make(self, name: str) -> BenchGraph:
        if name not in SPECS:
            return load_graph(name, device=self.device)
        return make_graph(name, seed=self.seed, device=self.device, scale=self.scale)
