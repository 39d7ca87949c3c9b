"""What tests and benchmarks share: problem rows, graph makers, comparisons.

**Rows.** :data:`ROWS` names small problems, each with one difficulty. Tests cross them
with all implementations; a new difficulty is one more row. They are small enough for
Triton's interpreter (at most 40 nodes and 300 edges).

**Comparisons.** A result passes if its error is at most :data:`SLACK` times the error
of the same formula in plain PyTorch at the same precision, both measured against
float64 on the same (already rounded) inputs, plus an absolute floor of
:data:`FLOOR_ULPS` machine epsilons of the largest true value: on a small problem the
plain formula can be exact by luck. Gradients are also compared as vectors, by relative
L2 distance and cosine. Where atomic additions leave the order of a sum open, two runs
of the plain formula differ as much as it and the truth do: the floor is then at least
the root of the number of terms in epsilons, the length of a random walk of their
roundings (Higham and Mary, 2019, doi:10.1137/18M1226312).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyg_tiga.relation.graph import Graph

SLACK = 2.0
FLOOR_ULPS = 4.0

Layout = Literal["contiguous", "transposed", "sliced", "offset", "expanded"]
EdgeMaker = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True)
class Row:
    """A named problem: sizes, an edge maker and the form of the inputs."""

    name: str
    num_src: int
    num_dst: int
    edges: EdgeMaker
    width: int = 8
    index_dtype: torch.dtype = torch.int64
    layout: Layout = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def square(self) -> bool:
        """Whether sources and destinations can be the same nodes."""
        return self.num_src == self.num_dst


@dataclass(frozen=True)
class Case:
    """The tensors of a row at one dtype, on one device."""

    edge_index: Tensor  # [2, E], row 0 the sources
    num_src: int
    num_dst: int
    x: Tensor  # [N_src, F]
    x_dst: Tensor  # [N_dst, F]
    weight: Tensor  # [E], in [0.5, 1.5)
    grad: Tensor  # [N_dst, F], a fixed cotangent

    def graph(self) -> Graph:
        """A new relation over the case's edges."""
        return Graph.from_edge_index(
            self.edge_index, num_src=self.num_src, num_dst=self.num_dst
        )

    def double(self) -> Case:
        """The same values in float64: the inputs of the truth."""
        names = ("x", "x_dst", "weight", "grad")
        return dataclasses.replace(
            self, **{n: getattr(self, n).double() for n in names}
        )

    def tied(self) -> Case:
        """The same case with features on a coarse grid, most of them 0.

        Layers see such features after a ReLU, and gradients of max and min depend on
        how ties are resolved.
        """
        return dataclasses.replace(self, x=_like(self.x, self.x.mul(2).round().relu()))


