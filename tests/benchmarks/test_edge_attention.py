from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.nn import GATv2Conv, TransformerConv
from torch_geometric.utils import index_sort, scatter, softmax

from benchmarks import (
    edge_layers,
    kinks,
    measure,
    ours,
    peers,
    peers_attention,
    run,
    vector_checks,
)
from benchmarks.checks import TOLERANCE, Edges
from benchmarks.edge_layers import EdgeShape
from benchmarks.engine import Context
from benchmarks.gates import evaluate
from benchmarks.graphs import GraphStore, data_file, make_graph
from benchmarks.memory import MemoryBook
from benchmarks.records import LESS_MEMORY, Record, Run
from benchmarks.suites import edge_attention
from benchmarks.suites.edge_attention import DOT, GATV2
from benchmarks.targets import TARGETS
from benchmarks.vector_checks import DotAttention, EdgeTerm, Gatv2Attention
from benchmarks.vector_layer_checks import (
    GATV2 as GATV2_NAMES,
)
from benchmarks.vector_layer_checks import (
    gatv2_conv_check,
    transformer_check,
    transformer_names,
)

CPU = torch.device("cpu")
SHAPE = (4, 6)
LABELS = ("1x128", "4x32")
SMALL = ["--device", "cpu", "--scale", "0.0005", "--budget-s", "1e-6"]


@pytest.fixture
def context():
    store = GraphStore(CPU, 7, 0.0005)
    return Context("edge_attention", CPU, store, 7, 1e-6, memory=MemoryBook())


@pytest.fixture
def graph():
    return make_graph("arxiv", seed=7, device=CPU, scale=0.001)


def core(context, form, phase):
    """A core as the suite prepares it, and PyG's call."""
    bench = edge_attention.make_core(context, "arxiv", form, SHAPE, torch.float32)
    (found,) = edge_attention.pyg_cores(bench, form, phase, compiles=False)
    return bench, found.build().run


