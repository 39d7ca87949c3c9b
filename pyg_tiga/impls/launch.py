"""Launching a kernel at little host cost.

Triton's own launcher inspects every argument of every call, some 30 microseconds for
our kernels. What it looks for changes between calls only with dtypes, strides and
alignment of operands; a `Launcher` looks at these alone and then launches the compiled
kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_INT32 = 1 << 31
_MOST = 8192

# (kernel, constexprs, warps, device, widths, dtypes) -> what Triton compiled for it.
_compiled: dict[tuple[Any, ...], Any] = {}


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

    __slots__ = ("_arguments", "_grid", "_is_small", "_kernel", "_runners", "_warps")

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
        self._runners: dict[Any, Any] = {}

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
        addresses = 0
        dtypes = []
        for tensor in tensors if varying is None else varying:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        sizes, constants = self._arguments
        key = (index, widths, *dtypes)
        runner = self._runners.get(key)
        if runner is None or addresses % _ALIGNMENT or index != current_device():
            self._launch_anew(key, tensors, widths, addresses)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        runner(*tensors, *sizes, *widths, *constants, stream=stream)

    def _launch_anew(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        widths: tuple[Any, ...],
        addresses: int,
    ) -> None:
        """Launch what was compiled for another graph, or else by Triton's own road."""
        sizes, constants = self._arguments
        arguments = (*tensors, *sizes, *widths, *constants)
        usual = key[0] >= 0 and self._is_small and addresses % _ALIGNMENT == 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        usual = usual and addresses % _ALIGNMENT == 0
        dtypes = tuple([tensor.dtype for tensor in tensors])
        shared = (id(self._kernel), constants, self._warps, key[:2], dtypes)
        compiled = _compiled.get(shared) if usual else None
        with on_device(tensors[0].device):
            if compiled is not None:
                self._runners[key] = compiled[self._grid]
                self._runners[key](*arguments)
                return
            compiled = self._kernel[self._grid](*arguments, num_warps=self._warps)
        if usual:
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[shared] = compiled
            self._runners[key] = compiled[self._grid]


def current_device() -> int:
    """The current CUDA device; -1, as of a CPU tensor, where CUDA is not in use."""
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else -1


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
