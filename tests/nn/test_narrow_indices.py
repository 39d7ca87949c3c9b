"""PyG's own path on edges whose indices are narrower than PyTorch's scatters take."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

import pyg_tiga as tg
import pyg_tiga.nn as tn
from pyg_tiga.nn._edges import for_parent

NUM_NODES, WIDTH = 8, 4
# PyG writes the methods of a class for the first layer made of it. If that has no fused
# aggregation, no later one of the process takes a matrix.
FIRST = [of.SAGEConv(1, 1) for of in (pyg, tn)]


def edges():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_NODES, (2, 20), generator=generator)
    return edge_index[:, edge_index[1].argsort(stable=True)]


def csr(edge_index):
    ptr = torch.zeros(NUM_NODES + 1, dtype=torch.long)
    ptr[1:] = edge_index[1].bincount(minlength=NUM_NODES).cumsum(0)
    return ptr, edge_index[0]


FORMS = {
    "int32": lambda e: e.int(),
    "int16": lambda e: e.short(),
    "EdgeIndex of int32": lambda e: EdgeIndex(e.int()),
    "graph": lambda e: tg.Graph.from_edge_index(e, NUM_NODES),
    "graph of int32": lambda e: tg.Graph.from_edge_index(e.int(), NUM_NODES),
    "graph of CSR": lambda e: tg.Graph.from_csr(*csr(e)),
    "reversed": lambda e: tg.Graph.from_edge_index(
        e.flip(0).int(), NUM_NODES
    ).reverse(),
}


def hooked(layer):
    layer.register_message_forward_pre_hook(lambda module, inputs: None)
    return layer


LAYERS = {
    "std": lambda of: of.SAGEConv(WIDTH, WIDTH, aggr="std"),
    "softmax": lambda of: of.SAGEConv(WIDTH, WIDTH, aggr="softmax"),
    "mul": lambda of: of.SAGEConv(WIDTH, WIDTH, aggr="mul"),
    "hooked SAGE": lambda of: hooked(of.SAGEConv(WIDTH, WIDTH)),
    "hooked GAT": lambda of: hooked(of.GATConv(WIDTH, WIDTH)),
    "hooked GATv2": lambda of: hooked(of.GATv2Conv(WIDTH, WIDTH)),
    "hooked Transformer": lambda of: hooked(of.TransformerConv(WIDTH, WIDTH)),
}


def gradient(layer, edge_index):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_NODES, WIDTH, generator=generator).requires_grad_()
    return torch.autograd.grad(layer(x, edge_index).square().sum(), x)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_the_parents_path(name, form):
    theirs, ours = LAYERS[name](pyg), LAYERS[name](tn)
    ours.load_state_dict(theirs.state_dict())
    found = gradient(ours, FORMS[form](edges()))
    torch.testing.assert_close(found, gradient(theirs, edges()))
    assert "PyG parent's own path" in tg.explain(ours)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_edge_features_beside_hooks(form):
    attr = torch.randn(20, 3)

    def of(package):
        return hooked(package.TransformerConv(WIDTH, WIDTH, edge_dim=3))

    theirs, ours = of(pyg), of(tn)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        gradient(lambda x, e: ours(x, e, attr), FORMS[form](edges())),
        gradient(lambda x, e: theirs(x, e, attr), edges()),
    )


@pytest.mark.parametrize("form", FORMS)
def test_gradients_under_transforms(form):
    layer, x = tn.SAGEConv(WIDTH, WIDTH), torch.randn(NUM_NODES, WIDTH)
    given, wide = FORMS[form](edges()), edges()
    found, expected = (
        torch.func.grad(lambda x, e=e: layer(x, e).square().sum())(x)
        for e in (given, wide)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("as_graph", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_matrices(layout, as_graph):
    # PyTorch has no gradient for entries that occur twice.
    ptr, index = csr(edges().unique(dim=1).flip(0))
    value = torch.rand(index.numel()).requires_grad_()
    dtype = torch.int32
    matrix = torch.sparse_compressed_tensor(
        ptr.to(dtype), index.to(dtype), value, (NUM_NODES, NUM_NODES), layout=layout
    )
    given = tg.Graph.from_adj(matrix) if as_graph else matrix
    found, _ = for_parent(given, None)
    parts = (
        (found.crow_indices(), found.col_indices())
        if found.layout is torch.sparse_csr
        else (found.ccol_indices(), found.row_indices())
    )
    assert {part.dtype for part in parts} == {torch.int64}
    torch.testing.assert_close(found.to_dense(), matrix.to_dense())
    (grad,) = torch.autograd.grad(found.values().square().sum(), value)
    torch.testing.assert_close(grad, 2 * value)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_gradients_on_graphs_with_values():
    theirs, ours = LAYERS["std"](pyg), LAYERS["std"](tn)
    ours.load_state_dict(theirs.state_dict())
    ptr, index = csr(edges())
    matrix = torch.sparse_csr_tensor(ptr, index, torch.ones(20), (NUM_NODES, NUM_NODES))
    found = gradient(ours, tg.Graph.from_adj(matrix))
    torch.testing.assert_close(found, gradient(theirs, matrix))
