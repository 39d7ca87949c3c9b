from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch_geometric.nn
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

import pyg_tiga as tg
from pyg_tiga import _features, testing
from pyg_tiga.nn import SAGEConv, sage_conv

FUSED = ["mean", "sum", "add", "max", "min"]
AGGR = pytest.mark.parametrize("aggr", FUSED)
BIPARTITE = testing.row("more_sources")
SQUARE = testing.row("unsorted")
ignore_sparse_warnings = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:Converting sparse tensor", "ignore:.*invariant checks"
)


def pair_of_layers(*args, dtype=torch.float32, **kwargs):
    theirs = torch_geometric.nn.SAGEConv(*args, **kwargs).to(dtype)
    ours = SAGEConv(*args, **kwargs).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def run(layer, x, edges, size=None):
    """Output and all gradients, by name."""
    layer.zero_grad()
    parts = x if isinstance(x, tuple) else (x,)
    leaves = tuple(
        None if part is None else part.detach().requires_grad_() for part in parts
    )
    out = layer(leaves if isinstance(x, tuple) else leaves[0], edges, size)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(cotangent.to(out))
    found = {f"x[{i}].grad": p.grad for i, p in enumerate(leaves) if p is not None}
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    return out.detach(), found


def assert_same(ours, theirs, x, edges, size=None, their_edges=None):
    """Hold outputs and gradients of ours to those of PyG, and both to float64."""
    their_edges = edges if their_edges is None else their_edges
    out, grads = run(ours, x, edges, size)
    plain, plain_grads = run(theirs, x, their_edges, size)
    truth, true_grads = run(
        copy.deepcopy(theirs).double(), double(x), double(their_edges), size
    )
    testing.assert_accurate(out, plain, truth)
    assert grads.keys() == plain_grads.keys()
    for name, plain_grad in plain_grads.items():
        if plain_grad is None:
            assert grads[name] is None or not grads[name].any(), name
        else:
            testing.assert_gradient_accurate(
                grads[name], plain_grad, true_grads[name], name
            )


def double(value):
    if isinstance(value, tuple):
        return tuple(None if part is None else part.double() for part in value)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def features(row, aggr, dtype=torch.float32, seed=0):
    case = testing.make_case(row, dtype, seed=seed)
    case = case.tied() if aggr in ("max", "min") else case
    return case, (case.x if row.square else (case.x, case.x_dst))


def is_fused(layer):
    return not layer._record.reasons and layer._record.plan is not None


@pytest.mark.parametrize("row", testing.ROWS, ids=str)
@AGGR
def test_equals_the_parent_on_every_row(row, aggr):
    case, x = features(row, aggr)
    ours, theirs = pair_of_layers((row.width, row.width), 5, aggr=aggr)
    # The parent gathers by int64 and int32 only, and its gradients are right by int64.
    index = case.edge_index
    assert_same(ours, theirs, x, index, their_edges=index.long())
    assert is_fused(ours)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.int32])
def test_every_integer_dtype_is_an_index(dtype):
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 5)
    long = case.edge_index
    assert_same(ours, theirs, x, long.to(dtype), their_edges=long)


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
def test_options(aggr, options, out_channels):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr, **options)
    assert_same(ours, theirs, x, case.edge_index)
    assert_same(ours.eval(), theirs.eval(), x, case.edge_index)
    assert is_fused(ours)


def values_of(case):
    """One value per edge, whatever the dtype, so that duplicates differ."""
    return torch.linspace(0.5, 1.5, case.edge_index.size(1))


def coo(case, *, coalesced=True):
    size = (case.num_dst, case.num_src)
    matrix = torch.sparse_coo_tensor(case.edge_index.flip(0), values_of(case), size)
    return matrix.coalesce() if coalesced else matrix


def edge_index_of(case, order=None):
    edge_index = EdgeIndex(case.edge_index, sparse_size=(case.num_src, case.num_dst))
    return edge_index if order is None else edge_index.sort_by(order).values


MATRICES = {
    "coo": coo,
    "coo_uncoalesced": lambda case: coo(case, coalesced=False),
    "csr": lambda case: coo(case).to_sparse_csr(),
    "csc": lambda case: coo(case).to_sparse_csc(),
}
EDGE_LISTS = {
    "edge_index": lambda case: case.edge_index,
    "EdgeIndex": edge_index_of,
    "EdgeIndex_by_row": lambda case: edge_index_of(case, "row"),
    "EdgeIndex_by_col": lambda case: edge_index_of(case, "col"),
}


