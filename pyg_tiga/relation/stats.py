"""What the host learns about a grouping: one small tensor, one copy."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pyg_tiga.relation.buffers import Rows

# Lengths at which long rows may be cut; powers of two, because pieces are counted by
# shifts.
CHUNKS = tuple(2**k for k in range(6, 14))  # 64 ... 8192
_SHIFTS = tuple(chunk.bit_length() - 1 for chunk in CHUNKS)

# Degrees at which the tail is counted: all up to 4, then two an octave.
THRESHOLDS = (0, 1, *(m << k for k in range(15) for m in (2, 3)), 65536)

# A summary: the number of edges without fault, minus the largest degree, the counts of
# the tail, minus the numbers of pieces, and the signature.
GOOD, LOWEST, TAIL = 0, 1, 2
PIECES = TAIL + len(THRESHOLDS)
SIGNATURE = PIECES + len(CHUNKS)
LENGTH = SIGNATURE + 1
# Behind it, place and both ends of the first edge with a fault, or what else is needed
# to describe a fault.
FOUND, WIDTH = LENGTH, LENGTH + 4
_PARTS = (TAIL, len(THRESHOLDS), len(CHUNKS), 1)
_SAMPLE = 4096
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Stats:
    """Degrees of the rows of a grouping, as the planner sees them.

    Attributes:
        num_rows: Rows.
        num_edges: E.
        max_degree: Edges of the longest row.
        tail: For each of `THRESHOLDS`, how many rows have more edges than that.
        hubs: For each of `CHUNKS`, how many rows have more edges than that.
        items: For each of `CHUNKS`, into how many pieces of at most that many edges
            these rows are cut.
        signature: Checksum of a sample of the indices, a part of `digest`.
    """

    num_rows: int
    num_edges: int
    max_degree: int
    tail: tuple[int, ...]
    hubs: dict[int, int]
    items: dict[int, int]
    signature: int

    @classmethod
    def from_summary(cls, values: list[int], num_rows: int, num_edges: int) -> Stats:
        """Read what :func:`summarise` wrote."""
        tail = tuple(values[TAIL:PIECES])
        above = dict(zip(THRESHOLDS, tail, strict=True))
        pieces = dict(zip(CHUNKS, values[PIECES:SIGNATURE], strict=True))
        # A row that is not cut counts as one piece, an empty one as none.
        items = {c: -pieces[c] - (above[0] - above[c]) for c in CHUNKS}
        hubs = {c: above[c] for c in CHUNKS}
        longest = -values[LOWEST]
        return cls(num_rows, num_edges, longest, tail, hubs, items, values[SIGNATURE])

    def degree_quantile(self, q: float) -> int:
        """Degree that a share `q` of the rows does not exceed.

        Exact up to 4, above that rounded up to the next of `THRESHOLDS`.
        """
        rows_above = int((1.0 - q) * self.num_rows)
        # `tail` falls; its negative rises, as bisection wants it.
        place = bisect_left([-count for count in self.tail], -rows_above)
        if place == len(THRESHOLDS):
            return self.max_degree
        return min(THRESHOLDS[place], self.max_degree)

    @cached_property
    def digest(self) -> str:
        """Hash of the structure: sizes, degrees, and a sample of the indices."""
        facts = (self.num_rows, self.num_edges, self.max_degree, self.tail)
        text = repr((*facts, self.items, self.signature))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def summarise(
    ptr: Tensor,  # [num_rows + 1]
    index: Tensor,  # [E]
    good: Tensor,  # [1]
) -> Tensor:
    """Write a grouping's statistics into one tensor on its device, without a sync.

    Small graphs pay for every launch, so it takes few.

    Args:
        ptr: Start of each row.
        index: The other end of each edge.
        good: Number of edges whose ends are in range.

    Returns:
        `[LENGTH]` int64, for :meth:`Stats.from_summary`; the first entry is `good`.
    """
    out = torch.empty(LENGTH, dtype=torch.int64, device=ptr.device)
    head, tail, pieces, signature = out.split_with_sizes(_PARTS)
    negative = ptr[:-1] - ptr[1:]  # [num_rows], minus the degrees
    lowest = negative.amin(0, keepdim=True) if negative.numel() else ptr
    torch.cat((good, lowest), out=head)
    below, shifts = _constants(ptr.device, ptr.dtype)
    torch.sum(negative < below, 1, out=tail)
    # The arithmetic shift rounds down, so that of a negative number rounds away from 0.
    torch.sum(negative >> shifts, 1, out=pieces)
    # A checksum of an evenly spread sample, which notices a change of order.
    sample = index[:: sample_step(index.numel())]
    torch.sum(sample[:-1] * sample[1:], 0, keepdim=True, out=signature)
    return out


def is_good(values: list[int], num_edges: int) -> bool:
    """Whether a summary found every index in range."""
    return values[GOOD] == num_edges


def sample_step(num_edges: int) -> int:
    """Distance of the indices that the signature looks at."""
    return max(1, num_edges // _SAMPLE)


class Readback:
    """A device tensor's way to the host: at once, or when the device gets there.

    Args:
        values: One-dimensional int64 tensor of at most `WIDTH` elements.
        deferred: Do not wait for the device.

    Attributes:
        event: Recorded behind the copy; None if the host did wait.
    """

    __slots__ = ("_host", "_row", "_values", "event")

    def __init__(self, values: Tensor, deferred: bool) -> None:
        self._values: list[int] | None = None
        self.event: torch.cuda.Event | None = None
        if not deferred or values.device.type != "cuda":
            self._values = values.tolist()
            return
        self._row = _PINNED.take()
        whole = values.numel() == WIDTH
        self._host = self._row if whole else self._row[: values.numel()]
        self._host.copy_(values, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(values.device))

    def landed(self) -> bool:
        """Whether `values` would return without waiting."""
        return self._values is not None or self.event.query()

    def values(self) -> list[int]:
        """The values; waits for the device if they are not there yet."""
        if self._values is None:
            self.event.synchronize()
            self._values = self._host.tolist()
            # One that is dropped unread is not used again: its copy may be on its way.
            _PINNED.give(self._row)
        return self._values


def blank_summary(device: torch.device) -> Tensor:
    """A summary of zeros for kernels of the current stream to fill, `[WIDTH]` int64."""
    stream = 0
    if device.type == "cuda":
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    return _blanks(device, stream).take()


@lru_cache(maxsize=64)
def _blanks(device: torch.device, _stream: int) -> Rows:
    shape = (_ROWS_AT_ONCE, WIDTH)
    return Rows(lambda: torch.zeros(shape, dtype=torch.int64, device=device))


def _pinned() -> Tensor:
    shape = (_ROWS_AT_ONCE, WIDTH)
    return torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)


_PINNED = Rows(_pinned)


@lru_cache(maxsize=64)
def table(device: torch.device) -> Tensor:
    """Thresholds and the shifts that count pieces, for kernels; int64."""
    numbers = (*THRESHOLDS, *_SHIFTS)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


@lru_cache(maxsize=64)
def _constants(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # On the host first, whatever the default device is.
    below = torch.tensor(THRESHOLDS, dtype=dtype, device="cpu").neg_()
    shifts = torch.tensor(_SHIFTS, dtype=dtype, device="cpu")
    return below.unsqueeze(1).to(device), shifts.unsqueeze(1).to(device)
