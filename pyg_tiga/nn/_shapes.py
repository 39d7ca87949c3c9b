"""Parameters of other shapes than a layer gives its own.

PyG broadcasts many of them, where a fused kernel would read past their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_geometric.nn.dense.linear import Linear

__all__: list[str] = []

Shape = tuple[int, ...]


def attention_reasons(
    layer: Any, scores: Sequence[str], maps: Sequence[str]
) -> list[str]:
    """Reasons for the parent's path that lie in what an attention layer learns.

    Args:
        layer: The layer.
        scores: Names of its vectors of scores, of which the first is always there.
        maps: Names of its maps to all heads and channels.
    """
    heads, channels = layer.heads, layer.out_channels
    shape = (1, heads, channels)
    if _found(layer, scores[0]).shape != shape:
        return ["'heads' or 'out_channels' changed after construction"]
    width = heads * channels
    bias = (width if layer.concat else channels,)
    wanted = {**dict.fromkeys(scores[1:], shape), "bias": bias}
    return shape_reasons(layer, wanted) + map_reasons(layer, maps, width)


def shape_reasons(owner: Any, wanted: dict[str, Shape], prefix: str = "") -> list[str]:
    """Reasons that lie in parameters of a module, of those that it has."""
    reasons = []
    for name, shape in wanted.items():
        # None has no shape, and what is no tensor is taken at its word.
        found = getattr(_found(owner, name), "shape", shape)
        if found != shape:
            reasons.append(
                f"'{prefix}{name}' has the shape {list(found)} in place of "
                f"{list(shape)}"
            )
    return reasons


def map_reasons(
    layer: Any, names: Sequence[str], width: int | None = None
) -> list[str]:
    """Reasons that lie in PyG's linear maps, which give `width` channels or their own.

    Maps of other kinds are called, and those that wait for their input have no shape.
    """
    reasons = []
    for name in names:
        lin = layer._modules.get(name)
        if type(lin) is Linear and lin.in_channels > 0:
            rows = lin.out_channels if width is None else width
            wanted = {"weight": (rows, lin.in_channels), "bias": (rows,)}
            reasons += shape_reasons(lin, wanted, f"{name}.")
    return reasons


def _found(owner: Any, name: str) -> Any:
    """A parameter, or what stands in its place; where a model is replicated, a tensor.

    Raises:
        AttributeError: It was deleted.
    """
    # The dictionary first: modules look up attributes by a slow road.
    value = owner._parameters.get(name)
    return getattr(owner, name) if value is None else value
