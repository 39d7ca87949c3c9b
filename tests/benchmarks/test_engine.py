from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import engine, measure
from benchmarks.engine import (
    Call,
    Candidate,
    Context,
    CustomCase,
    TimedCase,
    Workload,
)
from benchmarks.graphs import GraphStore
from benchmarks.measure import Timing
from benchmarks.memory import Demand, MemoryBook

CPU = torch.device("cpu")
RIGHT = torch.ones(3, 2)


@pytest.fixture
def context():
    return Context("suite", CPU, GraphStore(CPU, 7), 7, budget_s=1e-3, copy_gb_s=1000.0)


def case(*candidates: Candidate) -> TimedCase:
    def prepare(context, phase, dtype):
        return Workload(
            case="tiny/F2",
            candidates=list(candidates),
            check=lambda results: float((results[0] - RIGHT).norm()),
            sets=1,
            gather_bytes=5_000_000,
            gathers=2,
        )

    return TimedCase("tiny/F2", "spmm", "train", torch.float32, prepare, 2)


def returning(value):
    return lambda: Call(lambda i: (value,), lambda: 1 << 20)


def raising(failure):
    def build():
        raise failure

    return build


def test_a_right_candidate_is_timed(context):
    floor, ours = case(Candidate("pyg_tiga", returning(RIGHT))).run(context)
    assert ours.ms_low <= ours.ms <= ours.ms_high
    assert (ours.suite, ours.case, ours.op) == ("suite", "tiny/F2", "spmm")
    assert (ours.phase, ours.dtype, ours.in_channels) == ("train", "fp32", 2)
    assert (ours.rel_err, ours.relation_mib, ours.note) == (0.0, 1.0, None)
    assert (floor.impl, floor.note) == ("floor", "2 gathers")
    assert floor.ms == pytest.approx(0.01)


@pytest.mark.parametrize("value", [RIGHT + 1e-3, RIGHT + 1, RIGHT * torch.nan])
def test_a_wrong_result_has_no_speed(context, value):
    ours = case(Candidate("pyg_tiga", returning(value), ("tag",))).run(context)[-1]
    assert ours.ms is None
    assert ours.note.startswith("tag; wrong: error")


def test_a_peer_may_be_inaccurate_but_not_wrong(context):
    found = case(
        Candidate("pyg_tiga", returning(RIGHT + 0.01)),
        Candidate("cusparse", returning(RIGHT + 0.01)),
        Candidate("pyg", returning(RIGHT + 1)),
    ).run(context)[1:]
    ours, close, wrong = found
    assert (ours.ms, ours.note) == (None, "wrong: error 0.024 above 1e-04")
    assert close.ms is not None
    assert close.rel_err == pytest.approx(0.0245, rel=0.01)
    assert (close.note, close.inaccuracy) == ("inaccurate: error 0.024",) * 2
    assert (wrong.ms, wrong.inaccuracy) == (None, None)
    assert close.tags() == frozenset()


def fixed(ms):
    return Timing(ms, ms, ms, ms)


@pytest.fixture
def timed(context, monkeypatch):
    """Runs a case as on a GPU, with given eager and replayed times by name."""

    def run(**times):
        calls = {impl: object() for impl in times}
        by_call = {calls[impl]: pair for impl, pair in times.items()}
        captured = []

        def replay(call, **options):
            captured.append(by_call[call][1])
            if by_call[call][1] is None:
                raise RuntimeError("it waits")
            return fixed(by_call[call][1])

        def measured(self, trial, work, context):
            trial.call = Call(calls[trial.candidate.impl])
            trial.eager = fixed(times[trial.candidate.impl][0])

        monkeypatch.setattr(engine.TimedCase, "_measure", measured)
        monkeypatch.setattr(measure, "time_replay", replay)
        monkeypatch.setattr(measure, "release_memory", lambda device: None)
        monkeypatch.setattr(engine.TimedCase, "_floor", lambda *arguments: [])
        monkeypatch.setattr(MemoryBook, "refusal", lambda *arguments: None)
        on_gpu = replace(context, device=torch.device("cuda"))
        found = case(*(Candidate(impl, None) for impl in times)).run(on_gpu)
        return [(r.impl, r.ms, r.note) for r in found], captured

    return run


def test_a_case_counts_by_replay_if_one_replay_is_short(timed):
    found, captured = timed(cusparse=(0.5, 0.4), pyg_tiga=(0.6, 0.2), pyg=(2.0, 1.9))
    assert found == [
        ("cusparse", 0.4, None),
        ("cusparse", 0.5, "eager"),
        ("pyg_tiga", 0.2, None),
        ("pyg_tiga", 0.6, "eager"),
        ("pyg", 1.9, None),
        ("pyg", 2.0, "eager"),
    ]
    assert captured == [0.4, 0.2, 1.9]


def test_eager_calls_count_where_no_replay_is_short(timed):
    found, captured = timed(pyg_tiga=(0.9, 0.35), pyg=(3.1, 0.1))
    assert found == [("pyg_tiga", 0.9, None), ("pyg", 3.1, None)]
    assert captured == [0.35]


def test_a_peer_that_cannot_be_replayed_says_so(timed):
    found, _ = timed(pyg_tiga=(0.4, 0.1), pyg=(2.0, None))
    assert found[2:] == [
        ("pyg", None, "no replay: RuntimeError: it waits"),
        ("pyg", 2.0, "eager"),
    ]


def test_what_ran_out_of_memory_is_not_tried_on_more(context):
    def demand(case, nbytes, phase="train", impl="pyg", copies=0):
        return Demand("max_aggregate", impl, phase, case, nbytes, copies)

    book = MemoryBook()
    book.add(demand("reddit/F128", 100))
    assert "reddit/F128 train already" in book.refusal(demand("b", 100), CPU)
    assert book.refusal(demand("b", 99), CPU) is None
    assert book.refusal(demand("b", 200, "forward"), CPU) is None
    assert book.refusal(demand("b", 200, impl="pyg_compiled"), CPU) is None
    book.add(demand("products/F64", 300, "forward"))
    assert book.refusal(demand("b", 300, "train"), CPU)


def test_what_cannot_fit_is_not_tried(monkeypatch, context):
    from benchmarks import memory

    monkeypatch.setattr(memory, "total_bytes", lambda device: 9_000_000)
    peer = Candidate("pyg", returning(RIGHT), edge_copies=2)
    ours = Candidate("pyg_tiga", returning(RIGHT), edge_copies=2)
    refused, run = case(peer, ours).run(context)[1:]
    assert refused.note.startswith("out of memory; not run, 2 tensors of a row per")
    assert run.ms is not None


def test_failures_are_records_and_the_others_still_run(context):
    found = case(
        Candidate("pyg", raising(torch.OutOfMemoryError("too much"))),
        Candidate("cusparse", raising(ImportError("not here; sorry\nmore"))),
        Candidate("pyg_tiga", returning(RIGHT)),
    ).run(context)
    notes = {record.impl: record.note for record in found}
    assert notes["pyg"] == "out of memory"
    assert notes["cusparse"] == "ImportError: not here, sorry"
    assert [record.ms is None for record in found[1:]] == [True, True, False]


def test_a_failing_custom_case_is_a_record(context):
    def measure(context):
        raise FileNotFoundError("no data")

    (record,) = CustomCase("cora/F16", "sage_conv", "accuracy", measure).run(context)
    assert record.note == "accuracy; FileNotFoundError: no data"
    assert record.tags() == {"accuracy"}
