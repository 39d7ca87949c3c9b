"""Edges grouped by one end, summed over by embedding bags, one head after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_tiga.impls.attention_types import Operands, Options
from pyg_tiga.impls.scatter_attention import kept
from pyg_tiga.impls.vendor import announce_beta
from pyg_tiga.relation.graph import Graph


class Pair(NamedTuple):
    """What one head has at each stored edge that takes part and at each loop."""

    edge: Tensor  # [K]
    loop: Tensor  # [L]

    def times(self, other: Pair) -> Pair:
        """Their products, one by one."""
        return Pair(self.edge * other.edge, self.loop * other.loop)

    def is_positive(self) -> Pair:
        """1 where they are above 0, else 0: products with bools are slow."""
        edge, loop = torch.empty_like(self.edge), torch.empty_like(self.loop)
        torch.gt(self.edge, 0, out=edge)
        torch.gt(self.loop, 0, out=loop)
        return Pair(edge, loop)

    def rectified(self, slope: float) -> Pair:
        """Their LeakyReLU, in place."""
        edge = F.leaky_relu(self.edge, slope, inplace=True)
        return Pair(edge, F.leaky_relu(self.loop, slope, inplace=True))

    def sloped(self, above: Pair, slope: float) -> Pair:
        """What arrives through the LeakyReLU of numbers that are above 0 or not."""
        edge = above.edge.mul(1.0 - slope).add_(slope).mul_(self.edge)
        return Pair(edge, above.loop.mul(1.0 - slope).add_(slope).mul_(self.loop))

    def minus(self, value: Tensor, dst: Tensor) -> Pair:
        """Less the destination's value, in place."""
        edge = self.edge.sub_(value.index_select(0, dst))
        return Pair(edge, self.loop.sub_(value[: self.loop.numel()]))

    def powers(self, m: Tensor, dst: Tensor) -> Pair:
        """exp(s - m) of scores, in place."""
        edge, loop = self.minus(m, dst)
        return Pair(edge.exp_(), loop.exp_())


class Edges(NamedTuple):
    """The stored edges that take part, grouped by one end."""

    ptr: Tensor  # [num_rows + 1]
    index: Tensor  # [K], the other end
    row: Tensor  # [K], the end that groups them
    ids: Tensor | None  # [K], the caller's numbers; None: 0 to K - 1
    by_dst: bool

    @property
    def num_rows(self) -> int:
        """Rows, those without edges too."""
        return self.ptr.numel() - 1

    @property
    def dst(self) -> Tensor:
        """Destinations ``[K]``."""
        return self.row if self.by_dst else self.index

    def of_caller(self, value: Tensor) -> Tensor:
        """Values ``[K]`` of those of all stored edges, ``[E]``."""
        return value if self.ids is None else value.index_select(0, self.ids)

    def to_caller(self, value: Tensor, out: Tensor) -> None:
        """Write values ``[K]`` to their places among all stored edges, ``[E]``."""
        if self.ids is None:
            out.copy_(value)
        else:
            out.index_copy_(0, self.ids.long(), value)

    def sum(self, table: Tensor, weight: Pair) -> Tensor:
        """Weighted sums ``[num_rows, D]`` of the rows of a table ``[num_cols, D]``."""
        num_loops = weight.loop.numel()
        out = self._sum(table, weight.edge)
        out[:num_loops].addcmul_(weight.loop.unsqueeze(1), table[:num_loops])
        return out

    def largest(self, score: Tensor) -> Tensor:
        """Largest of the edge scores ``[K]`` in each row; -inf without edges."""
        if self.index.numel() == 0:
            return score.new_full((self.num_rows,), -torch.inf)
        return torch.segment_reduce(score, "max", offsets=self.ptr, unsafe=True)

    def largest_neighbour(self, value: Tensor) -> Tensor:
        """Largest neighbour ``[num_rows, H]`` of ``[num_cols, H]``; -inf without."""
        shape = (self.num_rows, value.size(1))
        if self.index.numel() == 0:
            return value.new_full(shape, -torch.inf)
        found = self._reduce(value, value.new_ones(self.index.numel()), "amax")
        return found.masked_fill_(self.lonely().unsqueeze(1), -torch.inf)

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """<left_i, right_j> ``[K]`` of ``[num_rows, C]`` and ``[num_cols, C]``."""
        if self.index.numel() == 0:
            return left.new_zeros(0)
        if self.index.numel() > left.size(0) * right.size(0):
            # More edges than entries: PyTorch takes no such matrix.
            rows = left.index_select(0, self.row)
            return rows.mul_(right.index_select(0, self.index)).sum(-1)
        zeros = left.new_zeros(self.index.numel())
        matrix = self._matrix(zeros, (left.size(0), right.size(0)))
        with torch.autocast("cpu", enabled=False):
            return torch.sparse.sampled_addmm(matrix, left, right.t()).values()

    def lonely(self) -> Tensor:
        """Rows without stored edges, ``[num_rows]`` bool."""
        return self.ptr[1:] == self.ptr[:-1]

    def _sum(self, table: Tensor, weight: Tensor) -> Tensor:
        if self.index.numel() == 0:
            return table.new_zeros(self.num_rows, table.size(1))
        if table.dtype != torch.float32:
            # The bag has no quick loop for float64.
            return self._reduce(table, weight, "sum")
        return F.embedding_bag(
            self.index,
            table,
            self.ptr,
            mode="sum",
            per_sample_weights=weight,
            include_last_offset=True,
        )

    def _reduce(self, table: Tensor, weight: Tensor, reduce: str) -> Tensor:
        matrix = self._matrix(weight, (self.num_rows, table.size(0)))
        # A product of matrices, to autocast.
        with torch.autocast("cpu", enabled=False):
            return torch.sparse.mm(matrix, table, reduce)

    def _matrix(self, values: Tensor, size: tuple[int, int]) -> Tensor:
        announce_beta()
        return torch.sparse_csr_tensor(
            self.ptr,
            self.index,
            values,
            size,
            device=values.device,
            check_invariants=False,
        )


