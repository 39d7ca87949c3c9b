"""The graph attention layer with dynamic scores, without features per edge."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_tiga import functional
from pyg_tiga.functional.arguments import check_number
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._attention import (
    check_dropout,
    dropout_options,
    feature_reasons,
    head_shape,
    join_heads,
    row_reasons,
)
from pyg_tiga.nn._dropin import DropIn, ParentSignature
from pyg_tiga.nn._gat_edges import (
    parents_edges,
    relation_for,
    with_given_edges,
    with_weights,
)
from pyg_tiga.nn._gat_inputs import check_nodes, check_options, matrix_reasons
from pyg_tiga.nn._inputs import (
    check_edges,
    check_graph_rows,
    is_matrix,
    name_of,
    node_counts,
    pair_of,
)
from pyg_tiga.nn._linear import apply_maps, is_plain, module_of
from pyg_tiga.nn._shapes import attention_reasons

__all__ = ["GATv2Conv"]


class GATv2Conv(DropIn, torch_geometric.nn.GATv2Conv):
    r"""The GATv2 operator, whose ranking of neighbours depends on who attends.

    From the `"How Attentive are Graph Attention Networks?"
    <https://arxiv.org/abs/2105.14491>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}}
        \alpha_{i,j}\mathbf{\Theta}_{t}\mathbf{x}_{j}, \qquad
        \alpha_{i,j} = \mathrm{softmax}_i\left(\mathbf{a}^{\top}\mathrm{LeakyReLU}
        \left(\mathbf{\Theta}_{s} \mathbf{x}_i + \mathbf{\Theta}_{t} \mathbf{x}_j
        + \mathbf{\Theta}_{e} \mathbf{e}_{i,j}\right)\right)

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
        share_weights: Use one matrix for both ends of an edge. (default: ``False``)
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
    backward. Self-loops are never added to the edges. Dropout draws its seed from the
    generator of the device and gives other masks than PyG's for the same seed.

    Not accelerated, but PyG's own path: edge features, ``aggr`` other than ``"add"`` or
    ``"sum"``, hooks on messages, edge updates or propagation, explain mode,
    ``decomposed_layers``, another ``node_dim``, overridden methods, ``heads`` or
    ``out_channels`` changed after construction, matrices with one row of values per
    entry, attention weights of matrices with self-loops, tracing and ONNX export.
    :meth:`explain_plan` says which; with ``PYG_TIGA_STRICT=1`` it is an error.
    """

    _pyg_class = torch_geometric.nn.GATv2Conv
    _fused_aggregations = ("sum", "add")
    _fused_node_dim = 0
    _generated = ("propagate", "edge_updater")
    propagate_type = ParentSignature("propagate", x="PairTensor", alpha="Tensor")
    edge_updater_type = ParentSignature(
        "edge_updater", x="PairTensor", edge_attr="OptTensor"
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
        share_weights: bool = False,
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
            share_weights,
            residual,
            **kwargs,
        )
        self._finish_init()

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Run the layer.

        Args:
            x: Features ``[N, F_in]``, or a pair (sources, destinations).
            edge_index: The edges, in any of the forms that PyG takes, or a
                :class:`pyg_tiga.Graph`.
            edge_attr: Edge features ``[E, D]``, or ``[E]`` for ``[E, 1]``.
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
        reasons = self._reasons(edge_index, edge_attr, return_attention_weights)
        if not reasons:
            pair = pair_of(x)
            counts = self._check(pair, edge_index)
            reasons = row_reasons(pair[1], counts)
        if reasons:
            if not torch.compiler.is_compiling():
                self._note_parent(reasons)
            check_graph_rows(x, edge_index)
            edges, _ = parents_edges(edge_index)
            found = super().forward(x, edges, edge_attr, return_attention_weights)
            if return_attention_weights and not self.add_self_loops:
                return with_given_edges(found, edge_index)
            return found
        is_shared = self.share_weights and isinstance(x, Tensor)
        root, *projected = self._project(*pair, is_shared)
        out, weights = self._attend(
            *projected, edge_index, counts, return_attention_weights
        )
        if not torch.compiler.is_compiling():
            self._note_fused()
        out = self._finish(out, root)
        return (out, weights) if return_attention_weights else out

    def _reasons(self, edge_index: Adj, edge_attr: Any, weights: Any) -> list[str]:
        """Reasons for the parent's path, with those that lie in the edges."""
        reasons = self._parent_reasons()
        reasons += attention_reasons(self, ("att",), ("lin_l", "lin_r"))
        reasons += feature_reasons(edge_attr)
        if is_matrix(edge_index):
            if is_traced(edge_index):
                reasons.append("a sparse matrix under a tracer")
            reasons += matrix_reasons(self, edge_index, edge_attr, weights)
        return reasons

    def _check(self, x: tuple[Any, Any], edge_index: Adj) -> tuple[int, int]:
        """Check all operands before anything is launched; gives (N_src, N_dst)."""
        check_edges(edge_index)
        x_src, x_dst = x
        lin_l, lin_r = self._projections()
        check_nodes("x", x_src, lin_l, edge_index, "GATv2Conv")
        if x_dst is not x_src or lin_r is not lin_l:
            name = name_of(x_src, x_dst)
            check_nodes(name, x_dst, lin_r, edge_index, "GATv2Conv")
        check_dropout(self)
        check_number("negative_slope", self.negative_slope)
        loops = None
        if self.add_self_loops:
            loops = min(x_src.size(0), x_dst.size(0))
        return node_counts(edge_index, x_src, x_dst, None, self.flow, loops)

    def _projections(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """The maps of sources and destinations."""
        return module_of(self, "lin_l"), module_of(self, "lin_r")

    def _project(
        self, x_src: Tensor, x_dst: Tensor, is_shared: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The residual, and values ``[N, H, C]`` of sources and destinations."""
        lin_l, lin_r = self._projections()
        res = module_of(self, "res")
        calls = [(lin_l, x_src)] if res is None else [(res, x_dst), (lin_l, x_src)]
        if not (is_shared or (x_dst is x_src and lin_r is lin_l and is_plain(lin_l))):
            calls.append((lin_r, x_dst))
        found = apply_maps(calls)
        root = None if res is None else found.pop(0)
        shape = (-1, *head_shape(self))
        values = [out.view(shape) for out in found]
        return root, values[0], values[-1]

    def _attend(
        self,
        x_src: Tensor,  # [N_src, H, C]
        x_dst: Tensor,  # [N_dst, H, C]
        edge_index: Adj,
        counts: tuple[int, int],
        wants_weights: bool | None,
    ) -> tuple[Tensor, Any]:
        """The output, and the weights in PyG's form where they are wanted."""
        has_loops = bool(self.add_self_loops)
        relation = relation_for(edge_index, has_loops)
        att = self.att.view(head_shape(self))
        given = (relation, x_src, x_dst, att)
        options = {
            "negative_slope": self.negative_slope,
            "self_loops": has_loops,
            "size": counts,
            "flow": self.flow,
            **dropout_options(self, x_src.device),
        }
        out = functional.gatv2_attention(*given, **options)
        if not wants_weights:
            return out, None
        weights = functional.gatv2_attention_weights(*given, **options)
        return out, with_weights(self, edge_index, relation, *weights)

    def _finish(self, out: Tensor, root: Tensor | None) -> Tensor:
        """Join the heads of ``[N_dst, H, C]``, add the residual and the bias."""
        out = join_heads(self, out)
        if root is not None:
            out = out + root
        bias = self.bias
        return out if bias is None else out + bias
