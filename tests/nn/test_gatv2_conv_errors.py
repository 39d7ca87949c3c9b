from __future__ import annotations

import pytest
import torch

from pyg_tiga.nn import GATv2Conv
from tests.nn.layer_error_checks import ErrorDuties


class TestErrors(ErrorDuties):
    layer = GATv2Conv


@pytest.mark.parametrize("pair", [False, True])
def test_batches_are_refused(pair):
    x, edges = torch.randn(2, 6, 8), torch.tensor([[0, 1], [2, 3]])
    given = (x, x) if pair else x
    with pytest.raises(AssertionError):
        GATv2Conv._pyg_class(8, 3)(given, edges)
    with pytest.raises(ValueError, match="Static graphs not supported in 'GATv2Conv'"):
        GATv2Conv(8, 3)(given, edges)


def test_destinations_by_the_shared_map():
    layer = GATv2Conv((8, 5), 3, share_weights=True)
    x, edges = (torch.randn(6, 8), torch.randn(6, 5)), torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"'x\[1\]' must have shape \[num_nodes, 8\]"):
        layer(x, edges)
