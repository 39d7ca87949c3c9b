"""What an implementation declares: its limits, as data, and how to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pyg_tiga.problem import Problem

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def nothing_to_say(problem: Problem) -> list[tuple[str, str]]:
    """No notes."""
    return []


def always_available(problem: Problem) -> list[str]:
    """Nothing has to be installed."""
    return []


@dataclass(frozen=True)
class Limits:
    """The problems that an implementation supports; an empty tuple allows all."""

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    relations: tuple[str, ...] = ("csr",)
    reduces: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    weighted: bool = True
    deterministic: bool = True
    min_capability: tuple[int, int] = (0, 0)

    def violations(self, problem: Problem) -> list[str]:
        """Every limit that the problem breaks, with what was found and is required."""
        reasons = [
            _not_in("device", problem.device, self.devices),
            _not_in("dtype", problem.dtype, self.dtypes),
            _not_in("out_dtype", problem.out_dtype, self.dtypes),
            _not_in("relation", problem.relation, self.relations),
            _not_in("reduce", problem.reduce, self.reduces),
            _not_in("ties", problem.ties, self.ties),
            _not_in("form", problem.form, self.forms),
        ]
        if problem.weighted and not self.weighted:
            reasons.append("weighted is True, required False")
        if problem.deterministic and not self.deterministic:
            reasons.append(
                "deterministic is True, but its additions have no fixed order"
            )
        if problem.device == "cuda" and problem.capability < self.min_capability:
            reasons.append(
                f"capability is {problem.capability}, required at least "
                f"{self.min_capability}"
            )
        return [reason for reason in reasons if reason]


@dataclass(frozen=True)
class Implementation:
    """One way to run one operation.

    Args:
        name: Unique name within the operation.
        family: ``"triton"``, ``"vendor"`` or ``"scatter"``.
        op: The operation that it runs.
        limits: The problems that it supports.
        run: ``run(problem, schedule, graph, *tensors)``.
        missing: Reasons why it cannot run here at all (a package, a device).
        scheduled: Whether it takes a `Schedule`.
        notes: What a plan says of how it runs a problem, as (field, value) pairs.
    """

    name: str
    family: str
    op: str
    limits: Limits
    run: Callable[..., Any] = field(repr=False)
    missing: Callable[[Problem], list[str]] = field(
        default=always_available, repr=False
    )
    scheduled: bool = False
    notes: Callable[[Problem], list[tuple[str, str]]] = field(
        default=nothing_to_say, repr=False
    )

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this implementation cannot run the problem; [] if it can."""
        reasons = self.limits.violations(problem)
        if problem.op != self.op:
            reasons.append(f"op is {problem.op!r}, required {self.op!r}")
        return reasons + self.missing(problem)


def _not_in(name: str, found: object, allowed: tuple[object, ...]) -> str:
    if not allowed or found in allowed:
        return ""
    return f"{name} is {_text(found)}, required {' or '.join(map(_text, allowed))}"


def _text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)
