"""What functions of attention take besides their operands, and how it is checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.functional.arguments import check_dense, check_number
from pyg_tiga.impls.attention_types import Options

_OBJECTIVES = ("time", "memory")
# What `Options.scale` is called by those who state it.
_SCALES = {"additive": "negative_slope", "gatv2": "negative_slope"}


def options_of(
    related: Any,
    x: Tensor,
    scale: float,
    self_loops: bool,
    dropout: float,
    seed: Tensor | None,
    objective: str,
    score: str = "additive",
) -> tuple[Options, Tensor | None]:
    """Options of a call and the seed of its dropout, drawn if it is not given.

    Raises:
        TypeError: One is of the wrong type.
        ValueError: One has a value that is not allowed.
    """
    check_number(_SCALES.get(score, "scale"), scale)
    check_number("dropout", dropout)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"'dropout' must be from 0 to 1 (got {dropout})")
    if not isinstance(self_loops, bool):
        raise TypeError(f"'self_loops' must be True or False (got {self_loops!r})")
    if objective not in _OBJECTIVES:
        allowed = ", ".join(map(repr, _OBJECTIVES))
        raise ValueError(f"'objective' must be one of {allowed} (got {objective!r})")
    if seed is not None:
        _check_seed(seed, x.device)
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**62, (1,), device=x.device)
    num_loops = min(related.num_src, related.num_dst) if self_loops else 0
    return Options(float(scale), num_loops, float(dropout), score), seed


def _check_seed(seed: Any, device: torch.device) -> None:
    if not isinstance(seed, Tensor):
        raise TypeError(
            f"'seed' must be a tensor of one int64 (got {type(seed).__name__})"
        )
    if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
        raise ValueError(
            f"'seed' must be one int64 on {device} (got {seed.dtype} of shape "
            f"{list(seed.shape)} on {seed.device})"
        )


def check_terms(
    related: Any,
    options: Options,
    x: Tensor,
    terms: tuple[Tensor | None, Tensor | None],
    edge_mask: Tensor | None,
    names: tuple[str, str] = ("edge_term", "loop_term"),
) -> None:
    """Check what edges and loops have of their own, for features `x` [N, H, ...]."""
    if x.device != related.device:
        raise ValueError(
            f"features and the relation must be on one device (got {x.device} and "
            f"{related.device})"
        )
    if terms[0] is None and terms[1] is None and edge_mask is None:
        return
    heads = x.size(1)
    if terms[0] is not None:
        check_numbers(names[0], terms[0], (related.num_edges, heads), x)
    if terms[1] is not None:
        check_numbers(names[1], terms[1], (options.num_loops, heads), x)
    if edge_mask is not None:
        check_shape("edge_mask", edge_mask, (related.num_edges,), x)
        if edge_mask.dtype != torch.bool:
            raise ValueError(f"'edge_mask' must be bool (got {edge_mask.dtype})")


def check_numbers(name: str, value: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Hold an argument to floating point numbers of a shape, on the device of `x`."""
    check_shape(name, value, shape, x)
    if not value.is_floating_point():
        raise ValueError(
            f"'{name}' must be a floating point tensor (got '{value.dtype}')"
        )


def check_shape(name: str, value: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Hold an argument to a shape, and to the device of `x`."""
    check_dense(name, value)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"'{name}' must have shape {list(shape)} (got {list(value.shape)})"
        )
    if value.device != x.device:
        raise ValueError(f"'{name}' must be on {x.device} (got {value.device})")
