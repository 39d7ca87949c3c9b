"""Launching a kernel at little host cost.

Triton's own launcher inspects every argument of every call, some 30 microseconds for
our kernels. What it looks for changes between calls only with dtypes, strides and
alignment of operands. A `Launcher` looks at these alone and then launches the compiled
kernel; a `Prepared` kernel (`prepared`) has its strides and the arrays of a relation
already. Both pass plain addresses: of a tensor, Triton would ask the driver.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes
INT32 = 1 << 31
_MOST = 8192
_NOTHING = nullcontext()


class Compiled(NamedTuple):
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
_compiled: dict[tuple[Any, ...], Compiled] = {}


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
    compiled = _compiled.get(_shared_key(kernel, warps, constants, widths, tensors))
    if compiled is not None and is_current(index) and max(sizes, default=0) < INT32:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not bits_of(pointers) % ALIGNMENT:
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
        self._is_small = max(sizes, default=0) < INT32
        self._warps = warps
        self._known: dict[Any, Compiled] = {}

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
            if not bits_of(pointers) % ALIGNMENT:
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
        if index >= 0 and self._is_small and not bits_of(pointers) % ALIGNMENT:
            made = (self._kernel, self._warps, constants)
            shared = _shared_key(*made, widths, tensors)
        given = (tensors, (*sizes, *widths, *constants))
        options = {"num_warps": self._warps}
        with device_guard(index):
            compiled = launch_shared(
                shared, self._kernel, self._grid, pointers, *given, options
            )
        if compiled is not None:
            self._known[key] = compiled


def _shared_key(
    kernel: Any,
    warps: int,
    constants: tuple[Any, ...],
    widths: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
) -> tuple[Any, ...]:
    """What Triton compiles a kernel for, whose sizes are of 32 bits."""
    dtypes = [tensor.dtype for tensor in tensors]
    index = tensors[0].get_device()
    return (id(kernel), warps, constants, index, widths, *dtypes)


def launch_shared(
    shared: tuple[Any, ...] | None,
    kernel: Any,
    grid: tuple[int, int, int],
    addresses: list[int],
    pointers: tuple[Tensor, ...] | list[Tensor],
    rest: tuple[Any, ...],
    options: dict[str, int],
) -> Compiled | None:
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
    compiled = Compiled(found, found.run, found.function, found.packed_metadata)
    _compiled[shared] = compiled
    return compiled


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


def bits_of(addresses: Any) -> int:
    """The bits that are set in any of them."""
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
