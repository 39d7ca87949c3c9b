from __future__ import annotations

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
import torch_geometric.nn
from torch._dynamo.backends.debugging import aot_eager

from pyg_tiga import testing
from pyg_tiga.nn import GATConv
from tests.nn.gat_checks import (
    BIPARTITE,
    EDGE_DIM,
    LOOPED,
    SQUARE,
    assert_same,
    features,
    is_fused,
    largest_of,
    pair_of_layers,
    run,
    twin_of,
)

OPTIONS = [
    {},
    {"heads": 1},
    {"concat": False},
    {"residual": True},
    {"residual": True, "concat": False, "bias": False},
    {"add_self_loops": False},
    {"negative_slope": 0.0},
    {"negative_slope": -0.5},
    {"negative_slope": 1.5},
    {"aggr": "sum"},
    {"edge_dim": EDGE_DIM},
    {"edge_dim": EDGE_DIM, "add_self_loops": False, "residual": True},
]


def name_of(options):
    return "-".join(f"{key}_{value}" for key, value in options.items()) or "default"


@pytest.mark.parametrize("row", testing.ROWS, ids=str)
@pytest.mark.parametrize("loops", [True, False], ids=["loops", "no_loops"])
def test_equals_the_parent_on_every_row(row, loops, device):
    case, x, _ = features(row, device=device)
    widths = (row.width, row.width)
    options = {"heads": 2, "add_self_loops": loops, "device": device}
    ours, theirs = pair_of_layers(widths, 5, **options)
    # The parent gathers by int64 and int32 only, and its gradients are right by int64.
    index = case.edge_index
    assert_same(ours, theirs, x, index, their_edges=index.long())
    assert is_fused(ours)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("row", [SQUARE, LOOPED, BIPARTITE], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
def test_options(options, row, weights, device):
    case, x, edge_attr = features(row, device=device)
    options = {"heads": 4, **options, "device": device}
    widths = 8 if row.square else (8, 8)
    edge_attr = edge_attr if "edge_dim" in options else None
    ours, theirs = pair_of_layers(widths, 6, **options)
    assert_same(ours, theirs, x, case.edge_index, edge_attr, weights=weights)
    assert_same(ours.eval(), theirs.eval(), x, case.edge_index, edge_attr)
    assert is_fused(ours)


def test_one_tensor_for_two_maps(device):
    case, x, _ = features(SQUARE, device=device)
    options = {"heads": 2, "residual": True, "device": device}
    ours, theirs = pair_of_layers((8, 8), 5, **options)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


def test_one_map_for_a_pair(device):
    case, x, _ = features(BIPARTITE, device=device)
    ours, theirs = pair_of_layers(8, 5, heads=2, residual=True, device=device)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_float64(options):
    case, x, edge_attr = features(LOOPED, torch.float64)
    options = {"heads": 4, **options}
    edge_attr = edge_attr if "edge_dim" in options else None
    ours, theirs = pair_of_layers(8, 6, dtype=torch.float64, **options)
    found, plain = (
        run(layer, x, case.edge_index, edge_attr, weights=True)
        for layer in (ours, theirs)
    )
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM], ids=["bare", "edge_dim"])
def test_half_precision(dtype, edge_dim, device):
    row = testing.Row("", 40, 40, testing.random_edges(40, 40, 300), width=32)
    case, x, edge_attr = features(row, dtype, device)
    options = {"heads": 2, "edge_dim": edge_dim, "dtype": dtype, "device": device}
    ours, theirs = pair_of_layers(32, 8, **options)
    edge_attr = None if edge_dim is None else edge_attr
    assert_same(ours, theirs, x, case.edge_index, edge_attr, weights=True)
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
    assert is_fused(ours)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM], ids=["bare", "edge_dim"])
