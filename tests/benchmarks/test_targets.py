from __future__ import annotations

import pytest

from benchmarks.compare import against_base, comparisons
from benchmarks.gates import EVALUATORS, Target, evaluate
from benchmarks.graphs import SPECS, data_file
from benchmarks.records import Record, Run
from benchmarks.report import document
from benchmarks.run import against
from benchmarks.suites import SUITES
from benchmarks.tables import comparison_table
from benchmarks.targets import TARGETS

CELL = ("arxiv/F128", "sage_conv", "train", "fp32")


def record(impl, ms, *, cell=CELL, note=None, spread=0.0, peak=None, **extra):
    low, high = (ms - spread, ms + spread) if ms else (None, None)
    return Record(
        "sage", *cell, impl, ms, low, high, peak_mib=peak, note=note, extra=extra
    )


def run(*records, date="2026-01-01"):
    return Run("cpu", "2", None, "2", "abc", date, 7, 4000.0, list(records))


def value(target, *records):
    return evaluate([run(*records)], [target])[0].value


def test_ratios_are_judged_by_their_low_bound():
    ours, even = record("pyg_tiga", 10.0), record("pyg_tiga", 10.0, spread=1.0)
    peers = [record("pyg", 30.0), record("pyg_compiled", 10.5), record("floor", 5.0)]
    (win,) = comparisons([ours, *peers])
    assert (win.peer.impl, win.verdict, win.floor_ratio) == ("pyg_compiled", "win", 2.0)
    (close,) = comparisons([even, *peers])
    assert (close.verdict, close.low) == ("even", pytest.approx(10.5 / 11))
    (lost,) = comparisons([record("pyg_tiga", 11.0), *peers])
    assert lost.verdict == "loss"


def test_eager_records_are_compared_with_eager_records_and_the_same_floor():
    found = comparisons(
        [
            record("floor", 0.1),
            record("pyg_tiga", 0.2),
            record("pyg_tiga", 0.3, note="eager"),
            record("pyg", None, note="no replay: RuntimeError: x"),
            record("pyg", 0.6, note="eager"),
        ]
    )
    assert [c.ratio for c in found] == [None, pytest.approx(2.0)]
    assert [c.floor_ratio for c in found] == pytest.approx([2.0, 3.0])


def test_speed_falls_back_to_the_eager_pair():
    target = Target("t", "speed", 1.0, (CELL,), "pyg")
    records = [record("pyg_tiga", 0.3, note="eager"), record("pyg", 0.6, note="eager")]
    assert value(target, record("pyg_tiga", 0.2), *records) == pytest.approx(2.0)
    assert value(target, record("pyg_tiga", 0.2)) is None


def test_every_kind_of_target():
    ours = record("pyg_tiga", 2.0, spread=0.1, peak=10.0)
    peer = record("pyg", 8.0, spread=0.5, peak=40.0)
    floor = record("floor", 0.5)
    other = ("b/F128", *CELL[1:])
    two = (CELL, other)
    more = [record("pyg_tiga", 1.0, cell=other), record("pyg", 1.0, cell=other)]
    cases = {
        "speed": (Target("t", "speed", 1, two, "pyg"), 1.0),
        "mean speed": (
            Target("t", "mean speed", 1, two, "pyg"),
            (7.5 / 2.1) ** 0.5,
        ),
        "memory": (Target("t", "memory", 1, (CELL,), "pyg"), 4.0),
        "milliseconds": (Target("t", "milliseconds", 1, (CELL,)), 2.1),
        "over own": (Target("t", "over own", 1.1, two), 2.1),
        "speed over own": (Target("t", "speed over own", 1.6, two[::-1]), 1.9),
        "over floor": (Target("t", "over floor", 1.05, (CELL,)), 4.2),
        "peak": (Target("t", "peak", 9.0, (CELL,)), 10.0),
        "over peak": (
            Target("t", "over peak", 1.0, (CELL,), "pyg", allowance=2.0),
            0.2,
        ),
        "completes": (Target("t", "completes", 1.0, (CELL,)), 1.0),
        "best of several": (
            Target("t", "best of several", 1, (CELL,), "pyg", frozenset({"cpu"})),
            1.5,
        ),
        "accuracy": (
            Target("t", "accuracy", 0.5, (CELL,), tags=frozenset({"accuracy"})),
            0.3,
        ),
    }
    tagged = [
        record("pyg_tiga", 2.5, note="cpu", best_ms=2.0),
        record("pyg", 3.5, note="cpu", best_ms=3.0),
        record("pyg_tiga", None, note="accuracy", diff_low=-0.3, diff_high=0.1),
    ]
    assert set(cases) == set(EVALUATORS)
    for target, expected in cases.values():
        assert value(target, ours, peer, floor, *more, *tagged) == pytest.approx(
            expected
        )
        assert value(target) is None