@pytest.mark.parametrize("all_heads", [True, False])
@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize("form", [GATV2, DOT], ids=lambda form: form.op)
def test_pygs_layers_agree_with_the_reference(
    context, form, phase, all_heads, monkeypatch
):
    monkeypatch.setattr("benchmarks.checks.CHUNK_ELEMENTS", 5000)
    if not all_heads:
        monkeypatch.setattr(vector_checks, "ALL_HEADS_ELEMENTS", 1)
    bench, call = core(context, form, phase)
    results = call(0)
    assert len(results) == (1 if phase == "forward" else 4)
    assert bench.check(results) < 1e-5


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("form", [GATV2, DOT], ids=lambda form: form.op)
def test_one_wrong_row_is_found(context, form, which):
    bench, call = core(context, form, "train")
    results = [each.detach().clone() for each in call(0)]
    results[which][results[which].size(0) // 2] += 1.0
    assert bench.check(results) > TOLERANCE[torch.float32]


def test_a_hub_is_checked_on_every_head(context, monkeypatch):
    monkeypatch.setattr(vector_checks, "ALL_HEADS_ELEMENTS", 1)
    bench, call = core(context, DOT, "forward")
    (out,) = call(0)
    out[int(torch.bincount(bench.graph.edge_index[1]).argmax()), 1] += 1.0
    assert bench.check((out,)) > TOLERANCE[torch.float32]


def test_references_are_differentiated_rightly():
    torch.manual_seed(0)
    edges = Edges(torch.randint(7, (30,)), torch.randint(5, (30,)), 5)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    q, k, v, x = draw(5, 2, 3), draw(7, 2, 3), draw(7, 2, 3), draw(5, 2, 3)
    att, features, weight, grad = draw(1, 2, 3), draw(30, 4), draw(6, 4), draw(5, 2, 3)

    def attended(score, message):
        alpha = softmax(score, edges.target, num_nodes=5)
        return scatter(message * alpha[..., None], edges.target, 0, 5, "sum")

    def dot(q, k, v, features, weight):
        term = (features @ weight.T).view(-1, 2, 3)
        key = k[edges.source] + term
        score = (q[edges.target] * key).sum(-1) / 3**0.5
        return attended(score, v[edges.source] + term)

    def gatv2(x_src, x_dst, att):
        inner = x_src[edges.source] + x_dst[edges.target]
        score = (torch.nn.functional.leaky_relu(inner, 0.2) * att).sum(-1)
        return attended(score, x_src[edges.source])

    whole = DotAttention(edges, (q, k, v), EdgeTerm(features, weight))
    for function, operands, reference in (
        (dot, (q, k, v, features, weight), whole),
        (gatv2, (k, x, att), Gatv2Attention(edges, (k, x, att))),
    ):
        leaves = [each.clone().requires_grad_() for each in operands]
        out = function(*leaves)
        wanted = [out, *torch.autograd.grad(out, leaves, grad)]
        for found, want in zip(reference.gradients(grad), wanted, strict=True):
            torch.testing.assert_close(found, want)


def conv_case(graph, layer, names, features=None):
    """Results of a PyG layer, its x and cotangent."""
    x = torch.randn(graph.num_nodes, 24, requires_grad=True)
    if isinstance(layer, GATv2Conv):
        kinks.make_sums_exact(x, dict(layer.named_parameters()))
    more = () if features is None else (features,)
    out = layer(x, graph.edge_index, *more)
    grad = torch.randn_like(out)
    leaves = [x, *more, *(layer.get_parameter(name) for name in names)]
    return x, grad, [out, *torch.autograd.grad(out, leaves, grad)]


def assert_each_is_checked(check, results, unchecked=0):
    assert check(results) < 2e-5
    assert check(results[:1]) < 2e-5
    for i in range(len(results) - unchecked):
        wrong = [each.detach().clone() for each in results]
        wrong[i].view(-1)[0] += 10.0
        assert check(wrong) > TOLERANCE[torch.float32], i


def test_the_gatv2_layer_reference_agrees_with_pyg(graph):
    torch.manual_seed(0)
    layer = GATv2Conv(24, SHAPE[1], SHAPE[0])
    x, grad, results = conv_case(graph, layer, GATV2_NAMES)
    edges = Edges(*peers.with_loops(graph.edge_index, graph.num_nodes), graph.num_nodes)
    check = gatv2_conv_check(edges, x, grad, dict(layer.named_parameters()))
    assert_each_is_checked(check, results)


@pytest.mark.parametrize("edge_dim", [None, 5])
def test_the_transformer_layer_reference_agrees_with_pyg(graph, edge_dim):
    torch.manual_seed(0)
    layer = TransformerConv(24, SHAPE[1], SHAPE[0], edge_dim=edge_dim)
    features = None
    if edge_dim:
        features = torch.randn(graph.num_edges, edge_dim, requires_grad=True)
    names = transformer_names(has_edges=bool(edge_dim))
    x, grad, results = conv_case(graph, layer, names, features=features)
    named = dict(layer.named_parameters())
    assert set(names) == set(named)
    check = transformer_check(Edges.of(graph), x, features, grad, named, SHAPE[0])
    assert_each_is_checked(check, results, unchecked=1)


def test_exact_sums_are_the_same_in_any_precision_and_never_zero(graph):
    torch.manual_seed(0)
    layer = GATv2Conv(128, 32, 4)
    named = dict(layer.named_parameters())
    drawn = torch.randn(graph.num_nodes, 128)
    x = drawn.clone()
    assert not kinks.has_exact_sums(x, named)
    kinks.make_sums_exact(x, named)
    assert kinks.has_exact_sums(x, named)
    assert float((x - drawn).norm() / drawn.norm()) < 0.01
    left, right = layer.lin_l(x), layer.lin_r(x)
    double = layer.double()
    assert torch.equal(left.double(), double.lin_l(x.double()))
    assert torch.equal(right.double(), double.lin_r(x.double()))
    source, target = graph.edge_index
    total = left[source] + right[target]
    total = total.detach()
    assert float(total.abs().min()) >= kinks.SUM_UNIT / 2
    assert 0.4 < float((total > 0).float().mean()) < 0.6


def test_a_sum_that_is_not_exact_is_refused(graph):
    layer = GATv2Conv(24, SHAPE[1], SHAPE[0])
    x, grad, results = conv_case(graph, layer, GATV2_NAMES)
    named = dict(layer.named_parameters())
    with torch.no_grad():
        layer.lin_l.weight[0, 0] += 1e-4
    with pytest.raises(ValueError, match="not exact"):
        gatv2_conv_check(Edges.of(graph), x, grad, named)(results)


class FakeAdjacency:
    """What turbo_gnn makes of a graph, as its README says."""

    def __init__(self, edge_index, num_nodes):
        self.source, self.target = edge_index.int()
        self.num_nodes = num_nodes

    @classmethod
    def from_edge_list(cls, edge_index, num_nodes, quantile=0.99, index_dtype=None):
        assert index_dtype is torch.int32
        return cls(edge_index, num_nodes)

    def attended(self, score, value):
        weight = softmax(score, self.target.long(), num_nodes=self.num_nodes)
        message = value[self.source] * weight[..., None]
        return scatter(message, self.target.long(), 0, self.num_nodes, "sum")


def fake_gatv2_aggr(graph, x, x_neighbors, attention_weights, negative_slope=0.2):
    inner = x[graph.target] + x_neighbors[graph.source]
    inner = torch.nn.functional.leaky_relu(inner, negative_slope)
    return graph.attended((inner * attention_weights).sum(-1), x_neighbors)


def fake_graph_transformer_aggr(graph, x, Q, K, V, scale):
    # In its kernel the destination's vector is K, and Q that of the neighbour.
    return graph.attended((K[graph.target] * Q[graph.source]).sum(-1) * scale, V)


@pytest.fixture
def turbo(monkeypatch):
    module = SimpleNamespace(
        AdjacencyForwardBackwardWithNodeBuckets=FakeAdjacency,
        gatv2_aggr=fake_gatv2_aggr,
        graph_transformer_aggr=fake_graph_transformer_aggr,
    )
    monkeypatch.setitem(sys.modules, "turbo_gnn", module)


@pytest.mark.parametrize("form", [GATV2, DOT], ids=lambda form: form.op)
def test_turbo_gnn_is_called_by_its_conventions(context, turbo, form):
    bench = edge_attention.make_core(context, "arxiv", form, SHAPE, torch.float32)
    call = edge_attention.turbo_core(bench, form, "train").build()
    assert bench.check(call.restore(call.run(0))) < 1e-5
    assert call.relation_bytes() == 2 * 4 * bench.graph.num_edges


def fake_csc(edge_index, num_nodes):
    target, order = index_sort(edge_index[1], stable=True)
    source = edge_index[0][order]
    empty = source.new_empty(0)
    return (source, empty), order, (empty, empty, target)


def fake_anemoi_conv(query, key, value, edges, csc, reverse):
    source, target = csc[0], reverse[2]
    score = (query[target] * (key[source] + edges)).sum(-1) / query.size(2) ** 0.5
    weight = softmax(score, target, num_nodes=query.size(0))
    message = (value[source] + edges) * weight[..., None]
    return scatter(message, target, 0, query.size(0), "sum")


@pytest.fixture
def anemoi(monkeypatch):
    gt = SimpleNamespace(graph_transformer_attention_conv=fake_anemoi_conv)
    utils = SimpleNamespace(edge_index_to_csc=fake_csc)
    for name, module in {"gt": gt, "utils": utils}.items():
        monkeypatch.setitem(sys.modules, f"anemoi.models.triton.{name}", module)
    for name in ("anemoi", "anemoi.models", "anemoi.models.triton"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))


