"""How a case is run: check first, then memory, then time; failures are records.

Launch-bound cases: a call that the host cannot enqueue as fast as the device runs it
says nothing about the kernels. Every candidate whose eager call takes under
`measure.CAPTURE_BELOW_MS` is also replayed from a CUDA graph, and if one of them then
takes under `measure.LAUNCH_BOUND_MS`, the case counts by replay, for us and for the
peers alike, and the eager calls are second records noted ``eager``. Otherwise the
eager calls count. A peer that waits for the device in its call cannot be replayed: its
record says so, and what is compared are the eager calls.

A result of ours that is wrong has no time. A peer that is less precise than we allow
ourselves keeps its time, noted ``inaccurate``, unless it is plainly wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks import measure
from benchmarks.checks import TOLERANCE, Check
from benchmarks.compare import OURS
from benchmarks.graphs import GraphStore
from benchmarks.inputs import Results
from benchmarks.measure import Timing
from benchmarks.memory import OUT_OF_MEMORY, Demand, MemoryBook
from benchmarks.records import INACCURATE, Record

MIB = 1 << 20
WRONG = 0.1  # a peer's error from here on is no lack of precision
FAILURES = (RuntimeError, ImportError, ValueError, TypeError, AttributeError)
log = logging.getLogger("benchmarks")


@dataclass(frozen=True)
class Context:
    """What the cases of a run share."""

    suite: str
    device: torch.device
    graphs: GraphStore
    seed: int
    budget_s: float
    copy_gb_s: float | None = None
    memory: MemoryBook = field(default_factory=MemoryBook)
    prepared: Latest = field(default_factory=lambda: Latest())


class Latest:
    """Holds the last thing made, for cases in a row that share it."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: Any = None

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        """What was made for this key just before, or made now."""
        if key != self._key:
            self.clear()
            self._key, self._value = key, make()
        return self._value

    def clear(self) -> None:
        """Give it up."""
        self._key = self._value = None


class Case(Protocol):
    """One row of a suite."""

    @property
    def name(self) -> str:
        """``<graph>/<shape>``."""

    @property
    def op(self) -> str:
        """The measured op."""

    def run(self, context: Context) -> list[Record]:
        """Measure it."""


@dataclass(frozen=True)
class Call:
    """A prepared implementation: ``run(i)`` computes on input set i.

    ``restore`` brings results into the order of the check, outside of what is timed.
    """

    run: Callable[[int], Results]
    relation_bytes: Callable[[], int] | None = None
    restore: Callable[[Results], Results] = lambda results: results


@dataclass(frozen=True)
class Candidate:
    """An implementation to prepare; preparation is not timed.

    Args:
        impl: Its name.
        build: Prepares it.
        tags: Tags of its records.
        edge_copies: So many tensors with a row per edge it holds at once at least.
        waits: Why its call waits for the device and cannot be captured, if it does.
    """

    impl: str
    build: Callable[[], Call]
    tags: tuple[str, ...] = ()
    edge_copies: int = 0
    waits: str | None = None


@dataclass(frozen=True)
class Workload:
    """A case on its graph: who runs, the check, and the bytes of its floor.

    Args:
        case: ``<graph>/<shape>``.
        candidates: Who runs.
        check: The error of a result.
        sets: How many input sets there are.
        gather_bytes: Bytes of one gather of a row per edge.
        gathers: So many of them are in the floor.
        loops: Implicit self-loops.
        more_bytes: What else the floor must move, such as edge features.
    """

    case: str
    candidates: list[Candidate]
    check: Check
    sets: int
    gather_bytes: int
    gathers: int = 1
    loops: int | None = None
    more_bytes: int = 0


