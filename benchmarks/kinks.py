"""Keeps the inputs of a layer off the kink of LeakyReLU, where it has no derivative.

Of the sums alpha_src + alpha_dst over ten million edges and heads or more, a few lie so
near 0 that rounding decides their sign. Any float32 program then takes one of the two
slopes, whatever float64 says, and a single such edge moves a gradient by up to 6e-4
of its length. A maximum has the same trouble with ties, and the same remedy: inputs at
which there is one gradient. The tolerance then holds for every program.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.checks import Edges

GAP = 2.0**-7  # of score terms; half of it is over twice what rounding may do to a sum
UNIT_ROUNDOFF = 2.0**-24  # of float32
ATTENTION = ("att_src", "att_dst")
X_UNIT, WEIGHT_UNIT = 2.0**-5, 2.0**-9  # of a GATv2Conv whose sums are exact
SUM_UNIT = X_UNIT * WEIGHT_UNIT
MANTISSA = 2.0**24  # integers up to it are exact in float32
GATV2_LINEAR = ("lin_l", "lin_r")  # of sources and of destinations

Parameters = Mapping[str, Tensor]


@torch.no_grad()
def keep_off_kink(x: Tensor, parameters: Parameters) -> None:
    """Move features ``[N, K]`` in place, by some thousandth, off a GATConv's kink.

    The terms of the sources become multiples of `GAP`, and those of the targets such
    multiples and a half: no sum of two is nearer to 0 than half of it.
    """
    weight = parameters["lin.weight"].double()
    pair = [_directions(weight, parameters[name].double()) for name in ATTENTION]
    directions = torch.cat(pair)  # [2H, K]
    offset = torch.zeros_like(directions[:, 0])
    offset[len(pair[0]) :] = GAP / 2
    terms = x.double() @ directions.T  # [N, 2H]
    wanted = ((terms - offset) / GAP).round_().mul_(GAP).add_(offset)
    x += (wanted - terms) @ torch.linalg.pinv(directions).T


@torch.no_grad()
def undecided(edges: Edges, x: Tensor, parameters: Parameters) -> int:
    """How many pairs of an edge and a head have a sum whose sign float32 may miss.

    A score term is a sum over K features and C channels. In whatever order a float32
    program adds it up, it is off by at most ``gamma(K + C)`` times the sum of the
    absolute values (Higham, Accuracy and Stability, section 3.1). The sum of two
    float32 terms has the right sign.
    """
    weight, x64 = parameters["lin.weight"].double(), x.double()
    roundings = (x.size(1) + parameters["att_src"].size(2)) * UNIT_ROUNDOFF
    gamma = roundings / (1 - roundings)
    terms, doubts = [], []  # [N, H] each
    for name in ATTENTION:
        att = parameters[name].double()
        terms.append(x64 @ _directions(weight, att).T)
        doubts.append(gamma * x64.abs() @ _directions(weight.abs(), att.abs()).T)
    found = torch.zeros((), dtype=torch.long, device=x.device)
    for source, target in edges.chunks(terms[0].size(1)):
        distance = (terms[0][source] + terms[1][target]).abs_()
        found += (distance <= doubts[0][source] + doubts[1][target]).sum()
    return int(found)


def _directions(weight: Tensor, att: Tensor) -> Tensor:
    """The features' weights in the score terms, ``[H, K]``."""
    return (att[0][..., None] * weight.view(*att.shape[1:], -1)).sum(1)


@torch.no_grad()
def make_sums_exact(x: Tensor, parameters: Parameters) -> None:
    """Round features and a GATv2Conv's projections in place, so that no sum is near 0.

    Each channel has a kink of its own, too many to keep features off them. But where
    features and weights are multiples of a unit and few enough bits wide, float32 has
    every projection exactly, in whatever order it adds up. The biases of the sources
    are multiples and a half: no sum of a source and a destination is 0.
    """
    x.copy_((x / X_UNIT).round_().mul_(X_UNIT))
    for name, offset in zip(GATV2_LINEAR, (0.5, 0.0), strict=True):
        weight, bias = (parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        weight.copy_((weight / WEIGHT_UNIT).round_().mul_(WEIGHT_UNIT))
        bias.copy_((bias / SUM_UNIT).round_().add_(offset).mul_(SUM_UNIT))


@torch.no_grad()
def has_exact_sums(x: Tensor, parameters: Parameters) -> bool:
    """Whether float32 has the sums in GATv2's scores exactly, and none of them is 0."""
    largest = 0.0
    for name, offset in zip(GATV2_LINEAR, (0.5, 0.0), strict=True):
        weight, bias = (parameters[f"{name}.{part}"] for part in ("weight", "bias"))
        shifted = bias.double() - offset * SUM_UNIT
        if not (_is_multiple(weight, WEIGHT_UNIT) and _is_multiple(shifted, SUM_UNIT)):
            return False
        reach = weight.double().abs().sum(1) * x.double().abs().max()
        largest += float((reach + bias.double().abs()).max())
    return _is_multiple(x, X_UNIT) and largest <= MANTISSA * SUM_UNIT / 2


def _is_multiple(values: Tensor, unit: float) -> bool:
    return bool((values.double() / unit).frac().eq(0).all())
