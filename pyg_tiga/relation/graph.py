"""`Graph`: a relation given by explicit edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_tiga.relation import inputs
from pyg_tiga.relation.cache import CACHE, key_of
from pyg_tiga.relation.csr import Grouping, index_dtype
from pyg_tiga.relation.edges import CSR, Edges
from pyg_tiga.relation.handles import LAYOUTS, Handle, layout_of
from pyg_tiga.relation.inputs import Flow, Parts
from pyg_tiga.relation.origin import Origin, origin_of
from pyg_tiga.relation.report import explain_graph
from pyg_tiga.relation.sharing import count_edits, remember, share


class Graph:
    """Which source node j sends to which destination node i, edge by edge.

    A graph stores the tensors it was made from. From them it derives, once and on their
    device, its edges grouped by destination (:meth:`rows`) and, when a gradient asks
    for it, by source (:meth:`columns`), each with one stable sort. Sorted input skips
    that sort. If the tensors are edited in place, everything is derived anew at the
    next use; the backward of a call keeps the edges that the call had.

    Use the constructors :meth:`from_edge_index`, :meth:`from_csr` and
    :meth:`from_adj`.

    Attributes:
        kind: Kind of the relation, `"csr"`.
        num_src: Source nodes.
        num_dst: Destination nodes.
        num_edges: E.
        device: Device of the tensors.
        index_dtype: Dtype of derived index arrays, int32 where it fits.
        value: Stored values, `[E]` in the caller's edge order, of a sparse matrix that
            has some.
    """

    kind = "csr"

    def __init__(
        self,
        edges: Edges,
        dst_end: int,
        value: Tensor | None = None,
        *,
        follows: bool = False,
        origin: Origin | None = None,
    ) -> None:
        self._edges = edges
        self._dst_end = dst_end
        # A graph that users hold follows edits of its tensors; one that a call works on
        # keeps its edges, because a backward reads them later.
        self._follows = follows
        self._origin = origin
        self._now: tuple[Graph, Graph] | None = None
        self._watched: tuple[Graph, Graph] | None = None
        self._reverse: Graph | ref[Graph] | None = None
        self.value = value
        self.num_src = edges.sizes[1 - dst_end]
        self.num_dst = edges.sizes[dst_end]
        self.num_edges = edges.num_edges
        self.device = edges.device
        self.index_dtype = index_dtype(edges.num_edges, *edges.sizes)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,  # [2, E]
        num_nodes: int | None = None,
        *,
        num_src: int | None = None,
        num_dst: int | None = None,
        flow: Flow = "source_to_target",
    ) -> Graph:
        """Make a graph of an `edge_index`.

        Args:
            edge_index: Edges `[2, E]` of any integer dtype, or a PyG `EdgeIndex`, whose
                sort order is used.
            num_nodes: Source and destination nodes, where these are the same.
            num_src: Source nodes.
            num_dst: Destination nodes. Without any of the three, an `EdgeIndex` may
                know; otherwise the largest index is read, which waits for the device.
            flow: With `"target_to_source"`, row 0 holds the destinations.

        Raises:
            TypeError: `edge_index` is no dense integer tensor.
            ValueError: Its shape is wrong, or an index is out of range.
        """
        inputs.check_edge_index(edge_index)
        dst_end = inputs.dst_end_of(flow)
        ends = (num_src, num_dst) if dst_end == 1 else (num_dst, num_src)
        sizes = inputs.infer_sizes(edge_index, num_nodes, ends)
        names = ("num_src", "num_dst") if dst_end == 1 else ("num_dst", "num_src")
        checked = tuple(map(inputs.size_of, sizes, names))
        tensor, layout = inputs.plain(edge_index)
        parts = Parts((tensor,), layout, dst_end, checked)
        return cls._from_parts(parts, origin_of(edge_index))

    @classmethod
    def from_csr(
        cls,
        rowptr: Tensor,  # [N_dst + 1]
        col: Tensor,  # [E]
        num_src: int | None = None,
    ) -> Graph:
        """Make a graph of edges that are grouped by destination.

        Args:
            rowptr: The edges of destination i are ``rowptr[i]`` to ``rowptr[i + 1]``.
            col: Source of each edge.
            num_src: Source nodes; as many as destinations unless given.

        Raises:
            TypeError: An argument is no dense integer tensor.
            ValueError: Shapes do not fit, `rowptr` does not rise from 0 to E, or an
                index is out of range.
        """
        inputs.check_csr(rowptr, col)
        rowptr, col = inputs.unwrapped(rowptr), inputs.unwrapped(col)
        num_dst = rowptr.numel() - 1
        num_src = num_dst if num_src is None else inputs.size_of(num_src, "num_src")
        return cls._from_parts(Parts((rowptr, col), CSR, 0, (num_dst, num_src)))

    @classmethod
    def from_adj(cls, adj_t: Tensor | SparseTensor) -> Graph:
        """Make a graph of a sparse matrix whose rows are destinations (PyG's `adj_t`).

        Entries that occur twice stay two edges. Stored values are in :attr:`value`.

        Args:
            adj_t: A `SparseTensor`, or a `torch.sparse` tensor in COO, CSR or CSC
                layout.

        Raises:
            TypeError: It is something else.
            ValueError: It does not have two dimensions, or an index is out of range.
        """
        return cls._from_parts(inputs.take_adjacency(adj_t))

    @classmethod
    def _from_parts(cls, parts: Parts, origin: Origin | None = None) -> Graph:
        inputs.check_parts(parts)
        edges = share(parts)
        edges.grouping(parts.dst_end)  # Checks the indices.
        if parts.value is not None:
            inputs.check_value(parts.value, edges.num_edges, edges.device)
        return cls(edges, parts.dst_end, parts.value, follows=True, origin=origin)

    @classmethod
    def from_handle(
        cls, tensors: Sequence[Tensor], layout: str, num_src: int, num_dst: int
    ) -> Graph:
        """Find the graph of a handle in the memo, or make it and keep it there.

        Args:
            tensors: The tensors that define the edges.
            layout: How they do; see :meth:`handle`.
            num_src: Source nodes.
            num_dst: Destination nodes.
        """
        base, dst_end = LAYOUTS[layout]
        sizes = (num_src, num_dst) if dst_end else (num_dst, num_src)
        tensors, is_counted = count_edits(tensors, base)
        if not is_counted:
            # Edits would go unnoticed.
            parts = Parts(tuple(tensors), base, dst_end, sizes)
            return cls._from_parts(parts).current()
        key = key_of(tensors, base, sizes)
        entry = CACHE.find(key)
        if entry is None:
            entry = remember(Parts(tuple(tensors), base, dst_end, sizes), key)
        graph = entry.views.get(dst_end)
        if graph is None:
            graph = entry.views[dst_end] = cls(entry.edges, dst_end)
            # Every backward asks for it.
            entry.views.setdefault(1 - dst_end, graph.reverse())
        return graph

    def current(self) -> Graph:
        """The graph of the tensors as they are now, for a call to work on.

        Later edits do not reach it, so that a backward finds the edges of its forward.
        """
        if not self._follows or torch.compiler.is_compiling():
            return self
        edges, now = self._current(), self._now
        if now is None or now[0].value is not self.value:
            edges.grouping(self._dst_end)  # Checks the indices.
            graph = Graph(edges, self._dst_end, self.value, origin=self._origin)
            # Every backward asks for the other one.
            self._now = now = graph, graph.reverse()
        return now[0]

    def watching(self, origin: Origin) -> Graph:
        """A graph of the memo for a call with an `EdgeIndex`, whose edits it sees."""
        edges, known = self._edges, self._watched
        if (
            known is None
            or known[0]._origin is not origin
            or known[0]._edges is not edges
        ):
            graph = Graph(edges, self._dst_end, self.value, origin=origin)
            # Every backward asks for the other one.
            self._watched = known = graph, graph.reverse()
        return known[0]

    def is_fresh(self) -> bool:
        """Whether the tensors still hold the edges that were read from them."""
        if self._origin is not None and not torch.compiler.is_compiling():
            self._origin.count_edits(self._edges.tensors[0])
        return self._edges.is_fresh()

    def handle(self) -> Handle:
        """What carries the graph across the boundary of an op.

        Returns:
            The tensors that define it, their layout (`"coo"`, `"coo_by_row"`,
            `"coo_by_col"` or `"csr"`, with `":reversed"` appended if destinations and
            sources are exchanged), and the numbers of source and destination nodes.
            Under a tracer, what counts edits through an `EdgeIndex` comes first.
        """
        # A tracer cannot see versions, and autograd checks those of compiled graphs.
        traced = torch.compiler.is_compiling()
        edges = self._edges if traced else self._current()
        layout = layout_of(edges.layout, self._dst_end)
        tensors = list(edges.tensors)
        if traced and self._origin is not None:
            tensors.insert(0, self._origin.counter)
        return tensors, layout, self.num_src, self.num_dst

    def rows(self) -> Grouping:
        """The edges grouped by destination."""
        return self._current().grouping(self._dst_end)

    def columns(self) -> Grouping:
        """The edges grouped by source."""
        return self._current().grouping(1 - self._dst_end)

    def slots(self) -> Tensor:
        """Position in :meth:`rows` of each position of :meth:`columns`, `[E]`."""
        return self._current().slots(self._dst_end)

    def places(self) -> Tensor:
        """Position in :meth:`columns` of each position of :meth:`rows`, `[E]`."""
        return self._current().slots(1 - self._dst_end)

    def ranks(self) -> Tensor | None:
        """Position in :meth:`rows` of each edge, `[E]` in the caller's order.

        None where these are the same.
        """
        return self._current().ranks(self._dst_end)

    def targets(self) -> Tensor:
        """Destination of each edge, `[E]` in the caller's order, as kernels read it.

        Other than :meth:`ends`, it waits for no check of the indices: one may be out of
        range.
        """
        return self._current().ends_at(self._dst_end)

    def row_ids(self) -> Tensor:
        """Destination of each position of :meth:`rows`, `[E]`, as :meth:`targets`."""
        return self._current().row_ids(self._dst_end)

    @property
    def scratch(self) -> dict[Any, Any]:
        """What operations derived for these edges in this direction, for reuse."""
        return self._current().scratch[self._dst_end]

    def reverse(self) -> Graph:
        """The graph with sources and destinations exchanged, sharing all groupings."""
        known = self._reverse
        if isinstance(known, ref):
            known = known()
        if known is None:
            known = self._like(1 - self._dst_end, self.value)
            # One direction is weak: a cycle would leave device memory to the garbage
            # collector.
            known._reverse = self
            self._reverse = ref(known)
        return known

    def with_value(self, value: Tensor | None) -> Graph:
        """The same edges with other stored values, `[E]` in the caller's order.

        Raises:
            TypeError: `value` is no dense tensor.
            ValueError: It is not one entry for each edge, or on another device.
        """
        if value is not None:
            inputs.check_value(value, self.num_edges, self.device)
        return self._like(self._dst_end, value)

    def _like(self, dst_end: int, value: Tensor | None) -> Graph:
        edges = self._current()
        options = {"follows": self._follows, "origin": self._origin}
        return Graph(edges, dst_end, value, **options)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Source and destination of each edge, `[E]` each, in the caller's order.

        Raises:
            ValueError: An index is out of range.
        """
        edges = self._current()
        edges.validate()
        if edges.layout == CSR:
            rows = edges.grouping(0)
            both = (rows.row_index(), rows.index)
        else:
            both = tuple(edges.tensors[0])
        return both[1 - self._dst_end], both[self._dst_end]

    def edge_index(self) -> Tensor:
        """Source and destination of each edge, `[2, E]`, in the caller's order.

        Raises:
            ValueError: An index is out of range.
        """
        edges = self._current()
        if edges.layout != CSR and self._dst_end == 1:
            edges.validate()
            return edges.tensors[0]
        return torch.stack(self.ends())

    def validate(self) -> None:
        """Wait for an index check whose result is not there yet.

        Raises:
            ValueError: An index is out of range.
        """
        self._current().validate()

    def nbytes(self) -> int:
        """Bytes of the arrays derived from the tensors that define the graph."""
        return self._current().nbytes()

    def explain(self) -> str:
        """Sizes, degrees, and what has been built."""
        edges, dst_end = self._current(), self._dst_end
        return explain_graph(self, edges.built(dst_end), edges.built(1 - dst_end))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """The graph on another device."""
        device = torch.device(device)
        edges = self._current()
        tensors = tuple(t.to(device, non_blocking=non_blocking) for t in edges.tensors)
        if tensors[0].device == self.device:
            return self
        value = self.value
        if value is not None:
            value = value.to(device, non_blocking=non_blocking)
        return _rebuild(Parts(tensors, edges.layout, self._dst_end, edges.sizes, value))

    def _current(self) -> Edges:
        """The edges: read anew if their tensors were edited, or as they were."""
        edges = self._edges
        if self.is_fresh():
            return edges
        if not self._follows:
            self._edges = edges = edges.preserved()
            # Cut loose from what its tensors and the wrapper around them become.
            self._origin = None
            CACHE.watch(edges)
            return edges
        parts = Parts(edges.tensors, edges.layout, self._dst_end, edges.sizes)
        self._now, self._edges = None, share(parts)
        edges.settle()  # What calls have read is reported all the same.
        return self._edges

    def __reduce__(self) -> tuple[Any, ...]:
        edges = self._current()
        parts = Parts(
            edges.tensors, edges.layout, self._dst_end, edges.sizes, self.value
        )
        return _rebuild, (parts,)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_src={self.num_src}, num_dst={self.num_dst}, "
            f"num_edges={self.num_edges}, device='{self.device}')"
        )


def _rebuild(parts: Parts) -> Graph:
    return Graph(share(parts), parts.dst_end, parts.value, follows=True)
