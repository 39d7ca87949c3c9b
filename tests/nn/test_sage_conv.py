from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch_geometric.nn
from torch._dynamo.backends.debugging import aot_eager

from pyg_tiga import testing
from pyg_tiga.nn import SAGEConv, sage_conv
from tests.nn.sage_checks import (
    AGGR,
    BIPARTITE,
    SQUARE,
    assert_same,
    edge_index_of,
    features,
    is_fused,
    pair_of_layers,
    run,
)


@pytest.mark.parametrize("row", testing.ROWS, ids=str)
@AGGR
def test_equals_the_parent_on_every_row(row, aggr, device):
    case, x = features(row, aggr, device=device)
    widths = (row.width, row.width)
    ours, theirs = pair_of_layers(widths, 5, aggr=aggr, device=device)
    # The parent gathers by int64 and int32 only, and its gradients are right by int64.
    index = case.edge_index
    assert_same(ours, theirs, x, index, their_edges=index.long())
    assert is_fused(ours)


@AGGR
@pytest.mark.parametrize(
    "options",
    [
        {"normalize": True},
        {"project": True},
        {"root_weight": False},
        {"bias": False},
        {"normalize": True, "project": True, "root_weight": False, "bias": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
def test_options(aggr, options, out_channels, device):
    case, x = features(SQUARE, aggr, device=device)
    options = {**options, "aggr": aggr, "device": device}
    ours, theirs = pair_of_layers(8, out_channels, **options)
    assert_same(ours, theirs, x, case.edge_index)
    assert_same(ours.eval(), theirs.eval(), x, case.edge_index)
    assert is_fused(ours)


@AGGR
def test_float64(aggr):
    case, x = features(SQUARE, aggr, torch.float64)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr, dtype=torch.float64)
    out, grads = run(ours, x, case.edge_index)
    plain, plain_grads = run(theirs, x, case.edge_index)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-13)
    torch.testing.assert_close(grads, plain_grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
@AGGR
def test_half_precision(aggr, dtype, out_channels, device):
    row = testing.Row("", 40, 40, testing.random_edges(40, 40, 300), width=32)
    case, x = features(row, aggr, dtype, device)
    options = {"aggr": aggr, "dtype": dtype, "device": device}
    ours, theirs = pair_of_layers(32, out_channels, **options)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize(
    "options", [{}, {"root_weight": False}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@AGGR
def test_autocast_gives_the_dtypes_of_the_parent(
    aggr, out_channels, options, batched, device
):
    case, x = features(SQUARE, aggr, device=device)
    x = x.expand(2, -1, -1) if batched else x
    options = {**options, "aggr": aggr, "device": device}
    ours, theirs = pair_of_layers(8, out_channels, **options)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = ours(x, case.edge_index)
        plain = theirs(x, case.edge_index)
    truth = copy.deepcopy(theirs).double()(x.double(), case.edge_index)
    assert out.dtype == plain.dtype == torch.bfloat16
    testing.assert_accurate(out, plain, truth)
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


def test_autocast_on_half_input():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x.bfloat16(), case.edge_index)
        plain = theirs(x.bfloat16(), case.edge_index)
    assert out.dtype == plain.dtype
    torch.testing.assert_close(out, plain, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("in_channels", [-1, (-1, -1)], ids=str)
@AGGR
def test_lazy_initialisation(in_channels, aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = SAGEConv(in_channels, 5, aggr=aggr), None
    ours(x, case.edge_index)
    theirs = torch_geometric.nn.SAGEConv(8, 5, aggr=aggr)
    theirs.load_state_dict(ours.state_dict())
    assert_same(ours, theirs, x, case.edge_index)
    assert repr(ours) == f"SAGEConv({in_channels}, 5, aggr={aggr})"


@pytest.mark.parametrize("first", [False, True], ids=["aggregate", "transform"])
@pytest.mark.parametrize(
    "options", [{}, {"root_weight": False}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("row", [SQUARE, testing.row("isolated"), BIPARTITE], ids=str)
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_both_orders_agree(monkeypatch, first, options, row, aggr):
    monkeypatch.setattr(sage_conv, "transform_first", lambda *_: first)
    case, x = features(row, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr, **options)
    assert_same(ours, theirs, x, case.edge_index)


def test_submodule_hooks_are_heard():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 3)
    heard = []
    for layer in (ours, theirs):
        for name in ("lin_l", "lin_r"):
            getattr(layer, name).register_forward_hook(
                lambda module, args, out: heard.append(out.detach().clone()) or 2 * out
            )
    out, plain = ours(x, case.edge_index), theirs(x, case.edge_index)
    torch.testing.assert_close(out, plain)
    assert len(heard) == 4
    torch.testing.assert_close(heard[:2], heard[2:])


def test_replaced_and_parametrised_submodules_are_called():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        torch.manual_seed(3)
        torch.nn.utils.parametrizations.weight_norm(layer.lin_l)
        layer.lin_r = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.ReLU())
    torch.testing.assert_close(ours(x, case.edge_index), theirs(x, case.edge_index))


def test_frozen_parts():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        layer.lin_l.requires_grad_(False)
    assert_same(ours, theirs, x, case.edge_index)
    ours.requires_grad_(False)
    assert not ours(x, case.edge_index).requires_grad
    with torch.inference_mode():
        ours(x, case.edge_index)


def test_attributes_changed_after_construction():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 3)
    for layer in (ours, theirs):
        layer.root_weight = False
        layer.normalize = True
        layer.project = True
        layer.flow = "target_to_source"
    torch.testing.assert_close(ours(x, case.edge_index), theirs(x, case.edge_index))


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_double_backward(aggr, device):
    case, x = features(SQUARE, "mean", torch.float64, device)
    options = {"aggr": aggr, "dtype": torch.float64, "device": device}
    ours, theirs = pair_of_layers(8, 3, **options)
    found = []
    for layer in (ours, theirs):
        leaf = x.detach().requires_grad_()
        out = layer(leaf, case.edge_index).tanh().sum()
        (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        grad.square().sum().backward()
        found.append([leaf.grad, layer.lin_l.weight.grad])
    torch.testing.assert_close(*found)


def test_gradients_are_right_to_second_order():
    case, _ = features(BIPARTITE, "mean", torch.float64)
    layer = SAGEConv((2, 2), 1).double()
    x, x_dst = case.x[:, :2].clone(), case.x_dst[:, :2].clone()
    inputs = (x.requires_grad_(), x_dst.requires_grad_())

    def function(x, x_dst):
        return layer((x, x_dst), case.edge_index[:, :30])

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("aggr", ["mean", "max", "std"])
def test_copies_and_pickles(aggr):
    case, x = features(SQUARE, aggr)
    layer = SAGEConv(8, 3, aggr=aggr)
    out = layer(x, case.edge_index)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in twins:
        assert twin.explain_plan() == layer.explain_plan()
        assert torch.equal(twin(x, case.edge_index), out)
        assert twin.explain_plan() == layer.explain_plan()


def test_state_dict_loads_both_ways():
    theirs = torch_geometric.nn.SAGEConv(8, 3, project=True)
    ours = SAGEConv(8, 3, project=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("aggr", ["mean", ["mean", "std"], "lstm"], ids=str)
def test_repr_and_initialisation(aggr):
    torch.manual_seed(5)
    theirs = torch_geometric.nn.SAGEConv((8, 4), 3, aggr=aggr)
    torch.manual_seed(5)
    ours = SAGEConv((8, 4), 3, aggr=aggr)
    assert repr(ours) == repr(theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_is_the_parents(method):
    def form(cls):
        parameters = inspect.signature(getattr(cls, method)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert form(SAGEConv) == form(torch_geometric.nn.SAGEConv)


class Recorder:
    """A backend that keeps what it was given."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph.code)
        return aot_eager(graph, inputs)


@AGGR
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
def test_compiles_to_one_graph(aggr, out_channels, dynamic, device):
    recorder = Recorder()
    case, x = features(SQUARE, aggr, device=device)
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr, device=device)
    ours.compile(fullgraph=True, backend=recorder, dynamic=dynamic)
    assert_same(ours, theirs, x, case.edge_index)
    assert len(recorder.graphs) == 1
    assert "torch.ops.pyg_tiga.spmm" in recorder.graphs[0]


def test_compiled_layer_takes_other_sizes_without_more_graphs():
    recorder = Recorder()
    ours, theirs = pair_of_layers(8, 3)
    ours.compile(fullgraph=True, backend=recorder, dynamic=True)
    for name in ("unsorted", "isolated", "self_loops"):
        case = testing.make_case(testing.row(name))
        assert_same(ours, theirs, case.x, case.edge_index)
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("form", ["pair", "EdgeIndex", "graph"])
def test_compiles_on_other_forms(form):
    recorder = Recorder()
    case, x = features(BIPARTITE if form == "pair" else SQUARE, "mean")
    ours, theirs = pair_of_layers((8, 8), 3, normalize=True, project=True)
    edges = {
        "pair": case.edge_index,
        "EdgeIndex": edge_index_of(case, "col"),
        "graph": case.graph(),
    }[form]
    ours.compile(fullgraph=True, backend=recorder)
    assert_same(ours, theirs, x, edges, their_edges=case.edge_index)
    assert "torch.ops.pyg_tiga.spmm" in recorder.graphs[0]


def test_compiles_on_the_parents_path():
    recorder = Recorder()
    case, x = features(SQUARE, "std")
    ours, theirs = pair_of_layers(8, 3, aggr="std")
    ours.compile(fullgraph=True, backend=recorder)
    torch.testing.assert_close(ours(x, case.edge_index), theirs(x, case.edge_index))
    assert "pyg_tiga" not in recorder.graphs[0]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("aggr", ["mean", "max", "std"])
def test_torchscript(aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 3, aggr=aggr, project=True, normalize=True)
    out = ours(x, case.edge_index)
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(x, case.edge_index), theirs(x, case.edge_index))
    scripted(x, case.edge_index).sum().backward()
    assert ours.lin_l.weight.grad is not None
    torch.testing.assert_close(ours(x, case.edge_index), out)
    assert type(ours.lin_l) is type(theirs.lin_l)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_of_a_model():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv(8, 3)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(x, edge_index).relu()

    case, x = features(SQUARE, "mean")
    net = Net()
    out = torch.jit.script(net)(x, case.edge_index)
    torch.testing.assert_close(out, net(x, case.edge_index))


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(ours)
    for layer in (wrapped, theirs):
        layer(x, case.edge_index).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
