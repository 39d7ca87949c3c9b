"""Aligned Markdown tables, in the terminal and in the report alike."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.compare import Comparison, against_base, comparisons
from benchmarks.records import MODE_TAGS, Record, Run

HEADERS = (
    "case",
    "op",
    "phase",
    "dtype",
    "ours ms",
    "best peer",
    "peer ms",
    "ratio (low)",
    "",
    "over floor",
    "MiB ours / peer",
    "other peers",
    "note",
)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    lines = [headers, *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]
    ruled = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        + " |"
        for line in ruled
    )


def comparison_table(records: Sequence[Record]) -> str:
    """Every record of ours with its best peer, wins and losses marked."""
    rows = [_row(c) for c in comparisons(records) if "accuracy" not in c.ours.tags()]
    return table(HEADERS, rows)


def _row(found: Comparison) -> list[str]:
    ours, peer = found.ours, found.peer
    return [
        ours.case,
        ours.op,
        ours.phase,
        ours.dtype,
        number(ours.ms),
        peer.impl if peer else "-",
        number(peer.ms if peer else None),
        f"{number(found.ratio)} ({number(found.low)})" if found.ratio else "-",
        found.verdict,
        number(found.floor_ratio),
        f"{mib(ours.peak_mib)} / {mib(peer.peak_mib if peer else None)}",
        ", ".join(f"{other.impl} {number(other.ms)}" for other in found.peers[1:]),
        "; ".join(_remarks(found)),
    ]


def _remarks(found: Comparison) -> list[str]:
    note = [found.ours.note] if found.ours.note else []
    imprecise = [(r.impl, r.inaccuracy) for r in found.peers if r.inaccuracy]
    return note + [f"{impl} {remark}" for impl, remark in imprecise]


def failures_table(records: Sequence[Record]) -> str:
    """What has no time, and why."""
    rows = [
        [r.case, r.op, r.phase, r.dtype, r.impl, r.note or ""]
        for r in records
        if r.ms is None and not r.extra
    ]
    if not rows:
        return ""
    return table(("case", "op", "phase", "dtype", "impl", "why no time"), rows)


def base_table(base: Run, run: Run) -> str:
    """Our times against an earlier run's."""
    rows = [
        [
            record.case,
            record.op,
            record.phase,
            record.dtype,
            number(record.ms),
            number(ratio),
            number(low),
            ", ".join(sorted(record.tags(MODE_TAGS))),
        ]
        for record, ratio, low in against_base(base, run)
    ]
    headers = ("case", "op", "phase", "dtype", "ms now", "times faster", "low", "")
    return table(headers, rows)


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def mib(value: float | None) -> str:
    """Whole MiB from ten upwards."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
