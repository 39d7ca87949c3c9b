"""Work of a layer that is the same at every call, handed to compiled code.

Between two kernels of a few microseconds, an interpreter takes longer than they do. A
`Replay` runs its work from Python once, then records it on `Slot`s, which stand for
tensors, and from then on has the recorded steps run without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga import native
from pyg_tiga.errors import log_fallback
from pyg_tiga.impls.launch import current_stream, is_watched
from pyg_tiga.impls.prepared import NotReplayed

Work = Callable[..., tuple[Tensor | None, ...]]

# Operands of a first call may lie where nothing is compiled that could be recorded.
_TRIES = 3


class Recorded:
    """A work and its steps, None as long as there are none.

    Args:
        work: Takes the stream and tensors, and gives those that it made. Shapes of what
            it allocates, dtypes and strides of what kernels are given, and which
            tensors are None must be the same at every call. It treats tensors by the
            functions of this module, by what a `Slot` has, and by calling `Prepared`
            kernels.
    """

    __slots__ = ("_tries", "_work", "steps")

    def __init__(self, work: Work) -> None:
        self._work = work
        self.steps: Any = None
        self._tries = _TRIES

    def make(self, index: int, there: Sequence[bool]) -> Any:
        """Record the steps on a device, once the work has been done from Python.

        Args:
            index: Of the device.
            there: Which tensors are not None.
        """
        if self.steps is None and index >= 0 and self._tries > 0:
            self._record(index, there)
        return self.steps

    def _record(self, index: int, there: Sequence[bool]) -> None:
        module = native.compiled()
        if module is None:
            return
        try:
            self.steps = record(module.Steps(len(there)), self._work, index, there)
        except NotReplayed as reason:
            self._tries -= 1
            log_fallback("a step of compiled host code to Python", str(reason))


class Replay(Recorded):
    """Tensors to tensors, by allocations, products and launches of prepared kernels.

    Where other tensors are None than at the first call, Python does the work.
    """

    __slots__ = ()

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Do the work on the current stream of the first tensor's device."""
        index = tensors[0].get_device()
        stream = current_stream(index)
        steps = self.steps
        if steps is None or is_watched():
            found = self._work(stream, *tensors)
            if steps is None:
                self.make(index, [tensor is not None for tensor in tensors])
            return found
        found = steps.run(stream, *tensors)
        # Operands may lie where kernels compiled for aligned ones cannot read, or not
        # be there.
        return self._work(stream, *tensors) if found is None else found


def record(steps: Any, work: Work, index: int, there: Sequence[bool]) -> Any:
    """Make steps of a work on tensors of which these are not None.

    Raises:
        NotReplayed: It does what no step can do.
    """
    slots = [Slot(steps, i, index) if one else None for i, one in enumerate(there)]
    results = work(steps, *slots)
    places = [None if slot is None else slot.place for slot in results]
    steps.finish(places, list(there))
    return steps


class Slot:
    """Stands for a tensor while work is recorded."""

    __slots__ = ("_index", "_steps", "place")

    def __init__(self, steps: Any, place: int, index: int) -> None:
        self._steps, self.place, self._index = steps, place, index

    def __del__(self) -> None:
        # Work lets go of a tensor in the same place.
        self._steps.release(self.place)

    def _made(self, place: int) -> Slot:
        return Slot(self._steps, place, self._index)

    def get_device(self) -> int:
        """As of a tensor, and so are all that follow."""
        return self._index

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> Slot:
        """Room of a shape."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            (shape,) = shape
        return self._made(self._steps.empty(self.place, list(shape), dtype))

    def empty_like(self) -> Slot:
        """Room of the same shape."""
        return self._made(self._steps.empty(self.place, None, None))

    def t(self) -> Slot:
        """A matrix turned."""
        return self._made(self._steps.turned(self.place))

    def mm(self, other: Slot) -> Slot:
        """A product of matrices."""
        return self._made(self._steps.mm(self.place, other.place))

    def addmm_(self, one: Slot, other: Slot) -> Slot:
        """A product of matrices added in place."""
        return self._made(self._steps.addmm_(self.place, one.place, other.place))

    def __add__(self, other: Slot) -> Slot:
        return self._made(self._steps.plus(self.place, other.place))

    def free(self) -> None:
        """Let go of an input."""
        self._steps.free(self.place)

    def linear(self, weight: Slot, bias: Slot | None) -> Slot:
        """A linear map."""
        added = None if bias is None else bias.place
        return self._made(self._steps.linear(self.place, weight.place, added))

    def sum_rows(self) -> Slot:
        """The sum over the first dimension."""
        return self._made(self._steps.sum_rows(self.place))

    def part(self, index: int, shape: tuple[int, ...]) -> Slot:
        """One of the first dimension, in another shape."""
        return self._made(self._steps.part(self.place, index, list(shape)))

    def column(self, index: int) -> Slot:
        """One of the second dimension."""
        return self._made(self._steps.column(self.place, index))

    def to(self, dtype: torch.dtype) -> Slot:
        """In another precision."""
        return self._made(self._steps.cast(self.place, dtype))


def empty_like(x: Any) -> Any:
    """`torch.empty_like`."""
    return x.empty_like() if type(x) is Slot else torch.empty_like(x)


def free(*values: Any) -> None:
    """Let go of inputs, so that their memory is free if nobody else has them.

    Only compiled code can: in Python, callers hold what they gave.
    """
    for value in values:
        if type(value) is Slot:
            value.free()


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`F.linear`."""
    if type(x) is Slot:
        return x.linear(weight, bias)
    return F.linear(x, weight, bias)


def sum_rows(x: Any) -> Any:
    """`x.sum(0)`."""
    return x.sum_rows() if type(x) is Slot else x.sum(0)


def column(x: Any, index: int) -> Any:
    """`x.select(1, index)`."""
    return x.column(index) if type(x) is Slot else x.select(1, index)


def part(x: Any, index: int, shape: tuple[int, ...]) -> Any:
    """`x[index].view(shape)`."""
    if type(x) is Slot:
        return x.part(index, shape)
    return x.select(0, index).view(shape)
