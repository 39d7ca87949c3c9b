"""Every kernel compiles for GPUs that are not here (see `compile_matrix`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARDS = 4


MOST = 300  # compilations, where not all are asked for


def test_the_matrix_is_not_too_large() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")
    from tests.kernels.compile_matrix import MAIN, TARGETS, matrix

    compiled = [(case.kernel.__name__, name) for case, name in matrix(False)]
    assert len(compiled) <= MOST
    kernels = {kernel for kernel, _ in compiled}
    assert {*compiled} == {(kernel, name) for kernel in kernels for name in TARGETS}
    assert MAIN in TARGETS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_compiles_for_every_target(shard: int, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")
    command = [sys.executable, "-m", "tests.kernels.compile_matrix"]
    command += ["--shard", f"{shard}/{SHARDS}"]
    if request.config.getoption("--compile-all"):
        command.append("--all")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " compilations, 0 failures" in done.stdout
    assert not done.stdout.startswith("0 compilations")
