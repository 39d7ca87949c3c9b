"""What a target is, and its evaluation from result files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.compare import FLOOR, OURS, Cell, Lookup, low_ratio
from benchmarks.records import Record, Run


@dataclass(frozen=True)
class Target:
    """One figure that must hold.

    Args:
        text: What is claimed.
        kind: How it is read off the records, a key of `EVALUATORS`.
        bound: The limit.
        cells: The cells (case, op, phase, dtype) it is read from.
            Where ours is held against ours, the first is held against the second.
        peer: The peer, where there is one.
        tags: Tags of our records, such as ``cpu``.
        level: ``gate`` must hold, ``aim`` should.
        allowance: MiB of ours that do not count.
    """

    text: str
    kind: str
    bound: float
    cells: tuple[Cell, ...]
    peer: str = ""
    tags: frozenset[str] = field(default_factory=frozenset)
    level: str = "gate"
    allowance: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured; None where it was not."""

    target: Target
    value: float | None

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds."""
        if self.value is None:
            return None
        if self.at_most:
            return self.value <= self.target.bound
        return self.value >= self.target.bound

    @property
    def at_most(self) -> bool:
        """Whether the bound is an upper one."""
        return self.target.kind in AT_MOST

    @property
    def word(self) -> str:
        """``PASS``, ``FAIL`` or ``not measured``."""
        return {True: "PASS", False: "FAIL", None: "not measured"}[self.passed]


Evaluator = Callable[[Target, Lookup], float | None]


def _pair(target: Target, found: Lookup, cell: Cell) -> list[Record] | None:
    return found.timed((cell, OURS), (cell, target.peer), tags=target.tags)


def _speeds(target: Target, found: Lookup) -> list[float] | None:
    pairs = [_pair(target, found, cell) for cell in target.cells]
    ratios = [low_ratio(*pair) for pair in pairs if pair]
    complete = len(ratios) == len(target.cells)
    return [ratio for ratio in ratios if ratio is not None] if complete else None


def _least_speed(target: Target, found: Lookup) -> float | None:
    ratios = _speeds(target, found)
    return min(ratios) if ratios else None


def _mean_speed(target: Target, found: Lookup) -> float | None:
    ratios = _speeds(target, found)
    return statistics.geometric_mean(ratios) if ratios else None


def _memory(target: Target, found: Lookup) -> float | None:
    peaks = _peaks(target, found)
    return peaks[1] / peaks[0] if peaks else None


def _over_peak(target: Target, found: Lookup) -> float | None:
    peaks = _peaks(target, found)
    return (peaks[0] - target.allowance) / peaks[1] if peaks else None


def _peaks(target: Target, found: Lookup) -> tuple[float, float] | None:
    (cell,) = target.cells
    ours = found.find(cell, OURS, target.tags)
    peer = found.find(cell, target.peer, target.tags)
    if not (ours and peer and ours.peak_mib and peer.peak_mib):
        return None
    return ours.peak_mib, peer.peak_mib


def _milliseconds(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    records = found.timed((cell, OURS), tags=target.tags)
    return records[0].ms_high if records else None


def _over_own(target: Target, found: Lookup) -> float | None:
    records = found.timed(*((cell, OURS) for cell in target.cells))
    if not records:
        return None
    mine, other = records
    low = low_ratio(mine, other)
    return 1 / low if low else None


def _speed_over_own(target: Target, found: Lookup) -> float | None:
    records = found.timed(*((cell, OURS) for cell in target.cells))
    return low_ratio(*records) if records else None


def _over_floor(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    records, floor = found.timed((cell, OURS)), found.find(cell, FLOOR)
    if not (records and records[0].ms_high and floor and floor.ms):
        return None
    return records[0].ms_high / floor.ms


def _peak(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    ours = found.find(cell, OURS)
    return ours.peak_mib if ours else None


def _completes(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    if not found.find(cell, OURS):
        return None
    return float(found.timed((cell, OURS)) is not None)


def _best_of_several(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    records = _pair(target, found, cell)
    if not records:
        return None
    ours, peer = (record.extra["best_ms"] for record in records)
    return peer / ours


def _accuracy(target: Target, found: Lookup) -> float | None:
    (cell,) = target.cells
    ours = found.find(cell, OURS, target.tags)
    if not ours or "diff_low" not in ours.extra:
        return None
    return max(abs(ours.extra["diff_low"]), abs(ours.extra["diff_high"]))


EVALUATORS: dict[str, Evaluator] = {
    "speed": _least_speed,
    "mean speed": _mean_speed,
    "memory": _memory,
    "over peak": _over_peak,
    "milliseconds": _milliseconds,
    "over own": _over_own,
    "speed over own": _speed_over_own,
    "over floor": _over_floor,
    "peak": _peak,
    "completes": _completes,
    "best of several": _best_of_several,
    "accuracy": _accuracy,
}
AT_MOST = (
    "milliseconds",
    "over own",
    "over floor",
    "over peak",
    "peak",
    "accuracy",
)


def evaluate(runs: Sequence[Run], targets: Sequence[Target]) -> list[Verdict]:
    """Each target in the newest run that measured it: sides of a ratio share a run."""
    newest = sorted(runs, key=lambda run: run.date, reverse=True)
    return [Verdict(target, _first(target, newest)) for target in targets]


def _first(target: Target, runs: Sequence[Run]) -> float | None:
    for run in runs:
        value = EVALUATORS[target.kind](target, Lookup(run))
        if value is not None:
            return value
    return None
