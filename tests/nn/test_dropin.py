from __future__ import annotations

import logging

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

import pyg_tiga as tg
from pyg_tiga import errors, testing
from pyg_tiga.nn import SAGEConv
from tests.nn.sage_checks import assert_parents_path, pair_of_layers, twin_of

CASE = testing.make_case(testing.row("unsorted"))
X, EDGES = CASE.x, CASE.edge_index
HOOKS = [
    f"{what}_forward_{when}hook"
    for what in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("pre_", "")
]


def test_explains_its_plan():
    layer = SAGEConv(8, 3)
    assert layer.explain_plan() == "SAGEConv(8, 3, aggr=mean)\nhas not run yet"
    layer(X, EDGES)
    text = layer.explain_plan()
    assert "spmm" in text
    assert "runs:" in text
    assert layer.explain() == text
    assert tg.explain(layer) == text


def test_explains_a_whole_model():
    model = torch.nn.ModuleDict({"a": SAGEConv(8, 8), "b": SAGEConv(8, 3, aggr="std")})
    model["b"](model["a"](X, EDGES), EDGES)
    text = tg.explain(model)
    assert "a: SAGEConv(8, 8, aggr=mean)" in text
    assert "because: aggr='std' has no fused form" in text
    with pytest.raises(TypeError, match="'obj'"):
        tg.explain(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="'obj'"):
        tg.explain(3)


def test_record_is_no_state():
    layer = SAGEConv(8, 3)
    before = set(layer.state_dict())
    layer(X, EDGES)
    assert set(layer.state_dict()) == before


def test_explain_mode_of_pyg_still_works():
    layer = SAGEConv(8, 3)
    theirs = twin_of(layer)
    assert not layer.explain
    mask = torch.linspace(-2, 2, EDGES.size(1))
    outs = []
    for conv in (layer, theirs):
        conv.explain = True
        assert conv.explain is True
        conv._edge_mask = mask
        outs.append(conv(X, EDGES))
    torch.testing.assert_close(*outs)
    assert_parents_path(layer, "explain mode is on")
    layer.explain = False
    assert layer.explain is False
    torch.testing.assert_close(layer(X, EDGES), twin_of(layer)(X, EDGES))
    assert "runs: the PyG parent" not in layer.explain_plan()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"aggr": "std"}, "aggr='std' has no fused form"),
        ({"aggr": "median"}, "aggr='median' has no fused form"),
        ({"aggr": "softmax"}, "aggr='softmax' has no fused form"),
        ({"aggr": ["mean", "max"]}, "aggr=['mean', 'max'] has no fused form"),
        ({"aggr": MeanAggregation()}, "aggr='MeanAggregation()' has no fused form"),
        ({"node_dim": 0}, "node_dim=0"),
    ],
    ids=str,
)
def test_options_without_a_fused_form(options, reason):
    ours, theirs = pair_of_layers(8, 3, **options)
    assert torch.equal(ours(X, EDGES), theirs(X, EDGES))
    assert_parents_path(ours, reason)


def test_lstm():
    edges = EDGES[:, EDGES[1].argsort(stable=True)]
    ours, theirs = pair_of_layers(8, 3, aggr="lstm")
    assert torch.equal(ours(X, edges), theirs(X, edges))
    assert_parents_path(ours, "aggr='lstm'")


def test_decomposed_layers_are_the_parents():
    ours, theirs = pair_of_layers(8, 3, decomposed_layers=2)
    raised = []
    for layer in (ours, theirs):
        with pytest.raises(Exception) as caught:
            layer(X, EDGES)
        raised.append(caught.type)
    assert raised[0] is raised[1]
    assert_parents_path(ours, "decomposed_layers=2")
    ours.decomposed_layers = 1
    torch.testing.assert_close(ours(X, EDGES), twin_of(ours)(X, EDGES))
    assert not ours._record.reasons


def test_another_aggregation_module():
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        layer.aggr_module = SumAggregation()
    assert torch.equal(ours(X, EDGES), theirs(X, EDGES))
    assert_parents_path(ours, "'aggr_module' is not the plain MeanAggregation")


