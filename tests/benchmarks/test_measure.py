from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import measure
from benchmarks.inputs import phase_runner

CPU = torch.device("cpu")


def test_summary_is_a_median_with_an_interval():
    timing = measure.summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.ms == 3.0
    assert timing.best == 1.0
    assert timing.low <= timing.ms <= timing.high
    assert measure.summarise([2.0]) == measure.Timing(2.0, 2.0, 2.0, 2.0)


def test_samples_follow_the_budget_within_limits():
    calls = []
    measure.time_eager(calls.append, CPU, sets=3, estimate_ms=50.0, budget_s=0.1)
    assert calls == [0, 1, 2, 0, 1]
    calls.clear()
    measure.time_eager(calls.append, CPU, sets=1, estimate_ms=1e-3, budget_s=0.1)
    assert len(calls) == measure.MAX_ITERATIONS + 25


def test_interleaved_calls_take_turns():
    calls = []
    runs = [lambda i: calls.append("a"), lambda i: calls.append("b")]
    first, second = measure.time_interleaved(runs, budget_s=1e-6)
    assert calls == ["a", "b"] * 6
    assert first.ms >= 0
    assert second.ms >= 0


def test_slow_calls_have_fewer_samples():
    calls = []
    measure.time_eager(calls.append, CPU, sets=1, estimate_ms=200.0, budget_s=0.1)
    assert len(calls) == measure.SLOW_ITERATIONS


def test_interleaved_calls_may_be_warm():
    calls = []
    measure.time_interleaved([calls.append], budget_s=1e-6, warm_up=0, least=3)
    assert len(calls) == 3


def test_host_overhead_is_of_the_fastest_blocks(monkeypatch):
    monkeypatch.setattr(measure, "HOST_WARM_UP", 1)
    monkeypatch.setattr(measure, "HOST_GROUPS", 2)
    monkeypatch.setattr(measure, "HOST_BLOCKS", 2)
    slow = 9.0
    times = {
        "a": [slow, 5.0, slow, slow, 6.0],
        "a part": [slow, 1.0, 2.0, 1.5, slow],
        "b": [slow, 3.0, 3.0, 3.0, 3.0],
        "b part": [slow, 2.0, 2.0, 2.0, 2.0],
    }
    taken = []

    def block(call, device):
        taken.append(call)
        return times[call][taken.count(call) - 1]

    monkeypatch.setattr(measure, "_host_block", block)
    first, second = measure.host_overheads([("a", "a part"), ("b", "b part")], CPU)
    assert taken[:8] == [*times, *times]
    assert (first.call, first.part) == (5.0, 1.0)
    assert first.beyond.ms == pytest.approx((4.0 + 4.5) / 2)
    assert (first.beyond.low, first.beyond.high) == (4.0, 4.5)
    assert second.beyond.ms == 1.0


def test_nothing_of_a_gpu_on_the_cpu():
    assert measure.input_sets(1, CPU) == 1
    assert measure.copy_bandwidth(CPU) is None
    assert measure.first_call(lambda i: None, CPU)[1] is None


@pytest.mark.gpu
def test_replay_agrees_with_eager_on_a_large_product():
    device = torch.device("cuda")
    a = torch.randn(2048, 2048, device=device)
    run = lambda i: a @ a  # noqa: E731
    eager = measure.time_eager(run, device, sets=1, estimate_ms=0.5, budget_s=0.05)
    replay = measure.time_replay(run, sets=1, estimate_ms=eager.ms, budget_s=0.05)
    assert replay.ms == pytest.approx(eager.ms, rel=0.3)
    assert measure.input_sets(1 << 20, device) > 1
    assert measure.first_call(run, device)[1] >= a.nbytes
    assert measure.copy_bandwidth(device) > 100


@pytest.mark.gpu
def test_a_backward_alone_can_be_replayed():
    # In a process of its own: a capture that fails leaves one in a state that makes
    # other tests fail.
    code = f"from {__name__} import replay_a_backward; replay_a_backward()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def replay_a_backward():
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    run = phase_runner(
        lambda i: x * x, lambda i: (x,), [torch.ones_like(x)], "backward"
    )
    run(0)
    timing = measure.time_replay(run, sets=1, estimate_ms=0.1, budget_s=0.02)
    assert 0 < timing.ms < 1.0
    torch.testing.assert_close(run(0)[1], 2 * x.detach())
