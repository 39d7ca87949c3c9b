"""Small rows of memory, made many at a time: a relation needs one for a moment.

Making one costs the host about as much as a launch, and pinned memory far more.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Rows:
    """A stock of rows that is filled up when it runs out.

    Args:
        make: Makes rows, `[n, width]`, on the device and stream that will use them.
    """

    __slots__ = ("_free", "_make")

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A row that nobody else uses, `[width]`."""
        try:
            return self._free.pop()
        except IndexError:
            first, *others = self._make().unbind(0)
            self._free += others
            return first

    def give(self, row: Tensor) -> None:
        """Hand a row on to others; nothing may write to it any more."""
        self._free.append(row)
