"""Launching a kernel at little host cost.

Triton's own launcher inspects every argument of every call, some 30 microseconds for our
kernels. What it finds is fixed by a few facts, which are the key here; the compiled
kernel of a key is then launched directly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_INT32 = 1 << 31
_MOST = 4096

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    flags: dict[str, Any],
    warps: int,
) -> None:
    """Launch `kernel` on its tensors' device and current stream.

    Args:
        kernel: A Triton kernel whose parameters stand in the order of the arguments
            here.
        grid: Programs along each axis.
        tensors: Pointers; those that stand for an absent operand are not read.
        sizes: Integers that the kernel does not specialise on.
        widths: Integers that it does specialise on.
        flags: Its constexprs, in order.
        warps: Warps per program.
    """
    device = tensors[0].device
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    constants = tuple(flags.values())
    if addresses % _ALIGNMENT or max(sizes, default=0) >= _INT32 or device.type != "cuda":
        with on_device(device):
            kernel[grid](*tensors, *sizes, *widths, *constants, num_warps=warps)
        return
    dtypes = tuple([tensor.dtype for tensor in tensors])
    key = (id(kernel), device.index, warps, widths, constants, dtypes)
    compiled = _compiled.get(key)
    with on_device(device):
        if compiled is None:
            arguments = (*tensors, *sizes, *widths, *constants)
            _remember(key, kernel[grid](*arguments, num_warps=warps))
            return
        padded = (*grid, 1, 1)[:3]
        compiled[padded](*tensors, *sizes, *widths, *constants)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _remember(key: tuple[Any, ...], compiled: Any) -> None:
    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled[key] = compiled
