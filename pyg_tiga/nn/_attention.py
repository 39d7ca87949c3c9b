"""What the attention layers have in common around their one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga.functional.arguments import check_number
from pyg_tiga.nn._inputs import is_autocast_on

__all__: list[str] = []

_SEEDS = 2**63 - 1
_HALF = (torch.float16, torch.bfloat16)


def feature_reasons(edge_attr: Any) -> list[str]:
    """Reasons for the parent's path that lie in edge features.

    This is for layers whose features cannot be folded into one number per head.
    """
    return [] if edge_attr is None else ["edge features have no fused form yet"]


def row_reasons(x_dst: Tensor | None, counts: tuple[int, int]) -> list[str]:
    """Reasons for the parent's path that lie in the rows of the destinations."""
    if x_dst is None or x_dst.size(-2) == counts[1]:
        return []
    return [f"x[1] has {x_dst.size(-2)} rows where the output has {counts[1]}"]


def check_dropout(layer: Any) -> None:
    """Hold the probability to what PyTorch takes, in evaluation as well.

    Raises:
        TypeError: It is no number.
        ValueError: It is another.
    """
    check_number("dropout", layer.dropout)
    if not 0.0 <= layer.dropout <= 1.0:
        raise ValueError(f"'dropout' must be in [0, 1] (got {layer.dropout})")


def head_shape(layer: Any) -> tuple[int, int]:
    """Heads and channels; PyG takes ``True`` for one, and views of a tuple do not."""
    return int(layer.heads), int(layer.out_channels)


def dropout_options(layer: Any, device: torch.device) -> dict[str, Any]:
    """What the operation has to know of dropout; empty where there is none."""
    if not (layer.training and layer.dropout > 0.0):
        return {}
    seed = torch.randint(_SEEDS, (1,), device=device)
    return {"dropout": layer.dropout, "seed": seed}


def in_parents_dtype(value: Tensor) -> Tensor:
    """Averages or weights in the dtype that the parent gives.

    Under autocast on CUDA, sums and exponentials are float32, on the CPU they are not.
    """
    is_widened = value.is_cuda and value.dtype in _HALF and is_autocast_on("cuda")
    return value.float() if is_widened else value


def join_heads(layer: Any, out: Tensor) -> Tensor:
    """Concatenate or average the heads of ``[N_dst, H, C]``."""
    if layer.concat:
        return out.view(-1, layer.heads * layer.out_channels)
    return out.mean(dim=1)
