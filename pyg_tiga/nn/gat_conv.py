"""The graph attention layer, without one row of features per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_tiga import functional
from pyg_tiga.functional.arguments import check_number
from pyg_tiga.functional.attention import Weights, gat_layer
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._attention import (
    check_dropout,
    dropout_options,
    head_shape,
    join_heads,
)
from pyg_tiga.nn._dropin import DropIn, ParentSignature
from pyg_tiga.nn._edge_terms import can_fold, edge_terms, loop_features
from pyg_tiga.nn._edges import flow_for
from pyg_tiga.nn._gat_edges import (
    check_edge_attr,
    feature_row_reasons,
    is_unread,
    relation_for,
    run_parent,
    with_weights,
)
from pyg_tiga.nn._gat_inputs import (
    check_nodes,
    check_options,
    matrix_reasons,
    plain_weights,
    size_reasons,
    usual_call,
    wide_reasons,
)
from pyg_tiga.nn._inputs import (
    check_edges,
    check_graph_rows,
    is_matrix,
    is_sparse_tensor,
    name_of,
    node_counts,
    pair_of,
    reads_size,
    size_of,
)
from pyg_tiga.nn._linear import module_of
from pyg_tiga.nn._shapes import attention_reasons
from pyg_tiga.relation.graph import Graph

__all__ = ["GATConv"]


class GATConv(DropIn, torch_geometric.nn.GATConv):
    r"""The graph attentional operator.

    From the `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}}
        \alpha_{i,j}\mathbf{\Theta}_t\mathbf{x}_{j}, \qquad
        \alpha_{i,j} = \mathrm{softmax}_i\left(\mathrm{LeakyReLU}\left(
        \mathbf{a}^{\top}_{s} \mathbf{\Theta}_{s}\mathbf{x}_i
        + \mathbf{a}^{\top}_{t} \mathbf{\Theta}_{t}\mathbf{x}_j
        + \mathbf{a}^{\top}_{e} \mathbf{\Theta}_{e} \mathbf{e}_{i,j}
        \right)\right)

    The last term is there with edge features only.

    Args:
        in_channels: Size of each input sample, or -1 to take it from the first input.
            A tuple holds the sizes of sources and destinations.
        out_channels: Size of each output sample.
        heads: Number of attention heads. (default: ``1``)
        concat: Concatenate the heads rather than average them. (default: ``True``)
        negative_slope: Slope of the LeakyReLU. (default: ``0.2``)
        dropout: Probability of dropping an attention weight in training.
            (default: ``0``)
        add_self_loops: Let every node attend to itself. (default: ``True``)
        edge_dim: Size of the edge features, if there are any. (default: ``None``)
        fill_value: Edge features of self-loops: a number or tensor, or how to reduce
            those of the edges that point to the node (``"add"``, ``"mean"``, ``"min"``,
            ``"max"``, ``"mul"``). (default: ``"mean"``)
        bias: Learn an additive bias. (default: ``True``)
        residual: Add a learnt projection of the node itself. (default: ``False``)
        **kwargs: Arguments of ``torch_geometric.nn.conv.MessagePassing``.

    Shapes:
        - **inputs:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite; edge
          indices :math:`(2, |\mathcal{E}|)`, or a ``SparseTensor``, torch sparse tensor
          or :class:`pyg_tiga.Graph`; edge features :math:`(|\mathcal{E}|, D)`
          *(optional)*
        - **outputs:** :math:`(|\mathcal{V}_t|, H \cdot F_{out})`, and with
          ``return_attention_weights=True`` the edges with their weights
          :math:`(|\mathcal{E}|, H)`, self-loops last

    Accelerated: scores, softmax, dropout and aggregation are one operation, whose
    memory does not grow with the edges times the channels, neither forward nor
    backward. Self-loops are never added to the edges, and edge features are reduced to
    one number per head. Dropout draws its seed from the generator of the device and
    gives other masks than PyG's for the same seed.

    Not accelerated, but PyG's own path: ``aggr`` other than ``"add"`` or ``"sum"``,
    hooks on messages, edge updates, propagation or ``lin_edge``, explain mode,
    ``decomposed_layers``, another ``node_dim``, overridden methods, ``heads`` or
    ``out_channels`` changed after construction, matrices with one row of values per
    entry, attention weights of matrices with self-loops, tracing and ONNX export.
    :meth:`explain_plan` says which; with ``PYG_TIGA_STRICT=1`` it is an error.
    """

    _pyg_class = torch_geometric.nn.GATConv
    _fused_aggregations = ("sum", "add")
    _fused_node_dim = 0
    _generated = ("propagate", "edge_updater")
    propagate_type = ParentSignature("propagate", x="OptPairTensor", alpha="Tensor")
    edge_updater_type = ParentSignature(
        "edge_updater", alpha="OptPairTensor", edge_attr="OptTensor"
    )

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        check_options(heads, dropout, negative_slope)
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            bias,
            residual,
            **kwargs,
        )
        self._finish_init()

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Run the layer.

        Args:
            x: Features ``[N, F_in]``, or a pair (sources, destinations or ``None``).
            edge_index: The edges, in any of the forms that PyG takes, or a
                :class:`pyg_tiga.Graph`.
            edge_attr: Edge features ``[E, D]``, or ``[E]`` for ``[E, 1]``.
            size: Numbers of (sources, destinations), where ``x`` does not say.
            return_attention_weights: Return the weights too, after dropout.

        Returns:
            ``[N_dst, H * F_out]`` (``[N_dst, F_out]`` with ``concat=False``); with
            weights, a pair of it and ``(edge_index, weights)``, or of it and a
            ``SparseTensor``, as PyG.

        Raises:
            ValueError: Shapes, dtypes, devices or indices that do not fit.
            TypeError: An option is no number.
            UnsupportedError: The parent's path is needed, and ``PYG_TIGA_STRICT`` set.
        """
        if (
            edge_attr is None
            and size is None
            and not return_attention_weights
            and not torch.compiler.is_compiling()
        ):
            call = usual_call(self, x, edge_index)
            if call is not None:
                return self._run_usual(x, *call)
        reasons = self._reasons(edge_index, edge_attr, return_attention_weights)
        if not reasons:
            pair, sizes = pair_of(x), self._sizes(edge_index, size)
            counts = self._check(pair, edge_index, edge_attr, sizes)
            reasons = size_reasons(self, pair, counts, sizes)
        if reasons:
            if not torch.compiler.is_compiling():
                self._note_parent(reasons)
            check_graph_rows(x, edge_index)
            args = (edge_attr, size, return_attention_weights)
            return run_parent(super().forward, self, x, edge_index, *args)
        used_attr = edge_attr
        if edge_attr is not None and module_of(self, "lin_edge") is None:
            used_attr = None
        out, weights = self._attend(
            pair, edge_index, used_attr, counts, return_attention_weights
        )
        if not torch.compiler.is_compiling():
            self._note_fused()
        return (out, weights) if return_attention_weights else out

    def _run_usual(self, x: Tensor, graph: Graph, weights: Weights) -> Tensor:
        """The output of a call that passed all checks."""
        counts = (graph.num_src, graph.num_dst)
        options = self._options(graph, None, counts, graph.device)
        out = gat_layer(graph, x, weights, **options)
        if out is None:
            out, _ = self._attend((x, x), graph, None, counts, None, options)
        self._note_fused()
        return out

    def _reasons(self, edge_index: Adj, edge_attr: Any, weights: Any) -> list[str]:
        """Reasons for the parent's path, with those that lie in the edges."""
        lin = None if edge_attr is None else module_of(self, "lin_edge")
        reads_attr = lin is not None
        scores, maps = ["att_src", "att_dst"], ["lin", "lin_src", "lin_dst"]
        if reads_attr:
            scores.append("att_edge")
            maps.append("lin_edge")
        reasons = self._parent_reasons() + attention_reasons(self, scores, maps)
        if reads_attr:
            if not can_fold(lin):
                reasons.append("'lin_edge' is not the plain Linear")
            if isinstance(edge_attr, Tensor) and edge_attr.dim() > 2:
                reasons += wide_reasons(self, edge_attr, edge_index)
            reasons += feature_row_reasons(self, edge_attr, edge_index)
        if is_matrix(edge_index):
            if is_traced(edge_index):
                reasons.append("a sparse matrix under a tracer")
            reasons += matrix_reasons(self, edge_index, edge_attr, weights)
        return reasons

    def _sizes(
        self, edge_index: Adj, size: Any
    ) -> tuple[int | None, int | None] | None:
        """The numbers of nodes in ``size``, as far as PyG reads them."""
        check_edges(edge_index)
        if not reads_size(edge_index) and (
            not self.add_self_loops or is_sparse_tensor(edge_index)
        ):
            return None
        sizes = size_of(size)
        if sizes is not None and self.add_self_loops and None in sizes:
            raise ValueError(
                f"'size' must hold both numbers where self-loops are added (got {size})"
            )
        return sizes

    def _check(
        self,
        x: tuple[Tensor, Tensor | None],
        edge_index: Adj,
        edge_attr: Any,
        size: tuple[int | None, int | None] | None,
    ) -> tuple[int, int]:
        """Check all operands before anything is launched; gives (N_src, N_dst)."""
        x_src, x_dst = x
        lin_src, lin_dst = self._projections()
        check_nodes("x", x_src, lin_src, edge_index)
        if x_dst is not None and not (x_dst is x_src and lin_dst is lin_src):
            name = name_of(x_src, x_dst)
            check_nodes(name, x_dst, lin_dst, edge_index)
        check_dropout(self)
        check_number("negative_slope", self.negative_slope)
        loops = None
        if self.add_self_loops:
            nodes = [part.size(0) for part in x if part is not None]
            loops = min(nodes if size is None else size)
        counts = node_counts(edge_index, x_src, x_dst, size, self.flow, loops)
        if edge_attr is not None:
            check_edge_attr(self, edge_attr, edge_index, counts)
        return counts

    def _projections(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """The maps of sources and destinations."""
        lin = module_of(self, "lin")
        if lin is not None:
            return lin, lin
        return module_of(self, "lin_src"), module_of(self, "lin_dst")

    def _attend(
        self,
        x: tuple[Tensor, Tensor | None],
        edge_index: Adj,
        edge_attr: Tensor | None,
        counts: tuple[int, int],
        wants_weights: bool | None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        """The output, and the weights in PyG's form where they are wanted."""
        relation = relation_for(edge_index, self.add_self_loops)
        # Options are given where one step has been tried with them.
        tries = options is None and not wants_weights
        if tries and edge_attr is None and x[0] is x[1]:
            parameters = plain_weights(self, x[0])
            if parameters is not None:
                options = self._options(edge_index, None, counts, x[0].device)
                out = gat_layer(relation, x[0], parameters, **options)
                if out is not None:
                    return out, None
        res = module_of(self, "res")
        root = None if res is None or x[1] is None else res(x[1])
        x_src, x_dst = self._project(*x)
        if options is None:
            options = self._options(edge_index, edge_attr, counts, x_src.device)
        weights = None
        if wants_weights:
            out, weights = self._attend_openly(relation, x_src, x_dst, counts, options)
            weights = with_weights(self, edge_index, relation, *weights)
        else:
            shape = head_shape(self)
            att_dst = None if x_dst is None else self.att_dst.view(shape)
            out = functional.gat_attention(
                relation, x_src, x_dst, self.att_src.view(shape), att_dst, **options
            )
        return self._finish(out, root), weights

    def _project(
        self, x_src: Tensor, x_dst: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Values ``[N, H, C]`` of sources and destinations."""
        lin_src, lin_dst = self._projections()
        heads, channels = head_shape(self)
        out_src = lin_src(x_src).view(-1, heads, channels)
        if x_dst is None:
            return out_src, None
        if x_dst is x_src and lin_dst is lin_src:
            return out_src, out_src
        return out_src, lin_dst(x_dst).view(-1, heads, channels)

    def _options(
        self,
        edge_index: Adj,
        edge_attr: Tensor | None,
        counts: tuple[int, int],
        device: torch.device,
    ) -> dict[str, Any]:
        """What the output and the weights have in common."""
        options: dict[str, Any] = {
            "negative_slope": self.negative_slope,
            "self_loops": bool(self.add_self_loops),
            "size": counts,
            "flow": flow_for(edge_index, self.flow),
        }
        num_loops = min(counts) if self.add_self_loops else 0
        if edge_attr is not None and not is_unread(edge_index, num_loops):
            loop_attr = None
            if self.add_self_loops:
                fill = self.fill_value
                loop_attr = loop_features(edge_index, edge_attr, fill, min(counts))
                # Integers become what their means are.
                dtype = torch.promote_types(edge_attr.dtype, loop_attr.dtype)
                edge_attr = edge_attr.to(dtype)
            options["edge_term"], options["loop_term"] = edge_terms(
                edge_attr, loop_attr, module_of(self, "lin_edge"), self.att_edge
            )
        return options | dropout_options(self, device)

    def _attend_openly(
        self,
        relation: Any,
        x_src: Tensor,  # [N_src, H, C]
        x_dst: Tensor | None,  # [N_dst, H, C]
        counts: tuple[int, int],
        options: dict[str, Any],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output with the weights that led to it, from the same scores."""
        alpha_src = (x_src * self.att_src).sum(-1)  # [N_src, H]
        if x_dst is None:
            alpha_dst = alpha_src.new_zeros(counts[1], head_shape(self)[0])
        else:
            alpha_dst = (x_dst * self.att_dst).sum(-1)  # [N_dst, H]
        scores = (alpha_src, alpha_dst)
        out = functional.additive_attention(relation, x_src, *scores, **options)
        weights = functional.additive_attention_weights(relation, *scores, **options)
        return out, weights

    def _finish(self, out: Tensor, root: Tensor | None) -> Tensor:
        """Join the heads of ``[N_dst, H, C]``, add the residual and the bias."""
        out = join_heads(self, out)
        if root is not None:
            out = out + root
        bias = self.bias
        return out if bias is None else out + bias