def test_a_missing_cell_leaves_a_group_unmeasured():
    target = Target("t", "speed", 1, (CELL, ("b/F128", *CELL[1:])), "pyg")
    assert value(target, record("pyg_tiga", 1.0), record("pyg", 2.0)) is None


def test_forms_of_a_gradient_share_their_peer():
    cell = ("arxiv/F128", "max_aggregate", "train", "fp32")
    forms = [
        record("pyg_tiga", ms, cell=cell, note=note)
        for ms, note in ((2.0, "deterministic"), (1.0, "winner scatter"))
    ]
    peer = record("pyg", 4.0, cell=cell)
    assert [c.ratio for c in comparisons([*forms, peer])] == [2.0, 4.0]
    tags = frozenset({"winner scatter"})
    assert value(Target("t", "milliseconds", 1, (cell,), tags=tags), *forms) == 1.0
    assert value(Target("t", "speed", 1, (cell,), "pyg", tags), *forms, peer) == 4.0


def test_the_newest_run_that_measured_it_counts():
    target = Target("t", "speed", 3.0, (CELL,), "pyg")
    old = run(record("pyg_tiga", 1.0), record("pyg", 2.0))
    new = run(record("pyg_tiga", 1.0), record("pyg", 4.0), date="2026-02-01")
    unrelated = run(date="2026-03-01")
    (verdict,) = evaluate([old, new, unrelated], [target])
    assert (verdict.value, verdict.word) == (4.0, "PASS")
    assert evaluate([old], [target])[0].word == "FAIL"
    assert evaluate([unrelated], [target])[0].word == "not measured"


def test_upper_bounds_are_upper():
    target = Target("t", "milliseconds", 0.08, (CELL,))
    assert evaluate([run(record("pyg_tiga", 0.07))], [target])[0].passed
    assert evaluate([run(record("pyg_tiga", 0.09))], [target])[0].passed is False


def test_every_target_names_a_case_of_a_suite():
    known = {(case.name, case.op) for cases in SUITES.values() for case in cases()}
    for target in TARGETS:
        for case, op, *_ in target.cells:
            graph = case.split("/")[0]
            if graph in (*SPECS, "cora") or data_file(graph):
                assert (case, op) in known


def test_what_does_not_complete_fails():
    target = Target("t", "completes", 1.0, (CELL,))
    lost = run(record("pyg_tiga", None, note="out of memory"))
    assert evaluate([lost], [target])[0].word == "FAIL"


def test_bf16_cells_are_gates_of_both_phases():
    found = {
        (target.cells[0][2], target.kind): target.bound
        for target in TARGETS
        if target.peer == "cusparse" and {cell[3] for cell in target.cells} == {"bf16"}
    }
    speeds = {"speed": 0.98, "mean speed": 2.0}
    phases = ("forward", "train")
    assert found == {(p, k): bound for p in phases for k, bound in speeds.items()}


def test_an_inaccurate_peer_counts_and_is_marked():
    ours = record("pyg_tiga", 1.0)
    peer = record("pyg", 2.0, note="inaccurate: error 0.03")
    target = Target("t", "speed", 1.0, (CELL,), "pyg")
    assert value(target, ours, peer) == 2.0
    assert "pyg inaccurate: error 0.03" in comparison_table([ours, peer])


def test_comparison_with_an_earlier_run():
    before = run(record("pyg_tiga", 2.0), record("pyg", 9.0))
    ((found, ratio, low),) = against_base(
        before, run(record("pyg_tiga", 1.0), record("pyg", 9.0))
    )
    assert (found.impl, ratio, low) == ("pyg_tiga", 2.0, 2.0)