def make_case(
    row: Row,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Build a row's tensors; they depend on the row and the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = row.edges(generator)

    def normal(size: int) -> Tensor:
        value = torch.randn(size, row.width, generator=generator, dtype=torch.float64)
        return value.to(device=device, dtype=dtype)

    x = _lay_out(normal(row.num_src), row.layout)
    x_dst = normal(row.num_dst)
    weight = 0.5 + torch.rand(edge_index.size(1), generator=generator)
    return Case(
        edge_index=edge_index.to(device=device, dtype=row.index_dtype),
        num_src=row.num_src,
        num_dst=row.num_dst,
        x=x,
        x_dst=x_dst,
        weight=weight.to(device=device, dtype=dtype),
        grad=normal(row.num_dst),
    )


def _lay_out(value: Tensor, layout: Layout) -> Tensor:
    """The same values at other strides (for "expanded": the first row everywhere)."""
    num, width = value.shape
    if layout == "transposed":
        return value.t().contiguous().t()
    if layout == "sliced":
        wide = value.new_full((num, width + 5), float("nan"))
        return wide[:, 3 : 3 + width].copy_(value)
    if layout == "offset":
        flat = value.new_full((num * width + 1,), float("nan"))
        return flat[1:].view(num, width).copy_(value)
    if layout == "expanded":
        return value[:1].expand(num, width)
    return value


def _like(old: Tensor, value: Tensor) -> Tensor:
    """Give new values the strides of a tensor whose strides may overlap."""
    if old.dim() == 2 and old.stride(0) == 0:
        return value[:1].expand_as(value)
    return torch.empty_strided(
        old.shape, old.stride(), dtype=old.dtype, device=old.device
    ).copy_(value)


def random_edges(num_src: int, num_dst: int, num_edges: int) -> EdgeMaker:
    """Edges drawn evenly and independently, unsorted; duplicates happen."""

    def make(generator: torch.Generator) -> Tensor:
        src = torch.randint(num_src, (num_edges,), generator=generator)
        dst = torch.randint(num_dst, (num_edges,), generator=generator)
        return torch.stack([src, dst])  # [2, E]

    return make


def hub_edges(num_nodes: int, hub: int, degree: int, *, reverse: bool) -> EdgeMaker:
    """One node with `degree` incoming (outgoing if reversed) edges among a few."""

    def make(generator: torch.Generator) -> Tensor:
        other = torch.randint(num_nodes, (degree,), generator=generator)
        ends = torch.stack([other, torch.full((degree,), hub)])  # [2, degree]
        rest = random_edges(num_nodes, num_nodes, num_nodes)(generator)
        edge_index = torch.cat([ends.flip(0) if reverse else ends, rest], dim=1)
        return edge_index[:, torch.randperm(edge_index.size(1), generator=generator)]

    return make


def power_law_edges(num_nodes: int, num_edges: int, max_degree: float) -> EdgeMaker:
    """Edges whose ends fall on the node of rank i with weight (i + m)^-0.75.

    The shift m is solved so that the largest expected degree is `max_degree`; node ids
    are permuted. Works on the generator's device and scales to benchmark graphs.
    """

    def make(generator: torch.Generator) -> Tensor:
        device = generator.device
        rank = torch.arange(num_nodes, dtype=torch.float64, device=device)
        weight = (rank + _shift(rank, max_degree / num_edges)).pow(-0.75)
        edge = torch.cumsum(weight, 0)
        edge = edge / edge[-1]
        name = torch.randperm(num_nodes, generator=generator, device=device)
        ends = [
            torch.rand(
                num_edges, generator=generator, dtype=torch.float64, device=device
            )
            for _ in range(2)
        ]
        drawn = [
            torch.searchsorted(edge, end).clamp_(max=num_nodes - 1) for end in ends
        ]
        return torch.stack([name[rank_of_end] for rank_of_end in drawn])  # [2, E]

    return make


def _shift(rank: Tensor, largest_share: float) -> float:
    """Solve for m such that the first weight has the wanted share, by bisection."""
    low, high = 1e-9, float(rank.numel()) * 1e3
    for _ in range(80):
        middle = (low * high) ** 0.5
        weight = (rank + middle).pow(-0.75)
        too_steep = float(weight[0] / weight.sum()) > largest_share
        low, high = (middle, high) if too_steep else (low, middle)
    return high


def _sorted(make: EdgeMaker) -> EdgeMaker:
    def sort(generator: torch.Generator) -> Tensor:
        edge_index = make(generator)
        return edge_index[:, edge_index[1].argsort(stable=True)]

    return sort


def _fixed(edges: list[tuple[int, int]]) -> EdgeMaker:
    return lambda _: torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous()


def _with_loops(num_nodes: int, num_edges: int) -> EdgeMaker:
    def make(generator: torch.Generator) -> Tensor:
        loop = torch.arange(num_nodes).expand(2, -1)
        other = random_edges(num_nodes, num_nodes, num_edges)(generator)
        return torch.cat([other, loop, loop[:, : num_nodes // 2]], dim=1)

    return make


_DUPLICATES = [(0, 1)] * 5 + [(2, 1)] * 3 + [(0, 1), (4, 4), (3, 0), (3, 0)]

ROWS: tuple[Row, ...] = (
    Row("no_edges", 7, 7, _fixed([])),
    Row("no_nodes", 0, 0, _fixed([])),
    Row("no_sources", 0, 5, _fixed([])),
    Row("no_destinations", 6, 0, _fixed([])),
    Row("one_edge", 3, 3, _fixed([(2, 0)])),
    Row("isolated", 20, 20, random_edges(9, 11, 40)),
    Row("hub_row", 40, 40, hub_edges(40, 3, 200, reverse=False)),
    Row("hub_column", 40, 40, hub_edges(40, 3, 200, reverse=True)),
    Row("duplicates", 6, 6, _fixed(_DUPLICATES)),
    Row("self_loops", 16, 16, _with_loops(16, 50)),
    Row("more_sources", 35, 8, random_edges(35, 8, 120)),
    Row("more_destinations", 8, 35, random_edges(8, 35, 120)),
    Row("unsorted", 24, 24, random_edges(24, 24, 150)),
    Row("sorted", 24, 24, _sorted(random_edges(24, 24, 150))),
    Row("int32", 24, 24, random_edges(24, 24, 150), index_dtype=torch.int32),
    Row("uint8", 24, 24, random_edges(24, 24, 80), index_dtype=torch.uint8),
    Row("width_1", 24, 24, random_edges(24, 24, 150), width=1),
    Row("width_63", 24, 24, random_edges(24, 24, 150), width=63),
    Row("width_100", 24, 24, random_edges(24, 24, 150), width=100),
    Row("transposed", 24, 24, random_edges(24, 24, 150), layout="transposed"),
    Row("sliced", 24, 24, random_edges(24, 24, 150), width=16, layout="sliced"),
    Row("offset", 24, 24, random_edges(24, 24, 150), width=16, layout="offset"),
    Row("expanded", 24, 24, random_edges(24, 24, 150), layout="expanded"),
    Row("power_law", 40, 40, power_law_edges(40, 300, 90.0), width=32),
)


def row(name: str) -> Row:
    """Find a row by its name."""
    return next(entry for entry in ROWS if entry.name == name)


def assert_accurate(
    actual: Tensor,
    plain: Tensor,
    truth: Tensor,
    name: str = "output",
    open_terms: int = 0,
) -> None:
    """Hold `actual` to the module's tolerance, by the largest absolute error.

    Args:
        actual: The result under test.
        plain: The same formula in plain PyTorch at the precision of `actual`.
        truth: The same formula in float64 on the same inputs.
        name: What to call it in the message.
        open_terms: The most terms of a sum whose order is left open; 0 if none is.
    """
    _assert_same_form(actual, plain, name)
    floor = _epsilon(actual.dtype, open_terms) * _largest(truth)
    error, allowed = _error(actual, truth), SLACK * _error(plain, truth) + floor
    if not error <= allowed:
        raise AssertionError(
            f"{name}: largest error {error:.3e}, allowed {allowed:.3e} = {SLACK} x "
            f"that of plain PyTorch + {floor:.3e}"
        )


def assert_gradient_accurate(
    actual: Tensor,
    plain: Tensor,
    truth: Tensor,
    name: str = "gradient",
    open_terms: int = 0,
) -> None:
    """Hold a gradient to the tolerance, elementwise and as a vector."""
    assert_accurate(actual, plain, truth, name, open_terms)
    if not truth.isfinite().all():
        return
    floor = _epsilon(actual.dtype, open_terms)
    distance, allowed = relative_l2(actual, truth), relative_l2(plain, truth)
    allowed = SLACK * allowed + floor
    if not distance <= allowed:
        raise AssertionError(
            f"{name}: relative L2 distance {distance:.3e}, allowed {allowed:.3e}"
        )
    # For small distances 1 - cosine is at most half the squared relative distance.
    if not 1.0 - cosine(actual, truth) <= allowed**2 + 1e-12:
        raise AssertionError(f"{name}: cosine {cosine(actual, truth):.9f}")


def relative_l2(actual: Tensor, truth: Tensor) -> float:
    """Distance over the length of the truth (over 1 where the truth is 0)."""
    actual, truth = actual.detach().double(), truth.detach().double()
    length = float(truth.norm())
    return float((actual - truth).norm()) / (length if length > 0 else 1.0)


def cosine(actual: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two tensors taken as vectors; 1 if one is 0."""
    actual, truth = actual.detach().double(), truth.detach().double()
    length = float(actual.norm() * truth.norm())
    return float((actual * truth).sum()) / length if length > 0 else 1.0


def _assert_same_form(actual: Tensor, plain: Tensor, name: str) -> None:
    if actual.shape != plain.shape or actual.dtype != plain.dtype:
        raise AssertionError(
            f"{name}: got {tuple(actual.shape)} {actual.dtype}, expected "
            f"{tuple(plain.shape)} {plain.dtype}"
        )
    if actual.device != plain.device:
        raise AssertionError(f"{name}: got {actual.device}, expected {plain.device}")


def _epsilon(dtype: torch.dtype, open_terms: int) -> float:
    return max(FLOOR_ULPS, open_terms**0.5) * torch.finfo(dtype).eps


def _largest(value: Tensor) -> float:
    finite = value.detach().double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def _error(actual: Tensor, truth: Tensor) -> float:
    """Largest error over the finite entries; infinite if the others do not match."""
    actual, truth = actual.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    if not bool((finite | same).all()):
        return float("inf")
    gap = torch.where(finite, (actual - truth).abs(), 0.0)
    gap = gap.nan_to_num(float("inf"), float("inf"))
    return float(gap.max()) if gap.numel() else 0.0
