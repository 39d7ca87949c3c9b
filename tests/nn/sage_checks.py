"""What the tests of SAGEConv share: both layers, inputs, and the comparison."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn
from torch_geometric import EdgeIndex

from pyg_tiga import _features, testing
from pyg_tiga.nn import SAGEConv, sage_conv

FUSED = ["mean", "sum", "add", "max", "min"]
AGGR = pytest.mark.parametrize("aggr", FUSED)
BIPARTITE = testing.row("more_sources")
SQUARE = testing.row("unsorted")
ignore_sparse_warnings = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:Converting sparse tensor", "ignore:.*invariant checks"
)


def pair_of_layers(*args, dtype=torch.float32, device="cpu", **kwargs):
    theirs = torch_geometric.nn.SAGEConv(*args, **kwargs).to(device, dtype)
    ours = SAGEConv(*args, **kwargs).to(device, dtype)
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


def features(row, aggr, dtype=torch.float32, device="cpu"):
    case = testing.make_case(row, dtype, device)
    # With torch_scatter on CUDA, PyG's own choice among equals is left to chance.
    by_chance = case.x.is_cuda and _features.torch_scatter() is not None
    if aggr in ("max", "min") and not by_chance:
        case = case.tied()
    return case, (case.x if row.square else (case.x, case.x_dst))


def is_fused(layer):
    return not layer._record.reasons and layer._record.plan is not None


def values_of(case):
    """One value per edge, whatever the dtype, so that duplicates differ."""
    return torch.linspace(
        0.5, 1.5, case.edge_index.size(1), device=case.edge_index.device
    )


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


def twin_of(layer):
    """PyG's layer with the parameters of ours."""
    theirs = torch_geometric.nn.SAGEConv(8, 3)
    theirs.load_state_dict(layer.state_dict())
    return theirs


def assert_parents_path(layer, reason):
    assert any(reason in entry for entry in layer._record.reasons), layer.explain_plan()
    assert reason in layer.explain_plan()


def sage_layer(out_channels=4, **options):
    """A layer with the same parameters each time."""
    torch.manual_seed(3)
    return SAGEConv(4, out_channels, **options)


def outcome(layer, x, *inputs):
    """Output, gradients and what the layer says of itself, or the error."""
    errors = (ValueError, TypeError, RuntimeError, KeyError, AttributeError)
    try:
        out = layer(x, *inputs)
    except errors as error:
        return type(error), str(error)
    grads = []
    if out.requires_grad:
        leaves = list(layer.parameters())
        if isinstance(x, torch.Tensor) and x.requires_grad:
            leaves.append(x)
        cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return out.detach(), list(grads), layer.explain_plan()


def assert_same_one_by_one(monkeypatch, make, *inputs, mode=torch.enable_grad):
    """Hold a call to one whose checks run one by one, bit by bit and word by word."""
    found = []
    for is_tried in (True, False):
        torch.manual_seed(5)
        layer = make()
        with monkeypatch.context() as patch, mode():
            if not is_tried:
                patch.setattr(sage_conv, "usual_call", lambda *_: None)
            found.append(outcome(layer, *inputs))
    ours, one_by_one = found
    if isinstance(ours[0], type):
        assert ours == one_by_one
        return
    assert ours[2] == one_by_one[2]
    torch.testing.assert_close(ours[:2], one_by_one[:2], rtol=0, atol=0, equal_nan=True)
