from __future__ import annotations

import pytest
import torch

from benchmarks import engine, measure, report, run
from benchmarks.records import Run
from benchmarks.suites import SUITES

SMALL = ["--device", "cpu", "--scale", "0.0005", "--budget-s", "1e-6"]


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    # The compiler's minute is no part of these tests.
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(measure, "HOST_WARM_UP", 1)
    monkeypatch.setattr(measure, "HOST_GROUPS", 2)
    monkeypatch.setattr(measure, "HOST_BLOCKS", 1)
    monkeypatch.setattr(measure, "HOST_CALLS", 2)
    monkeypatch.setattr(measure, "MAX_ITERATIONS", 5)


def run_small(tmp_path, *arguments):
    code = run.main([*SMALL, *arguments, "--out", str(tmp_path), "--commit", "abc"])
    return code, {p.stem: Run.load(p) for p in (tmp_path / "cpu").glob("*.json")}


@pytest.mark.parametrize(("suite", "glob"), [("spmm", "arxiv/F128"), ("sage", "[at]*")])
def test_a_suite_runs_and_ours_is_right(tmp_path, capsys, suite, glob):
    code, files = run_small(tmp_path, "--suite", suite, "--case", glob)
    records = files[suite].records
    mine = [record for record in records if record.impl == "pyg_tiga"]
    assert code == 0, [record.note for record in mine]
    assert all(record.ms is not None for record in mine)
    assert all(r.rel_err is not None or r.tags() == {"host"} for r in mine)
    assert {record.op for record in records} == {case.op for case in SUITES[suite]()}
    assert "arxiv@0.0005/F128" in capsys.readouterr().out
    report.main(["--results", str(tmp_path), "--to", str(tmp_path / "results.md")])
    assert f"## cpu, {suite}" in (tmp_path / "results.md").read_text()


def test_several_suites_share_a_run(tmp_path, capsys):
    suites = ["--suite", "spmm", "sage", "--case", "arxiv/F128", "--op", "s*"]
    code, files = run_small(tmp_path, *suites)
    assert (code, set(files)) == (0, {"spmm", "sage"})
    shown = capsys.readouterr().out
    assert "arxiv@0.0005/F128 | spmm" in shown
    assert "arxiv@0.0005/F128 | sage_conv" in shown


def test_host_times_of_both_sides_and_the_target_are_shown(tmp_path, capsys):
    code, files = run_small(
        tmp_path, "--suite", "sage", "--case", "tiny/*", "--scale", "1"
    )
    ours, pyg = files["sage"].records
    assert (code, ours.impl, pyg.impl) == (0, "pyg_tiga", "pyg")
    assert {"call_us", "projections_us"} == set(ours.extra) == set(pyg.extra)
    shown = capsys.readouterr().out
    assert "host time of a warm SAGEConv call" in shown
    assert "GATConv" not in shown


def test_parts_of_one_commit_join_and_compare_with_a_base(tmp_path, capsys):
    part = ["--suite", "spmm", "--op", "max*"]
    run_small(tmp_path, *part, "--case", "arxiv/*")
    base = tmp_path / "cpu" / "spmm.json"
    _, files = run_small(tmp_path, *part, "--case", "a*", "--base", str(base))
    assert list(files) == ["spmm"]
    forms = [r.note for r in files["spmm"].records if r.impl == "pyg_tiga"]
    assert forms == [None, "deterministic", "winner scatter"]
    assert "times faster" in capsys.readouterr().out


def test_cases_are_the_agreed_cells():
    cells = {(c.name, c.phase, c.dtype) for c in SUITES["spmm"]() if c.op == "spmm"}
    named = {cell for cell in cells if cell[0].split("/")[0] in run_names()}
    assert len(named) == 3 * 4 * 2 * 2
    layers = [c.name for c in SUITES["sage"]() if isinstance(c, engine.TimedCase)]
    assert {"arxiv/F128", "reddit/F128", "products/F64"} <= set(layers)


def run_names():
    return ("arxiv", "reddit", "products")


def test_tuning_seeds_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--all", "--seed", "1"])
    assert "report on another" in capsys.readouterr().err
