"""The compiled host code."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from pyg_tiga.impls.replay import Recorded, Replay
from pyg_tiga.native import build


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiled once for all workers of a run."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler on this machine")
    root = tmp_path_factory.getbasetemp()
    root = root.parent if root.name.startswith("popen-") else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(root / "extensions"))
        return build._load()


class Noted:
    """What replays did."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Replays at work, and counted."""
    found = Noted()
    monkeypatch.setenv("PYG_TIGA_NATIVE", "wait")
    assert build.wait(), "nothing was compiled"
    record, call = Recorded._record, Replay.__call__

    def noting(replay: Recorded, *args: Any) -> None:
        record(replay, *args)
        assert replay.steps is not None, "not recorded"
        found.recorded += 1

    def calling(replay: Replay, *tensors: Any) -> Any:
        found.replayed += replay.steps is not None
        return call(replay, *tensors)

    monkeypatch.setattr(Recorded, "_record", noting)
    monkeypatch.setattr(Replay, "__call__", calling)
    return found
