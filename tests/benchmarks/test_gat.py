from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv
from torch_geometric.utils import scatter, softmax

import pyg_tiga.functional
import pyg_tiga.nn
from benchmarks import accuracy, attention_checks, kinks, measure, ours, peers, run
from benchmarks.attention_checks import GAT, attention_check, gat_check
from benchmarks.checks import TOLERANCE, Edges
from benchmarks.engine import Context
from benchmarks.graphs import GraphStore, make_graph
from benchmarks.inputs import draw_attention, phase_runner
from benchmarks.kinks import keep_off_kink, undecided
from benchmarks.memory import MemoryBook
from benchmarks.records import Run
from benchmarks.suites import gat

CPU = torch.device("cpu")
HEADS, CHANNELS = 4, 6
HAS_LAYER = hasattr(pyg_tiga.nn, "GATConv")
HAS_CORE = hasattr(pyg_tiga.functional, "additive_attention")
SMALL = ["--device", "cpu", "--scale", "0.0005", "--budget-s", "1e-6"]


def stand_in(edge_index, value, alpha_src, alpha_dst):
    """The edge kernels through PyG."""
    source, target = peers.with_loops(edge_index, value.size(0))
    score = torch.nn.functional.leaky_relu(alpha_src[source] + alpha_dst[target], 0.2)
    weight = softmax(score, target, num_nodes=value.size(0))
    message = value[source] * weight[..., None]
    return scatter(message, target, 0, value.size(0), "sum")


@pytest.fixture
def graph():
    return make_graph("arxiv", seed=7, device=CPU, scale=0.001)


@pytest.fixture
def edges(graph):
    looped = peers.with_loops(graph.edge_index, graph.num_nodes)
    return Edges(*looped, graph.num_nodes)


def core(graph, edges, phase):
    inputs = draw_attention(
        graph.num_nodes, HEADS, CHANNELS, torch.float32, device=CPU, seed=7
    )
    call = phase_runner(
        lambda i: stand_in(graph.edge_index, *inputs.leaves(i)),
        inputs.leaves,
        inputs.grad,
        phase,
    )
    return attention_check(edges, inputs.leaves(0), inputs.grad[0]), call


@pytest.mark.parametrize("all_heads", [True, False])
@pytest.mark.parametrize("phase", ["forward", "backward", "train"])
def test_right_attention_passes(graph, edges, phase, all_heads, monkeypatch):
    monkeypatch.setattr("benchmarks.checks.CHUNK_ELEMENTS", 5000)
    if not all_heads:
        monkeypatch.setattr(attention_checks, "ALL_HEADS_ELEMENTS", 1)
    check, call = core(graph, edges, phase)
    results = call(0)
    assert len(results) == (1 if phase == "forward" else 4)
    assert check(results) < 1e-5