def test_hook_on_the_aggregation_module():
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        layer.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)
    assert torch.equal(ours(X, EDGES), theirs(X, EDGES))
    assert_parents_path(ours, "aggr_module")


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")
@pytest.mark.parametrize("name", HOOKS)
def test_message_passing_hooks_are_heard(name):
    edges = EDGES
    if name.startswith("message_and_aggregate"):
        edges = torch.eye(24).to_sparse_csr()
    ours, theirs = pair_of_layers(8, 3)
    heard = []
    handles = [
        getattr(layer, f"register_{name}")(lambda module, *args: heard.append(module))
        for layer in (ours, theirs)
    ]
    outs = [layer(X, edges) for layer in (ours, theirs)]
    assert torch.equal(*outs)
    assert heard == [ours, theirs]
    assert_parents_path(ours, "hooks are registered")
    handles[0].remove()
    ours(X, edges)
    assert not ours._record.reasons


def test_hooks_of_the_module_itself_stay_fused():
    layer = SAGEConv(8, 3)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(layer(X, EDGES), 2 * twin_of(layer)(X, EDGES))
    assert not layer._record.reasons


@pytest.mark.parametrize("kind", ["int32", "EdgeIndex", "graph", "graph_of_a_matrix"])
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")
def test_parents_path_takes_all_that_ours_takes(kind):
    matrix = torch.eye(24).to_sparse_csr() * 2
    edges = {
        "int32": EDGES.int(),
        "EdgeIndex": EdgeIndex(EDGES.int(), sparse_size=(24, 24)),
        "graph": CASE.graph(),
        "graph_of_a_matrix": tg.Graph.from_adj(matrix),
    }[kind]
    theirs_take = matrix if kind == "graph_of_a_matrix" else EDGES
    layer = SAGEConv(8, 3)
    layer.register_propagate_forward_hook(lambda *args: None)
    found = []
    for conv, its_edges in ((layer, edges), (twin_of(layer), theirs_take)):
        x = X.detach().requires_grad_()
        out = conv(x, its_edges)
        out.square().sum().backward()
        found.append((out, x.grad))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")
def test_unfused_matrices_are_the_parents():
    matrix = torch.eye(24).to_sparse_csr() * 2
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        layer.fuse = False
    torch.testing.assert_close(ours(X, matrix), theirs(X, matrix))
    assert_parents_path(ours, "fuse=False")
    ours(X, EDGES)
    assert not ours._record.reasons


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_layers_built_in_deterministic_mode(aggr):
    edges = EdgeIndex(EDGES, sparse_size=(24, 24)).sort_by("col").values
    x = CASE.tied().x
    torch.use_deterministic_algorithms(True)
    try:
        layers = pair_of_layers(8, 3, aggr=aggr)
    finally:
        torch.use_deterministic_algorithms(False)
    found = []
    for layer in layers:
        leaf = x.detach().requires_grad_()
        layer(leaf, edges).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_strict_raises_at_construction(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    with pytest.raises(tg.UnsupportedError, match="aggr='std'") as caught:
        SAGEConv(8, 3, aggr="std")
    assert caught.value.rejections == {"fused": ["aggr='std' has no fused form"]}
    SAGEConv(8, 3)(X, EDGES)


def test_strict_raises_at_the_call(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    layer = SAGEConv(8, 3)
    layer.message = lambda x_j: 2 * x_j
    with pytest.raises(tg.UnsupportedError, match="'message' is overridden"):
        layer(X, EDGES)
    layer = SAGEConv(8, 3)
    layer.register_message_forward_hook(lambda *args: None)
    with pytest.raises(tg.UnsupportedError, match="hooks are registered"):
        layer(X, EDGES)


def test_fallback_is_logged_once(caplog):
    errors.log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pyg_tiga"):
        for _ in range(3):
            SAGEConv(8, 3, aggr="std")(X, EDGES)
        SAGEConv(8, 3)(X, EDGES)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["SAGEConv falls back: aggr='std' has no fused form"]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
def test_tracing_sees_pytorch_operators_only():
    layer = SAGEConv(8, 3)
    traced = torch.jit.trace(layer, (X, EDGES), check_trace=False)
    assert "pyg_tiga::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(X, EDGES), layer(X, EDGES))


def test_function_transforms_take_the_parents_path():
    layer = SAGEConv(8, 3)
    theirs = twin_of(layer)

    def loss_of(conv):
        return lambda x: conv(x, EDGES).square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss_of(layer))(X), torch.func.grad(loss_of(theirs))(X)
    )
    assert_parents_path(layer, "torch.func")
    tangent = torch.ones_like(X)
    ours = torch.func.jvp(loss_of(layer), (X,), (tangent,))
    torch.testing.assert_close(ours, torch.func.jvp(loss_of(theirs), (X,), (tangent,)))
