"""The layer in PyTorch's deterministic mode: same bits, and nothing that it forbids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_tiga import testing
from pyg_tiga.nn import SAGEConv
from pyg_tiga.relation.graph import Graph
from tests.nn.sage_checks import (
    AGGR,
    assert_same,
    coo,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    run,
)

RUNS = 3
HUB = testing.row("hub_row")


def _rows_of_a_matrix(case):
    """A graph built by rows: the first of equals wins, as in any matrix.

    Without deterministic mode its gradient is scattered by atomic additions.
    """
    matrix = coo(case).to_sparse_csr()
    return Graph.from_csr(matrix.crow_indices(), matrix.col_indices(), case.num_src)


FORMS = {"edge_index": lambda case: case.edge_index, "rows": _rows_of_a_matrix}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", FORMS)
@AGGR
def test_bit_identical_from_run_to_run(aggr, form, device, deterministic):
    case, x = features(HUB, aggr, device=device)
    edges = FORMS[form](case)
    layer = SAGEConv(8, 5, aggr=aggr).to(device)
    runs = [_tensors(layer, x, edges) for _ in range(RUNS)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert is_fused(layer)
    assert layer._record.plan.problem.deterministic


@AGGR
def test_equals_the_parent(aggr, device, deterministic):
    case, x = features(HUB, aggr, device=device)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr, device=device)
    assert_same(ours, theirs, x, case.edge_index)


def test_the_mode_is_asked_at_every_call(device):
    case, x = features(HUB, "mean", device=device)
    layer = SAGEConv(8, 5).to(device)
    found = []
    for mode in (False, True, False):
        torch.use_deterministic_algorithms(mode)
        try:
            layer(x, case.edge_index)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append(layer._record.plan.problem.deterministic)
    assert found == [False, True, False]


def _tensors(layer: SAGEConv, x: Tensor, edges: Tensor) -> list[Tensor]:
    out, grads = run(layer, x, edges)
    return [out, *(grad.clone() for grad in grads.values())]
