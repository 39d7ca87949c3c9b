"""GraphSAGE's layer, aggregating without one row per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_tiga import _features, functional
from pyg_tiga.functional.aggregation import Maps, aggregate_linear
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._attention import row_reasons
from pyg_tiga.nn._dropin import DropIn, ParentSignature
from pyg_tiga.nn._edges import flow_for, for_functional, for_parent
from pyg_tiga.nn._inputs import (
    check_device,
    check_edges,
    check_features,
    check_graph_rows,
    is_matrix,
    name_of,
    node_counts,
    pair_of,
    reads_size,
    size_of,
)
from pyg_tiga.nn._linear import (
    has_bias,
    is_plain,
    module_of,
    reads_alike,
    transform_first,
)
from pyg_tiga.nn._sage_inputs import (
    LINEAR_REDUCTIONS,
    parent_ties,
    plain_maps,
    takes_segments,
    usual_call,
    width_reasons,
)
from pyg_tiga.relation.graph import Graph

__all__ = ["SAGEConv"]


class SAGEConv(DropIn, torch_geometric.nn.SAGEConv):
    r"""The GraphSAGE operator.

    From the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    With ``project=True``, :math:`\mathbf{x}_j` first becomes
    :math:`\sigma(\mathbf{W}_3 \mathbf{x}_j + \mathbf{b})`, as in Eq. (3) of the paper.

    Args:
        in_channels: Size of each input sample, or -1 to take it from the first input.
            A tuple holds the sizes of sources and destinations.
        out_channels: Size of each output sample.
        aggr: How neighbours are aggregated. (default: ``"mean"``)
        normalize: Scale each output to length 1. (default: ``False``)
        root_weight: Add the transformed features of the node itself.
            (default: ``True``)
        project: Transform source features before they are aggregated.
            (default: ``False``)
        bias: Learn an additive bias. (default: ``True``)
        **kwargs: Arguments of ``torch_geometric.nn.conv.MessagePassing``.

    Shapes:
        - **inputs:** node features :math:`(*, |\mathcal{V}|, F_{in})`, or
          :math:`((*, |\mathcal{V}_s|, F_s), (*, |\mathcal{V}_t|, F_t))` if bipartite;
          edge indices :math:`(2, |\mathcal{E}|)`, or a ``SparseTensor``, torch sparse
          tensor or :class:`pyg_tiga.Graph`
        - **outputs:** :math:`(*, |\mathcal{V}_t|, F_{out})`

    Accelerated with ``aggr`` ``"sum"``, ``"add"``, ``"mean"``, ``"max"`` and ``"min"``:
    no message is stored, neither forward nor backward. Where this saves work, ``lin_l``
    is applied before a sum or mean instead of after it (the two commute). Stored values
    of a torch sparse tensor weight its edges, those of a ``SparseTensor`` do not, as in
    PyG.

    Not accelerated, but PyG's own path: other aggregations, hooks on messages or
    propagation, explain mode, ``decomposed_layers``, another ``node_dim``, overridden
    methods, TorchScript, tracing and ONNX export. :meth:`explain_plan` says which; with
    ``PYG_TIGA_STRICT=1`` it is an error.
    """

    _pyg_class = torch_geometric.nn.SAGEConv
    propagate_type = ParentSignature("propagate", x="OptPairTensor")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] | Aggregation | None = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            aggr,
            normalize,
            root_weight,
            project,
            bias,
            **kwargs,
        )
        self._finish_init()

    def forward(
        self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size = None
    ) -> Tensor:
        """Run the layer.

        Args:
            x: Features ``[*, N, F_in]``, or a pair (sources, destinations or ``None``).
            edge_index: The edges, in any of the forms that PyG takes, or a
                :class:`pyg_tiga.Graph`.
            size: Numbers of (sources, destinations), where ``x`` does not say.

        Returns:
            ``[*, N_dst, F_out]``.

        Raises:
            ValueError: Shapes, dtypes, devices or indices that do not fit.
            UnsupportedError: The parent's path is needed, and ``PYG_TIGA_STRICT`` set.
        """
        if size is None and not torch.compiler.is_compiling():
            call = usual_call(self, x, edge_index)
            if call is not None:
                graph, maps = call
                return self._run_usual(x, graph, maps)
        reasons = self._reasons(edge_index)
        if not reasons:
            x_src, x_dst = pair_of(x)
            reasons = self._layout_reasons(x_src, edge_index)
        if not reasons:
            counts = self._check(x_src, x_dst, edge_index, size)
            if self.root_weight:
                reasons = row_reasons(x_dst, counts)
        if reasons:
            if not torch.compiler.is_compiling():
                self._note_parent(reasons)
            check_graph_rows(x, edge_index, self.root_weight)
            return super().forward(x, *for_parent(edge_index, size))
        if self.project and "lin" in self._modules:
            x_src = self.lin(x_src).relu()
        out = self._convolve(x_src, x_dst, edge_index, counts)
        if self.normalize:
            out = F.normalize(out, p=2.0, dim=-1)
        if not torch.compiler.is_compiling():
            self._note_fused()
        return out

    def _run_usual(self, x: Tensor, graph: Graph, maps: Maps) -> Tensor:
        """The output of a call that passed all checks."""
        lin_l, first = module_of(self, "lin_l"), False
        if lin_l.out_channels < lin_l.in_channels:
            counts = (graph.num_src, graph.num_dst)
            first = self._transforms_first(x, x, graph, counts)
        if first:
            out = self._aggregate_transformed(x, x, graph, counts)
        else:
            out = aggregate_linear(graph, x, x, maps, self.aggr)
        if self.normalize:
            out = F.normalize(out, p=2.0, dim=-1)
        self._note_fused()
        return out

    def _reasons(self, edge_index: Adj) -> list[str]:
        """Reasons for the parent's path, with those that lie in the edges."""
        reasons = self._parent_reasons() + width_reasons(self)
        if not reasons and is_matrix(edge_index):
            if not self.fuse:
                reasons.append("fuse=False with a sparse matrix")
            elif is_traced(edge_index):
                reasons.append("a sparse matrix under a tracer")
        if (
            self.aggr in ("max", "min")
            and not reasons
            and takes_segments(self, edge_index)
            and _features.torch_scatter() is None
        ):
            reasons.append(
                "built in deterministic mode, PyG reduces a sorted EdgeIndex by "
                "torch.segment_reduce, which has its own gradient at ties"
            )
        return reasons

    def _check(
        self, x_src: Tensor, x_dst: Tensor | None, edge_index: Adj, size: Size
    ) -> tuple[int, int]:
        """Check all operands before anything is launched; gives (N_src, N_dst)."""
        projects = self.project and "lin" in self._modules
        first = module_of(self, "lin" if projects else "lin_l")
        check_features("x", x_src, first)
        rooted = self.root_weight and x_dst is not None
        if rooted and (x_dst is not x_src or not reads_alike(first, self._root())):
            name = name_of(x_src, x_dst)
            check_features(name, x_dst, self._root())
        check_device("x", x_src, edge_index)
        sizes = size_of(size) if reads_size(edge_index) else None
        # With a matrix, PyG looks at the sources only, and so may a layer of a graph.
        is_own = isinstance(edge_index, Graph) and x_dst is x_src and not rooted
        counted = None if is_matrix(edge_index) or is_own else x_dst
        counts = node_counts(edge_index, x_src, counted, sizes, self.flow)
        # PyG adds one row to all.
        if (
            rooted
            and 1 not in (rows := (x_dst.size(-2), counts[1]))
            and (rows[0] != rows[1])
        ):
            raise ValueError(
                f"'{name_of(x_src, x_dst)}' must have {counts[1]} rows, as many as the "
                f"output, with flow='{self.flow}' (got {list(x_dst.shape)})"
            )
        return counts

    def _layout_reasons(self, x: Any, edge_index: Adj) -> list[str]:
        """Reasons for the parent's path that lie in sparse features.

        PyTorch knows sums of the rows of CSR features, and others on some devices.

        Raises:
            ValueError: It knows none for these.
        """
        check_edges(edge_index)
        if not isinstance(x, Tensor) or x.layout is torch.strided:
            return []
        if self.project and "lin" in self._modules:
            return []  # What is aggregated is dense.
        is_product = is_matrix(edge_index) and self.aggr in ("sum", "add")
        if is_product and (x.is_cuda or x.layout is torch.sparse_csr):
            return [f"'x' has the layout {x.layout}"]
        raise ValueError(
            f"'x' must be a dense tensor with aggr={self.aggr!r} and these edges (got "
            f"the layout {x.layout}). Call 'x.to_dense()'"
        )

    def _root(self) -> torch.nn.Module:
        return module_of(self, "lin_r")

    def _convolve(
        self,
        x_src: Tensor,  # [*, N_src, F_in]
        x_dst: Tensor | None,  # [*, N_dst, F_in]
        edge_index: Adj,
        counts: tuple[int, int],
    ) -> Tensor:
        """Aggregate and transform, in the cheaper order."""
        edges = for_functional(edge_index)
        if self._transforms_first(x_src, x_dst, edge_index, counts):
            return self._aggregate_transformed(x_src, x_dst, edges, counts)
        is_linear = self.aggr in LINEAR_REDUCTIONS
        if is_linear:
            maps = plain_maps(self, x_src, x_dst, edges)
            if maps is not None:
                flow = flow_for(edges, self.flow)
                return aggregate_linear(
                    edges, x_src, x_dst, maps, self.aggr, counts, flow
                )
        ties = "split" if is_linear else self._ties(edge_index, x_src)
        flow = flow_for(edges, self.flow)
        aggregate = functional.spmm(
            edges, x_src, None, self.aggr, size=counts, flow=flow, ties=ties
        )
        if x_src.is_floating_point():
            # Values of a matrix may be of a wider dtype.
            aggregate = aggregate.to(x_src.dtype)
        return self._combine(aggregate, x_dst)

    def _transforms_first(
        self,
        x_src: Tensor,
        x_dst: Tensor | None,
        edge_index: Adj,
        counts: tuple[int, int],
    ) -> bool:
        """Whether ``lin_l`` can go before the aggregation, and costs less there.

        Every source must also enter the output as a root, if there are gradients: a NaN
        of another, that no edge reads, would reach the gradient of the map.
        """
        return (
            self.aggr in LINEAR_REDUCTIONS
            and ((self.root_weight and x_dst is x_src) or not torch.is_grad_enabled())
            and transform_first(module_of(self, "lin_l"), x_src, edge_index, counts)
        )

    def _ties(self, edge_index: Adj, x: Tensor) -> str:
        # By segments it is torch_scatter that reduces, and the first of equals wins.
        if takes_segments(self, edge_index):
            return "first"
        return parent_ties(edge_index, x)

    def _combine(
        self,
        aggregate: Tensor,  # [*, N_dst, F_in]
        x_dst: Tensor | None,  # [*, N_dst, F_in]
    ) -> Tensor:
        """Add ``lin_l`` of the aggregate and ``lin_r`` of the destinations."""
        out = module_of(self, "lin_l")(aggregate)  # [*, N_dst, F_out]
        if not self.root_weight or x_dst is None:
            return out
        return out + self._root()(x_dst)

    def _aggregate_transformed(
        self,
        x_src: Tensor,  # [*, N_src, F_in]
        x_dst: Tensor | None,  # [*, N_dst, F_in]
        edges: Any,
        counts: tuple[int, int],
    ) -> Tensor:
        """Aggregate the sources behind the weight of ``lin_l``, and add the rest."""
        lin_l = module_of(self, "lin_l")
        x_src = F.linear(x_src, lin_l.weight)  # [*, N_src, F_out]
        flow = flow_for(edges, self.flow)
        out = functional.spmm(edges, x_src, None, self.aggr, size=counts, flow=flow)
        # Not that of a matrix's values, so that it is the same in either order.
        out = out.to(x_src.dtype)
        bias = lin_l.bias
        if not self.root_weight or x_dst is None:
            return out if bias is None else out + bias.to(out.dtype)
        lin_r = self._root()
        if is_plain(lin_r) and not has_bias(lin_r):
            # The product's epilogue adds the bias at no cost.
            root = F.linear(x_dst, lin_r.weight, bias)
        else:
            root = lin_r(x_dst)
            root = root if bias is None else root + bias.to(root.dtype)
        return out + root
