from __future__ import annotations

import pytest
import torch

from pyg_tiga import testing
from tests.nn.gat_checks import (
    BIPARTITE,
    EDGE_DIM,
    LOOPED,
    SQUARE,
    assert_parents_path,
    assert_same,
    features,
    is_fused,
    pair_of_layers,
)

REDUCTIONS = ["mean", "add", "sum", "max", "min", "mul"]
FILLS = [
    *REDUCTIONS,
    0.0,
    2,
    torch.tensor(0.5),
    torch.tensor([0.5, -1.0, 2.0]),
    torch.tensor([[0.5, -1.0, 2.0]]),
    None,
]
FLOWS = pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])


def layers_with(fill, row=SQUARE, **options):
    widths = 8 if row.square else (8, 8)
    options = {"heads": 4, "edge_dim": EDGE_DIM, "fill_value": fill, **options}
    return pair_of_layers(widths, 6, **options)


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("row", [SQUARE, LOOPED, BIPARTITE], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
def test_features_of_self_loops(fill, row, weights, device):
    case, x, edge_attr = features(row, device=device)
    ours, theirs = layers_with(fill, row, device=device)
    assert_same(ours, theirs, x, case.edge_index, edge_attr, weights=weights)
    assert is_fused(ours)


@pytest.mark.parametrize("fill", REDUCTIONS)
@pytest.mark.parametrize("name", ["isolated", "duplicates", "no_edges", "hub_row"])
def test_reductions_on_other_rows(fill, name):
    row = testing.row(name)
    case, x, edge_attr = features(row)
    ours, theirs = layers_with(fill)
    assert_same(ours, theirs, x, case.edge_index, edge_attr)


@pytest.mark.parametrize("fill", REDUCTIONS)
@FLOWS
def test_features_reduce_over_the_second_row(fill, flow):
    case, x, edge_attr = features(LOOPED)
    ours, theirs = layers_with(fill, flow=flow)
    assert_same(ours, theirs, x, case.edge_index, edge_attr)
    assert is_fused(ours)


@pytest.mark.parametrize("fill", ["max", "min"])
def test_equal_features_share_the_gradient_as_in_pyg(fill):
    case, x, edge_attr = features(LOOPED)
    ours, theirs = layers_with(fill)
    assert_same(ours, theirs, x, case.edge_index, edge_attr.round().relu())


def test_fill_value_that_is_learnt():
    case, x, edge_attr = features(LOOPED)
    grads = []
    for layer in layers_with("mean"):
        layer.fill_value = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        layer(x, case.edge_index, edge_attr).square().sum().backward()
        grads.append(layer.fill_value.grad)
    torch.testing.assert_close(*grads)


def test_fill_value_of_an_unknown_kind():
    case, x, edge_attr = features(LOOPED)
    for fill in ("median", [1.0]):
        raised = []
        for layer in layers_with(fill):
            with pytest.raises(Exception) as caught:
                layer(x, case.edge_index, edge_attr)
            raised.append((caught.type, str(caught.value)))
        assert raised[0] == raised[1]


@pytest.mark.parametrize("fill", ["mean", 1.0, torch.tensor(0.5)], ids=str)
def test_one_dimension(fill):
    case, x, edge_attr = features(LOOPED)
    ours, theirs = layers_with(fill, edge_dim=1)
    assert_same(ours, theirs, x, case.edge_index, edge_attr[:, 0], weights=True)
    assert_same(ours, theirs, x, case.edge_index, edge_attr[:, :1])
    assert is_fused(ours)


INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("weights", [None, True])
@pytest.mark.parametrize("edge_dim", [EDGE_DIM, -1])
def test_integers_become_what_their_means_are(dtype, weights, edge_dim):
    case, x, edge_attr = features(LOOPED)
    edge_attr = edge_attr.abs().mul(3).to(dtype)
    layers = layers_with("mean", edge_dim=edge_dim)
    outs = []
    for layer in layers:
        torch.manual_seed(3)
        out = layer(x, case.edge_index, edge_attr, None, weights)
        outs.append(out[0] if weights else out)
    torch.testing.assert_close(*outs)
    assert is_fused(layers[0])
    for layer in layers:
        layer.zero_grad()
        layer(x, case.edge_index, edge_attr).square().sum().backward()
    grads = [layer.lin_edge.weight.grad for layer in layers]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fill", [fill for fill in FILLS if fill != "mean"], ids=str)
def test_integers_that_stay_integers_are_refused(fill):
    case, x, edge_attr = features(LOOPED)
    ours, theirs = layers_with(fill)
    with pytest.raises(RuntimeError, match="dtype"):
        theirs(x, case.edge_index, edge_attr.long())
    with pytest.raises(ValueError, match=r"'edge_attr' must have the dtype .*int64"):
        ours(x, case.edge_index, edge_attr.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_without_self_loops_or_beside_wider_parameters_are_refused(dtype):
    case, x, edge_attr = features(LOOPED, dtype)
    loops = dtype is torch.float64
    ours, theirs = layers_with("mean", add_self_loops=loops, dtype=dtype)
    with pytest.raises(RuntimeError, match="dtype"):
        theirs(x, case.edge_index, edge_attr.long())
    with pytest.raises(ValueError, match="'edge_attr' must have the dtype"):
        ours(x, case.edge_index, edge_attr.long())


def test_integers_under_autocast():
    case, x, edge_attr = features(LOOPED)
    layers = layers_with("mean")
    with torch.autocast("cpu", torch.bfloat16):
        outs = [layer(x, case.edge_index, edge_attr.long()) for layer in layers]
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.05, check_dtype=False)


def test_features_without_edge_dim_are_ignored():
    case, x, edge_attr = features(LOOPED)
    ours, theirs = pair_of_layers(8, 6, heads=2)
    out = ours(x, case.edge_index, edge_attr)
    torch.testing.assert_close(out, theirs(x, case.edge_index, edge_attr))
    assert torch.equal(out, ours(x, case.edge_index))
    assert is_fused(ours)


def test_edge_dim_without_features():
    case, x, _ = features(LOOPED)
    ours, theirs = pair_of_layers(8, 6, heads=2, edge_dim=EDGE_DIM)
    assert_same(ours, theirs, x, case.edge_index)
    assert is_fused(ours)


def test_features_of_three_dimensions_are_the_parents():
    case, x, edge_attr = features(LOOPED)
    ours, theirs = pair_of_layers(8, 6, edge_dim=EDGE_DIM, add_self_loops=False)
    wide = edge_attr.unsqueeze(1)
    assert torch.equal(ours(x, case.edge_index, wide), theirs(x, case.edge_index, wide))
    assert_parents_path(ours, "'edge_attr' has 3 dimensions")


@pytest.mark.parametrize("how", ["hook", "parametrised", "replaced"])
def test_unusual_map_of_edge_features(how):
    case, x, edge_attr = features(LOOPED)
    layers = pair_of_layers(8, 6, heads=2, edge_dim=EDGE_DIM)
    for layer in layers:
        torch.manual_seed(3)
        if how == "hook":
            layer.lin_edge.register_forward_hook(lambda module, args, out: 2 * out)
        elif how == "parametrised":
            torch.nn.utils.parametrizations.weight_norm(layer.lin_edge)
        else:
            layer.lin_edge = torch.nn.Linear(EDGE_DIM, 12)
    outs = [layer(x, case.edge_index, edge_attr) for layer in layers]
    assert torch.equal(*outs)
    assert_parents_path(layers[0], "'lin_edge' is not the plain Linear")
    layers[0](x, case.edge_index)
    assert is_fused(layers[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("num_nodes", [0, 3])
def test_the_map_of_no_edges_gets_no_gradient(num_nodes, loops, compiled):
    layers = pair_of_layers(4, 2, heads=2, edge_dim=3, add_self_loops=loops)
    missing = []
    if compiled:
        layers[0].compile(backend="aot_eager", fullgraph=True)
    for layer in layers:
        edge_attr = torch.randn(0, 3, requires_grad=True)
        edges = torch.empty(2, 0, dtype=torch.long)
        layer(torch.randn(num_nodes, 4), edges, edge_attr).sum().backward()
        found = [name for name, p in layer.named_parameters() if p.grad is None]
        missing.append((found, edge_attr.grad is None))
    assert missing[0] == missing[1]
