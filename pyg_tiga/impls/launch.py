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

    __slots__ = ("_constants", "_grid", "_is_small", "_kernel", "_runners", "_sizes", "_warps")

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
        self._sizes = sizes
        self._is_small = max(sizes, default=0) < _INT32
        self._constants = tuple(flags.values())
        self._warps = warps
        self._runners: dict[Any, Any] = {}

    def __call__(self, tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            tensors: Pointers; one that stands for an absent operand is not read.
            widths: Integers that the kernel specialises on.
        """
        device = tensors[0].device
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        arguments = (*tensors, *self._sizes, *widths, *self._constants)
        fast = device.type == "cuda" and self._is_small and addresses % _ALIGNMENT == 0
        if not fast:
            with on_device(device):
                self._kernel[self._grid](*arguments, num_warps=self._warps)
            return
        index = device.index
        key = (index, widths, tuple([tensor.dtype for tensor in tensors]))
        runner = self._runners.get(key)
        if runner is None:
            with on_device(device):
                compiled = self._kernel[self._grid](*arguments, num_warps=self._warps)
            self._runners[key] = compiled[self._grid]
        elif index == torch.cuda.current_device():
            runner(*arguments, stream=torch._C._cuda_getCurrentRawStream(index))
        else:
            with torch.cuda.device(device):
                runner(*arguments, stream=torch._C._cuda_getCurrentRawStream(index))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
