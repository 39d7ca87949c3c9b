"""Clocks and memory: how a call is measured on the GPU and on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

LAUNCH_BOUND_MS = 0.3  # by replay
CAPTURE_BELOW_MS = 3.0  # by eager calls, host time among it
MIN_ITERATIONS, MAX_ITERATIONS = 5, 100
SLOW_MS, SLOW_ITERATIONS = 100.0, 3
WARM_UP_SHARE = 0.2
PEER_SHARE, REPLAY_SHARE = 0.5, 0.4  # of the budget of one timing
MAX_INPUT_SETS = 16
CALLS_PER_GRAPH = 8
COPY_BYTES = 2 << 30
RESERVED_LIMIT = 20 << 30
HOST_GROUPS, HOST_BLOCKS, HOST_CALLS = 10, 8, 50
HOST_WARM_UP = 8  # blocks

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
    least = SLOW_ITERATIONS if estimate_ms > SLOW_MS else MIN_ITERATIONS
    return min(max(fitting, least), MAX_ITERATIONS)


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

    def once() -> None:
        for i in range(sets):
            run(i)

    def several() -> None:
        for i in range(calls):
            run(i % sets)

    graph = capture(several, warm_up=once)
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


def capture(
    call: Callable[[], object], *, warm_up: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, after a warm-up on the stream that captures it.

    Raises:
        RuntimeError: If the call cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails can leave its stream current: the outer one restores ours.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, stream=stream),
    ):
        call()
    return graph


def stream_id() -> int:
    """The current stream, or 0 where there is no GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.current_stream().cuda_stream


def time_in_turns(
    runs: Sequence[Runner], device: torch.device, *, rounds: int = 8, calls: int = 10
) -> list[Timing]:
    """Time calls as a user makes them, a few of each in turn, after one round more."""
    if device.type != "cuda":
        return time_interleaved(runs, budget_s=0.0)
    samples: list[list[float]] = [[] for _ in runs]
    for i in range(rounds + 1):
        for run, found in zip(runs, samples, strict=True):
            taken = _event_samples(run, calls, sets=1)
            found += taken if i else []
    return [summarise(found) for found in samples]


def time_interleaved(
    runs: Sequence[Runner], *, budget_s: float, warm_up: int = 1, least: int = 5
) -> list[Timing]:
    """Time CPU calls in turns, so that a drift of the machine meets them alike.

    At least ``least`` rounds count, after ``warm_up`` more.
    """

    def one_round() -> list[float]:
        return [_host_samples(run, 1)[0] for run in runs]

    for _ in range(warm_up):
        one_round()
    rounds = [one_round()]
    fitting = int(1e3 * budget_s / max(*rounds[0], 1e-3))
    rounds += [one_round() for _ in range(min(max(fitting, least), 50) - 1)]
    return [summarise(samples) for samples in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class HostTime:
    """Host time of a call, in ms: beyond the part it is compared with, and of both."""

    beyond: Timing
    call: float
    part: float


def host_overheads(
    pairs: Sequence[tuple[Callable[[], object], Callable[[], object]]],
    device: torch.device,
) -> list[HostTime]:
    """Host time of each call beyond its part, all of them in turns, block by block.

    Whatever disturbs the host only adds time, so both sides count by their fastest
    block. The blocks form groups: each gives the fastest block of the call less the
    fastest of the part, and these differences have the median and the interval. Calls
    are only enqueued inside a block; the device is waited for between blocks.
    """
    calls = [call for pair in pairs for call in pair]
    blocks = [
        [_host_block(call, device) for call in calls]
        for _ in range(HOST_WARM_UP + HOST_GROUPS * HOST_BLOCKS)
    ]
    times = np.asarray(blocks[HOST_WARM_UP:])
    groups = times.reshape(HOST_GROUPS, HOST_BLOCKS, len(pairs), 2).min(1)
    found = []
    for i in range(len(pairs)):
        whole, part = groups[:, i].T  # [HOST_GROUPS] each
        beyond = summarise((whole - part).tolist())
        found.append(HostTime(beyond, float(whole.min()), float(part.min())))
    return found


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