def test_autocast_gives_the_dtypes_of_the_parent(weights, edge_dim, device):
    case, x, edge_attr = features(SQUARE, device=device)
    options = {"heads": 2, "residual": True, "edge_dim": edge_dim, "device": device}
    ours, theirs = pair_of_layers(8, 6, **options)
    given = (x, case.edge_index, edge_attr, None, weights or None)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, plain = ours(*given), theirs(*given)
    truth = copy.deepcopy(theirs).double()(
        x.double(), case.edge_index, edge_attr.double(), None, weights or None
    )
    if weights:
        testing.assert_accurate(out[1][1], plain[1][1], truth[1][1])
        out, plain, truth = out[0], plain[0], truth[0]
    assert out.dtype == plain.dtype == torch.float32
    # The inputs of both are rounded alike, to a precision far from float32's.
    error, allowed = (largest_of(y - truth) for y in (out, plain))
    assert error <= 2 * allowed + 1e-3
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.parametrize("in_channels", [-1, (-1, -1)], ids=str)
def test_lazy_initialisation(in_channels):
    case, x, edge_attr = features(SQUARE)
    options = {"heads": 2, "edge_dim": -1, "residual": True}
    torch.manual_seed(3)
    ours = GATConv(in_channels, 5, **options)
    out = ours(x, case.edge_index, edge_attr)
    assert is_fused(ours)
    torch.manual_seed(3)
    theirs = torch_geometric.nn.GATConv(in_channels, 5, **options)
    torch.testing.assert_close(out, theirs(x, case.edge_index, edge_attr))
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
    assert repr(ours) == f"GATConv({in_channels}, 5, heads=2)"


def test_submodule_hooks_are_heard():
    case, x, _ = features(SQUARE)
    layers = pair_of_layers(8, 6, heads=2, residual=True)
    heard = []
    for layer in layers:
        for name in ("lin", "res"):
            getattr(layer, name).register_forward_hook(
                lambda module, args, out: heard.append(out.detach().clone()) or 2 * out
            )
    torch.testing.assert_close(*(layer(x, case.edge_index) for layer in layers))
    assert len(heard) == 4
    torch.testing.assert_close(heard[:2], heard[2:])


def test_frozen_parts():
    case, x, edge_attr = features(SQUARE)
    ours, theirs = pair_of_layers(8, 3, heads=2, edge_dim=EDGE_DIM)
    for layer in (ours, theirs):
        layer.lin.requires_grad_(False)
        layer.att_src.requires_grad_(False)
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
    ours.requires_grad_(False)
    assert not ours(x, case.edge_index, edge_attr).requires_grad
    with torch.inference_mode():
        ours(x, case.edge_index, edge_attr)