def edges_of(graph: Graph, operands: Operands, options: Options, by_dst: bool) -> Edges:
    """Leave out masked edges, and i -> i where there are implicit loops."""
    grouping = graph.rows() if by_dst else graph.columns()
    ptr, index, ids = grouping.ptr, grouping.index, grouping.perm
    row = grouping.row_index()
    live = index != row if options.num_loops > 0 else None
    if operands.mask is not None:
        mask = operands.mask if ids is None else operands.mask.index_select(0, ids)
        live = mask if live is None else live & mask
    if live is not None and not live.all():
        place, gone = live.nonzero().view(-1), live.logical_not().nonzero().view(-1)
        ptr = ptr - torch.searchsorted(gone, ptr.long()).to(ptr.dtype)
        index, row = index.index_select(0, place), row.index_select(0, place)
        ids = place if ids is None else ids.index_select(0, place)
    return Edges(ptr, index, row, ids, by_dst)


class Heads(NamedTuple):
    """Operands of the scores, and dropout, head by head."""

    row: Tensor  # [H, N_dst]
    col: Tensor  # [H, N_src]
    term: Tensor | None  # [H, E]
    loop_term: Tensor | None  # [H, L]
    kept: Tensor | None  # [H, E + L]
    num_loops: int

    def pre_activations(self, head: int, edges: Edges) -> Pair:
        """Arguments of the LeakyReLU."""
        row, col, count = self.row[head], self.col[head], self.num_loops
        near, far = (row, col) if edges.by_dst else (col, row)
        pre = far.index_select(0, edges.index)
        pre += near.index_select(0, edges.row)
        loop = row[:count] + col[:count]
        if self.term is not None:
            pre += edges.of_caller(self.term[head])
        if self.loop_term is not None:
            loop += self.loop_term[head]
        return Pair(pre, loop)

    def keeps(self, head: int, edges: Edges) -> Pair | None:
        """1 for weights that dropout keeps, else 0; None keeps all."""
        if self.kept is None:
            return None
        end = self.kept.size(1) - self.num_loops
        chosen = self.kept[head]
        edge = edges.of_caller(chosen[:end])
        return Pair(edge.to(self.row.dtype), chosen[end:].to(self.row.dtype))


def heads_of(
    graph: Graph, operands: Operands, options: Options, dtype: torch.dtype
) -> Heads:
    """The operands in `dtype`, each head in one piece of memory."""
    keep = kept(graph, operands.seed, operands.value.size(1), options)
    return Heads(
        by_head(operands.row, dtype),
        by_head(operands.col, dtype),
        None if operands.term is None else by_head(operands.term, dtype),
        None if operands.loop_term is None else by_head(operands.loop_term, dtype),
        None if keep is None else keep.t().contiguous(),
        options.num_loops,
    )


def by_head(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``[H, N]`` of ``[N, H]``."""
    return value.t().to(dtype).contiguous()


class Summand(NamedTuple):
    """What is summed over edges: a table under kept weights, a column under all."""

    table: Tensor  # [N, C], or [N, C + 1] with the column where dropout keeps all
    column: Tensor | None  # [N, 1]
    keeps: Pair | None

    @classmethod
    def of(cls, table: Tensor, column: Tensor, keeps: Pair | None) -> Summand:
        """Of a table ``[N, C]`` and a column ``[N]``."""
        column = column.unsqueeze(1)
        if keeps is None:
            return cls(torch.cat([table, column], 1), None, None)
        return cls(table.contiguous(), column, keeps)

    def sum(self, edges: Edges, weight: Pair) -> tuple[Tensor, Tensor]:
        """The two sums, ``[num_rows, C]`` and ``[num_rows]``."""
        if self.column is None or self.keeps is None:
            both = edges.sum(self.table, weight)
            return both[:, :-1], both[:, -1]
        kept_sum = edges.sum(self.table, weight.times(self.keeps))
        return kept_sum, edges.sum(self.column, weight).squeeze(1)


def by_node(value: Tensor) -> Tensor:
    """``[N, H]`` of ``[H, N]``."""
    return value.t().contiguous()
