from __future__ import annotations

import pytest
import torch

from benchmarks.engine import (
    Call,
    Candidate,
    Context,
    CustomCase,
    TimedCase,
    Workload,
)
from benchmarks.graphs import GraphStore

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


@pytest.mark.parametrize("value", [RIGHT + 1, RIGHT * torch.nan])
def test_a_wrong_result_has_no_speed(context, value):
    ours = case(Candidate("pyg_tiga", returning(value), ("tag",))).run(context)[-1]
    assert ours.ms is None
    assert ours.note.startswith("tag; wrong: error")


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
