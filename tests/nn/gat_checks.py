"""What the tests of GATConv share: both layers, inputs, and the comparison."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn

from pyg_tiga import testing
from pyg_tiga.nn import GATConv

BIPARTITE = testing.row("more_sources")
SQUARE = testing.row("unsorted")
LOOPED = testing.row("self_loops")
EDGE_DIM = 3
# What reaches the output through scores alone.
SCORES = ("att_", "lin_edge", "edge_attr", "lin_dst", "x[1]")
ignore_sparse_warnings = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:Converting sparse tensor", "ignore:.*invariant checks"
)


def pair_of_layers(*args, dtype=torch.float32, device="cpu", **kwargs):
    theirs = torch_geometric.nn.GATConv(*args, **kwargs).to(device, dtype)
    ours = GATConv(*args, **kwargs).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def features(row, dtype=torch.float32, device="cpu"):
    """A case of a row, its node features and edge features."""
    case = testing.make_case(row, dtype, device)
    generator = torch.Generator().manual_seed(2)
    size = (case.edge_index.size(1), EDGE_DIM)
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    x = case.x if row.square else (case.x, case.x_dst)
    return case, x, drawn.to(device, dtype)


def run(layer, x, edges, edge_attr=None, size=None, weights=False):
    """Output, attention weights where wanted, and all gradients by name."""
    layer.zero_grad()
    parts = x if isinstance(x, tuple) else (x,)
    leaves = tuple(
        None if part is None else part.detach().requires_grad_() for part in parts
    )
    if edge_attr is not None:
        edge_attr = edge_attr.detach().requires_grad_()
    given = leaves if isinstance(x, tuple) else leaves[0]
    out = layer(given, edges, edge_attr, size, weights or None)
    outs = {"output": out}
    if weights:
        outs = {"output": out[0], "weights": out[1][1]}
    sum(map(cotangent_product, outs.values())).backward()
    found = {f"x[{i}].grad": p.grad for i, p in enumerate(leaves) if p is not None}
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    if edge_attr is not None:
        found["edge_attr.grad"] = edge_attr.grad
    return {name: value.detach() for name, value in outs.items()}, found


def cotangent_product(out):
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out * cotangent.to(out)).sum()


def assert_same(
    ours, theirs, x, edges, edge_attr=None, size=None, weights=False, their_edges=None
):
    """Hold outputs and gradients of ours to those of PyG, and both to float64."""
    their_edges = edges if their_edges is None else their_edges
    outs, grads = run(ours, x, edges, edge_attr, size, weights)
    plain, plain_grads = run(theirs, x, their_edges, edge_attr, size, weights)
    truth, true_grads = run(
        copy.deepcopy(theirs).double(),
        double(x),
        double(their_edges),
        double(edge_attr),
        size,
        weights,
    )
    for name, value in plain.items():
        testing.assert_accurate(outs[name], value, truth[name], name)
    assert grads.keys() == plain_grads.keys()
    for name, plain_grad in plain_grads.items():
        if plain_grad is None or grads[name] is None:
            both = (grads[name], plain_grad)
            assert not any(grad is not None and grad.any() for grad in both), name
        else:
            assert_same_gradient(grads[name], plain_grad, true_grads, name)


def assert_same_gradient(actual, plain, true_grads, name):
    truth = true_grads[name]
    if not name.startswith(SCORES):
        testing.assert_gradient_accurate(actual, plain, truth, name)
        return
    # Derivatives of a softmax sum to 0: these sums have terms of the size of the other
    # gradients, to which they may be rounded, and can be tiny themselves.
    largest = max(map(largest_of, true_grads.values()))
    floor = testing.FLOOR_ULPS * torch.finfo(actual.dtype).eps * largest
    error, allowed = largest_of(actual - truth), largest_of(plain - truth)
    assert actual.dtype == plain.dtype, name
    assert error <= testing.SLACK * allowed + floor, (name, error, allowed, floor)


def largest_of(value):
    if value is None or value.numel() == 0:
        return 0.0
    return float(value.detach().double().abs().max())


def double(value):
    if isinstance(value, tuple):
        return tuple(None if part is None else part.double() for part in value)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def is_fused(layer):
    return not layer._record.reasons and layer._record.plan is not None


def assert_parents_path(layer, reason):
    assert any(reason in entry for entry in layer._record.reasons), layer.explain_plan()
    assert reason in layer.explain_plan()


def twin_of(layer, *args, **kwargs):
    """PyG's layer with the parameters of ours."""
    theirs = torch_geometric.nn.GATConv(*(args or (8, 3)), **kwargs)
    theirs.load_state_dict(layer.state_dict())
    return theirs
