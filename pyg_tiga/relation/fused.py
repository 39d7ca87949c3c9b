"""Building in fewer launches, by whoever can: kernels are no part of the ground floor.

Without an injected builder, or on a device that it does not serve, groupings are built
with PyTorch's own operations, to the same values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pyg_tiga.relation.csr import Grouping


class FusedBuild(Protocol):
    """What builds groupings and summaries in few launches."""

    def serves(self, device: torch.device) -> bool:
        """Whether it runs on a device."""

    def group_coo(
        self, edge_index: Tensor, end: int, sizes: tuple[int, int], is_sorted: bool
    ) -> tuple[Grouping, Tensor]:
        """Group edges as :func:`pyg_tiga.relation.csr.group_coo` does.

        Returns:
            The grouping and its summary, `[WIDTH]` (see `pyg_tiga.relation.stats`).
        """

    def summarise(self, ptr: Tensor, index: Tensor, good: Tensor) -> Tensor:
        """Summarise as :func:`pyg_tiga.relation.stats.summarise` does."""


_injected: FusedBuild | None = None


def inject(builder: FusedBuild | None) -> None:
    """Have a builder used on the devices that it serves."""
    global _injected
    _injected = builder


def builder_for(device: torch.device) -> FusedBuild | None:
    """The builder that serves a device, if there is one."""
    if _injected is not None and _injected.serves(device):
        return _injected
    return None
