"""Launching a kernel at little host cost.

Triton's own launcher inspects every argument of every call, some 30 microseconds for
our kernels. What it looks for changes between calls only with dtypes, strides and
alignment of operands. A `Launcher` looks at these alone and then launches the compiled
kernel; a `Prepared` kernel has its strides and the arrays of a relation already. Both
pass plain addresses: of a tensor, Triton would ask the driver.
"""

from __future__ import annotations

import functools
import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes
_FLOAT = 4
_LINE = 128 // _FLOAT  # of a cache, in float32 numbers
_INT32 = 1 << 31
_MOST = 8192
_WARP = 32
_POINTER = 8  # bytes
# Triton passes two buffers behind a kernel's own parameters.
_NO_SCRATCH = (0, 0)
_NOTHING = nullcontext()


class _Compiled(NamedTuple):
    """What launches a compiled kernel, on the device on which it was loaded."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any

    def fire(
        self, grid: tuple[int, int, int], stream: int, arguments: list[Any]
    ) -> None:
        """Launch it, past all that Triton does for profilers unless one listens."""
        if is_watched():
            self.kernel[grid](*arguments, stream=stream)
            return
        nothing = (None, None, None)
        self.run(*grid, stream, self.function, self.metadata, *nothing, *arguments)


# (kernel, constexprs, warps, device, numbers, dtypes) -> what Triton compiled for it.
_compiled: dict[tuple[Any, ...], _Compiled] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int = 1,
) -> None:
    """Launch a kernel once, on the current stream of its tensors' device.

    The kernel's parameters are, in this order, what is given here.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        tensors: Pointers; one that stands for an absent operand is not read.
        sizes: Integers that the kernel does not specialise on.
        widths: Numbers that it does specialise on.
        constants: Constexprs.
        warps: Warps per program.
    """
    index = tensors[0].get_device()
    key = (id(kernel), warps, constants, index, widths)
    compiled = _compiled.get((*key, *[tensor.dtype for tensor in tensors]))
    if compiled is not None and is_current(index) and max(sizes, default=0) < _INT32:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not _bits(pointers) % _ALIGNMENT:
            arguments = [*pointers, *sizes, *widths, *constants]
            compiled.fire((*grid, 1, 1)[:3], current_stream(index), arguments)
            return
    Launcher(kernel, grid, sizes, constants, warps)(tensors, widths)


class Launcher:
    """A kernel with its grid, sizes and constexprs, to be launched on operands.

    Args:
        kernel: As for :func:`launch`, and so are all that follow.
        grid: Likewise.
        sizes: Likewise.
        constants: Likewise.
        warps: Likewise.
    """

    __slots__ = ("_arguments", "_grid", "_is_small", "_kernel", "_known", "_warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int = 1,
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = (sizes, constants)
        self._is_small = max(sizes, default=0) < _INT32
        self._warps = warps
        self._known: dict[Any, _Compiled] = {}

    def __call__(
        self,
        tensors: tuple[Tensor, ...],
        widths: tuple[Any, ...] = (),
        varying: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            tensors: Pointers.
            widths: Numbers that the kernel specialises on.
            varying: Those of the tensors that are not the same ones at every call of
                this launcher; all, if absent.
        """
        index = tensors[0].get_device()
        given = tensors if varying is None else varying
        key = (index, widths, *[tensor.dtype for tensor in given])
        compiled = self._known.get(key)
        if compiled is not None and index == current_device():
            pointers = [tensor.data_ptr() for tensor in tensors]
            if not _bits(pointers) % _ALIGNMENT:
                sizes, constants = self._arguments
                stream = current_stream(index)
                arguments = [*pointers, *sizes, *widths, *constants]
                compiled.fire(self._grid, stream, arguments)
                return
        self._launch_anew(key, tensors, widths)

    def _launch_anew(
        self, key: tuple[Any, ...], tensors: tuple[Tensor, ...], widths: tuple[Any, ...]
    ) -> None:
        """Launch what was compiled for another graph, or else by Triton's own road."""
        index = key[0]
        sizes, constants = self._arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        shared = None
        if index >= 0 and self._is_small and not _bits(pointers) % _ALIGNMENT:
            dtypes = [tensor.dtype for tensor in tensors]
            kernel = (id(self._kernel), self._warps)
            shared = (*kernel, constants, index, widths, *dtypes)
        given = (tensors, (*sizes, *widths, *constants))
        options = {"num_warps": self._warps}
        with device_guard(index):
            compiled = _launch_shared(
                shared, self._kernel, self._grid, pointers, *given, options
            )
        if compiled is not None:
            self._known[key] = compiled


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
        self._is_usual = self._index >= 0 and not self._fixed_bits() % _ALIGNMENT
        self._compiled: _Compiled | None = None
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
        if bits % _ALIGNMENT:
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

    def _fixed_bits(self) -> int:
        slots = {*self._slots, *[slot for room in self._rooms for slot, _ in room]}
        return _bits(
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
        if self._is_usual and not _bits(addresses) % _ALIGNMENT:
            shared = self._shared_key(arguments)
        found = _launch_shared(
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
            elif value >= _INT32:
                return None
        return tuple(key)


def _launch_shared(
    shared: tuple[Any, ...] | None,
    kernel: Any,
    grid: tuple[int, int, int],
    addresses: list[int],
    pointers: tuple[Tensor, ...] | list[Tensor],
    rest: tuple[Any, ...],
    options: dict[str, int],
) -> _Compiled | None:
    """Launch by a key of `_compiled`, or by Triton's road; gives what may be reused.

    Pointers are the first parameters of every kernel.
    """
    compiled = _compiled.get(shared) if shared is not None else None
    if compiled is not None:
        stream = current_stream(pointers[0].get_device())
        compiled.fire(grid, stream, [*addresses, *rest])
        return compiled
    found = kernel[grid](*pointers, *rest, **options)
    if shared is None:
        return None
    if len(_compiled) >= _MOST:
        _compiled.clear()
    compiled = _Compiled(found, found.run, found.function, found.packed_metadata)
    _compiled[shared] = compiled
    return compiled


def _check_plain(compiled: _Compiled) -> None:
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


def current_stream(index: int) -> int:
    """The current stream of a device as a number; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0


def current_device() -> int:
    """The current CUDA device, where a tensor is on one: CUDA is in use then."""
    return torch._C._cuda_getDevice()


def is_current(index: int) -> bool:
    """Whether kernels launched now run on the device of tensors with this index."""
    return index < 0 or index == current_device()


def device_guard(index: int) -> AbstractContextManager[object]:
    """Make a GPU current: Triton launches on the current one."""
    if is_current(index):
        return _NOTHING
    return torch.cuda.device(index)


def _bits(addresses: Any) -> int:
    return functools.reduce(int.__or__, addresses, 0)


def is_watched() -> bool:
    """Whether a profiler listens to Triton's launches."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime
