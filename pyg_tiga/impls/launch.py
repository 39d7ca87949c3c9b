"""Launching a kernel at little host cost.

Triton's own launcher inspects every argument of every call, some 30 microseconds for our
kernels. What it looks for changes between calls only with the addresses and strides of
operands; a `Launcher` looks at these alone and then launches the compiled kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_INT32 = 1 << 31


class Launcher:
    """A kernel with its grid, sizes and constexprs, to be launched on operands.

    The kernel's parameters are, in this order: pointers, sizes (on which it does not
    specialise), widths (on which it does) and constexprs.

    Args:
        kernel: A Triton kernel.
        grid: Programs along each axis.
        sizes: Integers that the kernel does not specialise on.
        flags: Constexprs, in order.
        warps: Warps per program.
    """

    __slots__ = ("_arguments", "_grid", "_is_small", "_kernel", "_runners", "_warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        flags: dict[str, Any],
        warps: int = 1,
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = (sizes, tuple(flags.values()))
        self._is_small = max(sizes, default=0) < _INT32
        self._warps = warps
        self._runners: dict[Any, Any] = {}

    def __call__(self, tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            tensors: Pointers; one that stands for an absent operand is not read.
            widths: Integers that the kernel specialises on.
        """
        index = tensors[0].get_device()
        addresses = 0
        dtypes = []
        for tensor in tensors:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        sizes, constants = self._arguments
        key = (index, widths, *dtypes)
        runner = self._runners.get(key)
        if runner is None or addresses % _ALIGNMENT or index != current_device():
            self._launch_anew(key, tensors, (*sizes, *widths, *constants), addresses)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        runner(*tensors, *sizes, *widths, *constants, stream=stream)

    def _launch_anew(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        rest: tuple[Any, ...],
        addresses: int,
    ) -> None:
        """Launch by Triton's own road, and keep what it compiled for aligned operands."""
        with on_device(tensors[0].device):
            kernel = self._kernel[self._grid](*tensors, *rest, num_warps=self._warps)
        if key[0] >= 0 and self._is_small and addresses % _ALIGNMENT == 0:
            self._runners[key] = kernel[self._grid]


def current_device() -> int:
    """The current CUDA device; -1, as of a CPU tensor, where CUDA is not in use."""
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else -1


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
