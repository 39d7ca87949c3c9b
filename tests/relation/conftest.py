from __future__ import annotations

import pytest

from pyg_tiga.relation import cache, check, edges, graph, memo
from pyg_tiga.relation.cache import Cache


@pytest.fixture(autouse=True)
def empty_memo(monkeypatch):
    """A memo of the test's own."""
    fresh = Cache()
    for module in (cache, edges, graph, memo):
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