@dataclass(frozen=True)
class TimedCase:
    """A case whose implementations are timed side by side."""

    name: str
    op: str
    phase: str
    dtype: torch.dtype
    prepare: Callable[[Context, str, torch.dtype], Workload]
    in_channels: int | None = None

    def run(self, context: Context) -> list[Record]:
        """Measure every candidate, and by replay too if the case is launch-bound."""
        work = self.prepare(context, self.phase, self.dtype)
        trials = [self._trial(c, work, context) for c in work.candidates]
        records = self._floor(work, context)
        if not self._launch_bound(trials, work, context):
            return records + [self._record(t, work, context, t.eager) for t in trials]
        for trial in trials:
            if trial.eager:
                self._replay(trial, work, context)
                why = [trial.no_replay] if trial.no_replay else []
                records.append(self._record(trial, work, context, trial.replayed, *why))
                records.append(self._record(trial, work, context, trial.eager, "eager"))
            else:
                records.append(self._record(trial, work, context, None))
        return records

    def _launch_bound(
        self, trials: list[_Trial], work: Workload, context: Context
    ) -> bool:
        if context.device.type != "cuda":
            return False
        for trial in trials:
            if trial.eager and trial.eager.ms < measure.CAPTURE_BELOW_MS:
                self._replay(trial, work, context)
                if trial.replayed and trial.replayed.ms < measure.LAUNCH_BOUND_MS:
                    return True
        return False

    def _trial(self, candidate: Candidate, work: Workload, context: Context) -> _Trial:
        trial = _Trial(candidate)
        demand = Demand(
            self.op,
            candidate.impl,
            self.phase,
            work.case,
            work.gather_bytes,
            candidate.edge_copies,
        )
        refusal = context.memory.refusal(demand, context.device)
        if refusal and candidate.impl != OURS:
            trial.notes += [OUT_OF_MEMORY, refusal]
            return trial
        try:
            self._measure(trial, work, context)
        except torch.OutOfMemoryError:
            trial.notes.append(OUT_OF_MEMORY)
            context.memory.add(demand)
        except FAILURES as failure:
            trial.notes.append(_reason(failure))
            if candidate.impl == OURS:
                log.warning("%s %s failed", self.name, self.op, exc_info=failure)
        if not trial.eager:
            trial.call = None
        measure.release_memory(context.device)
        return trial

    def _measure(self, trial: _Trial, work: Workload, context: Context) -> None:
        call = trial.call = trial.candidate.build()
        trial.rel_err = work.check(call.restore(call.run(0)))
        limit = TOLERANCE[self.dtype]
        note = precision_note(trial.candidate.impl, trial.rel_err, limit)
        if note:
            trial.notes.append(note)
            if not is_inaccurate(note):
                return
        estimate_ms, trial.peak = measure.first_call(call.run, context.device)
        if call.relation_bytes is not None:
            trial.relation = call.relation_bytes()
        share = 1.0 if trial.candidate.impl == OURS else measure.PEER_SHARE
        trial.eager = measure.time_eager(
            call.run,
            context.device,
            sets=work.sets,
            estimate_ms=estimate_ms,
            budget_s=share * context.budget_s,
        )

    def _replay(self, trial: _Trial, work: Workload, context: Context) -> None:
        if trial.replayed or trial.no_replay:
            return
        assert trial.call is not None
        assert trial.eager is not None
        if trial.candidate.waits:
            trial.no_replay = f"no replay: {trial.candidate.waits}"
            return
        try:
            trial.replayed = measure.time_replay(
                trial.call.run,
                sets=work.sets,
                estimate_ms=trial.eager.ms,
                budget_s=measure.REPLAY_SHARE * context.budget_s,
            )
        except FAILURES as failure:
            trial.no_replay = f"no replay: {_reason(failure)}"

    def _record(
        self,
        trial: _Trial,
        work: Workload,
        context: Context,
        timing: Timing | None,
        *notes: str,
    ) -> Record:
        finite = trial.rel_err is not None and trial.rel_err < float("inf")
        return Record(
            **self._identity(context, work),
            **timing_fields(timing),
            impl=trial.candidate.impl,
            peak_mib=_mib(trial.peak),
            relation_mib=_mib(trial.relation),
            rel_err=trial.rel_err if finite else None,
            loops=work.loops,
            note="; ".join([*trial.candidate.tags, *notes, *trial.notes]) or None,
        )

    def _floor(self, work: Workload, context: Context) -> list[Record]:
        if context.copy_gb_s is None:
            return []
        nbytes = work.gathers * work.gather_bytes + work.more_bytes
        ms = nbytes / context.copy_gb_s / 1e6
        gathers = "1 gather" if work.gathers == 1 else f"{work.gathers} gathers"
        if work.more_bytes:
            gathers += f" and {work.more_bytes / MIB:,.0f} MiB"
        timing = Timing(ms, ms, ms, ms)
        cell = self._identity(context, work)
        return [Record(**cell, **timing_fields(timing), impl="floor", note=gathers)]

    def _identity(self, context: Context, work: Workload) -> dict[str, Any]:
        return identity(
            context, work.case, self.op, self.phase, self.in_channels, self.dtype
        )


@dataclass
class _Trial:
    candidate: Candidate
    call: Call | None = None
    eager: Timing | None = None
    replayed: Timing | None = None
    no_replay: str | None = None
    peak: int | None = None
    relation: int | None = None
    rel_err: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CustomCase:
    """A case that measures in a way of its own."""

    name: str
    op: str
    tag: str
    measure: Callable[[Context], list[Record]]

    def run(self, context: Context) -> list[Record]:
        """Measure it, or record why not."""
        context.prepared.clear()
        try:
            return self.measure(context)
        except (*FAILURES, FileNotFoundError) as failure:
            log.warning("%s %s failed", self.name, self.tag, exc_info=failure)
            note = f"{self.tag}; {_reason(failure)}"
            cell = identity(context, self.name, self.op, "train", None)
            return [Record(**cell, impl="pyg_tiga", note=note)]


def identity(
    context: Context,
    case: str,
    op: str,
    phase: str,
    in_channels: int | None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The fields of a record that say what was measured."""
    return {
        "suite": context.suite,
        "case": case,
        "op": op,
        "phase": phase,
        "dtype": dtype_name(dtype),
        "in_channels": in_channels,
    }


def precision_note(impl: str, error: float, limit: float) -> str | None:
    """What is to be said of a result's error: ours may not exceed the limit at all."""
    if error <= limit:
        return None
    if impl != OURS and error < WRONG:
        return f"{INACCURATE}: error {error:.2g}"
    return f"wrong: error {error:.2g} above {limit:.0e}"


def is_inaccurate(note: str) -> bool:
    """Whether a note of `precision_note` leaves the result its time."""
    return note.startswith(INACCURATE)


def timing_fields(timing: Timing | None) -> dict[str, float]:
    """The time fields of a record."""
    if timing is None:
        return {}
    return {"ms": timing.ms, "ms_low": timing.low, "ms_high": timing.high}


def cpu_record(cell: dict[str, Any], error: float, timing: Timing) -> Record:
    """A record of a call on the CPU, fp32, by the same rule of precision."""
    note = precision_note(cell["impl"], error, TOLERANCE[torch.float32])
    notes = "; ".join(["cpu", note] if note else ["cpu"])
    if note and not is_inaccurate(note):
        return Record(**cell, note=notes)
    fields = {**cell, **timing_fields(timing), "rel_err": error, "note": notes}
    return Record(**fields, extra={"best_ms": timing.best})


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16``, ``fp16`` or ``fp64``."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    name = str(dtype).removeprefix("torch.")
    return short.get(name, name)


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / MIB


def _reason(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    text = lines[0] if lines else "no message"
    return f"{type(failure).__name__}: {text}".replace(";", ",")[:160]
