"""The targets, as data, and their evaluation from result files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.compare import OURS, Cell, Lookup, low_ratio
from benchmarks.records import Record, Run

TRAIN, FORWARD = "train", "forward"


@dataclass(frozen=True)
class Target:
    """One figure that must hold.

    Args:
        text: What is claimed.
        kind: How it is read off the records, a key of `EVALUATORS`.
        bound: The limit.
        cells: The cells (case, op, phase, dtype) it is read from.
        peer: The peer, where there is one.
        tags: Tags of our records, such as ``cpu``.
        level: ``gate`` must hold, ``aim`` should.
    """

    text: str
    kind: str
    bound: float
    cells: tuple[Cell, ...]
    peer: str = ""
    tags: frozenset[str] = field(default_factory=frozenset)
    level: str = "gate"


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
    (cell,) = target.cells
    ours, peer = found.find(cell, OURS), found.find(cell, target.peer)
    if not (ours and peer and ours.peak_mib and peer.peak_mib):
        return None
    return peer.peak_mib / ours.peak_mib


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
    "milliseconds": _milliseconds,
    "over own": _over_own,
    "best of several": _best_of_several,
    "accuracy": _accuracy,
}
AT_MOST = ("milliseconds", "over own", "accuracy")


def _layer_targets() -> Iterable[Target]:
    figures = (
        ("arxiv/F128", 3.5, 2.5),
        ("reddit/F128", 18.0, 8.0),
        ("products/F64", 12.0, 8.0),
    )
    for case, speed, memory in figures:
        cell = ((case, "sage_conv", TRAIN, "fp32"),)
        step = f"SAGEConv training step, {case}"
        yield Target(f"{step}: times PyG eager", "speed", speed, cell, "pyg")
        yield Target(f"{step}: PyG's peak over ours", "memory", memory, cell, "pyg")
        yield Target(f"{step}: times PyG compiled", "speed", 1.0, cell, "pyg_compiled")
    cell = (("arxiv/F128", "sage_aggregate", TRAIN, "fp32"),)
    text = "mean aggregation alone, forward + backward, arxiv/F128: times PyG eager"
    yield Target(text, "speed", 10.0, cell, "pyg")


def _spmm_targets() -> Iterable[Target]:
    for phase in (FORWARD, TRAIN):
        for dtype, mean in (("fp32", 1.5), ("bf16", 2.0)):
            cells = tuple(
                (f"{graph}/F{width}", "spmm", phase, dtype)
                for graph in ("arxiv", "reddit", "products")
                for width in (16, 64, 128, 256)
            )
            text = f"SpMM {phase}, {dtype}, 12 cells over cuSPARSE"
            yield Target(f"{text}: least", "speed", 0.98, cells, "cusparse")
            yield Target(
                f"{text}: geometric mean", "mean speed", mean, cells, "cusparse"
            )


def _max_targets() -> Iterable[Target]:
    for graph, ms in (("arxiv", 0.85), ("reddit", 10.0), ("products", 28.0)):
        case = f"{graph}/F128"
        cells = tuple((case, op, FORWARD, "fp32") for op in ("max_aggregate", "spmm"))
        yield Target(f"max forward over our sum, {case}", "over own", 1.1, cells)
        yield Target(
            f"max training, winner scatter, {case}, ms",
            "milliseconds",
            ms,
            ((case, "max_aggregate", TRAIN, "fp32"),),
            tags=frozenset({"winner scatter"}),
            level="aim",
        )


def _other_targets() -> Iterable[Target]:
    yield Target(
        "host time of a warm layer call beyond the projections, ms",
        "milliseconds",
        0.080,
        (("tiny/F32", "sage_conv", FORWARD, "fp32"),),
        tags=frozenset({"host"}),
    )
    yield Target(
        "Cora, 20 paired seeds: farthest end of the 95 % interval, points",
        "accuracy",
        0.5,
        (("cora/F16", "sage_conv", TRAIN, "fp32"),),
        tags=frozenset({"accuracy"}),
    )
    for phase in (FORWARD, TRAIN):
        yield Target(
            f"SAGEConv {phase} on the CPU, arxiv/F128: times PyG, best of several",
            "best of several",
            0.95,
            (("arxiv/F128", "sage_conv", phase, "fp32"),),
            "pyg",
            frozenset({"cpu"}),
        )


TARGETS: tuple[Target, ...] = (
    *_layer_targets(),
    *_spmm_targets(),
    *_max_targets(),
    *_other_targets(),
)


def evaluate(runs: Sequence[Run], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Each target in the newest run that measured it: sides of a ratio share a run."""
    newest = sorted(runs, key=lambda run: run.date, reverse=True)
    return [Verdict(target, _first(target, newest)) for target in targets]


def _first(target: Target, runs: Sequence[Run]) -> float | None:
    for run in runs:
        value = EVALUATORS[target.kind](target, Lookup(run))
        if value is not None:
            return value
    return None
