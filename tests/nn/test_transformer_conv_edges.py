"""TransformerConv with edge features, against PyG's layer."""

from __future__ import annotations

import pytest
import torch

import pyg_tiga as tg
from pyg_tiga import planner
from pyg_tiga.nn import TransformerConv
from tests.nn.layer_checks import (
    BIPARTITE,
    EDGE_DIM,
    EDGE_LISTS,
    LOOPED,
    SQUARE,
    assert_same,
    features,
    is_fused,
    pair_of_layers,
    plain_edges,
    run,
)
from tests.nn.layer_duties_checks import WEIGHTS

OPTIONS = [
    {},
    {"heads": 1},
    {"concat": False},
    {"beta": True},
    {"root_weight": False},
    {"bias": False},
]


def name_of(options):
    return "-".join(f"{key}_{value}" for key, value in options.items()) or "default"


def layers(row, dtype=torch.float64, device="cpu", **options):
    """Both layers, and what they are called with."""
    case, x, edge_attr = features(row, dtype, device)
    widths = 8 if row.square else (8, 8)
    options = {"heads": 4, "edge_dim": EDGE_DIM, **options}
    made = pair_of_layers(
        TransformerConv, widths, 6, dtype=dtype, device=device, **options
    )
    return (*made, x, case.edge_index, edge_attr)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
@WEIGHTS
def test_options(options, row, weights):
    ours, theirs, *given = layers(row, **options)
    assert_same(ours, theirs, *given, weights=weights)
    assert_same(ours.eval(), theirs.eval(), *given)
    assert is_fused(ours)


@pytest.mark.parametrize("form", EDGE_LISTS)
def test_edge_lists(form):
    ours, theirs, x, _, edge_attr = layers(SQUARE)
    case = features(SQUARE)[0]
    edges = EDGE_LISTS[form](case)
    plain = plain_edges(form, case, edges)
    assert_same(ours, theirs, x, edges, edge_attr, plain=plain)
    assert is_fused(ours)


def test_graphs_and_flow():
    ours, theirs, x, edges, edge_attr = layers(SQUARE)
    graph = tg.Graph.from_edge_index(edges, x.size(0))
    assert_same(ours, theirs, x, graph, edge_attr, plain=edges)
    ours, theirs, *given = layers(SQUARE, flow="target_to_source")
    assert_same(ours, theirs, *given)
    assert is_fused(ours)


def test_no_edges():
    ours, theirs, x, edges, edge_attr = layers(SQUARE)
    assert_same(ours, theirs, x, edges[:, :0], edge_attr[:0])
    assert is_fused(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_pieces")
def test_kernels(dtype, device):
    ours, _, *given = layers(LOOPED, dtype, device)
    exact, _, *wide = layers(LOOPED, torch.float64, device)
    exact.load_state_dict(ours.state_dict())
    wide = [x.double() if x.is_floating_point() else x for x in given]
    found = run(ours, *given)
    assert is_fused(ours)
    with planner.pin("scatter"):
        expected = run(exact, *wide)
    most = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for name, wanted in expected.items():
        error = (found[name].double() - wanted).norm()
        assert error <= most * wanted.norm().clamp(min=1.0), name


def test_autocast():
    ours, theirs, x, edges, edge_attr = layers(SQUARE, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (layer(x, edges, edge_attr) for layer in (ours, theirs))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert is_fused(ours)


def test_compiled():
    ours, theirs, *given = layers(SQUARE)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), theirs(*given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:3], "'edge_attr' must have"),
        (lambda x: x[:, :1], "'edge_attr' must have shape"),
        (lambda x: x.float(), "'edge_attr' must"),
    ],
)
def test_bad_features(change, message):
    ours, _, x, edges, edge_attr = layers(SQUARE)
    with pytest.raises(ValueError, match=message):
        ours(x, edges, change(edge_attr))