@ignore_sparse_warnings
@pytest.mark.parametrize("form", [*MATRICES, *EDGE_LISTS])
@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_every_form_of_the_edges(form, row, aggr):
    case, x = features(row, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    edges = (MATRICES | EDGE_LISTS)[form](case)
    assert_same(ours, theirs, x, edges)
    assert is_fused(ours)


@ignore_sparse_warnings
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
def test_gradients_reach_the_stored_values(aggr, form, out_channels):
    case, x = features(SQUARE, aggr)
    grads = []
    for layer in pair_of_layers(8, out_channels, aggr=aggr):
        matrix = MATRICES[form](case).requires_grad_()
        layer(x, matrix).square().sum().backward()
        grads.append(matrix.grad.to_dense())
    torch.testing.assert_close(*grads)


@pytest.mark.skipif(
    _features.torch_sparse() is None, reason="torch_sparse is not installed"
)
@pytest.mark.parametrize("has_value", [True, False], ids=["value", "no_value"])
@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_sparse_tensor_values_are_ignored(has_value, row, aggr):
    case, x = features(row, aggr)
    src, dst = case.edge_index
    adj_t = SparseTensor(
        row=dst,
        col=src,
        value=values_of(case) if has_value else None,
        sparse_sizes=(case.num_dst, case.num_src),
    )
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, x, adj_t)
    assert is_fused(ours)


@pytest.mark.parametrize("row", [SQUARE, BIPARTITE], ids=str)
@AGGR
def test_graph_counts_as_what_it_was_built_from(row, aggr):
    case, x = features(row, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, x, case.graph(), their_edges=case.edge_index)
    assert is_fused(ours)


@ignore_sparse_warnings
@AGGR
def test_graph_of_a_matrix_carries_its_values(aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr)
    matrix = coo(case).to_sparse_csr()
    out = ours(x, tg.Graph.from_adj(matrix))
    torch.testing.assert_close(out, theirs(x, matrix))


@pytest.mark.parametrize("size", [None, (35, 8), (None, 8), (35, None)], ids=str)
def test_bipartite_with_size(size):
    case, x = features(BIPARTITE, "mean")
    ours, theirs = pair_of_layers((8, 8), 5)
    assert_same(ours, theirs, x, case.edge_index, size)


@pytest.mark.parametrize("size", [(35, 8), (None, 8), (35, 40)], ids=str)
@AGGR
def test_bipartite_without_destination_features(size, aggr):
    case, (x, _) = features(BIPARTITE, aggr)
    ours, theirs = pair_of_layers((8, 8), 5, aggr=aggr)
    assert_same(ours, theirs, (x, None), case.edge_index, size)


def test_no_size_and_no_destinations_means_square():
    case, (x, _) = features(BIPARTITE, "mean")
    ours, theirs = pair_of_layers((8, 8), 5)
    assert_same(ours, theirs, (x, None), case.edge_index)
    assert ours((x, None), case.edge_index).size(0) == 35


@pytest.mark.parametrize("form", EDGE_LISTS)
@AGGR
def test_target_to_source(form, aggr):
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, 5, aggr=aggr, flow="target_to_source")
    assert_same(ours, theirs, x, EDGE_LISTS[form](case))
    assert is_fused(ours)


def test_target_to_source_gathers_from_the_first_of_a_pair():
    case, x = features(SQUARE, "mean")
    ours, theirs = pair_of_layers(8, 5, flow="target_to_source")
    assert_same(ours, theirs, (x, case.x_dst), case.edge_index)


@ignore_sparse_warnings
@pytest.mark.parametrize("form", [*MATRICES, "graph"])
def test_target_to_source_refuses_matrices(form):
    case, x = features(SQUARE, "mean")
    layers = pair_of_layers(8, 5, flow="target_to_source")
    edges = case.graph() if form == "graph" else MATRICES[form](case)
    for layer in layers:
        with pytest.raises(ValueError):
            layer(x, edges)


@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
@AGGR
def test_batch_of_features(aggr, out_channels):
    case, x = features(SQUARE, aggr)
    x = torch.stack([x, x.flip(0), 2 * x])  # [3, N, F]
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr)
    assert_same(ours, theirs, x, case.edge_index)
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
def test_half_precision(aggr, dtype, out_channels):
    row = testing.Row("", 40, 40, testing.random_edges(40, 40, 300), width=32)
    case, x = features(row, aggr, dtype)
    ours, theirs = pair_of_layers(32, out_channels, aggr=aggr, dtype=dtype)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