@pytest.mark.parametrize(("ms", "word"), [(10.2, "PASS"), (10.4, "FAIL")])
def test_no_cell_may_be_slower_than_the_base(ms, word):
    other = ("b/F128", *CELL[1:])
    base = run(record("pyg_tiga", 10.0), record("pyg_tiga", 9.0, cell=other))
    eager = record("pyg_tiga", 99.0, note="eager")
    now = run(record("pyg_tiga", ms), record("pyg_tiga", 8.0, cell=other), eager)
    found = against(base, now)
    assert (found.value, found.word) == (pytest.approx(10.0 / ms), word)
    assert against(run(), now).word == "not measured"


def test_the_report_shows_losses_failures_and_accuracy():
    figures = {"accuracy": 80.1, "diff": 0.05, "diff_low": -0.2, "diff_high": 0.3}
    text = document(
        {
            "cpu, sage": run(
                record("pyg_tiga", 4.0),
                record("pyg", 2.0),
                record("pyg_compiled", None, note="out of memory"),
                record("pyg_tiga", None, note="accuracy", **figures),
            )
        }
    )
    assert "| loss |" in text
    assert "out of memory" in text
    assert "+0.05 points, 95 % interval -0.20 to +0.30" in text
    assert "| FAIL" in text
    assert "commit abc" in text
    rows = [line for line in text.splitlines() if line.startswith("| SAGEConv")]
    assert len({line.count("|") for line in rows}) == 1


def gat_bounds(cell, kind, peer=""):
    return [
        target.bound
        for target in TARGETS
        if target.cells[0] == cell and (target.kind, target.peer) == (kind, peer)
    ]


@pytest.mark.parametrize(
    ("case", "eager"),
    [
        ("arxiv/4x32", 13.0),
        ("arxiv/8x8", 16.0),
        ("arxiv/1x64", 9.0),
        ("musae_github/4x32", 8.0),
        ("soc_slashdot0902/4x32", 8.0),
    ],
)
def test_bounds_of_gat_layers(case, eager):
    step = (case, "gat_conv", "train", "fp32")
    assert gat_bounds(step, "speed", "pyg") == [eager]
    assert gat_bounds(step, "speed", "pyg_compiled") == [2.5]
    memory = [8.0] if case.startswith("arxiv") else []
    assert gat_bounds(step, "memory", "pyg") == memory


@pytest.mark.parametrize("graph", ["reddit", "products"])
@pytest.mark.parametrize(
    ("shape", "forward", "backward"), [("4x32", 1.05, 1.4), ("8x8", 1.4, 1.8)]
)
def test_bounds_of_gat_on_large_graphs(graph, shape, forward, backward):
    case = f"{graph}/{shape}"
    step = (case, "gat_conv", "train", "fp32")
    assert gat_bounds(step, "completes") == [1.0]
    heads, channels = map(int, shape.split("x"))
    seven = 7 * SPECS[graph].num_nodes * heads * channels * 4 / (1 << 20)
    (peak,) = gat_bounds(step, "peak")
    assert seven - 1 < peak <= seven
    for phase, bound in (("forward", forward), ("backward", backward)):
        core = (case, "gat_attention", phase, "fp32")
        assert gat_bounds(core, "over floor") == [bound]
        half = (case, "gat_attention", phase, "bf16")
        expected = [1.6] if shape == "4x32" else []
        assert gat_bounds(half, "speed over own") == expected


def test_other_bounds_of_gat():
    core = ("arxiv/4x32", "gat_attention", "train", "fp32")
    assert gat_bounds(core, "over floor") == [1.5]
    cora = ("cora/8x8", "gat_conv", "train", "fp32")
    assert gat_bounds(cora, "speed", "pyg") == [2.0]
    assert gat_bounds(cora, "accuracy") == [0.5]
    for phase in ("forward", "train"):
        cpu = ("arxiv/8x8", "gat_conv", phase, "fp32")
        assert gat_bounds(cpu, "best of several", "pyg") == [0.95]
