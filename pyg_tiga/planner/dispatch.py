"""From a problem to a plan: the first implementation in the table that can run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from pyg_tiga.errors import UnsupportedError, log_fallback
from pyg_tiga.impls.base import Implementation
from pyg_tiga.planner.plan import Plan
from pyg_tiga.planner.schedule.defaults import default_schedule
from pyg_tiga.planner.table import candidates
from pyg_tiga.problem import Problem

# Not a context variable: backward passes run in threads of autograd's own.
_pinned: str | None = None


@contextmanager
def pin(name: str | None) -> Iterator[None]:
    """Within the context, run only implementations of this name or family.

    Operations that have none of that name follow the table. An operation whose pinned
    implementations cannot run the problem raises. A pin holds in all threads.

    Raises:
        UnsupportedError: When a plan is made that the pinned implementation refuses.
    """
    global _pinned
    before, _pinned = _pinned, name
    try:
        yield
    finally:
        _pinned = before


def pinned() -> str | None:
    """The name that :func:`pin` holds, if any."""
    return _pinned


def plan(problem: Problem) -> Plan:
    """The plan of a problem.

    Raises:
        UnsupportedError: No implementation can run it; lists every reason of each.
    """
    return _plan(problem, _pinned)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, pinned: str | None) -> Plan:
    table = candidates(problem.op, problem.device)
    named = tuple(c for c in table if pinned in (c.name, c.family))
    return _first(problem, named or table, "pinned" if named else "table")


def _first(problem: Problem, table: tuple[Implementation, ...], source: str) -> Plan:
    rejected: dict[str, list[str]] = {}
    for implementation in table:
        reasons = implementation.why_not(problem)
        if not reasons:
            _log(problem, implementation, rejected)
            schedule = default_schedule(problem) if implementation.scheduled else None
            return Plan(problem, implementation, schedule, source, rejected)
        rejected[implementation.name] = reasons
    raise UnsupportedError(f"nothing can run {problem}", rejected)


def _log(
    problem: Problem, chosen: Implementation, rejected: dict[str, list[str]]
) -> None:
    """Log once that a problem on a GPU leaves our kernels; on a CPU it is the rule."""
    if chosen.family == "triton" or problem.device == "cpu" or not rejected:
        return
    why = "; ".join(
        f"{name}: {', '.join(reasons)}" for name, reasons in rejected.items()
    )
    log_fallback(f"{problem.op} to {chosen.name}", why)
