"""The float64 reference of additive attention and of the layer around it.

It goes over the edges in chunks: nothing in it has a row per edge of the whole graph.
On graphs too large for all heads, whole heads are checked (they are independent of each
other), and of the others the output on sampled rows, the largest among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.checks import Check, Edges, relative_error, sampled_rows
from benchmarks.kinks import undecided

SLOPE = 0.2
ALL_HEADS_ELEMENTS = 1 << 30  # rows per edge times their width
CHECKED_HEADS = 2
GAT = ("lin.weight", "att_src", "att_dst", "bias")


@dataclass(frozen=True)
class Attention:
    """Additive attention over edges, self-loops among them, in float64.

    Args:
        edges: Which source each target attends to.
        value: Values of the sources ``[N, H, C]``.
        alpha_src: Score terms of the sources ``[N, H]``.
        alpha_dst: Score terms of the targets ``[N, H]``.
    """

    edges: Edges
    value: Tensor
    alpha_src: Tensor
    alpha_dst: Tensor

    def output(self) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """The result ``[N, H, C]``, and the weights of the edges of a chunk."""
        shape = (self.edges.num_targets, *self.value.shape[1:])
        out = self.value.new_zeros(shape, dtype=torch.float64)
        total = out.new_zeros(shape[:2])
        # No score of a row is above its limit, and in float64 none is so far below it
        # that its exponential vanishes: no pass for the maxima is needed.
        limit = self.alpha_dst.double() + self.alpha_src.double().amax(0)
        limit = torch.nn.functional.leaky_relu(limit, SLOPE)  # [N, H]

        def share(source: Tensor, target: Tensor) -> Tensor:
            return self._score(source, target).sub_(limit[target]).exp_()

        for source, target in self._chunks():
            part = share(source, target)  # [chunk, H]
            total.index_add_(0, target, part)
            message = self.value[source].double().mul_(part[..., None])
            out.index_add_(0, target, message)
        total.clamp_(min=torch.finfo(torch.float64).tiny)  # rows without edges

        def weights(source: Tensor, target: Tensor) -> Tensor:
            return share(source, target).div_(total[target])

        return out.div_(total[..., None]), weights

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """The output, then the gradients of value, alpha_src and alpha_dst."""
        grad = grad.double()
        out, weights = self.output()
        delta = (grad * out).sum(-1)  # [N, H]
        grad_value = torch.zeros_like(self.value, dtype=torch.float64)
        grad_src = torch.zeros_like(self.alpha_src, dtype=torch.float64)
        grad_dst = torch.zeros_like(self.alpha_dst, dtype=torch.float64)
        for source, target in self._chunks():
            weight, above = weights(source, target), grad[target]
            dot = self.value[source].double().mul_(above).sum(-1)  # [chunk, H]
            grad_value.index_add_(0, source, above.mul_(weight[..., None]))
            steep = torch.where(self._sum(source, target) > 0, 1.0, SLOPE)
            change = weight * (dot - delta[target]) * steep
            grad_src.index_add_(0, source, change)
            grad_dst.index_add_(0, target, change)
        return [out, grad_value, grad_src, grad_dst]

    def rows(self, rows: Tensor) -> Tensor:
        """The result on some targets alone ``[R, H, C]``."""
        edges, dst = self.edges.of_rows(rows), self.alpha_dst[rows]
        return Attention(edges, self.value, self.alpha_src, dst).output()[0]

    def heads(self, heads: Tensor) -> Attention:
        """The same on some heads alone."""
        parts = (self.value, self.alpha_src, self.alpha_dst)
        return Attention(self.edges, *(part[:, heads] for part in parts))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.edges.chunks(self.value.size(1) * self.value.size(2))

    def _sum(self, source: Tensor, target: Tensor) -> Tensor:
        return self.alpha_src[source].double() + self.alpha_dst[target].double()

    def _score(self, source: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(self._sum(source, target), SLOPE)


def attention_check(edges: Edges, operands: Sequence[Tensor], grad: Tensor) -> Check:
    """Check of a core: output, then gradients of value, alpha_src and alpha_dst.

    The operands are value, alpha_src and alpha_dst. All phases may share the check:
    the reference is made when first asked for, and a forward has the output alone.
    """
    whole = Attention(edges, *(operand.detach() for operand in operands))
    heads = _checked_heads(whole)

    @cache
    def expected() -> tuple[list[Tensor], Tensor, Tensor]:
        rows = sampled_rows(edges)
        found = whole.heads(heads).gradients(grad[:, heads])
        return found, rows, whole.rows(rows)

    def check(results: Sequence[Tensor]) -> float:
        wanted, rows, some = expected()
        pairs = zip(results, wanted, strict=False)
        errors = [relative_error(found.detach()[:, heads], w) for found, w in pairs]
        return max(*errors, relative_error(results[0].detach()[rows], some))

    return check


def _checked_heads(attention: Attention) -> Tensor:
    _, heads, channels = attention.value.shape
    elements = attention.edges.target.numel() * heads * channels
    count = heads if elements <= ALL_HEADS_ELEMENTS else min(CHECKED_HEADS, heads)
    device = attention.value.device
    return torch.linspace(0, heads - 1, count, device=device).long()


def gat_check(
    edges: Edges, x: Tensor, grad: Tensor, parameters: Mapping[str, Tensor]
) -> Check:
    """Check of a GATConv: output, then gradients of x and of the parameters `GAT`.

    Both phases may share it, as above. Every sum in a score must be far enough from 0
    for float32 to know its sign, as `kinks.keep_off_kink` makes it.

    Raises:
        ValueError: By the check, if one is not: the gradient is then one of several.
    """

    @cache
    def expected() -> list[Tensor]:
        doubtful = undecided(edges, x.detach(), parameters)
        if doubtful:
            raise ValueError(
                f"{doubtful} sums of score terms have a sign that float32 may miss"
            )
        named = (parameters[name].detach().double() for name in GAT)
        weight, att_src, att_dst, bias = named
        x64, shape = x.detach().double(), (x.size(0), *att_src.shape[1:])
        value = (x64 @ weight.T).view(shape)  # [N, H, C]
        scores = [(value * att).sum(-1) for att in (att_src, att_dst)]
        core = Attention(edges, value, *scores)
        out, back, *of_scores = core.gradients(grad.view(shape))
        grad_att = []
        for each, att in zip(of_scores, (att_src, att_dst), strict=True):
            back += each[..., None] * att
            grad_att.append((each[..., None] * value).sum(0, keepdim=True))
        flat = back.flatten(1)
        of_parameters = [flat.T @ x64, *grad_att, grad.double().sum(0)]
        return [out.flatten(1) + bias, flat @ weight, *of_parameters]

    def check(results: Sequence[Tensor]) -> float:
        pairs = zip(results, expected(), strict=False)
        return max(relative_error(found.detach(), want) for found, want in pairs)

    return check
