"""Implementations of every operation, in the order in which they are tried."""

from __future__ import annotations

from pyg_tiga.impls import (
    scatter,
    scatter_attention,
    scatter_edge_features,
    triton_attention,
    triton_attention_backward,
    triton_edge_features,
    triton_spmm,
    vendor,
    vendor_attention,
)
from pyg_tiga.impls.base import Implementation

_FEATURES: dict[str, tuple[Implementation, Implementation]] = {
    "feature_dots": (
        triton_edge_features.FEATURE_DOTS,
        scatter_edge_features.FEATURE_DOTS,
    ),
    "feature_sums": (
        triton_edge_features.FEATURE_SUMS,
        scatter_edge_features.FEATURE_SUMS,
    ),
    "feature_spread": (
        triton_edge_features.FEATURE_SPREAD,
        scatter_edge_features.FEATURE_SPREAD,
    ),
}

# On the CPU our kernels run only interpreted, which is for tests: there they are
# refused or asked for by name, and `_CPU` tries them last.
_CUDA: dict[str, tuple[Implementation, ...]] = {
    "spmm": (triton_spmm.SPMM, vendor.SPMM_CUDA, scatter.SPMM),
    "spmm_extremum": (triton_spmm.SPMM_EXTREMUM, scatter.SPMM_EXTREMUM),
    "spmm_extremum_backward": (
        triton_spmm.SPMM_EXTREMUM_WINNERS,
        triton_spmm.SPMM_EXTREMUM_COLUMNS,
        scatter.SPMM_EXTREMUM_BACKWARD,
    ),
    "spmm_extremum_select": (scatter.SPMM_EXTREMUM_SELECT,),
    "sddmm": (triton_spmm.SDDMM, scatter.SDDMM),
    "edge_attention": (triton_attention.ATTENTION, scatter_attention.ATTENTION),
    "edge_attention_backward": (
        triton_attention_backward.ATTENTION_BACKWARD,
        scatter_attention.ATTENTION_BACKWARD,
    ),
    **_FEATURES,
}

_CPU: dict[str, tuple[Implementation, ...]] = {
    **_CUDA,
    "spmm": (vendor.SPMM_CPU, scatter.SPMM, triton_spmm.SPMM),
    "spmm_extremum": (
        vendor.SPMM_EXTREMUM_CPU,
        scatter.SPMM_EXTREMUM,
        triton_spmm.SPMM_EXTREMUM,
    ),
    "spmm_extremum_backward": (
        scatter.SPMM_EXTREMUM_BACKWARD,
        triton_spmm.SPMM_EXTREMUM_COLUMNS,
        triton_spmm.SPMM_EXTREMUM_WINNERS,
    ),
    "sddmm": (scatter.SDDMM, triton_spmm.SDDMM),
    "edge_attention": (
        vendor_attention.ATTENTION,
        scatter_attention.ATTENTION,
        triton_attention.ATTENTION,
    ),
    "edge_attention_backward": (
        vendor_attention.ATTENTION_BACKWARD,
        scatter_attention.ATTENTION_BACKWARD,
        triton_attention_backward.ATTENTION_BACKWARD,
    ),
    **{op: found[::-1] for op, found in _FEATURES.items()},
}


def candidates(op: str, device: str) -> tuple[Implementation, ...]:
    """The implementations of an operation on a device type, best first."""
    return (_CPU if device == "cpu" else _CUDA)[op]
