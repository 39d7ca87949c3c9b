"""The float64 references of the layers around vector attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from torch import Tensor

from benchmarks.checks import Check, Edges, relative_error
from benchmarks.kinks import has_exact_sums
from benchmarks.vector_checks import DotAttention, EdgeTerm, Gatv2Attention

# In the order in which the results hold their gradients.
GATV2 = ("lin_l.weight", "lin_l.bias", "lin_r.weight", "lin_r.bias", "att", "bias")
TRANSFORMER = (
    "lin_query.weight",
    "lin_query.bias",
    "lin_key.weight",
    "lin_value.weight",
    "lin_value.bias",
    "lin_skip.weight",
    "lin_skip.bias",
)
EDGE_WEIGHT = "lin_edge.weight"
# A softmax does not see what is added to all keys: the gradient of this bias is 0 but
# for rounding, and no relative error is one. It comes last, and is not checked.
KEY_BIAS = "lin_key.bias"

Parameters = Mapping[str, Tensor]


def transformer_names(*, has_edges: bool) -> tuple[str, ...]:
    """The parameters of a TransformerConv in the order of its results."""
    return (*TRANSFORMER, *((EDGE_WEIGHT,) if has_edges else ()), KEY_BIAS)


def gatv2_conv_check(
    edges: Edges, x: Tensor, grad: Tensor, parameters: Parameters
) -> Check:
    """Check of a GATv2Conv: output, then gradients of x and of the parameters `GATV2`.

    Raises:
        ValueError: By the check, if float32 may miss the sign of a sum in a score: the
            gradient is then one of several. `kinks.make_sums_exact` sees to it.
    """

    @cache
    def expected() -> list[Tensor]:
        if not has_exact_sums(x.detach(), parameters):
            raise ValueError("sums of GATv2's scores are not exact in float32")
        left, left_bias, right, right_bias, att, bias = (
            parameters[name].detach().double() for name in GATV2
        )
        x64, shape = x.detach().double(), (x.size(0), *att.shape[1:])
        x_src = (x64 @ left.T + left_bias).view(shape)
        x_dst = (x64 @ right.T + right_bias).view(shape)
        core = Gatv2Attention(edges, (x_src, x_dst, att))
        out, of_src, of_dst, of_att = core.gradients(grad.view(shape))
        of_src, of_dst = of_src.flatten(1), of_dst.flatten(1)
        return [
            out.flatten(1) + bias,
            of_src @ left + of_dst @ right,
            of_src.T @ x64,
            of_src.sum(0),
            of_dst.T @ x64,
            of_dst.sum(0),
            of_att,
            grad.double().sum(0),
        ]

    return _layer_check(expected)


def transformer_check(
    edges: Edges,
    x: Tensor,
    features: Tensor | None,  # [E, F]
    grad: Tensor,
    parameters: Parameters,
    heads: int,
) -> Check:
    """Check of a TransformerConv: output, then gradients.

    They are those of x, of edge features if there are any, and of the parameters
    `transformer_names`, the last of which is not checked.
    """

    @cache
    def expected() -> list[Tensor]:
        p = {name: each.detach().double() for name, each in parameters.items()}
        x64, g = x.detach().double(), grad.double()
        shape = (x.size(0), heads, grad.size(1) // heads)
        lin = [
            (x64 @ p[f"lin_{name}.weight"].T + p[f"lin_{name}.bias"]).view(shape)
            for name in ("query", "key", "value")
        ]
        edge = None
        if features is not None:
            edge = EdgeTerm(features.detach(), p[EDGE_WEIGHT])
        core = DotAttention(edges, tuple(lin), edge)
        out, *found = core.gradients(grad.view(shape))
        of_query, of_key, of_value = (each.flatten(1) for each in found[:3])
        of_x = of_query @ p["lin_query.weight"] + of_key @ p["lin_key.weight"]
        of_x += of_value @ p["lin_value.weight"] + g @ p["lin_skip.weight"]
        root = x64 @ p["lin_skip.weight"].T + p["lin_skip.bias"]
        return [
            out.flatten(1) + root,
            of_x,
            *found[3:4],
            of_query.T @ x64,
            of_query.sum(0),
            of_key.T @ x64,
            of_value.T @ x64,
            of_value.sum(0),
            g.T @ x64,
            g.sum(0),
            *found[4:],
        ]

    return _layer_check(expected)


def _layer_check(expected: Callable[[], list[Tensor]]) -> Check:
    def check(results: Sequence[Tensor]) -> float:
        pairs = zip(results, expected(), strict=False)
        return max(relative_error(found.detach(), want) for found, want in pairs)

    return check
