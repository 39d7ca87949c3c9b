"""Layers under what records calls or runs them without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GATConv as ParentGAT
from torch_geometric.nn import SAGEConv as ParentSAGE

import pyg_tiga as tg
from pyg_tiga import functional
from pyg_tiga.nn import GATConv, SAGEConv

SAGE = pytest.param(SAGEConv, {"aggr": "mean"}, id="sage-mean")
SAGE_MAX = pytest.param(SAGEConv, {"aggr": "max"}, id="sage-max")
GAT = pytest.param(GATConv, {"heads": 2}, id="gat")
LAYERS = pytest.mark.parametrize(("make", "options"), [SAGE, SAGE_MAX, GAT])


def _inputs():
    x = torch.randn(30, 8)
    return x, torch.randint(30, (2, 120)), torch.randint(30, (2, 120))


@LAYERS
def test_make_fx_keeps_the_edges_an_input(make, options):
    x, edges, others = _inputs()
    layer = make(8, 4, **options)
    with torch.no_grad():
        traced = make_fx(layer)(x, edges)
        torch.testing.assert_close(traced(x, edges), layer(x, edges))
        torch.testing.assert_close(traced(x, others), layer(x, others))


@pytest.mark.parametrize("strict", [True, False])
@LAYERS
def test_export(make, options, strict):
    x, edges, _ = _inputs()
    layer = make(8, 4, **options).eval()
    program = torch.export.export(layer, (x, edges), strict=strict)
    torch.testing.assert_close(program.module()(x, edges), layer(x, edges))


@LAYERS
def test_fake_and_meta_tensors_give_the_form(make, options):
    x, edges, _ = _inputs()
    layer = make(8, 4, **options)
    shape = layer(x, edges).shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(mode.from_tensor(x), mode.from_tensor(edges))
    assert fake.shape == shape
    meta = make(8, 4, **options).to("meta")(x.to("meta"), edges.to("meta"))
    assert meta.shape == shape
    assert meta.is_meta


@pytest.mark.parametrize("weights", [False, True])
def test_edge_features_and_weights_without_data(weights):
    x = torch.randn(6, 8, device="meta")
    edges = torch.zeros(2, 9, dtype=torch.long, device="meta")
    edge_attr = torch.randn(9, 3, device="meta")
    options = {"heads": 2, "edge_dim": 3, "add_self_loops": False}
    found = []
    for make in (GATConv, ParentGAT):
        out = make(8, 4, **options).to("meta")(x, edges, edge_attr, None, weights)
        parts = (out[0], *out[1]) if weights else (out,)
        found.append([(part.shape, part.dtype, part.device) for part in parts])
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="'edge_attr' must have the dtype"):
        GATConv(8, 4, **options).to("meta")(x, edges, edge_attr.double())


@LAYERS
def test_a_dispatch_mode_sees_one_operation(make, options):
    x, edges, _ = _inputs()
    layer = make(8, 4, **options)
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():
        out = layer(x, edges)
    torch.testing.assert_close(out, layer(x, edges))
    assert sum("pyg_tiga" in name for name in seen) == 1


@pytest.mark.parametrize(
    "layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo]
)
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_compiles_with_sparse_matrices_as_the_parent_does(aggr, layout):
    x, edges, _ = _inputs()
    ones = torch.ones(120)
    matrix = torch.sparse_coo_tensor(edges.flip(0), ones, (30, 30)).coalesce()
    matrix = matrix.to_sparse(layout=layout)
    ours, theirs = SAGEConv(8, 4, aggr=aggr), ParentSAGE(8, 4, aggr=aggr)
    ours.load_state_dict(theirs.state_dict())
    compiled = torch.compile(ours, backend="eager")
    torch.testing.assert_close(compiled(x, matrix), theirs(x, matrix))


def test_functions_compile_with_matrices_and_weighted_graphs():
    x, edges, _ = _inputs()
    values = torch.rand(120)
    matrix = torch.sparse_coo_tensor(edges.flip(0), values, (30, 30)).coalesce()
    matrix = matrix.to_sparse_csr()
    expected = functional.spmm(matrix, x)
    call = torch.compile(lambda a, x: functional.spmm(a, x), backend="eager")
    torch.testing.assert_close(call(matrix, x), expected)
    graph = tg.Graph.from_adj(matrix)
    torch.testing.assert_close(call(graph, x), expected)
    # Copies: Dynamo cannot take views of a sparse tensor.
    parts = (matrix.crow_indices(), matrix.col_indices(), matrix.values())
    csr = tuple(part.clone() for part in parts)
    call = torch.compile(tg.spmm_csr, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(*csr, x), expected)
    torch.testing.assert_close(call(*csr[:2], None, x), tg.spmm_csr(*csr[:2], None, x))


@pytest.mark.parametrize("form", ["bipartite", "no root"])
def test_nan_that_no_edge_reads_stays_out_of_the_gradient(form):
    """With fewer outputs than inputs the map may come before the aggregation."""
    x = torch.randn(5, 16)
    x[4] = float("nan")
    edges = torch.tensor([[0, 1, 2], [0, 1, 2]])
    given = (x.requires_grad_(), torch.randn(3, 16)) if form == "bipartite" else x
    layer = SAGEConv(16, 4, root_weight=form == "bipartite")
    layer(given, edges)[:3].sum().backward()
    assert layer.lin_l.weight.grad.isfinite().all()


def test_gat_records_what_the_parent_would_compute():
    x, edges, others = _inputs()
    ours, theirs = (
        GATConv(8, 4, add_self_loops=False),
        ParentGAT(8, 4, add_self_loops=False),
    )
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        traced = make_fx(ours)(x, edges)
        torch.testing.assert_close(traced(x, edges), theirs(x, edges))
        torch.testing.assert_close(traced(x, others), theirs(x, others))