@pytest.mark.parametrize(
    "options", [{}, {"root_weight": False}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@AGGR
def test_autocast_gives_the_dtypes_of_the_parent(aggr, out_channels, options, batched):
    case, x = features(SQUARE, aggr)
    x = x.expand(2, -1, -1) if batched else x
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
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
        layer.flow = "target_to_source"
    torch.testing.assert_close(ours(x, case.edge_index), theirs(x, case.edge_index))


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_double_backward(aggr):
    case, x = features(SQUARE, "mean", torch.float64)
    ours, theirs = pair_of_layers(8, 3, aggr=aggr, dtype=torch.float64)
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


@pytest.mark.parametrize("aggr", FUSED)
@pytest.mark.parametrize("out_channels", [3, 12], ids=["narrower", "wider"])
def test_compiles_to_one_graph(aggr, out_channels):
    torch._dynamo.reset()
    case, x = features(SQUARE, aggr)
    ours, theirs = pair_of_layers(8, out_channels, aggr=aggr)
    ours.compile(fullgraph=True, backend="aot_eager")
    assert_same(ours, theirs, x, case.edge_index)


def test_compiles_with_a_pair_and_normalisation():
    torch._dynamo.reset()
    case, x = features(BIPARTITE, "mean")
    ours, theirs = pair_of_layers((8, 8), 3, normalize=True, project=True)
    ours.compile(fullgraph=True, backend="aot_eager")
    assert_same(ours, theirs, x, case.edge_index)


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


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        case, x = features(SQUARE, "mean")
        ours, theirs = pair_of_layers(8, 3)
        wrapped = torch.nn.parallel.DistributedDataParallel(ours)
        for layer in (wrapped, theirs):
            layer(x, case.edge_index).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    finally:
        torch.distributed.destroy_process_group()


def bad_calls():
    x, index = torch.randn(6, 8), torch.tensor([[0, 1], [2, 3]])
    wide = torch.randn(6, 9)
    matrix = torch.eye(6).to_sparse_csr()
    return {
        "width": (x[:, :7], index, None, r"'x' must have shape .*8\]"),
        "width_of_destinations": ((x, wide), index, None, r"'x\[1\]' must have shape"),
        "one_dimension": (x[0], index, None, "'x' must have shape"),
        "no_tensor": ((None, x), index, None, "'x' must be a tensor"),
        "dtype": (x.double(), index, None, "'x' must have the dtype"),
        "integer_features": (x.long(), index, None, "'x' must have the dtype"),
        "float_index": (x, index.float(), None, "'edge_index' must hold integers"),
        "bool_index": (x, index.bool(), None, "'edge_index' must hold integers"),
        "shape_of_index": (x, index.new_zeros(3, 2), None, r"shape \[2, num_edges\]"),
        "one_row_of_index": (x, index[0], None, r"shape \[2, num_edges\]"),
        "kind_of_index": (x, [[0, 1], [2, 3]], None, "'edge_index' must be"),
        "size": (x, index, (7, 6), "'x' must have 7 rows by 'size'"),
        "size_of_destinations": ((x, x[:5]), index, (6, 4), r"'x\[1\]' must have 4"),
        "matrix_columns": (x[:5], matrix, None, "'x' must have 6 rows"),
        "matrix_rows": ((x, x[:5]), matrix, None, r"'x\[1\]' must have 6 rows"),
        "too_large": (x, index + 4, None, "index 6 .* 6 destination nodes"),
        "negative": (x, index - 1, None, "index -1 .* 6 source nodes"),
        "device": (x.to("meta"), index, None, "device"),
    }


@ignore_sparse_warnings
@pytest.mark.parametrize("name", list(bad_calls()))
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_bad_input_is_named(name, aggr):
    x, edges, size, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message):
        SAGEConv((8, 8), 3, aggr=aggr)(x, edges, size)


def test_edge_index_knows_its_size():
    case, x = features(SQUARE, "mean")
    edge_index = EdgeIndex(case.edge_index, sparse_size=(24, 30))
    for layer in pair_of_layers(8, 3):
        with pytest.raises(ValueError):
            layer(x, edge_index)


def test_mixed_flow_and_pair_that_cannot_be_added():
    case, (x, x_dst) = features(BIPARTITE, "mean")
    index = case.edge_index.clamp(max=7)
    layer = SAGEConv((8, 8), 3, flow="target_to_source")
    with pytest.raises(ValueError, match="target_to_source"):
        layer((x, x_dst), index)
