from __future__ import annotations

import pytest
import torch
import torch_geometric.nn

from pyg_tiga.nn._linear import is_plain, transform_first


def test_plain_linear():
    linear = torch_geometric.nn.Linear(4, 2)
    assert is_plain(linear)
    assert not is_plain(torch_geometric.nn.Linear(-1, 2))
    assert not is_plain(torch.nn.Linear(4, 2))
    assert not is_plain(None)
    handle = linear.register_forward_pre_hook(lambda *args: None)
    assert not is_plain(linear)
    handle.remove()
    assert is_plain(linear)
    linear.forward = lambda x: x
    assert not is_plain(linear)
    parametrised = torch_geometric.nn.Linear(4, 2)
    torch.nn.utils.parametrizations.spectral_norm(parametrised)
    assert not is_plain(parametrised)


@pytest.mark.parametrize(
    ("widths", "counts", "edges", "trained_input", "first"),
    [
        ((64, 16), (100, 100), 1000, True, True),
        ((16, 64), (100, 100), 1000, True, False),
        ((64, 64), (100, 100), 1000, True, False),
        # Only the map is trained: a map in front costs a second pass of the edges.
        ((128, 100), (100, 100), 1000, False, False),
        ((128, 16), (100, 100), 1000, False, True),
        # A sampled batch: about as many sources as edges.
        ((64, 48), (1000, 50), 1000, True, False),
        ((64, 16), (1000, 50), 20000, True, True),
    ],
)
def test_cheaper_order(widths, counts, edges, trained_input, first):
    linear = torch_geometric.nn.Linear(*widths)
    x = torch.zeros(counts[0], widths[0], requires_grad=trained_input)
    edge_index = torch.zeros(2, edges, dtype=torch.int64)
    assert transform_first(linear, x, edge_index, counts) is first
