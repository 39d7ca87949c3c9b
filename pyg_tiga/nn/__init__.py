"""Drop-in replacements of PyG layers: same constructor, parameters and numbers."""

from __future__ import annotations

from typing import Any

import torch

from pyg_tiga.nn._dropin import DropIn
from pyg_tiga.nn.gat_conv import GATConv
from pyg_tiga.nn.gatv2_conv import GATv2Conv
from pyg_tiga.nn.sage_conv import SAGEConv
from pyg_tiga.nn.transformer_conv import TransformerConv

__all__ = ["GATConv", "GATv2Conv", "SAGEConv", "TransformerConv", "explain"]


def explain(obj: Any) -> str:
    """Say what runs, and why: for a layer, a model, a graph or a plan.

    Args:
        obj: A layer of ours (its last call), a module that holds such layers, a
            :class:`pyg_tiga.Graph`, or a plan.

    Returns:
        Readable text.

    Raises:
        TypeError: There is nothing to explain in `obj`.
    """
    if isinstance(obj, torch.nn.Module):
        layers = [(n, m) for n, m in obj.named_modules() if isinstance(m, DropIn)]
        if layers:
            return "\n\n".join(
                f"{name}: {layer.explain_plan()}" if name else layer.explain_plan()
                for name, layer in layers
            )
    elif not isinstance(obj, type) and hasattr(obj, "explain"):
        return obj.explain()
    is_class = isinstance(obj, type)
    got = f"the class '{obj.__name__}'" if is_class else f"'{type(obj).__name__}'"
    raise TypeError(
        f"'obj' must be a layer or model with layers of pyg_tiga, a graph or a plan "
        f"(got {got})"
    )