def test_anemoi_is_called_by_its_conventions(context, anemoi):
    work = edge_attention.prepare_edge_layer(
        context, "train", torch.float32, graph="mesh8", shape=EdgeShape(2, 4, 3)
    )
    calls = {each.impl: each.build for each in work.candidates}
    call = calls["anemoi"]()
    assert work.check(call.run(0)) > 0.1  # its edges are in another order
    assert work.check(call.restore(call.run(0))) < 1e-5
    assert work.check(calls["pyg"]().run(0)) < 1e-5
    assert call.relation_bytes() > 0


@pytest.mark.parametrize("peer", ["turbo_gnn", "anemoi"])
def test_a_missing_peer_is_a_record(tmp_path, monkeypatch, capsys, peer):
    module = {"turbo_gnn": "turbo_gnn", "anemoi": "anemoi.models.triton.gt"}[peer]
    monkeypatch.setitem(sys.modules, module, None)
    found = run_small(tmp_path, monkeypatch, "arxiv/*")
    records = [record for record in found if record.impl == peer]
    assert records
    assert all(record.ms is None for record in records)
    assert all(f"{peer} is not installed" in record.note for record in records)
    capsys.readouterr()


def test_cases_are_the_agreed_cells():
    found = {(c.name, c.op, c.phase, c.dtype) for c in edge_attention.cases()}
    half, fp32 = torch.float16, torch.float32
    for graph in ("arxiv", "reddit", "products"):
        for shape in ("1x128", "4x32"):
            for phase in ("forward", "train"):
                case = f"{graph}/{shape}"
                assert (case, "gatv2_attention", phase, fp32) in found
                assert (case, "dot_attention", phase, fp32) in found
                assert (case, "dot_attention", phase, torch.bfloat16) in found
    forwards = {cell[0] for cell in found if cell[2:] == ("forward", half)}
    assert forwards == {"reddit/1x128", "products/1x128"}
    layers = {cell[0] for cell in found if cell[3] == half and cell[2] == "train"}
    assert layers == {
        *(f"{graph}/{s}-e16" for graph in ("arxiv", "mesh8") for s in LABELS),
        *(f"mesh8/{shape}-e128" for shape in LABELS),
    }
    if data_file("musae_github"):
        real = {cell[1] for cell in found if cell[0] == "musae_github/4x32"}
        assert real == {"gatv2_conv", "transformer_conv"}


