"""Errors of the planner and the record of fallbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

logger = logging.getLogger("pyg_tiga")


class UnsupportedError(NotImplementedError):
    """No implementation can run the problem; says for each of them why not.

    Args:
        problem: What was asked for, in words.
        rejections: Every reason of every implementation that was considered.
    """

    def __init__(
        self,
        problem: str,
        rejections: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.problem = problem
        self.rejections: dict[str, list[str]] = {
            name: list(reasons) for name, reasons in (rejections or {}).items()
        }
        # Both go to `args`, from which pickle and copy build the exception anew.
        super().__init__(problem, self.rejections)

    def __str__(self) -> str:
        lines = [self.problem]
        for name, reasons in self.rejections.items():
            lines.append(f"  {name}:")
            lines.extend(f"    - {reason}" for reason in reasons)
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def log_fallback(what: str, why: str) -> None:
    """Log a fallback, the first time that this one is met in the process.

    Args:
        what: The layer or op that takes another road than asked for.
        why: The reason, as it stands in the plan.
    """
    logger.warning("%s falls back: %s", what, why)