@pytest.mark.parametrize("which", range(4))
def test_one_wrong_node_is_found(graph, edges, which):
    check, call = core(graph, edges, "train")
    results = call(0)
    results[which].detach()[graph.num_nodes // 2 + 1] += 1.0
    assert check(results) > TOLERANCE[torch.float32]


def test_a_hub_is_checked_on_every_head(graph, edges, monkeypatch):
    monkeypatch.setattr(attention_checks, "ALL_HEADS_ELEMENTS", 1)
    check, call = core(graph, edges, "forward")
    (out,) = call(0)
    hub = int(torch.bincount(edges.target).argmax())
    out[hub, 1] += 1.0  # heads 0 and 3 are checked on all rows
    assert check((out,)) > TOLERANCE[torch.float32]


def test_a_backward_runs_its_forward_once():
    calls = []
    x = torch.ones(3, requires_grad=True)

    def forward(i):
        calls.append(i)
        return x * x

    back = phase_runner(forward, lambda i: (x,), [torch.ones(3)], "backward")
    for _ in range(3):
        assert torch.equal(back(0)[1], 2 * x)
    assert calls == [0]


def layer_case(graph):
    """A layer with inputs as the suite makes them: layer, x and cotangent."""
    torch.manual_seed(0)
    layer = GATConv(HEADS * CHANNELS, CHANNELS, HEADS)
    x = torch.randn(graph.num_nodes, HEADS * CHANNELS, requires_grad=True)
    keep_off_kink(x, dict(layer.named_parameters()))
    return layer, x, torch.randn_like(x)


def by_hand(layer, x, grad, edges, *, steeper=()):
    """Score arguments and results; some edges have slope 1, not 0.2, in backward."""
    value = layer.lin(x).view(-1, HEADS, CHANNELS)
    alpha_src, alpha_dst = (
        (value * att).sum(-1) for att in (layer.att_src, layer.att_dst)
    )
    total = alpha_src[edges.source] + alpha_dst[edges.target]
    score = torch.nn.functional.leaky_relu(total, 0.2)
    for place in steeper:
        change = torch.zeros_like(total)
        change[place] = 0.8
        score = score + change * (total - total.detach())
    weight = softmax(score, edges.target, num_nodes=edges.num_targets)
    message = value[edges.source] * weight[..., None]
    out = scatter(message, edges.target, 0, edges.num_targets, "sum")
    out = out.flatten(1) + layer.bias
    leaves = [x, *(layer.get_parameter(name) for name in GAT)]
    return total.detach(), [out, *torch.autograd.grad(out, leaves, grad)]


def test_layer_reference_agrees_with_pyg(graph, edges):
    layer, x, grad = layer_case(graph)
    named = dict(layer.named_parameters())
    out = layer(x, graph.edge_index)
    leaves = [x, *(named[name] for name in GAT)]
    results = [out, *torch.autograd.grad(out, leaves, grad)]
    check = gat_check(edges, x, grad, named)
    assert check(results) < 1e-5
    assert check(results[:1]) < 1e-5
    for i in range(len(results)):
        wrong = [each.detach().clone() for each in results]
        wrong[i].view(-1)[0] += 10.0
        assert check(wrong) > TOLERANCE[torch.float32]


def test_one_edge_with_the_wrong_slope_is_found(graph, edges):
    layer, x, grad = layer_case(graph)
    check = gat_check(edges, x, grad, dict(layer.named_parameters()))
    total, results = by_hand(layer, x, grad, edges)
    assert check(results) < 1e-5
    nearest = total.masked_fill(total > 0, -torch.inf).argmax()
    place = divmod(int(nearest), HEADS)
    assert -kinks.GAP < float(total[place]) < 0
    _, results = by_hand(layer, x, grad, edges, steeper=[place])
    assert check(results) > TOLERANCE[torch.float32]


def test_features_kept_off_the_kink_hardly_move(graph, edges):
    torch.manual_seed(0)
    named = dict(GATConv(32, 8, 4).named_parameters())
    drawn = torch.randn(graph.num_nodes, 32)
    x = drawn.clone()
    keep_off_kink(x, named)
    assert float((x - drawn).norm() / drawn.norm()) < 3e-3
    value = (x @ named["lin.weight"].detach().T).view(-1, 4, 8)
    terms = [(value * named[name].detach()).sum(-1) for name in kinks.ATTENTION]
    total = terms[0][edges.source] + terms[1][edges.target]
    assert float(total.abs().min()) > 0.99 * kinks.GAP / 2
    assert 0.3 < float((total > 0).float().mean()) < 0.7
    assert undecided(edges, x, named) == 0


def test_a_sign_that_float32_may_miss_is_refused(graph, edges):
    layer, x, grad = layer_case(graph)
    named = dict(layer.named_parameters())
    assert undecided(edges, x, named) == 0
    with torch.no_grad():
        layer.att_dst[0, 1] = -layer.att_src[0, 1]
    loops = int((edges.source == edges.target).sum())
    assert undecided(edges, x, named) >= loops > 0
    with pytest.raises(ValueError, match="float32 may miss"):
        gat_check(edges, x, grad, named)([layer(x, graph.edge_index)])


def test_the_compiled_layer_shares_the_parameters(graph, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    parent = GATConv(HEADS * CHANNELS, CHANNELS, HEADS)
    layer = gat.compiled_layer(parent, (HEADS, CHANNELS))
    found, wanted = dict(layer.named_parameters()), dict(parent.named_parameters())
    assert all(found[name] is wanted[name] for name in GAT)
    x = torch.randn(graph.num_nodes, HEADS * CHANNELS)
    looped = peers.with_loops(graph.edge_index, graph.num_nodes)
    torch.testing.assert_close(layer(x, looped), parent(x, graph.edge_index))


def test_cases_are_the_agreed_cells():
    found = {(c.name, c.op) for c in gat.cases()}
    for graph in ("arxiv", "reddit", "products"):
        shapes = ("4x32", "8x8", "1x64")
        assert {(f"{graph}/{s}", "gat_attention") for s in shapes} <= found
        layers = {c for c in found if c[0].startswith(graph) and c[1] == "gat_conv"}
        assert len(layers) == (3 if graph == "arxiv" else 2)
    bf16 = [c for c in gat.cases() if getattr(c, "dtype", None) == torch.bfloat16]
    assert {c.name for c in bf16} == {"arxiv/4x32", "reddit/4x32", "products/4x32"}


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_the_floor_counts_the_loops(phase):
    store = GraphStore(CPU, 7, 0.0005)
    context = Context("gat", CPU, store, 7, 1e-6, memory=MemoryBook())
    work = gat.prepare_layer(
        context, phase, torch.float32, graph="arxiv", shape=(4, 32)
    )
    on = store.get("arxiv")
    stored_loops = int((on.edge_index[0] == on.edge_index[1]).sum())
    edges = on.num_edges - stored_loops + on.num_nodes
    assert work.gather_bytes == edges * 128 * 4
    assert work.loops == on.num_nodes
    assert work.gathers == (1 if phase == "forward" else 2)


def run_small(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(measure, "MAX_ITERATIONS", 5)
    arguments = ["--suite", "gat", "--case", "arxiv/*", "--commit", "abc"]
    code = run.main([*arguments, *SMALL, "--out", str(tmp_path)])
    return code, Run.load(tmp_path / "cpu" / "gat.json").records


def assert_all_timed(code, records, impls):
    failures = [r.note for r in records if r.impl in impls and r.ms is None]
    assert (code, failures) == (0, [])
    assert {r.op for r in records} == {"gat_conv", "gat_attention"}
    assert {r.phase for r in records} == {"forward", "backward", "train"}
    assert {"pyg", "pyg_compiled", "pyg_tiga"} <= {r.impl for r in records}


def test_the_suite_runs_with_a_stand_in(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ours, "gat_conv", peers.pyg_gat_conv)
    monkeypatch.setattr(ours, "additive_attention", stand_in)
    # PyG in bf16 rounds every message: it would be no subject for our tolerance.
    kinds = gat.CORE_KINDS[:-1]
    monkeypatch.setattr(gat, "CORE_KINDS", kinds)
    code, records = run_small(tmp_path, monkeypatch)
    assert_all_timed(code, records, ("pyg_tiga", "pyg", "pyg_compiled"))
    assert "arxiv@0.0005/4x32" in capsys.readouterr().out


@pytest.mark.skipif(
    not (HAS_LAYER and HAS_CORE), reason="pyg_tiga has no GATConv or edge kernels yet"
)
def test_the_suite_runs_with_ours(tmp_path, monkeypatch, capsys):
    code, records = run_small(tmp_path, monkeypatch)
    assert_all_timed(code, records, ("pyg_tiga", "pyg", "pyg_compiled"))
    capsys.readouterr()


@pytest.mark.skipif(HAS_LAYER and HAS_CORE, reason="pyg_tiga has both")
def test_what_is_missing_is_a_record(tmp_path, monkeypatch, capsys):
    code, records = run_small(tmp_path, monkeypatch)
    mine = [r for r in records if r.impl == "pyg_tiga"]
    assert code == 1
    assert all(r.ms is None and "Error" in r.note for r in mine)
    assert all(r.ms is not None for r in records if r.impl == "pyg")
    capsys.readouterr()


@pytest.mark.skipif(not gat.accuracy.data_file("cora"), reason="no Cora")
def test_cora_step_and_accuracy(monkeypatch):
    monkeypatch.setattr(ours, "gat_conv", peers.pyg_gat_conv)
    monkeypatch.setattr(accuracy, "SEEDS", range(2))
    monkeypatch.setattr(accuracy.Trainer.accuracy, "__defaults__", (2,))
    context = Context("gat", CPU, GraphStore(CPU, 7), 7, 1e-6)
    mine, _ = gat.cora_accuracy(context)
    assert mine.case == "cora/8x8"
    # The loops of the one are those that the other was given.
    assert mine.extra["diff"] == pytest.approx(0.0, abs=0.6)
    steps = gat.cora_step(context)
    assert [r.impl for r in steps] == ["pyg_tiga", "pyg"]
    assert all(r.ms > 0 and r.tags() == {"optimizer"} for r in steps)