@pytest.mark.parametrize(
    "change",
    [
        {"add_self_loops": False},
        {"negative_slope": -0.3},
        {"concat": False, "bias": None},
        {"fill_value": "add"},
        {"flow": "target_to_source"},
        {"res": None},
        {"lin_edge": None},
    ],
    ids=str,
)
def test_attributes_changed_after_construction(change):
    case, x, edge_attr = features(LOOPED)
    layers = pair_of_layers(8, 6, heads=2, edge_dim=EDGE_DIM, residual=True)
    for layer in layers:
        if "concat" in change:
            layer.res = None
        for name, value in change.items():
            setattr(layer, name, value)
    torch.testing.assert_close(
        *(layer(x, case.edge_index, edge_attr) for layer in layers)
    )
    assert is_fused(layers[0])


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM], ids=["bare", "edge_dim"])
def test_double_backward(edge_dim, device):
    case, x, edge_attr = features(LOOPED, torch.float64, device)
    options = {"heads": 2, "edge_dim": edge_dim, "dtype": torch.float64}
    found = []
    for layer in pair_of_layers(8, 3, device=device, **options):
        leaf = x.detach().requires_grad_()
        out = layer(leaf, case.edge_index, edge_attr).tanh().sum()
        (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        grad.square().sum().backward()
        found.append([leaf.grad, layer.lin.weight.grad, layer.att_src.grad])
    torch.testing.assert_close(*found)


def test_gradients_are_right_to_second_order():
    case, (x, x_dst), edge_attr = features(BIPARTITE, torch.float64)
    layer = GATConv((2, 2), 1, heads=2, edge_dim=EDGE_DIM).double()
    inputs = tuple(
        part.detach().clone().requires_grad_()
        for part in (x[:6, :2], x_dst[:3, :2], edge_attr[:9])
    )
    edges = case.edge_index[:, :9] % torch.tensor([[6], [3]])

    def function(x, x_dst, edge_attr):
        return layer((x, x_dst), edges, edge_attr)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_copies_and_pickles():
    case, x, edge_attr = features(SQUARE)
    layer = GATConv(8, 3, heads=2, edge_dim=EDGE_DIM)
    out = layer(x, case.edge_index, edge_attr)
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
        assert torch.equal(twin(x, case.edge_index, edge_attr), out)
        assert twin.explain_plan() == layer.explain_plan()


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_state_dict_loads_both_ways(edge_dim):
    options = {"heads": 2, "edge_dim": edge_dim, "residual": True}
    theirs = torch_geometric.nn.GATConv(8, 3, **options)
    ours = GATConv(8, 3, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def test_repr_and_initialisation():
    layers = []
    for cls in (torch_geometric.nn.GATConv, GATConv):
        torch.manual_seed(5)
        layers.append(cls((8, 4), 3, heads=2, edge_dim=5, residual=True))
    theirs, ours = layers
    assert repr(ours) == repr(theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_is_the_parents(method):
    def form(cls):
        parameters = inspect.signature(getattr(cls, method)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert form(GATConv) == form(torch_geometric.nn.GATConv)


class Recorder:
    """A backend that keeps what it was given."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph.code)
        return aot_eager(graph, inputs)


COMPILED = [{}, {"edge_dim": EDGE_DIM, "residual": True}, {"add_self_loops": False}]


@pytest.mark.parametrize("options", COMPILED, ids=name_of)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_to_one_graph(options, dynamic, device):
    recorder = Recorder()
    case, x, edge_attr = features(LOOPED, device=device)
    ours, theirs = pair_of_layers(8, 6, heads=2, device=device, **options)
    ours.compile(fullgraph=True, backend=recorder, dynamic=dynamic)
    edge_attr = edge_attr if "edge_dim" in options else None
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
    assert "torch.ops.pyg_tiga" in recorder.graphs[-1]


def test_compiles_with_dropout():
    recorder = Recorder()
    case, x, _ = features(LOOPED)
    layer = GATConv(8, 6, heads=2, dropout=0.5)
    layer.compile(fullgraph=True, backend=recorder)
    first, second = layer(x, case.edge_index), layer(x, case.edge_index)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    first = layer(x, case.edge_index)
    torch.manual_seed(1)
    assert torch.equal(layer(x, case.edge_index), first)
    assert len(recorder.graphs) == 1


def test_compiled_layer_takes_other_sizes_without_more_graphs():
    ours, theirs = pair_of_layers(8, 3, heads=2)
    ours.compile(fullgraph=True, backend=Recorder(), dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in ("unsorted", "isolated", "self_loops"):
            case = testing.make_case(testing.row(name))
            assert_same(ours, theirs, case.x, case.edge_index)


def test_compiles_on_a_pair():
    recorder = Recorder()
    case, x, _ = features(BIPARTITE)
    ours, theirs = pair_of_layers((8, 8), 3, heads=2)
    ours.compile(fullgraph=True, backend=recorder)
    assert_same(ours, theirs, x, case.edge_index)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel():
    case, x, _ = features(SQUARE)
    ours, theirs = pair_of_layers(8, 3, heads=2)
    wrapped = torch.nn.parallel.DistributedDataParallel(ours)
    for layer in (wrapped, theirs):
        layer(x, case.edge_index).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_cora(data_dir):
    path = data_dir / "graphs" / "cora.npz"
    if not path.is_file():
        pytest.skip(f"no such file: {path}")
    with np.load(path, allow_pickle=False) as stored:
        edges = torch.from_numpy(stored["edge_index"]).long()
        x = torch.randn(int(stored["num_nodes"]), 16)
    layer = GATConv(16, 8, heads=8)
    theirs = twin_of(layer, 16, 8, heads=8)
    assert_same(layer, theirs, x, edges, weights=True)
    assert_same(layer, theirs, x, edges)
