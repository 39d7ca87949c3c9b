from __future__ import annotations

import sys

import pytest

import pyg_tiga  # noqa: F401 - all modules that hold the memo
from pyg_tiga.relation import check, edges
from pyg_tiga.relation.cache import CACHE, Cache


@pytest.fixture(autouse=True)
def empty_memo(monkeypatch):
    """A memo of the test's own."""
    fresh = Cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("pyg_tiga.") and getattr(module, "CACHE", None) is CACHE:
            monkeypatch.setattr(module, "CACHE", fresh)
    yield fresh
    check._open.clear()


@pytest.fixture
def builds(monkeypatch):
    """Counts the groupings that are built."""
    count = []
    build = edges.Edges._group

    def counted(self, end):
        count.append(end)
        return build(self, end)

    monkeypatch.setattr(edges.Edges, "_group", counted)
    return count
