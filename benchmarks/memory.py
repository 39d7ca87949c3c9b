"""What need not be tried: calls that cannot fit, or whose like did not fit before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

OUT_OF_MEMORY = "out of memory"
GIB = 1 << 30


@dataclass(frozen=True)
class Demand:
    """What a call of an implementation is known to need.

    Args:
        op: The measured op.
        impl: The implementation.
        phase: ``forward``, ``backward`` or ``train``.
        case: Where it would run.
        edge_bytes: Bytes of one tensor with a row per edge.
        copies: So many such tensors live at once in any case; 0 where not known.
    """

    op: str
    impl: str
    phase: str
    case: str
    edge_bytes: int
    copies: int = 0

    def covers(self, other: Demand) -> bool:
        """Whether the other fails wherever this one fails: as large, and as deep."""
        same = (self.op, self.impl) == (other.op, other.impl)
        deeper = other.phase == self.phase or self.phase == "forward"
        return same and deeper and other.edge_bytes >= self.edge_bytes


@dataclass
class MemoryBook:
    """Remembers what ran out of memory, so that larger cases need not repeat it."""

    failed: list[Demand] = field(default_factory=list)

    def refusal(self, demand: Demand, device: torch.device) -> str | None:
        """Why the call would run out of memory, or None where it may not."""
        for past in self.failed:
            if past.covers(demand):
                return f"not run, {past.case} {past.phase} already was"
        total = total_bytes(device)
        least = demand.copies * demand.edge_bytes
        if total is None or least <= total:
            return None
        return (
            f"not run, {demand.copies} tensors of a row per edge are "
            f"{least / GIB:.0f} GiB"
        )

    def add(self, demand: Demand) -> None:
        """Note that the call ran out of memory."""
        self.failed.append(demand)


def total_bytes(device: torch.device) -> int | None:
    """Memory of the GPU; None on the CPU, which swaps instead."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory
