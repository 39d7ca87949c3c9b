"""Clocks and memory: how a call is measured on the GPU and on the CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

LAUNCH_BOUND_MS = 0.3
MIN_ITERATIONS, MAX_ITERATIONS = 5, 100
WARM_UP_SHARE = 0.2
MAX_INPUT_SETS = 16
CALLS_PER_GRAPH = 8
COPY_BYTES = 2 << 30
RESERVED_LIMIT = 20 << 30
HOST_BLOCKS, HOST_CALLS = 30, 100

Runner = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Median of the samples with a bootstrap 95 % interval, in milliseconds."""

    ms: float
    low: float
    high: float
    best: float


def summarise(samples: Sequence[float]) -> Timing:
    """Median, its bootstrap 95 % interval, and the least of the samples."""
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(values, (1000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Timing(
        float(np.median(values)), float(low), float(high), float(values.min())
    )


def input_sets(nbytes: int, device: torch.device) -> int:
    """How many copies of an input to rotate, so that L2 does not hold them all."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    if nbytes >= cache:
        return 1
    return min(-(-2 * cache // max(nbytes, 1)), MAX_INPUT_SETS)


def first_call(run: Runner, device: torch.device) -> tuple[float, int | None]:
    """Time in ms and peak bytes above what is allocated, of one warm call."""
    if device.type != "cuda":
        start = time.perf_counter()
        run(0)
        return (time.perf_counter() - start) * 1e3, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    (elapsed,) = _event_samples(run, 1, sets=1)
    return elapsed, torch.cuda.max_memory_allocated(device) - before


def time_eager(
    run: Runner, device: torch.device, *, sets: int, estimate_ms: float, budget_s: float
) -> Timing:
    """Time a call as a user makes it; ``estimate_ms`` sets the number of samples."""
    count = _iterations(estimate_ms, budget_s)
    warm_up = min(_iterations(estimate_ms, budget_s * WARM_UP_SHARE), 25)
    if estimate_ms * warm_up < 1e3 * budget_s:
        for i in range(warm_up):
            run(i % sets)
    if device.type != "cuda":
        return summarise(_host_samples(run, count, sets=sets))
    return summarise(_event_samples(run, count, sets=sets))


def _iterations(estimate_ms: float, budget_s: float) -> int:
    fitting = int(1e3 * budget_s / max(estimate_ms, 1e-3))
    return min(max(fitting, MIN_ITERATIONS), MAX_ITERATIONS)


def _event_samples(run: Runner, count: int, *, sets: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i % sets)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _host_samples(run: Runner, count: int, *, sets: int = 1) -> list[float]:
    samples = []
    for i in range(count):
        start = time.perf_counter()
        run(i % sets)
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def time_replay(
    run: Runner, *, sets: int, estimate_ms: float, budget_s: float
) -> Timing:
    """Time a call by replaying a CUDA graph of several of them.

    Raises:
        RuntimeError: If the call cannot be captured.
    """
    calls = max(sets, CALLS_PER_GRAPH)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails can leave its stream current: the outer one restores ours.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, stream=stream),
    ):
        for i in range(calls):
            run(i % sets)
    timing = time_eager(
        lambda _: graph.replay(),
        torch.device("cuda"),
        sets=1,
        estimate_ms=estimate_ms * calls,
        budget_s=budget_s,
    )
    graph.reset()
    per_call = (timing.ms, timing.low, timing.high, timing.best)
    return Timing(*(value / calls for value in per_call))


def time_interleaved(
    runs: Sequence[Runner], *, budget_s: float, warm_up: int = 1
) -> list[Timing]:
    """Time CPU calls in turns, so that a drift of the machine meets them alike."""
    slowest = 0.0
    for run in runs:
        for _ in range(warm_up):
            slowest = max(slowest, *_host_samples(run, 1))
    count = min(max(int(1e3 * budget_s / max(slowest, 1e-3)), 5), 50)
    rounds = [[_host_samples(run, 1)[0] for run in runs] for _ in range(count)]
    return [summarise(samples) for samples in zip(*rounds, strict=True)]


def host_overhead(
    call: Callable[[], object], less: Callable[[], object], device: torch.device
) -> tuple[Timing, float, float]:
    """Host time of ``call`` beyond ``less`` per call in ms, and both medians.

    Calls are only enqueued inside a block; the device is waited for between blocks.
    """
    pairs = []
    for _ in range(HOST_BLOCKS + 2):
        pairs.append((_host_block(call, device), _host_block(less, device)))
    warm = pairs[2:]
    beyond = summarise([whole - part for whole, part in warm])
    whole, part = (statistics.median(side) for side in zip(*warm, strict=True))
    return beyond, whole, part


def _host_block(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - start) * 1e3 / HOST_CALLS


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes read and written per second by a large copy on the GPU, in GB/s."""
    if device.type != "cuda":
        return None
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    run = lambda _: target.copy_(source)  # noqa: E731
    timing = time_eager(run, device, sets=1, estimate_ms=1.0, budget_s=0.03)
    return 2 * COPY_BYTES / timing.ms / 1e6


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is anything to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give cached blocks back once they are many: giving back costs time."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > RESERVED_LIMIT:
        gc.collect()
        torch.cuda.empty_cache()
