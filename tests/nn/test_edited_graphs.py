"""Layers on a `Graph` whose tensors are edited, eager and compiled alike."""

from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

import pyg_tiga as tg
import pyg_tiga.nn as tn

LAYERS = (tn.SAGEConv, tn.GATConv, tn.GATv2Conv, tn.TransformerConv)


def gradient(out, x):
    return torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("cls", LAYERS)
def test_edits_are_seen_and_backwards_keep_theirs(cls, order):
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator).requires_grad_()
    edge_index = torch.randint(6, (2, 12), generator=generator)
    graph = tg.Graph.from_edge_index(edge_index, 6)
    layer = cls(4, 5).eval()
    calls = (layer, torch.compile(layer, backend="aot_eager"))
    before, early = gradient(layer(x, edge_index.clone()), x), layer(x, graph)
    calls[1](x, graph)
    edge_index.zero_()
    expected = layer(x, edge_index.clone())
    for which in order:
        out = calls[which](x, graph)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            gradient(out, x), gradient(layer(x, edge_index.clone()), x)
        )
    torch.testing.assert_close(gradient(early, x), before)
    edge_index.data.fill_(3)
    tg.forget(edge_index)
    expected = layer(x, edge_index.clone())
    for which in order:
        torch.testing.assert_close(calls[which](x, graph), expected)


@pytest.mark.parametrize("cls", LAYERS)
def test_edges_that_were_used_can_be_swapped(cls):
    x, layer = torch.randn(6, 4), cls(4, 5)
    for kind in (torch.Tensor, EdgeIndex):
        edge_index, other = torch.zeros(2, 5).long(), torch.ones(2, 5).long()
        if kind is EdgeIndex:
            edge_index, other = EdgeIndex(edge_index), EdgeIndex(other)
        zeros, ones = layer(x, edge_index), layer(x, other.clone())
        layer(x, edge_index)
        torch.utils.swap_tensors(edge_index, other)
        torch.testing.assert_close(layer(x, edge_index), ones)
        torch.testing.assert_close(layer(x, other), zeros)


@pytest.mark.parametrize("make", [tg.Graph.from_edge_index, EdgeIndex])
def test_functions_work_on_the_edges_of_now(make):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator).requires_grad_()
    edge_index = torch.randint(6, (2, 12), generator=generator)
    plain, relation = edge_index.clone(), make(edge_index)
    before = gradient(tg.functional.spmm(plain, x), x)
    out = tg.functional.spmm(relation, x)
    edge_index.zero_()
    expected = tg.functional.spmm(plain.zero_(), x)
    torch.testing.assert_close(tg.functional.spmm(relation, x), expected)
    torch.testing.assert_close(gradient(out, x), before)
