"""Kernels that are prepared for a relation: launched, or made a step of host code."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga.impls.launch import (
    ALIGNMENT,
    INT32,
    Compiled,
    bits_of,
    is_watched,
    launch_shared,
)

_FLOAT = 4
_LINE = 128 // _FLOAT  # of a cache, in float32 numbers
_WARP = 32
_POINTER = 8  # bytes
# Triton passes two buffers behind a kernel's own parameters.
_NO_SCRATCH = (0, 0)


class NotReplayed(Exception):
    """A launch cannot be a step of compiled host code; says why."""


class Room(NamedTuple):
    """One float32 buffer into which several pointers of a kernel point.

    Args:
        places: Where each begins, by name, in numbers; see :func:`room_of`.
        size: Numbers in all.
    """

    places: dict[str, int]
    size: int


def room_of(sizes: dict[str | tuple[str, ...], int]) -> Room:
    """A room for arrays of these sizes, each beginning a line of cache.

    An array may have several names, where kernels call it differently.
    """
    places, end = {}, 0
    for names, size in sizes.items():
        places |= dict.fromkeys((names,) if isinstance(names, str) else names, end)
        end += -(-size // _LINE) * _LINE
    return Room(places, end)


class Prepared:
    """A kernel with everything but the pointers that change from call to call.

    Its caller finds it again by whatever the other arguments depend on: a call looks at
    nothing but dtypes and alignment of the changing pointers.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        given: Arguments by name: numbers, constexprs, and tensors that never change,
            which are kept alive.
        varying: Names of the pointers that each call gives, in its order; rooms come
            last, and may have places for pointers of other kernels.
        absent: Stands for the pointers of which nobody speaks; it is not read.
        warps: Warps per program.
        registers: Registers per thread at most, where the compiler can be told; 0 for
            as many as it likes.
    """

    __slots__ = (
        "_compiled",
        "_dtypes",
        "_grid",
        "_index",
        "_is_usual",
        "_kept",
        "_kernel",
        "_options",
        "_rooms",
        "_slots",
        "_template",
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        given: dict[str, Any],
        varying: tuple[str | Room, ...],
        absent: Tensor,
        warps: int = 1,
        registers: int = 0,
    ) -> None:
        names = kernel.arg_names
        singles = [name for name in varying if isinstance(name, str)]
        unknown = {*given, *singles}.difference(names)
        assert not unknown, f"'{kernel.__name__}' has no {sorted(unknown)}"
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._options = {"num_warps": warps}
        if registers and torch.version.hip is None:
            self._options["maxnreg"] = registers
        self._slots = tuple([names.index(name) for name in singles])
        self._rooms = [
            [
                (names.index(name), place * _FLOAT)
                for name, place in room.places.items()
                if name in names
            ]
            for room in varying[len(singles) :]
        ]
        # Tensors where Triton compiles, and addresses where it launches.
        self._kept = [
            given.get(name, absent) if name.endswith("_ptr") else given[name]
            for name in names
        ]
        self._template = [
            value.data_ptr() if isinstance(value, Tensor) else value
            for value in self._kept
        ]
        self._index = absent.get_device()
        self._is_usual = self._index >= 0 and not self._fixedbits_of() % ALIGNMENT
        self._compiled: Compiled | None = None
        self._dtypes: tuple[torch.dtype, ...] = ()

    def __call__(self, stream: Any, *tensors: Any) -> None:
        """Launch on a stream of the current device, which is that of the tensors.

        Instead of a stream there may be steps that are recorded, see `replay`.

        Raises:
            NotReplayed: The launch cannot be a step.
        """
        compiled = self._compiled
        if type(stream) is not int:
            self._record(stream, tensors)
            return
        if compiled is None:
            self._launch_anew(tensors)
            return
        arguments = self._template.copy()
        bits = 0
        given = iter(tensors)
        for slot, dtype, tensor in zip(self._slots, self._dtypes, given):  # noqa: B905
            arguments[slot] = address = tensor.data_ptr()
            bits |= address
            if tensor.dtype is not dtype:
                bits = 1
                break
        for room, tensor in zip(self._rooms, given):  # noqa: B905
            address = tensor.data_ptr()
            bits |= address
            for slot, place in room:
                arguments[slot] = address + place
        if bits % ALIGNMENT:
            self._launch_anew(tensors)
            return
        if is_watched():
            compiled.fire(self._grid, stream, arguments)
            return
        _, run, function, metadata = compiled
        run(*self._grid, stream, function, metadata, None, None, None, *arguments)

    def _record(self, steps: Any, slots: tuple[Any, ...]) -> None:
        """Make the launch a step."""
        compiled = self._compiled
        if compiled is None:
            raise NotReplayed("operands are not aligned")
        _check_plain(compiled)
        sources = [
            (parameter, slot.place, 0)
            for parameter, slot in zip(self._slots, slots)  # noqa: B905
        ]
        for room, slot in zip(self._rooms, slots[len(self._slots) :], strict=True):
            sources += [(parameter, slot.place, place) for parameter, place in room]
        # Parameters of a value that is compiled in are not passed.
        kinds = list(_signature(compiled.kernel).values())
        passed = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        words = [_word(self._template[i], kinds[i]) for i in passed]
        warps, _, shared = compiled.metadata[:3]
        reason = steps.kernel(
            compiled.function,
            self._grid,
            _WARP * warps,
            shared,
            [*words, *_NO_SCRATCH],
            [_size(kinds[i]) for i in passed] + [_POINTER] * len(_NO_SCRATCH),
            [(passed.index(i), place, offset) for i, place, offset in sources],
            True,
        )
        if reason is not None:
            raise NotReplayed(reason)

    def _fixedbits_of(self) -> int:
        slots = {*self._slots, *[slot for room in self._rooms for slot, _ in room]}
        return bits_of(
            value.data_ptr()
            for slot, value in enumerate(self._kept)
            if slot not in slots and isinstance(value, Tensor)
        )

    def _launch_anew(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch what was compiled for another graph, or else by Triton's own road."""
        arguments = self._kept.copy()
        singles = tensors[: len(self._slots)]
        for slot, tensor in zip(self._slots, singles, strict=True):
            arguments[slot] = tensor
        for room, tensor in zip(self._rooms, tensors[len(singles) :], strict=True):
            for slot, place in room:
                arguments[slot] = tensor.view(-1)[place // _FLOAT :]
        pointers = [value for value in arguments if isinstance(value, Tensor)]
        rest = tuple([value for value in arguments if not isinstance(value, Tensor)])
        addresses = [pointer.data_ptr() for pointer in pointers]
        shared = None
        if self._is_usual and not bits_of(addresses) % ALIGNMENT:
            shared = self._shared_key(arguments)
        found = launch_shared(
            shared, self._kernel, self._grid, addresses, pointers, rest, self._options
        )
        if found is not None:
            self._dtypes = tuple([tensor.dtype for tensor in singles])
            self._compiled = found

    def _shared_key(self, arguments: list[Any]) -> tuple[Any, ...] | None:
        """What Triton compiles a kernel for; None where sizes need 64 bits."""
        key = [id(self._kernel), *self._options.values(), self._index]
        for value, parameter in zip(arguments, self._kernel.params, strict=True):
            if isinstance(value, Tensor):
                key.append(value.dtype)
            elif not parameter.do_not_specialize:
                key.append(value)
            elif value >= INT32:
                return None
        return tuple(key)


def _check_plain(compiled: Compiled) -> None:
    """Whether a kernel needs nothing but its parameters.

    Raises:
        NotReplayed: It needs more.
    """
    run = compiled.run
    more = ("global_scratch_size", "profile_scratch_size")
    more += ("launch_cooperative_grid", "launch_pdl")
    if compiled.metadata[1] != 1 or any(getattr(run, name, True) for name in more):
        raise NotReplayed("a kernel needs more than a plain launch")


def _signature(kernel: Any) -> dict[Any, str]:
    """Types of a compiled kernel's parameters, in order."""
    signature = getattr(getattr(kernel, "src", None), "signature", None)
    if signature is None:
        raise NotReplayed("Triton does not say what a kernel's parameters are")
    return signature


def _size(kind: str) -> int:
    """Bytes of a parameter of one of Triton's types."""
    return _POINTER if kind[0] == "*" else max(1, int(kind.lstrip("fpiu")) // 8)


def _word(value: float, kind: str) -> int:
    """A parameter as the lowest bytes of a 64-bit number."""
    if kind in ("fp32", "f32"):
        return int.from_bytes(struct.pack("<f", value), "little")
    if kind[0] == "*" or kind[0] in "iu":
        return int(value) % (1 << 64)
    raise NotReplayed(f"a parameter is of type '{kind}'")
