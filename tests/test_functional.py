"""`functional.spmm` against dense float64 products, on graphs that hypothesis draws."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_tiga import functional, planner

FAMILIES = pytest.mark.parametrize("family", ["vendor", "scatter", None], ids=str)
MAX_NODES = 7
MAX_EDGES = 20
MAX_WIDTH = 4


@dataclass(frozen=True)
class Drawn:
    """A small graph with features and weights, all of which are exact in float32."""

    edge_index: Tensor  # [2, E]
    num_dst: int
    x: Tensor  # [N_src, F]
    weight: Tensor  # [E]

    @property
    def size(self) -> tuple[int, int]:
        return self.x.size(0), self.num_dst

    def dense(self, value: Tensor) -> Tensor:
        """The matrix [N_dst, N_src] of the edges' values; equal edges add up."""
        src, dst = self.edge_index.long()
        matrix = torch.zeros(self.num_dst, self.x.size(0), dtype=torch.float64)
        return matrix.index_put((dst, src), value.double(), accumulate=True)

    def degree(self) -> Tensor:
        """Edges at each destination, at least 1: [N_dst, 1]."""
        return self.dense(torch.ones_like(self.weight)).sum(1, True).clamp(min=1)


@st.composite
def graphs(draw: st.DrawFn) -> Drawn:
    num_src = draw(st.integers(0, MAX_NODES))
    num_dst = draw(st.integers(0, MAX_NODES))
    most = MAX_EDGES if num_src and num_dst else 0
    edge = st.tuples(
        st.integers(0, max(num_src - 1, 0)), st.integers(0, max(num_dst - 1, 0))
    )
    edges = draw(st.lists(edge, max_size=most))
    width = draw(st.integers(1, MAX_WIDTH))
    # Small integers: sums of their products are exact, and ties are frequent.
    entry = st.integers(-3, 3)
    count = num_src * width
    x = draw(st.lists(entry, min_size=count, max_size=count))
    weight = draw(st.lists(entry, min_size=len(edges), max_size=len(edges)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Drawn(
        edge_index=torch.tensor(edges, dtype=dtype).view(-1, 2).t(),
        num_dst=num_dst,
        x=torch.tensor(x, dtype=torch.float32).view(num_src, width),
        weight=torch.tensor(weight, dtype=torch.float32),
    )


# An example takes under a millisecond; a first call may load a library.
drawn = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@FAMILIES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@drawn
@given(graph=graphs())
def test_sums_are_dense_products(
    family: str | None, reduce: str, weighted: bool, graph: Drawn
) -> None:
    x, weight = graph.x.clone().requires_grad_(), graph.weight.clone().requires_grad_()
    value = graph.weight if weighted else torch.ones_like(graph.weight)
    scale = graph.degree().reciprocal() if reduce == "mean" else torch.ones(1).double()
    used = weight if weighted else None
    with planner.pin(family):
        out = functional.spmm(graph.edge_index, x, used, reduce, size=graph.size)
        out.sum().backward()
    expected = graph.dense(value) @ graph.x.double() * scale
    torch.testing.assert_close(out.double(), expected)
    # The cotangent is all ones.
    row = scale.expand(graph.num_dst, 1)
    to_x = (graph.dense(value).t() @ row).expand_as(graph.x)
    torch.testing.assert_close(x.grad.double(), to_x)
    if weighted:
        src, dst = graph.edge_index.long()
        to_weight = graph.x.double().sum(1)[src] * row.squeeze(1)[dst]
        torch.testing.assert_close(weight.grad.double(), to_weight)


@FAMILIES
@pytest.mark.parametrize("reduce", ["max", "min"])
@drawn
@given(graph=graphs())
def test_extrema_are_those_of_a_dense_mask(
    family: str | None, reduce: str, graph: Drawn
) -> None:
    with planner.pin(family):
        out = functional.spmm(graph.edge_index, graph.x, reduce=reduce, size=graph.size)
    sign = 1 if reduce == "max" else -1
    there = graph.dense(torch.ones_like(graph.weight)).bool().unsqueeze(2)
    lowest = torch.tensor(-float("inf"), dtype=torch.float64)
    table = torch.where(there, sign * graph.x.double(), lowest)  # [N_dst, N_src, F]
    expected = torch.zeros_like(out, dtype=torch.float64)
    if table.size(1):
        expected = sign * table.amax(1)
        expected[~there.any(1).squeeze(1)] = 0
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("ties", ["split", "first"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@drawn
@given(graph=graphs())
def test_the_gradient_of_an_extremum_is_shared_by_its_ties(
    reduce: str, ties: str, graph: Drawn
) -> None:
    x = graph.x.clone().requires_grad_()
    out = functional.spmm(
        graph.edge_index, x, reduce=reduce, size=graph.size, ties=ties
    )
    out.sum().backward()
    found = out.detach()
    expected = torch.zeros_like(graph.x, dtype=torch.float64)
    for i in range(graph.num_dst):
        # In the caller's order, which is kept among the edges of a row.
        sources = graph.edge_index[0][graph.edge_index[1] == i].tolist()
        for f in range(graph.x.size(1)):
            best = float(found[i, f])
            winners = [j for j in sources if float(graph.x[j, f]) == best]
            # The initial zero is a candidate of `scatter_reduce`.
            shares = len(winners) + (best == 0) if ties == "split" else 1
            for j in winners if ties == "split" else winners[:1]:
                expected[j, f] += 1 / shares
    torch.testing.assert_close(x.grad.double(), expected)


@drawn
@given(graph=graphs())
def test_sddmm_is_a_masked_dense_product(graph: Drawn) -> None:
    count = graph.num_dst * graph.x.size(1)
    a = torch.linspace(-1, 1, count).view(graph.num_dst, graph.x.size(1))
    out = functional.sddmm(graph.edge_index, a, graph.x)
    src, dst = graph.edge_index.long()
    expected = (a.double() @ graph.x.double().t())[dst, src]
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


@drawn
@given(graph=graphs())
def test_the_product_with_a_csr_matrix(graph: Drawn) -> None:
    if 0 in graph.size:
        return
    matrix = graph.dense(graph.weight).to_sparse_csr()
    crow, col, value = (
        matrix.crow_indices(),
        matrix.col_indices(),
        matrix.values().float(),
    )
    out = functional.spmm_csr(crow, col, value, graph.x)
    torch.testing.assert_close(out.double(), matrix.to_dense() @ graph.x.double())
