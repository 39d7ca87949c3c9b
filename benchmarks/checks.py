"""Float64 references, straight from the edges, that every result is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.graphs import BenchGraph

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CHUNK_ELEMENTS = 1 << 27
SAMPLED_COLUMNS = 8
SAMPLED_ROWS = 64
HUB_ROWS = 4

Check = Callable[[Sequence[Tensor]], float]


@dataclass(frozen=True)
class Edges:
    """Edges ``source → target`` with the number of targets."""

    source: Tensor  # [E]
    target: Tensor  # [E]
    num_targets: int

    @staticmethod
    def of(graph: BenchGraph) -> Edges:
        """The edges of a graph, in its direction."""
        return Edges(*graph.edge_index, graph.num_nodes)

    def reverse(self, num_sources: int) -> Edges:
        """The edges the other way round."""
        return Edges(self.target, self.source, num_sources)

    def of_rows(self, rows: Tensor) -> Edges:
        """The edges into some targets, which are numbered anew in this order."""
        place = torch.full((self.num_targets,), -1, device=rows.device)
        place[rows] = torch.arange(rows.numel(), device=rows.device)
        wanted = (place[self.target] >= 0).nonzero().flatten()
        return Edges(self.source[wanted], place[self.target[wanted]], rows.numel())

    def chunks(self, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of (source, target) whose messages fit in a bounded buffer."""
        size = max(CHUNK_ELEMENTS // max(width, 1), 1)
        return zip(self.source.split(size), self.target.split(size), strict=True)

    def degree(self) -> Tensor:
        """Edges per target, float64, at least 1."""
        count = torch.bincount(self.target, minlength=self.num_targets)
        return count.clamp_(min=1).double()  # [N]


def aggregate64(edges: Edges, x: Tensor) -> Tensor:
    """Sum over the edges of each target in float64."""
    out = torch.zeros(
        edges.num_targets, x.size(1), dtype=torch.float64, device=x.device
    )
    for source, target in edges.chunks(x.size(1)):
        out.index_add_(0, target, x[source].double())
    return out  # [N, F]


def extremum64(edges: Edges, x: Tensor) -> Tensor:
    """Maximum over the edges of each target in float64, 0 without edges."""
    shape = (edges.num_targets, x.size(1))
    out = torch.full(shape, -torch.inf, dtype=torch.float64, device=x.device)
    for source, target in edges.chunks(x.size(1)):
        index = target[:, None].expand(-1, x.size(1))
        out.scatter_reduce_(0, index, x[source].double(), "amax")
    return out.masked_fill_(out == -torch.inf, 0.0)  # [N, F]


def extremum_grad64(edges: Edges, x: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the maximum with respect to x, split evenly over tied edges."""
    count = torch.zeros_like(out)
    for source, target in edges.chunks(x.size(1)):
        count.index_add_(0, target, (x[source] == out[target]).double())
    share = grad.double() / count.clamp_(min=1)
    grad_x = torch.zeros_like(x, dtype=torch.float64)
    for source, target in edges.chunks(x.size(1)):
        wins = (x[source] == out[target]).double()
        grad_x.index_add_(0, source, wins * share[target])
    return grad_x  # [N, F]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance in float64; anything not finite is an infinite error."""
    difference = (found.to(expected.device).double() - expected).norm()
    error = float(difference / expected.norm().clamp(min=1e-300))
    return error if error == error else float("inf")


def spmm_check(
    graph: BenchGraph, x: Tensor, grad: Tensor, *, phase: str, reduce: str
) -> Check:
    """Check of ``out`` (and ``grad_x`` when training) of one aggregation.

    All rows are held against float64 on sampled columns, and on sampled rows, the
    largest among them, all columns of a sum or mean are.
    """
    edges, width = Edges.of(graph), x.size(1)
    columns = torch.linspace(
        0, width - 1, min(SAMPLED_COLUMNS, width), dtype=torch.long, device=x.device
    )

    @cache
    def expected() -> list[tuple[int, Tensor | None, Tensor]]:
        part, part_grad = x.detach()[:, columns], grad[:, columns]
        out, grad_x = _aggregation64(edges, part, part_grad, reduce, phase)
        found = [(0, None, out)]
        if phase == "train":
            found.append((1, None, grad_x))
        if reduce in ("sum", "mean"):
            rows = sampled_rows(edges)
            found.append((0, rows, _rows64(edges, rows, x.detach(), reduce)))
        return found

    def check(results: Sequence[Tensor]) -> float:
        errors = []
        for which, rows, want in expected():
            result = results[which].detach()
            result = result[:, columns] if rows is None else result[rows]
            errors.append(relative_error(result, want))
        return max(errors)

    return check


def _aggregation64(
    edges: Edges, x: Tensor, grad: Tensor, reduce: str, phase: str
) -> tuple[Tensor, Tensor]:
    if reduce == "max":
        out = extremum64(edges, x)
        empty = out.new_zeros(0)
        wanted = phase == "train"
        return out, extremum_grad64(edges, x, out, grad) if wanted else empty
    scale = edges.degree()[:, None] if reduce == "mean" else 1.0
    out = aggregate64(edges, x) / scale
    if phase != "train":
        return out, out.new_zeros(0)
    return out, aggregate64(edges.reverse(x.size(0)), grad.double() / scale)


def sampled_rows(edges: Edges) -> Tensor:
    """Targets spread over the graph, and the largest among them."""
    degree = edges.degree()
    hubs = degree.topk(min(HUB_ROWS, degree.numel())).indices
    spread = torch.linspace(
        0, degree.numel() - 1, SAMPLED_ROWS, dtype=torch.long, device=degree.device
    )
    return torch.cat([hubs, spread]).unique()  # [R]


def _rows64(edges: Edges, rows: Tensor, x: Tensor, reduce: str) -> Tensor:
    part = edges.of_rows(rows)
    out = aggregate64(part, x)
    return out / part.degree()[:, None] if reduce == "mean" else out  # [R, F]


def sage_check(
    graph: BenchGraph,
    x: Tensor,
    grad: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    phase: str,
) -> Check:
    """Check of a mean SAGEConv: output, then gradients of x and of the parameters.

    The parameters are ``lin_l.weight``, ``lin_l.bias`` and ``lin_r.weight``.
    """

    @cache
    def expected() -> list[Tensor]:
        edges = Edges.of(graph)
        weight, bias, root = (parameters[name].detach().double() for name in SAGE)
        x64, degree = x.detach().double(), edges.degree()[:, None]
        mean = aggregate64(edges, x64) / degree
        out = mean @ weight.T + bias + x64 @ root.T
        if phase != "train":
            return [out]
        g = grad.double()
        back = aggregate64(edges.reverse(graph.num_nodes), (g @ weight) / degree)
        return [out, back + g @ root, g.T @ mean, g.sum(0), g.T @ x64]

    def check(results: Sequence[Tensor]) -> float:
        pairs = zip(results, expected(), strict=True)
        return max(relative_error(found.detach(), want) for found, want in pairs)

    return check


SAGE = ("lin_l.weight", "lin_l.bias", "lin_r.weight")
