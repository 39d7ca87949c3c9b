"""Arguments of attention with queries and keys that are normalised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.functional.arguments import check_dense
from pyg_tiga.ops.attention import Call, Inputs

# Added to the mean of squares.
EPS = 1e-6


def check_unprojected(qk_norm: bool | Tensor, **features: Tensor | None) -> None:
    """Hold features of edges to keys that are as they are given.

    Raises:
        ValueError: There are features beside `qk_norm`.
    """
    given = [f"'{name}'" for name, x in features.items() if x is not None]
    if given and qk_norm is not False:
        raise ValueError(
            "'edge_attr' and 'edge_proj' must be absent where 'qk_norm' is given, as "
            "the norm of a key would be another on every edge (got "
            f"{' and '.join(given)}). Normalise 'query' and 'key' instead"
        )


def normalised(
    call: Call, inputs: Inputs, qk_norm: Any
) -> tuple[Call, Inputs, torch.dtype]:
    r"""A call of dot products as one of normalised ones, and its results' dtype.

    With root mean squares in the place of norms, and gains p, a score is

    .. math::
        \alpha \sum_k p_k \frac{q_k}{\sqrt{|q|^2 / K + \epsilon}}
        \frac{k_k}{\sqrt{|k|^2 / K + \epsilon}} =
        \sum_k (\alpha K p_k) \frac{q_k}{\sqrt{|q|^2 + K \epsilon}}
        \frac{k_k}{\sqrt{|k|^2 + K \epsilon}}

    so that implementations need no more than factors ``[H, K]``, in the accumulator,
    and one number.

    Args:
        call: The call.
        inputs: Its inputs, of which `row` are the queries.
        qk_norm: True, or the gains.

    Raises:
        TypeError: `qk_norm` is neither True nor a dense tensor.
        ValueError: Gains of a shape, dtype or device that does not fit.
    """
    query, options = inputs.row, call.options
    shape, width = query.shape[1:], max(query.size(2), 1)
    gains = None if qk_norm is True else _checked(qk_norm, query)
    number = options.scale * width
    if gains is None:
        dtype = reference.widened(query.dtype)
        factors = query.new_full(shape, number, dtype=dtype)
    else:
        factors = gains.to(reference.widened(gains.dtype)).expand(shape) * number
    options = options._replace(score="dot_norm", scale=width * EPS)
    return (
        call._replace(options=options),
        inputs._replace(param=factors),
        reference.promoted(*inputs, gains),
    )


def _checked(gains: Any, query: Tensor) -> Tensor:
    if not isinstance(gains, Tensor):
        raise TypeError(
            f"'qk_norm' must be True, False or a tensor (got {type(gains).__name__})"
        )
    check_dense("qk_norm", gains)
    heads, width = query.shape[1:]
    shapes = ([width], [heads, width])
    if list(gains.shape) not in shapes or not gains.is_floating_point():
        raise ValueError(
            f"'qk_norm' must be a floating point tensor of shape {shapes[0]} or "
            f"{shapes[1]} (got {gains.dtype} of shape {list(gains.shape)})"
        )
    if gains.device != query.device:
        raise ValueError(f"'qk_norm' must be on {query.device} (got {gains.device})")
    return gains
