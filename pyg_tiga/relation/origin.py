"""Edits made through an `EdgeIndex`, which the tensor inside does not count."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch_geometric import EdgeIndex

from pyg_tiga.relation.streams import lasting

_NAME = "_pyg_tiga_origin"


class Origin:
    """The edits of an `EdgeIndex`, without a reference to it or to its edges.

    PyG's wrapper passes an edit to the tensor inside below the place where PyTorch
    counts edits, so that only the wrapper's counter moves. An origin is shared by the
    wrapper and all graphs of its edges, and adds what it finds to the inner counter.

    Attributes:
        counter: A tensor without content of its own, whose version counter is the
            wrapper's. It can be handed to an op that has to ask when it runs.
    """

    def __init__(self, wrapper: EdgeIndex, seen: int) -> None:
        self.counter = _counter_of(wrapper)
        self._seen = seen
        self._owner, self._place = id(wrapper), wrapper._data.data_ptr()
        _ALIVE[_address(self.counter)] = self

    def count_edits(self, data: Tensor) -> None:
        """Add new edits through the wrapper to those of the tensor inside."""
        version = self.counter._version
        if version != self._seen:
            increment_version(data)
            self._seen = version

    def is_of(self, wrapper: EdgeIndex) -> bool:
        """Whether it belongs to this wrapper, as it is now.

        Copies share what hangs on the original, and swapped tensors take it along.
        """
        return (
            self._owner == id(wrapper)
            and self._place == wrapper._data.data_ptr()
            and self.counter._version == wrapper._version
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or pickle of the wrapper has edits of its own. Nothing of this package
        # may be needed to read it.
        return OrderedDict, ()


def origin_of(edge_index: Tensor) -> Origin | None:
    """What else counts edits of an `edge_index`, if something does."""
    if not isinstance(edge_index, EdgeIndex) or edge_index._data.is_inference():
        return None
    if edge_index.is_inference():
        return None
    state = edge_index.__dict__
    known = state.get(_NAME)
    if isinstance(known, Origin) and known.is_of(edge_index):
        return known
    # Where it is not known what was counted, one edit too many does no harm.
    seen = 0 if known is None else -1
    made = state[_NAME] = Origin(edge_index, seen)
    return made


def latest_origin(edge_index: EdgeIndex) -> Origin | None:
    """What :func:`origin_of` found when it was last asked, which was just now."""
    if edge_index._data.is_inference() or edge_index.is_inference():
        return None
    return edge_index.__dict__[_NAME]


def origin_with(counter: Tensor) -> Origin | None:
    """The origin of a counter, if it still exists."""
    return _ALIVE.get(_address(counter))


@torch.library.custom_op("pyg_tiga::copied", mutates_args=())
def copied(data: Tensor) -> Tensor:
    """A copy that is made at each run of compiled code.

    That sees the tensor inside of an `EdgeIndex` only, and cannot tell whether it was
    edited. A `clone` will not do, because Inductor removes it.
    """
    return data.clone()


@copied.register_fake
def _(data: Tensor) -> Tensor:
    return torch.empty_like(data)


def _counter_of(wrapper: EdgeIndex) -> Tensor:
    with lasting(), torch._C._DisableTorchDispatch():
        # An alias shares the version counter, and keeps it when given other memory:
        # what a wrapper has none of, the alias must not be asked for.
        counter = Tensor.detach(wrapper)
        counter.data = torch.empty(1, dtype=wrapper.dtype, device=wrapper.device)
    return counter


def _address(counter: Tensor) -> int:
    return counter.untyped_storage()._cdata


_ALIVE: WeakValueDictionary[int, Origin] = WeakValueDictionary()
