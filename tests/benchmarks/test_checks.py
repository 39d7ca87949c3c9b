from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import SAGEConv, SimpleConv

from benchmarks import checks
from benchmarks.graphs import make_graph
from benchmarks.inputs import draw_inputs, runner
from benchmarks.peers import sparse_sum

CPU = torch.device("cpu")
WIDTH = 24


@pytest.fixture
def graph():
    return make_graph("arxiv", seed=7, device=CPU, scale=0.001)


def inputs_of(graph, phase, *, distinct=False, dtype=torch.float32):
    return draw_inputs(
        graph.num_nodes,
        WIDTH,
        dtype,
        phase=phase,
        device=CPU,
        seed=7,
        distinct=distinct,
    )


def aggregate(graph, reduce, phase):
    inputs = inputs_of(graph, phase, distinct=reduce == "max")
    module = SimpleConv(aggr=reduce)
    run = runner(lambda x: module(x, graph.edge_index), inputs, phase)
    check = checks.spmm_check(
        graph, inputs.x[0], inputs.grad[0], phase=phase, reduce=reduce
    )
    return check, run(0)


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_right_aggregation_passes(graph, reduce, phase, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK_ELEMENTS", 1000)
    check, results = aggregate(graph, reduce, phase)
    assert len(results) == (1 if phase == "forward" else 2)
    assert check(results) < 1e-6


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_one_wrong_row_is_found(graph, reduce, which):
    check, results = aggregate(graph, reduce, "train")
    results[which].detach()[graph.num_nodes // 2 + 1] += 1.0
    assert check(results) > checks.TOLERANCE[torch.float32]


def test_a_wrong_column_of_a_hub_is_found(graph):
    check, (out,) = aggregate(graph, "sum", "forward")
    columns = torch.linspace(0, WIDTH - 1, checks.SAMPLED_COLUMNS).long().tolist()
    hidden = next(c for c in range(WIDTH) if c not in columns)
    hub = int(torch.bincount(graph.edge_index[1]).argmax())
    out[hub, hidden] += 10.0
    assert check((out,)) > checks.TOLERANCE[torch.float32]


def test_nan_is_an_infinite_error(graph):
    check, (out,) = aggregate(graph, "sum", "forward")
    out[0] = torch.nan
    assert check((out,)) == float("inf")


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_prepared_sparse_peer_is_right(graph, phase):
    inputs = inputs_of(graph, phase)
    run, nbytes = sparse_sum(graph, inputs, phase)
    check = checks.spmm_check(
        graph, inputs.x[0], inputs.grad[0], phase=phase, reduce="sum"
    )
    assert check(run(0)) < 1e-6
    one = 4 * (graph.num_nodes + 1) + 8 * graph.num_edges
    assert nbytes == one * (1 if phase == "forward" else 2)


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_sage_reference_agrees_with_pyg(graph, phase):
    inputs = inputs_of(graph, phase)
    layer = SAGEConv(WIDTH, WIDTH)
    parameters = [layer.get_parameter(name) for name in checks.SAGE]
    run = runner(lambda x: layer(x, graph.edge_index), inputs, phase, parameters)
    named = dict(layer.named_parameters())
    check = checks.sage_check(graph, inputs.x[0], inputs.grad[0], named, phase=phase)
    results = run(0)
    assert check(results) < 1e-5
    results[-1].detach()[0] += 1.0
    assert check(results) > checks.TOLERANCE[torch.float32]


def test_distinct_inputs_have_no_ties_in_a_column():
    graph = make_graph("arxiv", seed=7, device=CPU, scale=0.01)
    x = inputs_of(graph, "forward", distinct=True).x[0]
    assert all(column.unique().numel() == graph.num_nodes for column in x.T)


@pytest.mark.parametrize("num_nodes", [16, 17, 169_343])
def test_distinct_inputs_have_no_zero(num_nodes):
    made = draw_inputs(
        num_nodes, 2, torch.float32, phase="train", device=CPU, seed=7, distinct=True
    )
    assert float(made.x[0].detach().abs().min()) > 0
    assert made.x[0][:, 0].unique().numel() == num_nodes
