"""Records of one measurement each, the run that holds them, and their files."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
UNKNOWN = "unknown"
MODE_TAGS = ("eager", "cpu", "host", "accuracy", "optimizer")
LESS_MEMORY = "objective memory"
FORM_TAGS = ("deterministic", "winner scatter", LESS_MEMORY)
INACCURATE = "inaccurate"


@dataclass(frozen=True)
class Record:
    """One measurement of one implementation.

    ``note`` joins tags (`MODE_TAGS`, `FORM_TAGS`) and remarks by "; ". A record
    without ``ms`` says in its note why. ``extra`` holds figures that are no time.
    """

    suite: str
    case: str
    op: str
    phase: str
    dtype: str
    impl: str
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    peak_mib: float | None = None
    relation_mib: float | None = None
    rel_err: float | None = None
    in_channels: int | None = None
    loops: int | None = None
    note: str | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def tags(self, known: Iterable[str] = MODE_TAGS + FORM_TAGS) -> frozenset[str]:
        """The tags of ``known`` that the note carries."""
        return frozenset((self.note or "").split("; ")) & frozenset(known)

    @property
    def inaccuracy(self) -> str | None:
        """The remark on the error of a peer that kept its time, if there is one."""
        parts = (self.note or "").split("; ")
        return next((part for part in parts if part.startswith(INACCURATE)), None)

    @property
    def key(self) -> tuple[str | frozenset[str], ...]:
        """What a measurement is identified by over time."""
        return (*self.cell, self.impl, self.tags(FORM_TAGS))

    @property
    def cell(self) -> tuple[str | frozenset[str], ...]:
        """What the records of one comparison share."""
        mode = self.tags(MODE_TAGS)
        return self.suite, self.case, self.op, self.phase, self.dtype, mode

    def to_json(self) -> dict[str, object]:
        """A plain dictionary, without ``extra`` where it is empty."""
        plain = {name: _rounded(value) for name, value in asdict(self).items()}
        if not self.extra:
            del plain["extra"]
        return plain


@dataclass(frozen=True)
class Run:
    """The records of one run of one suite, and where they were taken."""

    device: str
    torch: str
    triton: str | None
    pyg: str | None
    commit: str
    date: str
    seed: int
    copy_gb_s: float | None = None
    records: list[Record] = field(default_factory=list)

    def dumps(self) -> str:
        """JSON with one record a line, so that a diff can be read."""
        head = {f.name: getattr(self, f.name) for f in fields(self)[:-1]}
        lines = [f" {json.dumps(name)}: {json.dumps(v)}," for name, v in head.items()]
        rows = ",\n".join(f"  {json.dumps(r.to_json())}" for r in self.records)
        return "\n".join(["{", *lines, f' "records": [\n{rows}\n ]', "}"]) + "\n"

    @staticmethod
    def load(path: Path) -> Run:
        """Read a result file."""
        stored = json.loads(path.read_text())
        stored["records"] = [Record(**record) for record in stored["records"]]
        return Run(**stored)


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def slug(text: str) -> str:
    """A name fit for a file: lower case, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def device_name(device: torch.device) -> str:
    """The name of the measured device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def current_commit(given: str | None = None) -> str:
    """The commit measured: as given, from ``BENCH_COMMIT``, or from git."""
    given = given or os.environ.get("BENCH_COMMIT")
    if given:
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        dirty = _git("status", "--porcelain", "--", "pyg_tiga", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{head}-dirty" if dirty else head


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=True,
        text=True,
    )
    return found.stdout.strip()


def new_run(
    device: torch.device, *, commit: str, seed: int, copy_gb_s: float | None
) -> Run:
    """An empty run that describes this environment."""
    return Run(
        device=device_name(device),
        torch=torch.__version__,
        triton=_version("triton"),
        pyg=_version("torch_geometric"),
        commit=commit,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seed=seed,
        copy_gb_s=copy_gb_s,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def merge(older: Run, newer: Run) -> Run:
    """The newer run with the records of the older that it did not measure."""
    measured = {_place(record) for record in newer.records}
    kept = [record for record in older.records if _place(record) not in measured]
    return replace(newer, records=kept + newer.records)


def _place(record: Record) -> tuple[object, ...]:
    # A replayed case and its eager record are taken together.
    return (*record.cell[:-1], record.tags(MODE_TAGS) - {"eager"})


@dataclass(frozen=True)
class ResultFile:
    """Where a run goes, with the older records that it joins."""

    path: Path
    older: Run | None = None

    @staticmethod
    def of(
        run: Run, suite: str, *, out: Path = RESULTS, part: str | None = None
    ) -> ResultFile:
        """``<out>/<device>/<suite>.json``, or a part of it.

        A part of a suite joins the suite's file if both are of one known commit and
        one seed, and else gets a file of its own, ``<suite>.<part>.json``.
        """
        folder = out / slug(run.device)
        whole = ResultFile(folder / f"{suite}.json")
        if part is None or not whole.path.is_file():
            return whole
        older = Run.load(whole.path)
        same = (older.commit, older.seed) == (run.commit, run.seed)
        if same and run.commit != UNKNOWN:
            return ResultFile(whole.path, older)
        return ResultFile(folder / f"{suite}.{slug(part)}.json")

    def write(self, run: Run) -> None:
        """Store what the run has so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        merged = merge(self.older, run) if self.older else run
        self.path.write_text(merged.dumps())
