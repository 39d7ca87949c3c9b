"""Runs suites: ``python -m benchmarks.run --suite spmm sage``, or ``--all``."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks import measure, ours, records
from benchmarks.compare import OURS, slowest_against
from benchmarks.engine import Case, Context
from benchmarks.gates import Target, Verdict
from benchmarks.graphs import REPORT_SEED, TUNING_SEEDS, GraphStore
from benchmarks.records import Record, Run
from benchmarks.report import target_table, verdicts
from benchmarks.suites import SUITES
from benchmarks.tables import base_table, comparison_table, failures_table
from pyg_tiga import native

SLOWER_AT_MOST = 1.03  # than the base, in any cell
log = logging.getLogger("benchmarks")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--suite", nargs="+", choices=sorted(SUITES))
    which.add_argument("--all", action="store_true", help="every suite")
    parser.add_argument("--case", metavar="GLOB", help="such as 'arxiv/*'")
    parser.add_argument("--op", metavar="GLOB", help="such as 'max_*'")
    parser.add_argument("--part", help="name of this part, when not all cases run")
    parser.add_argument("--base", type=Path, help="an earlier result file")
    parser.add_argument("--out", type=Path, default=records.RESULTS)
    parser.add_argument("--seed", type=int, default=REPORT_SEED)
    parser.add_argument("--budget-s", type=float, default=0.5, help="per timing")
    parser.add_argument("--commit", help="what is measured, where git is not")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrink the graphs, for a try-out"
    )
    options = parser.parse_args(arguments)
    if options.seed in TUNING_SEEDS:
        parser.error(f"seeds {TUNING_SEEDS} tune the defaults: report on another")
    return options


def selected(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """The cases that the globs leave."""
    return [
        case
        for case in cases
        if fnmatch(case.name, options.case or "*")
        and fnmatch(case.op, options.op or "*")
    ]


def part_name(options: argparse.Namespace) -> str | None:
    """The name of the part, or None when a whole suite runs."""
    globs = [glob for glob in (options.case, options.op) if glob]
    return options.part or ("-".join(globs) if globs else None)


def run_suite(name: str, options: argparse.Namespace, context: Context) -> Run:
    """Run one suite and store it after every case, so that nothing is lost."""
    run = records.new_run(
        context.device,
        commit=records.current_commit(options.commit),
        seed=options.seed,
        copy_gb_s=context.copy_gb_s,
    )
    target = records.ResultFile.of(run, name, out=options.out, part=part_name(options))
    chosen = selected(SUITES[name](), options)
    start = time.perf_counter()
    for i, case in enumerate(chosen, 1):
        run = replace(run, records=[*run.records, *case.run(context)])
        target.write(run)
        seconds = time.perf_counter() - start
        log.info("%6.1f s %3d/%d %s %s", seconds, i, len(chosen), case.name, case.op)
    context.prepared.clear()
    context.graphs.clear()
    log.info("%d cases in %s", len(chosen), target.path)
    return run


def show(run: Run, base: Path | None) -> None:
    """Print what was measured."""
    parts = [comparison_table(run.records), failures_table(run.records)]
    if base is not None:
        parts.append(base_table(Run.load(base), run))
    sys.stdout.write("\n\n".join(part for part in parts if part) + "\n\n")


def against(base: Run, run: Run) -> Verdict:
    """Whether no cell is slower than in an earlier run."""
    suites = ", ".join(sorted({record.suite for record in run.records}))
    text = f"{suites}: slowest cell, times as fast as in the base"
    target = Target(text, "speed over base", 1 / SLOWER_AT_MOST, ())
    return Verdict(target, slowest_against(base, run))


def failed(found: Sequence[Record]) -> bool:
    """Whether one of ours has nothing to show."""
    return any(r.impl == OURS and r.ms is None and not r.extra for r in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites; 1 when one of our cases failed."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = torch.device(options.device)
    names = list(SUITES) if options.all else options.suite
    if device.type == "cuda" and not native.wait():
        log.warning("no compiled host code: steps run from Python")
    # CUDA graphs collect garbage at each capture: what is loaded by now need not
    # be walked every time.
    gc.freeze()
    context = Context(
        suite="",
        device=device,
        graphs=GraphStore(device, options.seed, options.scale, ours.release),
        seed=options.seed,
        budget_s=options.budget_s,
        copy_gb_s=measure.copy_bandwidth(device),
    )
    runs = [run_suite(n, options, replace(context, suite=n)) for n in names]
    for run in runs:
        show(run, options.base)
    found = verdicts(runs)
    if options.base is not None:
        base = Run.load(options.base)
        found += [against(base, run) for run in runs]
    sys.stdout.write(target_table(found) + "\n")
    return int(any(failed(run.records) for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
