"""What the tests of attention with two vectors share: operands, and a dense formula."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga import _philox, functional
from pyg_tiga.testing import Row, make_case

FORMS = ("dot", "dot_norm", "gatv2")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loops": {"loops": True, "biases": True},
    "masked": {"masked": True, "biases": True},
    "dropped": {"dropout": 0.4},
    "everything": {"loops": True, "biases": True, "masked": True, "dropout": 0.4},
}
HEADS, WIDTH, CHANNELS = 2, 3, 4
SEED, SLOPE, EPS = 7, 0.2, 1e-6


class Given:
    """A call of one form on the edges of a row: its tensors, and the dense formula."""

    def __init__(
        self,
        form: str,
        row: Row,
        dtype: torch.dtype = torch.float64,
        *,
        loops: bool = False,
        biases: bool = False,
        masked: bool = False,
        dropout: float = 0.0,
        kv_heads: int = HEADS,
        heads: int = HEADS,
        device: torch.device | str = "cpu",
    ) -> None:
        case = make_case(row, device=device)
        self.form, self.heads, self.loops, self.dropout = form, heads, loops, dropout
        self.edge_index, self.size = case.edge_index, (row.num_src, row.num_dst)
        self.num_edges = self.edge_index.size(1)
        self.num_loops = min(self.size) if loops else 0
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(device, dtype).requires_grad_()

        num_src, num_dst = self.size
        if form != "gatv2":
            self.leaves = {
                "query": draw(num_dst, heads, WIDTH),
                "key": draw(num_src, kv_heads, WIDTH),
                "value": draw(num_src, kv_heads, CHANNELS),
            }
        else:
            self.leaves = {
                "x_src": draw(num_src, heads, CHANNELS),
                "x_dst": draw(num_dst, heads, CHANNELS),
                "att": draw(heads, CHANNELS),
            }
        if form == "dot_norm":
            self.leaves["qk_norm"] = draw(heads, WIDTH)
        if biases:
            self.leaves["edge_bias"] = draw(self.num_edges, heads)
        if biases and loops:
            self.leaves["loop_bias"] = draw(self.num_loops, heads)
        self.grad = draw(num_dst, heads, CHANNELS).detach()
        ids = torch.arange(self.num_edges, device=device)
        self.mask = ids % 3 > 0 if masked else None
        self.seed = torch.tensor([SEED], device=device) if dropout else None

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.leaves.values())

    def options(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        names = ("qk_norm", "edge_bias", "loop_bias")
        return {
            **{name: leaves[name] for name in names if name in leaves},
            "self_loops": self.loops,
            "dropout": self.dropout,
            "seed": self.seed,
            "edge_mask": self.mask,
            "size": self.size,
        }

    def named(self, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.leaves, tensors or self.tensors(), strict=True))

    def out(self, *tensors: Tensor, relation: Any = None, **options: Any) -> Tensor:
        """The public function, of other tensors where they are given."""
        leaves = self.named(tensors)
        options = {**self.options(leaves), **options}
        relation = self.edge_index if relation is None else relation
        first = list(leaves.values())[:3]
        if self.form != "gatv2":
            return functional.graph_attention(*first, relation, **options)
        return functional.gatv2_attention(relation, *first, **options)

    def weights(
        self, *tensors: Tensor, relation: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        leaves = self.named(tensors)
        options = {**self.options(leaves), **options}
        relation = self.edge_index if relation is None else relation
        first = list(leaves.values())
        if self.form != "gatv2":
            call = functional.graph_attention_weights
            return call(*first[:2], relation, **options)
        return functional.gatv2_attention_weights(relation, *first[:3], **options)

    def operands(
        self, *tensors: Tensor, scale: float | None = None
    ) -> tuple[tuple[Tensor | None, ...], float]:
        """Value, row, col and parameter, as ops take them, and their one number."""
        leaves = self.named(tensors)
        first, second, third = list(leaves.values())[:3]
        if self.form == "gatv2":
            return (first, second, None, third), SLOPE if scale is None else scale
        scale = WIDTH**-0.5 if scale is None else scale
        if self.form == "dot":
            return (third, first, second, None), scale
        factors = leaves["qk_norm"] * (scale * WIDTH)
        return (third, first, second, factors), WIDTH * EPS

    def dense(
        self, *tensors: Tensor, scale: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output and weights by a softmax over a masked matrix of all pairs."""
        leaves = self.named(tensors)
        pairs, value = self._pairs(leaves, scale)  # [N_dst, N_src, H], [N_src, H, C]
        live, src = self._slots()  # [N_dst, S], [S]
        scores = pairs[:, src]  # [N_dst, S, H]
        bias = [
            leaves.get(name, scores.new_zeros(count, self.heads))
            for name, count in (
                ("edge_bias", self.num_edges),
                ("loop_bias", self.num_loops),
            )
        ]
        scores = scores + torch.cat(bias)
        scores = scores.masked_fill(~live.unsqueeze(-1), float("-inf"))
        # A row of nothing has no softmax.
        filled = live.any(1).view(-1, 1, 1)
        weight = scores.where(filled, 0.0).softmax(1) * live.unsqueeze(-1)
        if self.seed is not None:
            ids = self.num_edges + self.num_loops
            keep = _philox.kept(self.seed, ids, self.heads, self.dropout)
            scaled = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
            weight = weight * keep * scaled
        out = torch.einsum("ish,shc->ihc", weight, value[src])
        of_slots = weight.sum(0)  # Each slot has one destination.
        return out, of_slots[: self.num_edges], of_slots[self.num_edges :]

    def _pairs(
        self, leaves: dict[str, Tensor], scale: float | None
    ) -> tuple[Tensor, Tensor]:
        first, second, third = list(leaves.values())[:3]
        if self.form == "gatv2":
            pre = second.unsqueeze(1) + first.unsqueeze(0)
            rectified = F.leaky_relu(pre, SLOPE if scale is None else scale)
            return (rectified * third).sum(-1), first
        group = self.heads // second.size(1)
        heads = torch.arange(self.heads) // group
        scale = WIDTH**-0.5 if scale is None else scale
        second = second[:, heads]
        if self.form == "dot_norm":
            first, second = (
                x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
                for x in (first, second)
            )
            first = first * leaves["qk_norm"]
        product = torch.einsum("ihk,jhk->ijh", first, second)
        return product * scale, third[:, heads]

    def _slots(self) -> tuple[Tensor, Tensor]:
        """Which slots (edges, then loops) each row has, and their sources."""
        src, dst = self.edge_index.long()
        loop = torch.arange(self.num_loops, device=src.device)
        live = torch.ones_like(src, dtype=torch.bool)
        if self.loops:
            live &= src != dst
        if self.mask is not None:
            live &= self.mask
        live = torch.cat([live, torch.ones_like(loop, dtype=torch.bool)])
        rows = torch.arange(self.size[1], device=src.device).unsqueeze(1)
        return (torch.cat([dst, loop]) == rows) & live, torch.cat([src, loop])

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            out, self.tensors(), self.grad.to(out.dtype), materialize_grads=True
        )
