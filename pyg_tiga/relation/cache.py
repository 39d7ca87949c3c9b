"""The memo's store: tensors, told apart by identity, to what was built from them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pyg_tiga.relation.streams import lasting

if TYPE_CHECKING:
    from pyg_tiga.relation.edges import Edges

MAX_ENTRIES = 64
MAX_BYTES_CPU = 2 << 30
# Share of a device's memory that entries may hold.
MAX_SHARE = 1 / 8

Key = tuple[Any, ...]


class Entry:
    """An entry: the edges, and room for the objects that a hit hands out."""

    __slots__ = ("edges", "nbytes", "views")

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        self.nbytes = 0
        self.views: dict[int, Any] = {}


def key_of(tensors: Sequence[Tensor], layout: str, sizes: tuple[int, int]) -> Key:
    """What tells one relation from another, without reading the tensors.

    The storage object stands for its device and, because entries hold on to it, for no
    other storage that comes to lie at its address.
    """
    key: list[Any] = [layout, sizes]
    for tensor in tensors:
        key += (
            tensor.untyped_storage()._cdata,
            tensor.data_ptr(),
            tensor._version,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
    return tuple(key)


def has_no_other_holder(storage: int, own: int) -> bool:
    """Whether a storage is held by no more than `own` tensors.

    Args:
        storage: Its address, as in a key; one of the tensors keeps it valid.
        own: Number of tensors.
    """
    if _use_count is None:
        return False
    return _use_count(storage) < _one_holder() + own


_use_count = getattr(torch._C, "_storage_Use_Count", None)


@lru_cache(maxsize=1)
def _one_holder() -> int:
    """What PyTorch counts for a storage that one tensor holds."""
    with lasting():
        lonely = torch.zeros(1, device="cpu")
    return _use_count(lonely.untyped_storage()._cdata)


class Cache:
    """Entries bounded in number and bytes, the least recently used first out.

    Beside them it knows, without keeping them alive, the edges that a `Graph` of the
    user holds.

    Args:
        max_entries: Most entries.
        max_bytes: Most bytes of all entries of a device; the newest entry stays in any
            case.
    """

    def __init__(
        self,
        max_entries: int = MAX_ENTRIES,
        max_bytes: Callable[[torch.device], int] | None = None,
    ) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes or _max_bytes
        # Building holds `building`, so that threads do not build the same; looking up
        # does not wait for it.
        self.building = threading.RLock()
        self._lock = threading.RLock()
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._total: dict[torch.device, int] = {}
        self._alive: WeakValueDictionary[Key, Edges] = WeakValueDictionary()
        self._pinned: dict[int, Edges] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> Entry | None:
        """The entry of a key, now the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if not entry.edges.is_fresh():
                # The key's version came from another counter on the same storage.
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return entry

    def find_alive(self, key: Key) -> Edges | None:
        """Edges that someone holds, in an entry or not."""
        with self._lock:
            edges = self._alive.get(key)
            return edges if edges is not None and edges.is_fresh() else None

    def watch(self, edges: Edges) -> None:
        """Find the edges by their key for as long as someone holds them."""
        with self._lock:
            self._alive[edges.key] = edges

    def keep(self, edges: Edges) -> Entry:
        """Make an entry."""
        with self._lock:
            self._drop_unreachable()
            self._drop(edges.key)
            entry = self._entries[edges.key] = Entry(edges)
            self._alive[edges.key] = edges
            self.grown(edges)
        return entry

    def grown(self, edges: Edges) -> None:
        """Count the bytes of the edges anew, and drop entries until the bounds hold."""
        with self._lock:
            entry = self._entries.get(edges.key)
            if entry is None or entry.edges is not edges:
                return
            held, device = edges.held_bytes(), edges.device
            self._total[device] = self._total.get(device, 0) + held - entry.nbytes
            entry.nbytes = held
            while len(self._entries) > self.max_entries:
                self._drop(next(iter(self._entries)))
            if self._total[device] > self.max_bytes(device):
                self._drop_bytes(device)

    def _drop_bytes(self, device: torch.device) -> None:
        *older, _newest = self._entries.items()
        for key, entry in older:
            if self._total[device] <= self.max_bytes(device):
                return
            if entry.edges.device == device:
                self._drop(key)

    def _drop_unreachable(self) -> None:
        """Drop entries whose storage nobody else holds: they cannot be asked for."""
        for key, entry in list(self._entries.items()):
            if entry.edges.is_unreachable():
                self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._total[entry.edges.device] -= entry.nbytes

    def pin(self, edges: Edges) -> None:
        """Keep the edges for good: a CUDA graph reads them at every replay."""
        with self._lock:
            self._pinned[id(edges)] = edges

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drop everything that was built from the storages of these tensors."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        with self._lock:
            for key, edges in list(self._alive.items()):
                if storages & edges.storages.keys():
                    edges.outdated = True
                    self._alive.pop(key, None)
                    self._drop(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self._total.clear()


@lru_cache(maxsize=64)
def _max_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return MAX_BYTES_CPU
    return int(torch.cuda.get_device_properties(device).total_memory * MAX_SHARE)


CACHE = Cache()
