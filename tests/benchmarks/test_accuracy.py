from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import SAGEConv

from benchmarks import accuracy
from benchmarks.graphs import data_file

CPU = torch.device("cpu")


def test_paired_interval():
    found = accuracy.paired([80.0, 81.0, 82.0], [80.0, 80.5, 81.0])
    assert found["accuracy"] == 81.0
    assert found["diff"] == pytest.approx(0.5)
    assert found["diff_high"] - found["diff"] == pytest.approx(2.093 * 0.5 / 3**0.5)
    same = accuracy.paired([80.0, 81.0], [80.0, 81.0])
    assert same["diff_low"] == same["diff_high"] == 0.0


def test_cora_is_asked_for_by_name(monkeypatch):
    monkeypatch.delenv("PYG_TIGA_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="PYG_TIGA_DATA"):
        accuracy.load_cora(CPU)


@pytest.mark.skipif(not data_file("cora"), reason="PYG_TIGA_DATA holds no Cora")
def test_a_few_epochs_learn_and_repeat():
    data = accuracy.load_cora(CPU)
    assert data.x.shape == (2708, 1433)
    assert data.num_classes == 7
    torch.testing.assert_close(data.x.sum(1), torch.ones(2708))
    trainer = accuracy.Trainer(accuracy.SAGE, SAGEConv, data)
    first, _, again = (
        trainer.accuracy(seed, epochs=n) for seed, n in ((3, 6), (4, 1), (3, 6))
    )
    assert first > 25.0
    assert first == again


@pytest.mark.gpu
@pytest.mark.skipif(not data_file("cora"), reason="PYG_TIGA_DATA holds no Cora")
def test_a_captured_epoch_trains_like_a_plain_one(monkeypatch):
    data = accuracy.load_cora(torch.device("cuda"))
    captured = accuracy.Trainer(accuracy.SAGE, SAGEConv, data)
    assert captured._epoch != captured._plain_epoch
    found = [captured.accuracy(seed, epochs=40) for seed in (3, 4, 3)]
    assert found[0] == found[2]
    monkeypatch.setattr(accuracy.Trainer, "_captured", lambda self: self._plain_epoch)
    plain = accuracy.Trainer(accuracy.SAGE, SAGEConv, data)
    assert plain.accuracy(3, epochs=40) == pytest.approx(found[0], abs=1.0)
