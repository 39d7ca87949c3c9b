"""Ours beside its peers: pairs of records, ratios and their low bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records import FORM_TAGS, MODE_TAGS, Record, Run

OURS, FLOOR = "pyg_tiga", "floor"
Cell = tuple[str, str, str, str]  # case, op, phase, dtype


@dataclass(frozen=True)
class Comparison:
    """One of our records, the timed peers of its cell, and the floor."""

    ours: Record
    peers: list[Record]  # timed, fastest first
    floor: Record | None

    @property
    def peer(self) -> Record | None:
        """The fastest peer."""
        return self.peers[0] if self.peers else None

    @property
    def ratio(self) -> float | None:
        """How many times the peer's time ours is."""
        return speed_ratio(self.ours, self.peer)

    @property
    def low(self) -> float | None:
        """The low bound of the ratio."""
        return low_ratio(self.ours, self.peer)

    @property
    def floor_ratio(self) -> float | None:
        """Our time over the floor's."""
        if self.floor is None or not self.ours.ms or not self.floor.ms:
            return None
        return self.ours.ms / self.floor.ms

    @property
    def verdict(self) -> str:
        """``win``, ``loss``, ``even`` or empty where there is no peer."""
        if self.low is None or self.ratio is None:
            return ""
        if self.low > 1:
            return "win"
        return "loss" if self.ratio < 1 else "even"


def speed_ratio(ours: Record, peer: Record | None) -> float | None:
    """The peer's median over ours."""
    if peer is None or not peer.ms or not ours.ms:
        return None
    return peer.ms / ours.ms


def low_ratio(ours: Record, peer: Record | None) -> float | None:
    """The least ratio that both 95 % intervals allow: a bound on the safe side."""
    if peer is None or not peer.ms_low or not ours.ms_high:
        return None
    return peer.ms_low / ours.ms_high


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Each of our records with what stands beside it, in order."""
    cells: dict[object, list[Record]] = {}
    for record in records:
        cells.setdefault(record.cell, []).append(record)
    found = []
    for record in records:
        if record.impl != OURS:
            continue
        beside = cells[record.cell]
        floors = [r for r in beside if r.impl == FLOOR]
        floors += [r for r in cells.get(_without_mode(record), ()) if r.impl == FLOOR]
        found.append(Comparison(record, _timed_peers(beside), next(iter(floors), None)))
    return found


def _without_mode(record: Record) -> object:
    mode = record.tags(("eager",))
    return (*record.cell[:-1], frozenset()) if mode else None


def _timed_peers(records: Iterable[Record]) -> list[Record]:
    timed = [r for r in records if r.impl not in (OURS, FLOOR) and r.ms]
    return sorted(timed, key=lambda r: r.ms or 0.0)


@dataclass(frozen=True)
class Lookup:
    """Finds records of one run by what a target names."""

    run: Run

    def find(
        self, cell: Cell, impl: str, tags: frozenset[str] = frozenset()
    ) -> Record | None:
        """The record with exactly these tags; a peer has none of the form tags."""
        if impl != OURS:
            tags -= frozenset(FORM_TAGS)
        wanted = (*cell, impl, tags)
        for r in self.run.records:
            if (r.case, r.op, r.phase, r.dtype, r.impl, r.tags()) == wanted:
                return r
        return None

    def timed(
        self, *wanted: tuple[Cell, str], tags: frozenset[str] = frozenset()
    ) -> list[Record] | None:
        """All of the (cell, impl) with a time, by eager calls if replay failed."""
        for mode in (frozenset[str](), frozenset({"eager"})):
            found = [self.find(cell, impl, tags | mode) for cell, impl in wanted]
            timed = [record for record in found if record and record.ms]
            if len(timed) == len(wanted):
                return timed
        return None


def against_base(base: Run, run: Run) -> list[tuple[Record, float, float]]:
    """Our records measured before: how many times faster now, and the low bound."""
    before = {record.key: record for record in base.records}
    found = []
    for record in run.records:
        old = before.get(record.key)
        if record.impl != OURS or old is None:
            continue
        ratio, low = speed_ratio(record, old), low_ratio(record, old)
        if ratio is not None and low is not None:
            found.append((record, ratio, low))
    return found


def slowest_against(base: Run, run: Run) -> float | None:
    """The least low bound of them, of times that count on the device."""
    lows = [
        low for record, _, low in against_base(base, run) if not record.tags(MODE_TAGS)
    ]
    return min(lows, default=None)