def test_floors_count_gathers_and_edge_features(context):
    on = context.graphs.get("arxiv")
    work = edge_attention.prepare_core(
        context, "train", torch.bfloat16, graph="arxiv", form=DOT, shape=(4, 32)
    )
    assert (work.gathers, work.gather_bytes) == (5, on.num_edges * 128 * 2)
    work = edge_attention.prepare_edge_layer(
        context, "train", torch.float16, graph="arxiv", shape=EdgeShape(4, 32, 16)
    )
    assert (work.gathers, work.gather_bytes) == (5, on.num_edges * 128 * 2)
    assert work.more_bytes == 4 * on.num_edges * 16 * 2


def test_pyg_is_compiled_on_small_graphs_alone():
    some = ["pyg_tiga", "pyg_tiga", "turbo_gnn", "pyg"]
    assert [each.impl for each in candidates("reddit")] == some
    assert [each.impl for each in candidates("arxiv")] == [*some, "pyg_compiled"]


def candidates(graph):
    store = GraphStore(CPU, 7, 0.0001)
    context = Context("edge_attention", CPU, store, 7, 1e-6)
    work = edge_attention.prepare_core(
        context, "train", torch.float32, graph=graph, form=DOT, shape=(4, 32)
    )
    return work.candidates


def run_small(tmp_path, monkeypatch, glob):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(measure, "MAX_ITERATIONS", 5)
    arguments = ["--suite", "edge_attention", "--case", glob, "--commit", "abc"]
    run.main([*arguments, *SMALL, "--out", str(tmp_path)])
    return Run.load(tmp_path / "cpu" / "edge_attention.json").records


def test_the_suite_runs_with_ours(tmp_path, monkeypatch, capsys):
    found = run_small(tmp_path, monkeypatch, "arxiv/*")
    impls = ("pyg_tiga", "pyg", "pyg_compiled")
    timed = [r for r in found if r.impl in impls]
    assert [r.note for r in timed if r.ms is None] == []
    less = [r for r in timed if LESS_MEMORY in r.tags()]
    assert {r.op for r in less} == {"gatv2_attention", "dot_attention"}
    assert {r.phase for r in less} == {"train"}
    assert {r.op for r in timed} == {*(r.op for r in less), "transformer_conv"}
    capsys.readouterr()


@pytest.mark.parametrize(
    "prepare",
    [edge_attention.prepare_gatv2_layer, edge_attention.prepare_transformer_layer],
)
def test_layers_of_all_candidates_are_right(context, monkeypatch, prepare):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    work = prepare(context, "train", torch.float32, graph="arxiv", shape=(4, 6))
    errors = {c.impl: work.check(c.build().run(0)) for c in work.candidates}
    assert set(errors) == {"pyg_tiga", "pyg", "pyg_compiled"}
    assert max(errors.values()) < 2e-5


