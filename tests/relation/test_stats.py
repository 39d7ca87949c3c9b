from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_tiga.relation.stats import (
    CHUNKS,
    LENGTH,
    THRESHOLDS,
    Readback,
    Stats,
    is_good,
    summarise,
)

quick = settings(max_examples=30, deadline=None)


def summary_of(degrees, dtype=torch.int32, index=None):
    ptr = torch.tensor([0, *torch.tensor(degrees, dtype=torch.int64).cumsum(0)])
    num_edges = int(ptr[-1])
    index = torch.arange(num_edges) % 7 if index is None else index
    ptr, index = ptr.to(dtype), index.to(dtype)
    values = summarise(ptr, index, ptr[-1:]).tolist()
    assert len(values) == LENGTH
    assert is_good(values, num_edges)
    assert not is_good(values, num_edges + 1)
    return Stats.from_summary(values, len(degrees), num_edges)


degrees_lists = st.lists(
    st.one_of(st.integers(0, 5), st.integers(0, 300), st.sampled_from([64, 128, 9000])),
    max_size=20,
)


@quick
@given(degrees_lists, st.sampled_from([torch.int32, torch.int64]))
def test_counts(degrees, dtype):
    stats = summary_of(degrees, dtype)
    assert stats.num_rows == len(degrees)
    assert stats.num_edges == sum(degrees)
    assert stats.max_degree == max(degrees, default=0)
    assert stats.tail == tuple(sum(d > t for d in degrees) for t in THRESHOLDS)
    for chunk in CHUNKS:
        hubs = [d for d in degrees if d > chunk]
        assert stats.hubs[chunk] == len(hubs)
        assert stats.items[chunk] == sum(math.ceil(d / chunk) for d in hubs)


@quick
@given(degrees_lists.filter(bool), st.floats(0, 1))
def test_degree_quantile_is_exact_or_rounded_up(degrees, q):
    stats = summary_of(degrees)
    found = stats.degree_quantile(q)
    above = int((1.0 - q) * len(degrees))
    exact = sorted(degrees)[len(degrees) - above - 1] if above < len(degrees) else 0
    assert exact <= found <= stats.max_degree
    if exact <= 4:
        assert found == exact
    else:
        assert found <= max(5, 1.5 * exact)


def test_thresholds_hold_the_chunks():
    assert list(THRESHOLDS) == sorted(set(THRESHOLDS))
    assert set(CHUNKS) <= set(THRESHOLDS)
    assert all(b <= 2 * a for a, b in itertools.pairwise(THRESHOLDS[1:]))


def test_digest_tells_structures_apart():
    index = torch.arange(9)
    base = summary_of([2, 3, 4], index=index)
    assert base.digest == summary_of([2, 3, 4], index=index).digest
    others = [
        summary_of([3, 3, 3], index=index),
        summary_of([2, 3, 4], index=index[[1, 0, *range(2, 9)]]),
        summary_of([2, 3, 4, 0], index=index),
    ]
    digests = {base.digest, *(other.digest for other in others)}
    assert len(digests) == 4


@pytest.mark.parametrize("deferred", [False, True])
def test_readback_on_the_cpu_lands_at_once(deferred):
    readback = Readback(torch.tensor([3, 1]), deferred)
    assert readback.landed()
    assert readback.values() == [3, 1]
