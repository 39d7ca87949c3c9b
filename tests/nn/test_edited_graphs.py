"""Layers on a `Graph` whose tensors are edited, eager and compiled alike."""

from __future__ import annotations

import copy

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


def drawn():
    """Features of 6 nodes, and 12 edges between them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator)
    return x, torch.randint(6, (2, 12), generator=generator)


def wrapped(make, edge_index):
    """An `EdgeIndex`, and what a layer is called with."""
    edges = EdgeIndex(edge_index.clone(), sparse_size=(6, 6))
    return edges, edges if make is None else make(edges, 6)


MAKERS = (None, tg.Graph.from_edge_index)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cls", LAYERS)
def test_backwards_keep_the_edges_of_a_wrapper(cls, make):
    x, edge_index = drawn()
    x.requires_grad_()
    layer = cls(4, 5).eval()
    expected = gradient(layer(x, edge_index.clone()), x)
    edges, given = wrapped(make, edge_index)
    for _ in range(2):
        out = layer(x, given)
        edges.fill_(3)
        torch.testing.assert_close(gradient(out, x), expected)
        changed = layer(x, given)
        torch.testing.assert_close(changed, layer(x, edges.as_tensor().clone()))
        edges.copy_(edge_index)
        after = gradient(layer(x, torch.full_like(edge_index, 3)), x)
        torch.testing.assert_close(gradient(changed, x), after)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("make", MAKERS)
def test_compiled_functions_see_edits_of_a_wrapper(make, backend):
    torch._dynamo.reset()
    x, edge_index = drawn()
    edges, given = wrapped(make, edge_index)
    spmm = tg.functional.spmm
    call = torch.compile(lambda e, x: spmm(e, x), backend=backend, fullgraph=True)
    torch.testing.assert_close(call(given, x), spmm(edge_index, x))
    for edit in (edges.fill_, edges.as_tensor().fill_, edges.fill_):
        for value in (3, 2):
            edit(value)
            expected = spmm(torch.full_like(edge_index, value), x)
            torch.testing.assert_close(call(given, x), expected)
    copied = copy.copy(edges)
    again = copied if make is None else make(copied, 6)
    torch.testing.assert_close(call(again, x), expected)
    copied.fill_(1)
    expected = spmm(torch.full_like(edge_index, 1), x)
    torch.testing.assert_close(call(again, x), expected)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cls", LAYERS)
def test_compiled_layers_see_edits_of_a_wrapper(cls, make):
    torch._dynamo.reset()
    x, edge_index = drawn()
    edges, given = wrapped(make, edge_index)
    layer = cls(4, 5).eval()
    call = torch.compile(layer, backend="aot_eager")
    for value in (3, 2):
        torch.testing.assert_close(call(x, given), layer(x, edges.as_tensor().clone()))
        edges.fill_(value)
    torch.testing.assert_close(call(x, given), layer(x, edges.as_tensor().clone()))
