"""Plans: the table's order, every reason of a refusal, pins, and what explain says."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from pyg_tiga import UnsupportedError, _features, functional, planner
from pyg_tiga.errors import log_fallback
from pyg_tiga.impls import triton_spmm
from pyg_tiga.planner import dispatch
from pyg_tiga.planner.schedule.defaults import Rule, default_schedule, rules
from pyg_tiga.planner.table import candidates
from pyg_tiga.problem import Problem
from pyg_tiga.testing import make_case, row

PROBLEM = Problem(
    op="spmm",
    num_dst=1000,
    num_src=1000,
    num_edges=14000,
    features=128,
    dtype=torch.float32,
    out_dtype=torch.float32,
    index_dtype=torch.int32,
    device="cuda",
    capability=(9, 0),
)


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    dispatch._plan.cache_clear()
    log_fallback.cache_clear()


def test_our_kernels_come_first_on_cuda() -> None:
    plan = planner.plan(PROBLEM)
    assert plan.implementation.family == "triton"
    assert plan.schedule is not None
    assert plan.source == "table"
    assert not plan.rejected


@pytest.mark.parametrize("op", ["spmm", "spmm_extremum", "spmm_extremum_backward"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_last_resort_takes_everything(op: str, device: str) -> None:
    names = [c.family for c in candidates(op, device)]
    assert "scatter" in names
    scatter = candidates(op, device)[names.index("scatter")]
    odd = dataclasses.replace(
        PROBLEM, op=op, device=device, dtype=torch.int64, out_dtype=torch.int64
    )
    assert scatter.why_not(odd) == []


def test_a_refusal_lists_every_reason() -> None:
    problem = dataclasses.replace(
        PROBLEM,
        op="spmm_extremum",
        dtype=torch.float64,
        out_dtype=torch.float64,
        weighted=True,
        capability=(7, 5),
        relation="dense",
    )
    reasons = triton_spmm.SPMM_EXTREMUM.why_not(problem)
    assert len(reasons) == 5
    assert "dtype is float64, required float32 or bfloat16 or float16" in reasons
    assert any("capability is (7, 5)" in reason for reason in reasons)


def test_without_triton_cusparse_runs_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_features, "has_triton", lambda: False)
    with caplog.at_level(logging.WARNING, logger="pyg_tiga"):
        plan = planner.plan(PROBLEM)
        planner.plan(dataclasses.replace(PROBLEM, num_edges=13000))
    assert plan.implementation.name == "cusparse"
    assert plan.rejected == {"triton": ["Triton is not installed"]}
    assert [r.getMessage() for r in caplog.records] == [
        "spmm to cusparse falls back: triton: Triton is not installed"
    ]


def test_deterministic_mode_refuses_unordered_additions() -> None:
    backward = dataclasses.replace(
        PROBLEM, op="spmm_extremum_backward", ties="first", reduce="max"
    )
    assert planner.plan(backward).implementation.name == "triton_winners"
    strict = dataclasses.replace(backward, deterministic=True)
    plan = planner.plan(strict)
    assert plan.implementation.name == "triton_columns"
    assert "no fixed order" in plan.rejected["triton_winners"][0]


def test_a_pinned_implementation_that_cannot_run_raises() -> None:
    problem = dataclasses.replace(PROBLEM, dtype=torch.float64, out_dtype=torch.float64)
    with planner.pin("triton"), pytest.raises(UnsupportedError) as caught:
        planner.plan(problem)
    assert list(caught.value.rejections) == ["triton"]
    assert planner.plan(problem).implementation.name == "cusparse"


def test_a_pin_ends_with_its_context() -> None:
    with planner.pin("scatter"):
        assert planner.plan(PROBLEM).source == "pinned"
    assert planner.plan(PROBLEM).source == "table"


def test_explain_names_the_choice_and_the_refusals() -> None:
    problem = dataclasses.replace(PROBLEM, dtype=torch.float64, out_dtype=torch.float64)
    text = planner.plan(problem).explain()
    assert "runs: cusparse (vendor)" in text
    assert "not triton: dtype is float64" in text
    assert "14000 edges" in text
    assert "chosen by: table" in text


@pytest.mark.parametrize(
    ("form", "objective", "said"),
    [
        ("dot", "time", "E H in float32: 8.00 MiB"),
        ("gatv2", "memory", "forms scores again"),
        ("additive", "time", "P and p, sums over edges with positive scores: 0.58 MiB"),
        ("additive", "memory", "forms scores again"),
    ],
)
def test_explain_says_what_attention_keeps_for_its_backward(
    form: str, objective: str, said: str
) -> None:
    problem = Problem(
        op="edge_attention",
        num_dst=1024,
        num_src=1024,
        num_edges=2**19,
        features=144,
        dtype=torch.float32,
        out_dtype=torch.float32,
        index_dtype=torch.int32,
        device="cpu",
        heads=4,
        form=form,
        objective=objective,
    )
    with planner.pin("triton"):
        assert said in planner.plan(problem).explain()


def test_a_plan_is_a_table_in_a_terminal() -> None:
    console = pytest.importorskip("rich.console").Console(width=100, record=True)
    console.print(planner.plan(PROBLEM))
    assert "runs" in console.export_text()


def test_plan_spmm_does_not_run_anything() -> None:
    case = make_case(row("unsorted"))
    plan = functional.plan_spmm(case.edge_index, case.x, reduce="max")
    assert plan.problem.ties == "none"
    x = case.x.clone().requires_grad_()
    plan = functional.plan_spmm(case.edge_index, x, reduce="max")
    assert plan.problem.ties == "split"


@pytest.mark.parametrize("op", sorted({rule.op for rule in rules()}))
@pytest.mark.parametrize("features", [1, 3, 16, 63, 100, 128, 602, 1433])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (10**3, 10**4), (10**7, 10**9)])
def test_the_shipped_table_answers_everything(
    op: str, features: int, dtype: torch.dtype, nodes: int, edges: int
) -> None:
    problem = dataclasses.replace(
        PROBLEM,
        op=op,
        features=features,
        dtype=dtype,
        num_src=nodes,
        num_dst=nodes,
        num_edges=edges,
    )
    schedule = default_schedule(problem)
    for size in (schedule.rows, schedule.edges, schedule.slice, schedule.chunk):
        assert size >= 1
        assert size & (size - 1) == 0
    # What a program holds must fit its registers: 32-bit accumulators and loads.
    # (Attention takes the rows of a program one after the other.)
    rows = 1 if op.startswith("edge_attention") else schedule.rows
    held = rows * schedule.edges * schedule.slice
    assert held <= 64 * 32 * schedule.warps


def test_registers_are_bounded_by_dtype_where_tiles_are_small() -> None:
    made = Rule("sddmm", 512, 64, step_bytes=2048, registers=72, registers_of_halves=64)
    bounds = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = dataclasses.replace(PROBLEM, features=128, dtype=dtype)
        bounds[dtype] = made.schedule(problem).registers
        large = dataclasses.replace(made, step_bytes=4096)
        assert large.schedule(problem).registers == 0
        plain = dataclasses.replace(made, registers_of_halves=0)
        assert plain.schedule(problem).registers == 72
    assert list(bounds.values()) == [72, 64, 64]


@pytest.mark.parametrize("op", ["edge_attention", "edge_attention_backward"])
@pytest.mark.parametrize("form", ["dot", "gatv2"])
def test_registers_are_bounded_for_vectors_of_usual_heads(op: str, form: str) -> None:
    problem = dataclasses.replace(PROBLEM, op=op, form=form, heads=4)
    for channels, is_bounded in ((8, True), (128, True), (160, False)):
        wide = dataclasses.replace(problem, features=4 * channels)
        assert bool(default_schedule(wide).registers) == is_bounded
    additive = dataclasses.replace(problem, features=64, heads=8, form="additive")
    assert default_schedule(additive).registers in (64, 72)
    # A norm of every gathered row takes registers of its own.
    normed = dataclasses.replace(problem, features=64, heads=8, form="dot_norm")
    assert default_schedule(normed).registers == 0


def test_scheduled_implementations_have_rules() -> None:
    ops = {rule.op for rule in rules()}
    for op in ("spmm", "spmm_extremum", "spmm_extremum_backward", "sddmm"):
        for implementation in candidates(op, "cuda"):
            assert not implementation.scheduled or op in ops
