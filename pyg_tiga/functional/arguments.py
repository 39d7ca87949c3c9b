"""Rules that hold for operands of every public function."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_dense(name: str, value: Any) -> None:
    """Raise unless an argument is a dense tensor of at least one dimension.

    Raises:
        TypeError: It is no tensor, or one of another layout, or its numbers are of
            less than 16 bits, which PyTorch has no sums of.
        ValueError: It has no dimension.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"'{name}' must be a dense tensor (got {type(value).__name__})")
    if value.layout != torch.strided:
        raise TypeError(
            f"'{name}' must be a dense tensor (got layout '{value.layout}'). Call "
            f"'{name}.to_dense()'"
        )
    if value.dtype.is_floating_point and value.dtype.itemsize < 2:
        raise TypeError(
            f"'{name}' must have floating point numbers of 16 bits or more (got "
            f"{value.dtype}). Call '{name}.bfloat16()'"
        )
    if value.dim() == 0:
        raise ValueError(f"'{name}' must have at least one dimension (got none)")


def check_device(name: str, value: Tensor, device: torch.device, of: str) -> None:
    """Raise unless an argument is on the device of something else.

    Raises:
        ValueError: It is on another.
    """
    if value.device != device:
        raise ValueError(
            f"'{name}' and {of} must be on one device (got {value.device} and {device})"
        )


def check_number(name: str, value: Any) -> None:
    """Hold an option to what PyTorch takes for a number.

    That is a tensor of one number, too, but none that wants a gradient: it would not
    get one.

    Raises:
        TypeError: It is something else.
        ValueError: It is NaN.
    """
    if type(value) is float or isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
        if value != value:
            raise ValueError(f"'{name}' must be a number (got {value})")
        return
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise TypeError(f"'{name}' must be a number (got {type(value).__name__})")
    if value.requires_grad:
        raise TypeError(
            f"'{name}' must be a number, which is not trained (got a "
            f"{type(value).__name__} that requires a gradient)"
        )


def check_vectors(**given: Any) -> None:
    """Raise unless arguments are floating point tensors ``[nodes, heads, channels]``.

    Raises:
        TypeError: One is no dense tensor.
        ValueError: A shape or dtype does not fit.
    """
    _check_floats(given, 3, "[nodes, heads, channels]")


def check_scores(**given: Any) -> None:
    """Raise unless arguments are floating point tensors ``[nodes, heads]``.

    Raises:
        TypeError: One is no dense tensor.
        ValueError: A shape or dtype does not fit.
    """
    _check_floats(given, 2, "with shape [nodes, heads]")


def _check_floats(given: dict[str, Any], dims: int, form: str) -> None:
    for name, x in given.items():
        check_dense(name, x)
        if x.dim() != dims or not x.is_floating_point():
            raise ValueError(
                f"'{name}' must be a floating point tensor {form} (got {x.dtype} of "
                f"shape {list(x.shape)})"
            )
