"""Inputs and options that are rare, as the parents take or refuse them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_geometric.nn as pn
from torch_geometric import EdgeIndex

import pyg_tiga as tg
import pyg_tiga.nn as tn
from pyg_tiga.relation import clear
from tests.nn.layer_checks import ignore_sparse_warnings

LAYERS = ("SAGEConv", "GATConv", "GATv2Conv", "TransformerConv")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, generator=GENERATOR)
EDGES = torch.randint(6, (2, 12), generator=GENERATOR)
NONE = EDGES[:, :0]


def matrix(layout=torch.sparse_coo, dtype=torch.float32):
    value = torch.arange(1.0, EDGES.size(1) + 1)
    coo = torch.sparse_coo_tensor(EDGES, value, (6, 6)).coalesce().to(dtype)
    return coo if layout is torch.sparse_coo else coo.to_sparse(layout=layout)


def pair(name, *args, **options):
    theirs = getattr(pn, name)(*args, **options)
    ours = getattr(tn, name)(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


def assert_same(name, args, options, *inputs, **named):
    """Outputs, weights and gradients are the parent's; gives our layer."""
    layers, found = pair(name, *args, **options), []
    for layer in layers:
        out = layer(*inputs, **named)
        out, more = out if isinstance(out, tuple) else (out, ())
        out.square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        found.append((out, *more, *grads))
    for ours, theirs in zip(*found, strict=True):
        if ours is not None or theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return layers[0]


# Result dtypes


