"""How a case is run: check first, then memory, then time; failures are records."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks import measure
from benchmarks.checks import TOLERANCE, Check
from benchmarks.graphs import GraphStore
from benchmarks.inputs import Results
from benchmarks.measure import Timing
from benchmarks.records import Record

MIB = 1 << 20
OUT_OF_MEMORY = "out of memory"
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
    """A prepared implementation: ``run(i)`` computes on input set i."""

    run: Callable[[int], Results]
    relation_bytes: Callable[[], int] | None = None


@dataclass(frozen=True)
class Candidate:
    """An implementation to prepare; preparation is not timed."""

    impl: str
    build: Callable[[], Call]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """A case on its graph: who runs, the check, and the bytes of its floor."""

    case: str
    candidates: list[Candidate]
    check: Check
    sets: int
    gather_bytes: int
    gathers: int = 1


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
        """Measure every candidate, and once more by replay if one is launch-bound."""
        work = self.prepare(context, self.phase, self.dtype)
        trials = [self._trial(c, work, context) for c in work.candidates]
        records = self._floor(work, context)
        bound = [t for t in trials if t.eager and t.eager.ms < measure.LAUNCH_BOUND_MS]
        replay = bool(bound) and context.device.type == "cuda"
        for trial in trials:
            if replay and trial.eager:
                records.append(self._replayed(trial, work, context))
                records.append(self._record(trial, work, context, trial.eager, "eager"))
            else:
                records.append(self._record(trial, work, context, trial.eager))
        return records

    def _trial(self, candidate: Candidate, work: Workload, context: Context) -> _Trial:
        trial = _Trial(candidate)
        try:
            self._measure(trial, work, context)
        except torch.OutOfMemoryError:
            trial.notes.append(OUT_OF_MEMORY)
        except FAILURES as failure:
            trial.notes.append(_reason(failure))
            if candidate.impl == "pyg_tiga":
                log.warning("%s %s failed", self.name, self.op, exc_info=failure)
        if not trial.eager:
            trial.call = None
        measure.release_memory(context.device)
        return trial

    def _measure(self, trial: _Trial, work: Workload, context: Context) -> None:
        call = trial.call = trial.candidate.build()
        trial.rel_err = work.check(call.run(0))
        limit = TOLERANCE[self.dtype]
        if not trial.rel_err <= limit:
            trial.notes.append(f"wrong: error {trial.rel_err:.2g} above {limit:.0e}")
            return
        estimate_ms, trial.peak = measure.first_call(call.run, context.device)
        if call.relation_bytes is not None:
            trial.relation = call.relation_bytes()
        trial.eager = measure.time_eager(
            call.run,
            context.device,
            sets=work.sets,
            estimate_ms=estimate_ms,
            budget_s=context.budget_s,
        )

    def _replayed(self, trial: _Trial, work: Workload, context: Context) -> Record:
        assert trial.call is not None
        assert trial.eager is not None
        try:
            timing = measure.time_replay(
                trial.call.run,
                sets=work.sets,
                estimate_ms=trial.eager.ms,
                budget_s=context.budget_s,
            )
        except FAILURES as failure:
            note = f"no replay: {_reason(failure)}"
            return self._record(trial, work, context, None, note)
        return self._record(trial, work, context, timing)

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
            note="; ".join([*trial.candidate.tags, *notes, *trial.notes]) or None,
        )

    def _floor(self, work: Workload, context: Context) -> list[Record]:
        if context.copy_gb_s is None:
            return []
        ms = work.gathers * work.gather_bytes / context.copy_gb_s / 1e6
        gathers = "1 gather" if work.gathers == 1 else f"{work.gathers} gathers"
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


def timing_fields(timing: Timing | None) -> dict[str, float]:
    """The time fields of a record."""
    if timing is None:
        return {}
    return {"ms": timing.ms, "ms_low": timing.low, "ms_high": timing.high}


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
