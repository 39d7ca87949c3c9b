"""What implementations of edge attention take and give, whatever the family."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """What a forward and a backward of edge attention read.

    Args:
        value: Values of the sources, ``[N_src, H, C]``.
        row: Operand of the destinations: ``[N_dst, H]`` of the additive score, else
            ``[N_dst, H, K]``, queries or GATv2's ``x_dst``.
        col: Operand of the sources, likewise: keys or ``x_src``. GATv2's is the same
            tensor as `value`.
        term: Added to every edge's score, ``[E, H]`` in the caller's edge order.
        loop_term: Added to every self-loop's, ``[num_loops, H]``.
        mask: Edges that take part, ``[E]`` bool in the caller's order.
        seed: One int64: the seed of dropout.
        param: Parameter of the score, if it has one, ``[H, K]``.
        share: Gradient of the weights, ``[E, H]`` in the caller's order, in a backward
            of a forward that gave them. Where the state has none of these, they are
            used in the result already, and its gradient says what delta has of them.

    `col` may be the very tensor that `value` is (:meth:`is_shared`): it is then read
    once, and has one gradient.
    """

    value: Tensor
    row: Tensor
    col: Tensor
    term: Tensor | None = None
    loop_term: Tensor | None = None
    mask: Tensor | None = None
    seed: Tensor | None = None
    param: Tensor | None = None
    share: Tensor | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the sources' operand is their value.

        That is the very tensor: two that merely lie in the same memory may be leaves of
        their own, each with its gradient.
        """
        return self.col is self.value


class Options(NamedTuple):
    """The numbers of a call.

    Args:
        scale: The number that the score takes: the negative slope, the factor of a dot
            product, or what is added to the squares of norms.
        num_loops: Implicit self-loops, of the first nodes. Above 0, stored i -> i edges
            do not take part.
        dropout: Probability of dropping a weight.
        score: Name of the score: ``"additive"``, ``"dot"``, ``"dot_norm"`` or
            ``"gatv2"``.
        gives_weights: Whether the weights are a result, too; of scores of vectors.
        by_row: Whether terms, weights, their gradients and those of terms stand in the
            order of the rows and not in the caller's; for kernels alone.
    """

    scale: float
    num_loops: int = 0
    dropout: float = 0.0
    score: str = "additive"
    gives_weights: bool = False
    by_row: bool = False

    @property
    def factor(self) -> float:
        """What kept weights are multiplied by; with p = 1 nothing is kept."""
        return 0.0 if self.dropout >= 1.0 else 1.0 / (1.0 - self.dropout)


class State(NamedTuple):
    """What a backward needs of a forward; its meaning is the same in every family.

    Args:
        out: The result, ``[N_dst, H, C]``.
        m: Largest score of each row, ``[N_dst, H]`` float32; 0 without edges.
        total: Sum of exp(s - m), ``[N_dst, H]`` float32; 1 without edges.
        positive: P = sum of w v over edges with positive pre-activation, like `out`.
        positive_sum: p = sum of w over these edges (without dropout), ``[N_dst, H]``.
        weights: What dropout leaves of the weights, ``[E, H]`` float32 in the caller's
            order, where the options ask for them; 0 for edges that take no part.
    """

    out: Tensor
    m: Tensor
    total: Tensor
    positive: Tensor | None
    positive_sum: Tensor | None
    weights: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of the operands; None where not asked for.

    Those of terms, of operands of one number per head and of the parameter are float32;
    the others have the dtype of the operand. Where value and `col` are one tensor, the
    gradient of `value` is the whole one, and that of `col` is None.
    """

    value: Tensor  # [N_src, H, C]
    row: Tensor | None  # as the operand
    col: Tensor | None  # as the operand
    term: Tensor | None  # [E, H]
    loop_term: Tensor | None  # [num_loops, H]
    param: Tensor | None = None  # [H, K]


class Wanted(NamedTuple):
    """Which gradients a backward forms, and how; that of a parameter always.

    Args:
        term: That of the edge terms.
        loop_term: That of the loop terms.
        hands_over: Sum the destination's from those of the scores, in an ``[E, H]``
            tensor; else from P and p where the state has them, else by another pass
            that forms the scores again.
    """

    term: bool = False
    loop_term: bool = False
    hands_over: bool = False
