from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.records import Record, ResultFile, Run, merge, new_run, slug

CELL = ("spmm", "arxiv/F64", "spmm", "forward", "fp32")
FIELDS = [
    *("suite", "case", "op", "phase", "dtype", "impl", "ms", "ms_low", "ms_high"),
    *("peak_mib", "relation_mib", "rel_err", "in_channels", "loops", "note"),
]


def record(impl="pyg_tiga", ms=1.0, note=None, case="arxiv/F64"):
    return Record("spmm", case, *CELL[2:], impl, ms, ms, ms, note=note)


def run(*records, commit="abc", date="2026-01-01", seed=7):
    return Run("NVIDIA H200", "2", "3", "2", commit, date, seed, 4000.0, list(records))


def test_json_has_the_agreed_fields_and_comes_back(tmp_path):
    stored = run(record(), replace(record("pyg"), extra={"best_ms": 1.0}))
    plain = json.loads(stored.dumps())
    assert list(plain["records"][0]) == FIELDS
    agreed = {"device", "torch", "triton", "pyg", "commit", "date", "records"}
    assert agreed <= set(plain)
    path = tmp_path / "spmm.json"
    path.write_text(stored.dumps())
    assert Run.load(path) == stored


def test_notes_carry_tags():
    tagged = record(note="winner scatter; eager; a remark")
    assert tagged.tags() == {"winner scatter", "eager"}
    assert tagged.cell[-1] == {"eager"}
    assert record().key != tagged.key
    assert record("pyg").cell == record().cell


def test_merge_replaces_what_was_measured_again():
    older = run(record(), record("pyg"), record(note="eager"), record(case="b/F64"))
    merged = merge(older, run(record(ms=2.0)))
    assert [(r.case, r.ms) for r in merged.records] == [
        ("b/F64", 1.0),
        ("arxiv/F64", 2.0),
    ]


@pytest.mark.parametrize(
    ("commit", "seed", "part", "name", "count"),
    [
        ("abc", 7, None, "spmm.json", 1),
        ("abc", 7, "b/*", "spmm.json", 2),
        ("def", 7, "b/*", "spmm.b.json", 1),
        ("abc", 8, "b/*", "spmm.b.json", 1),
        ("unknown", 7, "b/*", "spmm.b.json", 1),
    ],
)
def test_parts_join_only_their_own_commit(tmp_path, commit, seed, part, name, count):
    before = "unknown" if commit == "unknown" else "abc"
    first = run(record(), commit=before)
    ResultFile.of(first, "spmm", out=tmp_path).write(first)
    second = run(record(case="b/F64"), commit=commit, seed=seed)
    target = ResultFile.of(second, "spmm", out=tmp_path, part=part)
    target.write(second)
    target.write(second)
    assert target.path == tmp_path / "nvidia-h200" / name
    assert len(Run.load(target.path).records) == count


def test_new_run_describes_the_environment():
    import torch

    made = new_run(torch.device("cpu"), commit="abc", seed=7, copy_gb_s=None)
    assert made.device == "cpu"
    assert made.torch == torch.__version__
    assert made.pyg
    assert slug("NVIDIA H200 (x)") == "nvidia-h200-x"
