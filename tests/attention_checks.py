"""What the tests of additive edge attention share: operands, and the float64 check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga import _philox, functional, reference_attention
from pyg_tiga.relation.graph import Graph
from pyg_tiga.testing import Row, assert_accurate, make_case

NAMES = ("value", "alpha_src", "alpha_dst", "edge_term", "loop_term")
HUBS = ("hub_row", "hub_column", "self_loops", "power_law")

Drawn = dict[str, Tensor]


def draw(
    problem: Row,
    heads: int,
    channels: int,
    *,
    device: torch.device | str = "cpu",
    terms: bool = False,
) -> tuple[Graph, Drawn, Tensor]:
    """A relation, operands in float32, and a cotangent."""
    graph = make_case(problem, torch.float32, device).graph()
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "value": (graph.num_src, heads, channels),
        "alpha_src": (graph.num_src, heads),
        "alpha_dst": (graph.num_dst, heads),
    }
    if terms:
        loops = min(graph.num_src, graph.num_dst)
        shapes |= {"edge_term": (graph.num_edges, heads), "loop_term": (loops, heads)}
    drawn = {
        name: torch.randn(shape, generator=generator).to(device)
        for name, shape in shapes.items()
    }
    grad = torch.randn(graph.num_dst, heads, channels, generator=generator)
    return graph, drawn, grad.to(device)


def run(
    call: Any, graph: Graph, drawn: Drawn, grad: Tensor, **options: Any
) -> list[Tensor]:
    """The output and the gradients of all operands, 0 where there is none."""
    leaves = {name: x.clone().requires_grad_() for name, x in drawn.items()}
    operands = [leaves[name] for name in NAMES[:3]]
    terms = {name: leaves[name] for name in NAMES[3:] if name in leaves}
    out = call(graph, *operands, **terms, **options)
    out = out[0] if isinstance(out, tuple) else out
    grads = torch.autograd.grad(
        out, list(leaves.values()), grad.to(out.dtype), allow_unused=True
    )
    found = [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(drawn.values(), grads, strict=True)
    ]
    return [out.detach(), *found]


def for_reference(
    graph: Graph, drawn: Drawn, options: dict[str, Any]
) -> dict[str, Any]:
    """Options of the function as the reference takes them."""
    given = {key: x for key, x in options.items() if key != "objective"}
    loops = min(graph.num_src, graph.num_dst) if given.pop("self_loops", False) else 0
    seed, p = given.pop("seed", None), given.get("dropout", 0.0)
    if seed is not None:
        ids, heads = graph.num_edges + loops, drawn["value"].size(1)
        given["keep"] = _philox.kept(seed, ids, heads, p)
    return {**given, "num_loops": loops}


def check(graph: Graph, drawn: Drawn, grad: Tensor, **options: Any) -> list[Tensor]:
    """Hold a call and its gradients to the formula in float64; gives them."""
    found = run(functional.additive_attention, graph, drawn, grad, **options)
    given = for_reference(graph, drawn, options)
    reference = reference_attention.additive_attention
    plain = run(reference, graph, drawn, grad, **given)
    double = {name: x.double() for name, x in drawn.items()}
    truth = run(reference, graph, double, grad.double(), **given)
    assert_accurate(found[0], plain[0], truth[0])
    # Gradients of scores cancel within a row: their errors are those of the terms.
    finite = [t[t.isfinite()].abs().max() for t in truth if t.isfinite().any()]
    scale = max([1.0, *map(float, finite)])
    for name, got, want in zip(drawn, found[1:], truth[1:], strict=True):
        error = float((got.double() - want).abs().max()) if got.numel() else 0.0
        assert error <= 1e-5 * scale, name
    return found
