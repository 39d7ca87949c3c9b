"""Writes docs/results.md from the result files: ``python -m benchmarks.report``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gates import Verdict, evaluate
from benchmarks.records import RESULTS, Record, Run
from benchmarks.tables import comparison_table, failures_table, number, table
from benchmarks.targets import TARGETS

DOCUMENT = Path(__file__).parent.parent / "docs" / "results.md"
HEAD = """# Results

Written by `python -m benchmarks.report` from `benchmarks/results/`; not edited by hand.

Ours and its peers ran in one process, warm, on graphs with their true tails and on a
seed that tuned nothing. Times are medians. A ratio is the best peer's time over ours;
in brackets stands its low bound, the low end of the peer's 95 % interval over the
high end of ours. It counts as a win when that bound is above 1. "Over floor" is our
time over that of the gathers alone at the measured copy bandwidth. Peak memory is
above the inputs and the cached relation. A case that some implementation runs in under
0.3 ms by CUDA-graph replay is launch-bound: it counts by replay for ours and the peers,
and the row noted `eager` repeats it as plain calls. Every result is held against a
float64 reference in the same run: ours has no time if it is wrong, and a peer whose
error is above our tolerance but below 0.1 keeps its time, noted `inaccurate`. Inputs
are such that there is one gradient for every implementation: those of a maximum have no
ties, and those of a GATConv or GATv2Conv no sum in a score so near the kink of
LeakyReLU that rounding in float32 picks its slope. In rows noted `host`, times are the
host's, beyond the layer's projections, each side by the fastest of its interleaved
blocks. Rows noted `objective memory` are ours when it keeps nothing for every edge.
The floor of a layer with edge features has their bytes in it. Targets whose cells have
not been run are left out.

`loaded-host` is a run of an earlier commit on a machine whose host was busy with other
work: PyG's own layer took it 2.9 times the host time of the runs beside it. What the
device bounds is comparable there, and what the host bounds is not: so much a busy host
takes away.

The run of `edge_attention` ended at its time limit before its last cells: dot products
on products at 4x32 in training and in half precision.

To measure again: `python -m benchmarks.run --all` on the device, where
`benchmarks/setup_peers.sh` installs turbo_gnn and anemoi-models before.
"""


def target_table(verdicts: Sequence[Verdict]) -> str:
    """The targets with what was measured, by the low bound."""
    rows = [
        [
            v.target.text,
            v.target.level,
            f"{'≤' if v.at_most else '≥'} {v.target.bound:g}",
            number(v.value),
            v.word,
        ]
        for v in verdicts
    ]
    return table(("target", "level", "bound", "measured", ""), rows)


def accuracy_lines(records: Sequence[Record]) -> list[str]:
    """One sentence for each accuracy record of ours."""
    lines = []
    for r in records:
        if "diff" in r.extra:
            e = r.extra
            lines.append(
                f"Accuracy, {r.case}: {e['accuracy']:.2f} %; paired difference to "
                f"PyG's layer {e['diff']:+.2f} points, 95 % interval "
                f"{e['diff_low']:+.2f} to {e['diff_high']:+.2f}."
            )
    return lines


def section(name: str, run: Run) -> str:
    """One result file: its environment, its table, its failures."""
    bandwidth = f", copy {run.copy_gb_s:,.0f} GB/s" if run.copy_gb_s else ""
    environment = (
        f"{run.device}, torch {run.torch}, Triton {run.triton or '-'}, PyG "
        f"{run.pyg or '-'}, commit {run.commit}, {run.date[:10]}, seed {run.seed}"
        f"{bandwidth}."
    )
    parts = [f"## {name}", environment, comparison_table(run.records)]
    parts += accuracy_lines(run.records)
    failed = failures_table(run.records)
    return "\n\n".join([*parts, failed] if failed else parts)


def load_runs(results: Path) -> dict[str, Run]:
    """Every result file by ``<device>, <file name>``."""
    files = sorted(results.glob("*/*.json"))
    return {f"{path.parent.name}, {path.stem}": Run.load(path) for path in files}


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """The targets all of whose cells were run, with or without a time."""
    cells = {record.cell[1:5] for run in runs for record in run.records}
    return [
        found
        for found in evaluate(runs, TARGETS)
        if cells.issuperset(found.target.cells)
    ]


def target_sections(runs: dict[str, Run]) -> list[str]:
    """The targets for each place of which there are result files, in its own runs."""
    places: dict[str, list[Run]] = {}
    for name, run in runs.items():
        places.setdefault(name.partition(",")[0], []).append(run)
    parts = []
    for place, found in places.items():
        parts += [f"## Targets, {place}", target_table(verdicts(found))]
    return parts


def document(runs: dict[str, Run]) -> str:
    """The whole report."""
    sections = [section(name, run) for name, run in runs.items()]
    return "\n\n".join([HEAD.strip(), *target_sections(runs), *sections]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(document(load_runs(options.results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
