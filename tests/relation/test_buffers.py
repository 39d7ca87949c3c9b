from __future__ import annotations

import torch

from pyg_tiga.relation import stats
from pyg_tiga.relation.buffers import Rows


def test_rows_are_made_when_they_run_out():
    made = []

    def make():
        made.append(torch.arange(6).view(3, 2) + 10 * len(made))
        return made[-1]

    rows = Rows(make)
    taken = [rows.take().tolist() for _ in range(4)]
    assert len(made) == 2
    assert sorted(taken[:3]) == [[0, 1], [2, 3], [4, 5]]
    assert taken[3] in made[1].tolist()


def test_a_row_handed_back_is_used_again():
    rows = Rows(lambda: torch.zeros(1, 2))
    first = rows.take()
    assert rows.take().data_ptr() != first.data_ptr()
    rows.give(first)
    assert rows.take() is first


def test_blank_summaries_are_zero_and_apart():
    summaries = [stats.blank_summary(torch.device("cpu")) for _ in range(70)]
    for k, summary in enumerate(summaries):
        assert summary.shape == (stats.WIDTH,)
        assert not summary.any()
        summary.fill_(k + 1)
    assert [int(summary[0]) for summary in summaries] == list(range(1, 71))
