from __future__ import annotations

import pytest
import torch
import torch_geometric.nn
from torch.utils.checkpoint import checkpoint

from pyg_tiga import testing
from pyg_tiga.nn import GATConv
from tests.nn.gat_checks import (
    BIPARTITE,
    EDGE_DIM,
    LOOPED,
    assert_same,
    features,
    is_fused,
    pair_of_layers,
    run,
)


def seeded(layer, *args, seed=3):
    torch.manual_seed(seed)
    return layer(*args)


def mask_of(layer, x, edges, edge_attr):
    """Which weights the fixed seed keeps, by comparison with no dropout."""
    training = layer.training
    with torch.no_grad():
        _, (_, dropped) = seeded(layer, x, edges, edge_attr, None, True)
        _, (_, full) = layer.eval()(x, edges, edge_attr, None, True)
    layer.train(training)
    keep = dropped != 0
    scaled = full / (1 - layer.dropout)
    torch.testing.assert_close(dropped, torch.where(keep, scaled, 0.0))
    return keep


class WithMask(torch_geometric.nn.GATConv):
    """PyG's layer, which drops what it is told to."""

    # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor)
    # propagate_type: (x: OptPairTensor, alpha: Tensor)
    keep: torch.Tensor | None = None

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        training, self.training = self.training, False
        alpha = super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
        self.training = training
        return alpha * self.keep / (1 - self.dropout)


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize(
    "options",
    [{}, {"edge_dim": EDGE_DIM}, {"add_self_loops": False}, {"concat": False}],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
def test_all_see_the_mask_of_the_weights(row, options, weights, device):
    case, x, edge_attr = features(row, device=device)
    edge_attr = edge_attr if "edge_dim" in options else None
    widths = 8 if row.square else (8, 8)
    options = {"heads": 4, "dropout": 0.4, **options}
    ours, _ = pair_of_layers(widths, 6, device=device, **options)
    theirs = WithMask(widths, 6, **options).to(device)
    theirs.load_state_dict(ours.state_dict())
    theirs.keep = mask_of(ours, x, case.edge_index, edge_attr)
    assert 0.3 < theirs.keep.float().mean() < 0.9
    torch.manual_seed(3)
    forward = ours.forward
    ours.forward = lambda *args: torch.manual_seed(3) and forward(*args)
    assert_same(ours, theirs, x, case.edge_index, edge_attr, weights=weights)
    assert is_fused(ours)


def test_output_is_the_sum_of_the_returned_weights(device):
    case, x, _ = features(LOOPED, device=device)
    layer = GATConv(8, 6, heads=2, dropout=0.3, bias=False).to(device)
    out, ((src, dst), weight) = seeded(layer, x, case.edge_index, None, None, True)
    value = layer.lin(x).view(-1, 2, 6)
    expected = torch.zeros_like(value)
    expected.index_add_(0, dst, weight.unsqueeze(-1) * value[src])
    torch.testing.assert_close(out, expected.flatten(1))
    torch.testing.assert_close(seeded(layer, x, case.edge_index), out)


def test_seeds():
    case, x, _ = features(LOOPED)
    layer = GATConv(8, 6, heads=2, dropout=0.5)
    first = seeded(layer, x, case.edge_index)
    assert torch.equal(seeded(layer, x, case.edge_index), first)
    assert not torch.equal(layer(x, case.edge_index), first)
    assert not torch.equal(seeded(layer, x, case.edge_index, seed=4), first)


def test_evaluation_draws_nothing():
    case, x, _ = features(LOOPED)
    state = torch.get_rng_state()
    for options in ({"dropout": 0.5}, {}):
        layer = GATConv(8, 6, **options).train(not options)
        torch.set_rng_state(state)
        layer(x, case.edge_index)
        assert torch.equal(torch.get_rng_state(), state)


def test_dropout_that_is_0_is_exact():
    case, x, _ = features(LOOPED)
    layer = GATConv(8, 6, heads=2, dropout=0.0)
    assert torch.equal(layer(x, case.edge_index), layer.eval()(x, case.edge_index))


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
def test_dropout_of_everything(weights, device):
    case, x, edge_attr = features(LOOPED, device=device)
    options = {"heads": 2, "dropout": 1.0, "edge_dim": EDGE_DIM}
    layers = pair_of_layers(8, 6, device=device, **options)
    found, plain = (
        run(layer, x, case.edge_index, edge_attr, weights=weights) for layer in layers
    )
    torch.testing.assert_close(found[0], plain[0])
    for grad in found[1].values():
        assert grad.isfinite().all()
    del found[1]["bias.grad"]
    assert not any(grad.any() for grad in found[1].values())


def test_share_of_dropped_weights():
    edges = testing.random_edges(40, 40, 300)
    case, x, _ = features(testing.Row("", 40, 40, edges))
    layer = GATConv(8, 2, heads=16, dropout=0.3, add_self_loops=False)
    _, (_, weight) = layer(x, case.edge_index, return_attention_weights=True)
    share = float((weight == 0).float().mean())
    assert share == pytest.approx(0.3, abs=0.03)


def test_checkpoints_see_the_same_mask():
    case, x, _ = features(LOOPED)
    layer = GATConv(8, 6, heads=2, dropout=0.5)
    grads = []
    for through in (False, True):
        leaf = x.detach().requires_grad_()
        torch.manual_seed(3)
        if through:
            out = checkpoint(layer, leaf, case.edge_index, use_reentrant=False)
        else:
            out = layer(leaf, case.edge_index)
        out.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("p", [-0.1, 1.5])
@pytest.mark.parametrize("training", [False, True])
def test_impossible_probability(p, training):
    case, x, _ = features(LOOPED)
    for layer in pair_of_layers(8, 6, dropout=p):
        with pytest.raises(ValueError):
            layer.train(training)(x, case.edge_index)