@ignore_sparse_warnings
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("widths", [(33, 8), (8, 33), (4, 4)])
def test_autocast_with_a_matrix(widths, aggr, layout):
    x, adj = torch.randn(6, widths[0]), matrix(layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [layer(x, adj) for layer in pair("SAGEConv", *widths, aggr=aggr)]
    assert outs[0].dtype == outs[1].dtype == torch.bfloat16


@ignore_sparse_warnings
@pytest.mark.parametrize("values", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_the_dtype_is_that_of_the_features(aggr, dtype, values):
    for widths in ((33, 8), (8, 33)):
        layer = tn.SAGEConv(*widths, aggr=aggr).to(dtype)
        out = layer(torch.randn(6, widths[0], dtype=dtype), matrix(dtype=values))
        assert out.dtype == dtype


# Sizes


@pytest.mark.parametrize("weights", [None, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("sparse_size", [(20, 10), (None, 10), (20, None), (20, 20)])
def test_sizes_of_an_edge_index_object(sparse_size, loops, flow, weights):
    edges = EdgeIndex([[0, 5, 7], [0, 1, 2]], sparse_size=sparse_size)
    options = {"add_self_loops": loops, "flow": flow}
    x, few = torch.randn(20, 4), torch.randn(10, 4)
    named = {"return_attention_weights": weights}
    assert_same("GATConv", (4, 5), options, (x, None), edges, **named)
    if loops:
        assert_same("GATConv", (4, 5), options, x, edges, **named)
        assert_same("GATv2Conv", (4, 5), options, x, edges, **named)
    if sparse_size != (20, 20) and flow == "source_to_target":
        assert_same("GATConv", (4, 5), options, (x, few), edges, **named)
        assert_same("GATv2Conv", (4, 5), options, (x, few), edges, **named)


@ignore_sparse_warnings
def test_sizes_of_other_types():
    six = torch.tensor([6, 6])
    for loops in (True, False):
        assert_same("GATConv", (4, 5), {"add_self_loops": loops}, X, EDGES, size=six)
    assert_same("SAGEConv", (4, 5), {}, X, EDGES, size=six)
    # Where PyG does not read them, they may be anything.
    assert_same("SAGEConv", (4, 5), {}, X, matrix(), size=(2.5,))
    assert_same("SAGEConv", (4, 5), {}, X, EdgeIndex(EDGES), size="no")
    for size in ((6, 6, 6), (6.0, 6.0), torch.tensor([6.0, 6.0]), torch.tensor(6)):
        for layer in (tn.SAGEConv(4, 5), tn.GATConv(4, 5)):
            with pytest.raises(ValueError, match="'size' must be a pair"):
                layer(X, EDGES, size=size)


# Features


@ignore_sparse_warnings
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_one_row_is_added_to_all(aggr):
    options = {"aggr": aggr, "flow": "target_to_source"}
    for root in (torch.ones(1, 3), torch.ones(2, 1, 3)):
        layer = assert_same("SAGEConv", ((4, 3), 5), options, (X, root), EDGES)
        assert "x[1] has 1 rows" in layer.explain_plan()
    one = (X[:1], torch.ones(6, 3))
    assert_same("SAGEConv", ((4, 3), 5), options, one, EDGES * 0)
    given = (X, torch.ones(1, 3)), matrix()
    assert_same("SAGEConv", ((4, 3), 5), {"aggr": aggr}, *given)
    layer = tn.SAGEConv((4, 3), 5, **options)
    with pytest.raises(ValueError, match="must have 6 rows"):
        layer((X, torch.ones(2, 3)), EDGES)


@ignore_sparse_warnings
def test_edge_features_of_one_edge_for_all():
    options = {"edge_dim": 2, "add_self_loops": False}
    for edges in (EDGES, matrix(), EdgeIndex(EDGES)):
        layer = assert_same("GATConv", (4, 5), options, X, edges, torch.ones(1, 2))
        assert "one row for all edges" in layer.explain_plan()
    options["edge_dim"] = 1
    assert_same("GATConv", (4, 5), options, X, EDGES, torch.ones(1))
    layer = tn.GATConv(4, 5, edge_dim=2)
    with pytest.raises(ValueError, match="must have 12 rows"):
        layer(X, EDGES, torch.ones(1, 2))


@pytest.mark.parametrize("attr", [torch.ones(0, 2).long(), torch.ones(0, 2).double()])
def test_edge_features_without_edges_are_not_read(attr):
    for loops, x in ((False, X), (False, X[:0]), (True, X[:0])):
        options = {"edge_dim": 2, "add_self_loops": loops, "fill_value": "add"}
        assert_same("GATConv", (4, 5), options, x, NONE, attr)


@ignore_sparse_warnings
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_features(name, layout):
    x = X.to_sparse(layout=layout)
    if name != "SAGEConv":
        assert_same(name, (4, 5), {}, x, EDGES)
        assert_same(name, (4, 5), {}, (X, x), EDGES)
        return
    assert_same(name, (4, 5), {}, (X, x), EDGES)
    assert_same(name, (4, 5), {"project": True}, x, EDGES)
    for aggr in ("sum", "mean", "max"):
        for edges in (EDGES, EdgeIndex(EDGES), tg.Graph.from_edge_index(EDGES)):
            for given in (x, (x, None)):
                with pytest.raises(ValueError, match="'x' must be a dense tensor"):
                    tn.SAGEConv(4, 5, aggr=aggr)(given, edges)
    if layout is torch.sparse_csr:
        layer = assert_same(name, (4, 5), {"aggr": "sum"}, x, matrix())
        assert "layout torch.sparse_csr" in layer.explain_plan()


# Options


@pytest.mark.parametrize("cls", [tn.GATConv, tn.GATv2Conv])
def test_a_slope_is_a_number(cls):
    wrong = (None, "0.2", np.array([0.2]), torch.ones(2))
    trained = (torch.nn.Parameter(torch.tensor(0.2)), torch.ones(()).requires_grad_())
    for slope in (*wrong, *trained):
        with pytest.raises(TypeError, match="'negative_slope' must be a number"):
            cls(4, 5, negative_slope=slope)
        for edges in (EDGES, EdgeIndex(EDGES)):
            layer = cls(4, 5)
            del layer.negative_slope
            layer.negative_slope = slope
            with pytest.raises(TypeError, match="'negative_slope' must be a number"):
                layer(X, edges)
    layer = cls(4, 5)
    layer.negative_slope = float("nan")
    with pytest.raises(ValueError, match="'negative_slope' must be a number"):
        layer(X, EDGES)
    for slope in (True, 1, np.float32(0.2), torch.tensor(0.2)):
        assert_same(cls.__name__, (4, 5), {"negative_slope": slope}, X, EDGES)


@pytest.mark.parametrize("name", LAYERS[1:])
def test_a_dropout_is_not_trained(name):
    layer = getattr(tn, name)(4, 5)
    del layer.dropout
    layer.dropout = torch.nn.Parameter(torch.tensor(0.2))
    with pytest.raises(TypeError, match="'dropout' must be a number"):
        layer(X, EDGES)


@pytest.mark.parametrize("weights", [None, True])
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("name", LAYERS[1:])
def test_true_is_one_head(name, concat, weights):
    options = {"heads": True, "concat": concat}
    named = {"return_attention_weights": weights}
    layer = assert_same(name, (4, 5), options, X, EDGES, **named)
    assert repr(layer) == repr(getattr(pn, name)(4, 5, **options))
    assert_same(name, ((4, 4), 5), options, (X, X), EDGES, **named)


@pytest.mark.parametrize("name", LAYERS)
def test_a_deleted_part_is_missed_as_in_the_parent(name):
    options = {} if name == "SAGEConv" else {"edge_dim": 2}
    inputs = (X, EDGES) if name == "SAGEConv" else (X, EDGES, torch.ones(12, 2))
    theirs = getattr(pn, name)(4, 5, **options)
    for part in [*dict(theirs.named_children()), *dict(theirs.named_parameters())]:
        if "." in part:
            continue
        for layer in pair(name, 4, 5, **options):
            delattr(layer, part)
            with pytest.raises(AttributeError, match=part):
                layer(*inputs)


# Places


@ignore_sparse_warnings
@pytest.mark.parametrize("name", LAYERS)
def test_the_default_device_does_not_matter(name):
    adj = matrix(torch.sparse_csr)
    weighted = tg.Graph.from_adj(adj)
    layer = getattr(tn, name)(4, 5)
    layer.register_message_forward_hook(lambda *_: None)
    expected = layer(X, weighted)
    clear()
    with torch.device("meta"):
        torch.testing.assert_close(layer(X, weighted), expected)
