"""The float64 reference of attention whose scores come from two vectors.

As in `attention_checks`, nothing in it has a row per edge of the whole graph but the
gradient of edge features, and on graphs too large for all heads whole heads are
checked, and of the others the output on sampled rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import checks
from benchmarks.attention_checks import ALL_HEADS_ELEMENTS, CHECKED_HEADS, SLOPE
from benchmarks.checks import Check, Edges, relative_error, sampled_rows


class Chunk(NamedTuple):
    """Some edges, with their projected features if they have any."""

    source: Tensor  # [B]
    target: Tensor  # [B]
    place: slice
    term: Tensor | None  # [B, H, C]


@dataclass(frozen=True)
class EdgeTerm:
    """Edge features, which are projected and added to keys and values."""

    features: Tensor  # [E, F]
    weight: Tensor  # [H * C, F]


class _Forward(NamedTuple):
    limit: Tensor  # [N, H]
    total: Tensor  # [N, H]
    out: Tensor  # [N, H, C]


@dataclass
class VectorAttention(ABC):
    """Attention over edges in float64.

    Args:
        edges: Which source each target attends to.
        operands: What gradients are taken of, each with its heads in dimension 1.
    """

    edges: Edges
    operands: tuple[Tensor, ...]

    @property
    @abstractmethod
    def value(self) -> Tensor:
        """Values of the sources ``[N, H, C]``."""

    @abstractmethod
    def of_rows(self, rows: Tensor) -> VectorAttention:
        """The same with some targets alone."""

    @abstractmethod
    def _limit(self) -> Tensor:
        """For each target and head a number that none of its scores exceeds."""

    @abstractmethod
    def _score(self, chunk: Chunk) -> Tensor:
        """Scores ``[B, H]``."""

    @abstractmethod
    def _add(
        self, chunk: Chunk, of_score: Tensor, of_value: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add what the gradients of scores and messages come to."""

    def heads(self, heads: Tensor) -> VectorAttention:
        """The same on some heads alone."""
        return replace(self, operands=tuple(each[:, heads] for each in self.operands))

    @property
    def output(self) -> Tensor:
        """The result ``[N, H, C]``."""
        return self._forward.out

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """The output, then the gradients of the operands and of edge features."""
        grad, out = grad.double(), self.output
        delta = (grad * out).sum(-1)  # [N, H]
        sums = [torch.zeros_like(x, dtype=torch.float64) for x in self._leaves()]
        for chunk in self._chunks():
            weight = self._share(chunk).div_(self._forward.total[chunk.target])
            above = grad[chunk.target]  # [B, H, C]
            dot = self._message(chunk).mul_(above).sum(-1)  # [B, H]
            of_score = dot.sub_(delta[chunk.target]).mul_(weight)
            self._add(chunk, of_score, above.mul_(weight[..., None]), sums)
        return [out, *sums]

    @cached_property
    def _forward(self) -> _Forward:
        # No score of a row is above its limit, and in float64 none is so far below it
        # that its exponential vanishes: no pass for the maxima is needed.
        limit = self._limit()
        total = torch.zeros_like(limit)
        shape = (self.edges.num_targets, *self.value.shape[1:])
        out = self.value.new_zeros(shape, dtype=torch.float64)
        for chunk in self._chunks():
            part = self._share(chunk, limit)
            total.index_add_(0, chunk.target, part)
            message = self._message(chunk).mul_(part[..., None])
            out.index_add_(0, chunk.target, message)
        total.clamp_(min=torch.finfo(torch.float64).tiny)  # rows without edges
        return _Forward(limit, total, out.div_(total[..., None]))

    def _leaves(self) -> tuple[Tensor, ...]:
        return self.operands

    def _share(self, chunk: Chunk, limit: Tensor | None = None) -> Tensor:
        limit = self._forward.limit if limit is None else limit
        return self._score(chunk).sub_(limit[chunk.target]).exp_()  # [B, H]

    def _message(self, chunk: Chunk) -> Tensor:
        return self.value[chunk.source].double()  # [B, H, C], not shared

    def _chunks(self) -> Iterator[Chunk]:
        source, target = self.edges.source, self.edges.target
        width = self.value.size(1) * self.value.size(2)
        size = max(checks.CHUNK_ELEMENTS // max(width, 1), 1)
        for start in range(0, source.numel(), size):
            place = slice(start, start + size)
            yield Chunk(source[place], target[place], place, self._term(place))

    def _term(self, place: slice) -> Tensor | None:
        return None


@dataclass
class DotAttention(VectorAttention):
    """Scores ``⟨query_i, key_j + term⟩ / √C``; the operands are query, key, value.

    A term of the edge is added to the values too.
    """

    edge: EdgeTerm | None = None

    @property
    def value(self) -> Tensor:
        """Values of the sources."""
        return self.operands[2]

    @property
    def _scale(self) -> float:
        return self.operands[0].size(2) ** -0.5

    def of_rows(self, rows: Tensor) -> DotAttention:
        """The same with some targets alone; without edge features."""
        assert self.edge is None
        query, key, value = self.operands
        return DotAttention(self.edges.of_rows(rows), (query[rows], key, value))

    def _leaves(self) -> tuple[Tensor, ...]:
        if self.edge is None:
            return self.operands
        return (*self.operands, self.edge.features, self.edge.weight)

    def _limit(self) -> Tensor:
        query, key, _ = self.operands
        far = key.double().norm(dim=-1).amax(0)  # [H]
        if self.edge is not None:
            weight = self.edge.weight.double().norm()
            far = far + self.edge.features.double().norm(dim=-1).max() * weight
        return query.double().norm(dim=-1).mul_(far * self._scale)

    def _term(self, place: slice) -> Tensor | None:
        if self.edge is None:
            return None
        term = self.edge.features[place].double() @ self.edge.weight.double().T
        return term.view(-1, *self.value.shape[1:])

    def _message(self, chunk: Chunk) -> Tensor:
        found = super()._message(chunk)
        return found if chunk.term is None else found.add_(chunk.term)

    def _keys(self, chunk: Chunk) -> Tensor:
        key = self.operands[1][chunk.source].double()  # [B, H, C], not shared
        return key if chunk.term is None else key.add_(chunk.term)

    def _score(self, chunk: Chunk) -> Tensor:
        query = self.operands[0][chunk.target].double()
        return self._keys(chunk).mul_(query).sum(-1).mul_(self._scale)

    def _add(
        self, chunk: Chunk, of_score: Tensor, of_value: Tensor, sums: Sequence[Tensor]
    ) -> None:
        step = (of_score * self._scale)[..., None]
        sums[0].index_add_(0, chunk.target, self._keys(chunk).mul_(step))
        of_key = self.operands[0][chunk.target].double().mul_(step)
        sums[1].index_add_(0, chunk.source, of_key)
        sums[2].index_add_(0, chunk.source, of_value)
        if self.edge is None:
            return
        of_term = of_key.add_(of_value).flatten(1)  # [B, H * C]
        sums[3][chunk.place] = of_term @ self.edge.weight.double()
        sums[4].add_(of_term.T @ self.edge.features[chunk.place].double())


@dataclass
class Gatv2Attention(VectorAttention):
    """Scores ``⟨att, LeakyReLU(x_dst_i + x_src_j)⟩``.

    The operands are x_src, which holds the values, x_dst, and att ``[1, H, C]``.
    """

    @property
    def value(self) -> Tensor:
        """Values of the sources."""
        return self.operands[0]

    def of_rows(self, rows: Tensor) -> Gatv2Attention:
        """The same with some targets alone."""
        x_src, x_dst, att = self.operands
        return Gatv2Attention(self.edges.of_rows(rows), (x_src, x_dst[rows], att))

    def _limit(self) -> Tensor:
        x_src, x_dst, att = (each.double().abs() for each in self.operands)
        return x_dst.add_(x_src.amax(0)).mul_(att).sum(-1)

    def _sum(self, chunk: Chunk) -> Tensor:
        x_src, x_dst, _ = self.operands
        return x_src[chunk.source].double().add_(x_dst[chunk.target])

    def _score(self, chunk: Chunk) -> Tensor:
        inner = torch.nn.functional.leaky_relu_(self._sum(chunk), SLOPE)
        return inner.mul_(self.operands[2].double()).sum(-1)

    def _add(
        self, chunk: Chunk, of_score: Tensor, of_value: Tensor, sums: Sequence[Tensor]
    ) -> None:
        inner = self._sum(chunk)
        of_sum = torch.where(inner > 0, 1.0, SLOPE).to(torch.float64)
        of_sum.mul_(of_score[..., None])  # times the slope: what `att` multiplies
        sums[2].add_(inner.mul_(of_sum).sum(0, keepdim=True))
        of_sum.mul_(self.operands[2].double())
        sums[1].index_add_(0, chunk.target, of_sum)
        sums[0].index_add_(0, chunk.source, of_sum.add_(of_value))


def core_check(whole: VectorAttention, grad: Tensor) -> Check:
    """Check of a core: output, then gradients of the operands.

    All phases may share it: the output's reference is made when first asked for, and
    that of the gradients when a result has some.
    """
    heads = _checked_heads(whole)
    part = whole if heads.numel() == whole.value.size(1) else whole.heads(heads)
    made: dict[str, list[Tensor]] = {}

    def once(name: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        if name not in made:
            made[name] = make()
        return made[name]

    def sampled() -> list[Tensor]:
        rows = sampled_rows(whole.edges)
        return [rows, whole.of_rows(rows).output]

    def check(results: Sequence[Tensor]) -> float:
        wanted = [part.output]
        if len(results) > 1:
            wanted = once("gradients", lambda: part.gradients(grad[:, heads]))
        pairs = zip(results, wanted, strict=True)
        errors = [relative_error(found.detach()[:, heads], w) for found, w in pairs]
        rows, some = once("rows", sampled)
        return max(*errors, relative_error(results[0].detach()[rows], some))

    return check


def _checked_heads(attention: VectorAttention) -> Tensor:
    _, heads, channels = attention.value.shape
    elements = attention.edges.target.numel() * heads * channels
    count = heads if elements <= ALL_HEADS_ELEMENTS else min(CHECKED_HEADS, heads)
    device = attention.value.device
    return torch.linspace(0, heads - 1, count, device=device).long()