def bounds(cell, kind, peer=""):
    return [
        target.bound
        for target in TARGETS
        if target.cells[0] == cell and (target.kind, target.peer) == (kind, peer)
    ]


@pytest.mark.parametrize("op", ["gatv2_attention", "dot_attention"])
def test_bounds_of_cores(op):
    wide = {"gatv2_attention": 2.2, "dot_attention": 2.0}[op]
    for shape, large in (("1x128", 1.4), ("4x32", wide)):
        small = (f"arxiv/{shape}", op, "train", "fp32")
        assert bounds(small, "speed", "turbo_gnn") == [6.0]
        assert bounds(small, "speed", "pyg_compiled") == [3.0]
        for graph in ("reddit", "products"):
            cell = (f"{graph}/{shape}", op, "train", "fp32")
            assert bounds(cell, "speed", "turbo_gnn") == [large]
            assert bounds(cell, "over peak", "turbo_gnn") == [1.0, 1.05]


def test_bounds_of_half_precision_and_real_graphs():
    for graph in ("arxiv", "reddit", "products"):
        cell = (f"{graph}/4x32", "dot_attention", "train", "bf16")
        assert bounds(cell, "speed over own") == [1.7]
    for graph, ms in (("reddit", 13.0), ("products", 17.0)):
        cell = (f"{graph}/1x128", "dot_attention", "forward", "fp16")
        assert bounds(cell, "milliseconds") == [ms]
    for op in ("gatv2_conv", "transformer_conv"):
        for graph in ("musae_github", "soc_slashdot0902"):
            cell = (f"{graph}/4x32", op, "train", "fp32")
            assert bounds(cell, "speed", "pyg_compiled") == [4.0]


@pytest.mark.parametrize(
    ("case", "anemoi", "compiled", "eager", "peak"),
    [
        ("arxiv/1x128-e16", 6.0, 3.0, [12.0], 0.6),
        ("mesh8/4x32-e16", 2.0, 3.0, [12.0], 0.6),
        ("mesh8/1x128-e128", 1.0, 1.0, [], 0.8),
    ],
)
def test_bounds_of_layers_with_edge_features(case, anemoi, compiled, eager, peak):
    cell = (case, "transformer_conv", "train", "fp16")
    assert bounds(cell, "speed", "anemoi") == [anemoi]
    assert bounds(cell, "speed", "pyg_compiled") == [compiled]
    assert bounds(cell, "speed", "pyg") == eager
    assert bounds(cell, "over peak", "anemoi") == [peak]


def test_what_is_handed_over_is_allowed_beside_the_peers_peak():
    cell = ("arxiv/4x32", "dot_attention", "train", "fp32")
    targets = [t for t in TARGETS if (t.kind, t.cells) == ("over peak", (cell,))]
    handed = 2_315_598 * 4 * 4 / (1 << 20)
    assert targets[0].allowance == pytest.approx(handed)

    def record(impl, peak, note=None):
        return Record("s", *cell, impl, 1.0, 1.0, 1.0, peak_mib=peak, note=note)

    records = [
        record("pyg_tiga", 300 + handed),
        record("pyg_tiga", 330, LESS_MEMORY),
        record("turbo_gnn", 300),
    ]
    found = Run("cpu", "2", None, "2", "abc", "2026-01-01", 7, None, records)
    verdicts = evaluate([found], targets)
    assert [v.value for v in verdicts] == pytest.approx([1.0, 1.1])
    assert [v.passed for v in verdicts] == [True, False]


def test_the_form_of_a_graph_is_made_once(graph):
    made = []
    for _ in range(2):
        graph.form("peer", lambda: made.append(1) or (torch.ones(3),))
    assert made == [1]
    assert peers_attention.form_bytes(graph, "peer") == 12


def test_our_layer_has_the_parameters_of_pygs():
    parent = TransformerConv(24, 6, 4, edge_dim=5).half()
    layer = edge_layers.our_layer(ours.transformer_conv, parent, (4, 6), edge_dim=5)
    for name, each in parent.named_parameters():
        assert torch.equal(layer.get_parameter(name), each)
