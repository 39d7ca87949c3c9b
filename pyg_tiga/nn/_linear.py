"""What layers may do with the dense maps around an aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from pyg_tiga.nn._inputs import num_edges
from pyg_tiga.ops.projections import project

__all__: list[str] = []

# What grouping the edges by their other end costs, in elements moved per edge.
_REGROUPING = 16


def module_of(layer: Any, name: str) -> Any:
    """A submodule, or what stands in its place.

    Raises:
        AttributeError: It was deleted.
    """
    # The dictionary first: modules look up attributes by a slow road.
    found = layer._modules.get(name)
    return getattr(layer, name) if found is None else found


def is_plain(
    module: torch.nn.Module | None, cls: type[torch.nn.Module] = Linear
) -> bool:
    """Whether a module does what its class says and nobody listens to it.

    Only then may a layer compute what the module would, without calling it.
    Parametrisations change the class, and a lazy PyG map that has not seen its input
    waits for it in a hook, so that neither needs a test of its own.
    """
    return (
        type(module) is cls
        and not (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._backward_pre_hooks
            or module._backward_hooks
        )
        and "forward" not in module.__dict__
        and not _has_any_global_hook()
    )


def is_untouched(
    module: torch.nn.Module | None, cls: type[torch.nn.Module] = Linear
) -> bool:
    """:func:`is_plain` where nobody listens to all modules, for eager calls.

    Modules look up attributes by a slow road, on which their dictionary is not.
    """
    if type(module) is not cls:
        return False
    state = module.__dict__
    return not (
        state["_forward_pre_hooks"]
        or state["_forward_hooks"]
        or state["_backward_pre_hooks"]
        or state["_backward_hooks"]
        or "forward" in state
    )


def has_bias(lin: torch.nn.Module) -> bool:
    """Whether a linear map adds a bias, or may: one that is no parameter counts too."""
    parameters = lin._parameters
    return "bias" not in parameters or parameters["bias"] is not None


def reads_alike(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two maps take the same input, so that one check serves both."""
    return (
        type(one) is type(other) is Linear
        and one.in_channels == other.in_channels > 0
        and one.weight.dtype == other.weight.dtype
    )


def apply_maps(calls: Sequence[tuple[torch.nn.Module, Tensor]]) -> list[Tensor]:
    """Results of maps of features ``[N, F]``, for those of the same in one step.

    Only gradients gain by it. Where one of the maps is not plain, all are called, so
    that who listens hears all that a call of the layer does, in its order.
    """
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not all(is_plain(lin) for lin, _ in calls)
    ):
        return [lin(x) for lin, x in calls]
    found = {}
    for _, x in calls:
        places = [i for i, (_, other) in enumerate(calls) if other is x]
        if places[0] not in found:
            maps = [(calls[i][0].weight, calls[i][0].bias) for i in places]
            found.update(zip(places, project(x, maps), strict=True))
    return [found[i] for i in range(len(calls))]


def transform_first(
    lin: torch.nn.Module,
    x: Tensor,  # [*, N_src, F_in]
    edge_index: Any,
    counts: tuple[int, int],
) -> bool:
    """Whether a linear map before the aggregation costs less than after it.

    Sum and mean commute with a map (but for its bias). Gathers then move rows of F_out
    instead of F_in; dense reads and writes are over N_src instead of N_dst nodes, which
    are many more in loader batches. Where only the map is trained and not its input (a
    first layer), a map in front needs the transposed aggregation in the backward, which
    a map behind does not. All costs are in elements moved.
    """
    if type(lin) is not Linear or lin.out_channels >= lin.in_channels:
        return False
    if not is_plain(lin):
        return False
    weight = lin.weight
    wide, narrow = weight.size(1), weight.size(0)
    trains = torch.is_grad_enabled()
    wide_passes = 2 if trains and x.requires_grad else 1
    narrow_passes = 2 if trains and (x.requires_grad or weight.requires_grad) else 1
    before, after = narrow_passes * narrow, wide_passes * wide
    num_src, num_dst = counts
    if torch.compiler.is_compiling():
        # Sizes may be symbols here, and to compare costs would be a guard on them.
        return before <= after and num_src == num_dst
    edges = num_edges(edge_index)
    before = edges * before + num_src * (wide + narrow)
    if narrow_passes > wide_passes:
        before += edges * _REGROUPING
    return before < edges * after + num_dst * 2 * wide
