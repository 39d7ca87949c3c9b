from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCKED_IMPORT = """
import sys

for name in {blocked!r}:
    sys.modules[name] = None
"""

USE = """
import torch
import pyg_tiga as tg

assert not any(name.startswith("pyg_tiga.kernels.") for name in sys.modules)
edge_index = torch.tensor([[0, 1, 1], [1, 0, 2]])
out = tg.functional.spmm(edge_index, torch.eye(3))
assert out.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]], out
assert tg.nn.SAGEConv(3, 2)(torch.eye(3), edge_index).shape == (3, 2)
"""


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_tiers():
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is missing")
    code = (
        f"from {cli.__name__} import lint_imports; "
        "raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "blocked",
    [(), ("triton",), ("torch_scatter", "torch_sparse"), ("rich",)],
    ids=["all-packages", "no-triton", "no-scatter", "no-rich"],
)
def test_works_without_gpu_and_optional_packages(blocked):
    code = BLOCKED_IMPORT.format(blocked=blocked) + USE
    done = run_python(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_package_is_marked_as_typed():
    assert (ROOT / "pyg_tiga" / "py.typed").exists()
