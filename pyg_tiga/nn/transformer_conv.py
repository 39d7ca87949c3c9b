"""The graph transformer layer, without features or scores per edge and channel."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_tiga import functional
from pyg_tiga.functional.relations import is_traced
from pyg_tiga.nn._attention import (
    check_dropout,
    dropout_options,
    head_shape,
    in_parents_dtype,
    join_heads,
)
from pyg_tiga.nn._dropin import DropIn, ParentSignature
from pyg_tiga.nn._edges import for_functional
from pyg_tiga.nn._gat_edges import (
    check_edge_features,
    parents_edges,
    with_given_edges,
)
from pyg_tiga.nn._gat_inputs import check_options, matrix_reasons
from pyg_tiga.nn._inputs import (
    check_device,
    check_edges,
    check_features,
    check_graph_rows,
    is_matrix,
    name_of,
    pair_of,
)
from pyg_tiga.nn._linear import apply_maps, is_plain, module_of, reads_alike
from pyg_tiga.nn._transformer_inputs import (
    attended_counts,
    batch_reasons,
    edges_with_weights,
    feature_reasons,
    width_reasons,
)

__all__ = ["TransformerConv"]


class TransformerConv(DropIn, torch_geometric.nn.TransformerConv):
    r"""The graph transformer operator.

    From the `"Masked Label Prediction: Unified Message Passing Model for
    Semi-Supervised Classification" <https://arxiv.org/abs/2009.03509>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)}
        \alpha_{i,j} \left(\mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{e}_{ij}
        \right), \qquad \alpha_{i,j} = \mathrm{softmax}_i\left(
        \frac{(\mathbf{W}_3\mathbf{x}_i)^{\top} (\mathbf{W}_4\mathbf{x}_j
        + \mathbf{W}_6 \mathbf{e}_{ij})}{\sqrt{d}}\right)

    The terms of :math:`\mathbf{e}_{ij}` are there with edge features only.

    Args:
        in_channels: Size of each input sample, or -1 to take it from the first input.
            A tuple holds the sizes of sources and destinations.
        out_channels: Size of each output sample.
        heads: Number of attention heads. (default: ``1``)
        concat: Concatenate the heads rather than average them. (default: ``True``)
        beta: Weigh the node itself against its neighbours by a learnt gate
            :math:`\beta_i = \mathrm{sigmoid}(\mathbf{w}_5^{\top} [\mathbf{W}_1
            \mathbf{x}_i, \mathbf{m}_i, \mathbf{W}_1 \mathbf{x}_i - \mathbf{m}_i])`, in
            place of their sum. (default: ``False``)
        dropout: Probability of dropping an attention weight in training.
            (default: ``0``)
        edge_dim: Size of the edge features, if there are any. (default: ``None``)
        bias: Learn additive biases. (default: ``True``)
        root_weight: Add the transformed node itself; without it ``beta`` is off.
            (default: ``True``)
        **kwargs: Arguments of ``torch_geometric.nn.conv.MessagePassing``.

    Shapes:
        - **inputs:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite; edge
          indices :math:`(2, |\mathcal{E}|)`, or a ``SparseTensor``, torch sparse tensor
          or :class:`pyg_tiga.Graph`; edge features :math:`(|\mathcal{E}|, D)`
          *(optional)*
        - **outputs:** :math:`(|\mathcal{V}_t|, H \cdot F_{out})`, and with
          ``return_attention_weights`` the edges with their weights
          :math:`(|\mathcal{E}|, H)`

    Accelerated: scores, softmax, dropout and aggregation are one operation, whose
    memory does not grow with the edges times the channels, neither forward nor
    backward; with edge features it grows with the edges times the heads. Dropout draws
    its seed from the generator of the device and gives other masks than PyG's for the
    same seed.

    Not accelerated, but PyG's own path: edge features without ``edge_dim``, with a
    ``lin_edge`` that is not a plain map, or beside a sparse matrix; ``aggr`` other than
    ``"add"`` or ``"sum"``, hooks on messages or propagation, explain mode,
    ``decomposed_layers``, another ``node_dim``, overridden methods, ``heads`` or
    ``out_channels`` changed after construction to another width, batches of node
    features, matrices with one row of values per entry, tracing and ONNX export.
    :meth:`explain_plan` says which; with ``PYG_TIGA_STRICT=1`` it is an error.
    """

    _pyg_class = torch_geometric.nn.TransformerConv
    _fused_aggregations = ("sum", "add")
    _fused_node_dim = 0
    propagate_type = ParentSignature(
        "propagate",
        query="Tensor",
        key="Tensor",
        value="Tensor",
        edge_attr="OptTensor",
    )

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        check_options(heads, dropout)
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            beta,
            dropout,
            edge_dim,
            bias,
            root_weight,
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
            edge_attr: Edge features ``[E, D]``.
            return_attention_weights: Return the weights too, before dropout; as in PyG
                ``False`` does so as well.

        Returns:
            ``[N_dst, H * F_out]`` (``[N_dst, F_out]`` with ``concat=False``); with
            weights, a pair of it and ``(edge_index, weights)``, or of it and a
            ``SparseTensor``, as PyG.

        Raises:
            ValueError: Shapes, dtypes, devices or indices that do not fit.
            UnsupportedError: The parent's path is needed, and ``PYG_TIGA_STRICT`` set.
        """
        wants_weights = isinstance(return_attention_weights, bool)
        reasons = self._reasons(x, edge_index, edge_attr)
        if reasons:
            if not torch.compiler.is_compiling():
                self._note_parent(reasons)
            check_graph_rows(x, edge_index)
            edges, _ = parents_edges(edge_index)
            found = super().forward(x, edges, edge_attr, return_attention_weights)
            return with_given_edges(found, edge_index) if wants_weights else found
        x_src, x_dst = pair_of(x)
        counts = self._check(x_src, x_dst, edge_index, edge_attr)
        out, weights, root = self._attend(
            x_src, x_dst, edge_index, edge_attr, counts, wants_weights
        )
        if not torch.compiler.is_compiling():
            self._note_fused()
        out = self._finish(out, root, x_dst)
        return (out, weights) if wants_weights else out

    def _reasons(self, x: Any, edge_index: Adj, edge_attr: Any) -> list[str]:
        """Reasons for the parent's path, with those that lie in the inputs."""
        reasons = self._parent_reasons() + width_reasons(self) + batch_reasons(x)
        reasons += feature_reasons(self, edge_attr, edge_index)
        if is_matrix(edge_index):
            if is_traced(edge_index):
                reasons.append("a sparse matrix under a tracer")
            reasons += matrix_reasons(self, edge_index, edge_attr, False)
        return reasons

    def _check(
        self, x_src: Any, x_dst: Any, edge_index: Adj, edge_attr: Any
    ) -> tuple[int, int]:
        """Check all operands before anything is launched; gives (N_src, N_dst)."""
        check_edges(edge_index)
        lin_edge = module_of(self, "lin_edge")
        if lin_edge is not None:
            if edge_attr is None:
                raise ValueError(
                    "'edge_attr' must be given to a layer with 'edge_dim' (got None)"
                )
            check_edge_features(edge_attr, edge_index, lin_edge)
        self._check_nodes("x", x_src, ("lin_key", "lin_value"), edge_index)
        readers = ("lin_query", "lin_skip") if self.root_weight else ("lin_query",)
        if x_dst is not x_src or not reads_alike(
            module_of(self, "lin_key"), module_of(self, "lin_query")
        ):
            name = name_of(x_src, x_dst)
            self._check_nodes(name, x_dst, readers, edge_index)
        check_dropout(self)
        return attended_counts(edge_index, x_src, x_dst, self.flow)

    def _check_nodes(
        self, name: str, x: Any, readers: tuple[str, ...], edge_index: Adj
    ) -> None:
        first = module_of(self, readers[0])
        check_features(name, x, first, leading="")
        check_device(name, x, edge_index)
        for reader in readers[1:]:
            other = module_of(self, reader)
            if not reads_alike(first, other):
                check_features(name, x, other, leading="")

    def _project(
        self, x_src: Tensor, x_dst: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key and value ``[N, H, C]``, and the root if it goes with them."""
        readers = {"lin_query": x_dst, "lin_key": x_src, "lin_value": x_src}
        calls = [(module_of(self, name), x) for name, x in readers.items()]
        # Without gradients the root gains nothing, and would be in memory for longer.
        if self.root_weight and torch.is_grad_enabled():
            skip = module_of(self, "lin_skip")
            if is_plain(skip):
                calls.append((skip, x_dst))
        query, key, value, *root = apply_maps(calls)
        shape = (-1, *head_shape(self))
        parts = (query.view(shape), key.view(shape), value.view(shape))
        return (*parts, root[0] if root else None)

    def _attend(
        self,
        x_src: Tensor,  # [N_src, F]
        x_dst: Tensor,  # [N_dst, F]
        edge_index: Adj,
        edge_attr: Tensor | None,  # [E, D]
        counts: tuple[int, int],
        wants_weights: bool,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """The output, the weights in PyG's form if wanted, and the root if formed."""
        query, key, value, root = self._project(x_src, x_dst)
        relation = for_functional(edge_index)
        options = {"size": counts, "flow": self.flow}
        if edge_attr is not None:
            options |= self._edge_features(edge_attr, query.dtype)
        dropout = dropout_options(self, query.device)
        out = in_parents_dtype(
            functional.graph_attention(
                query, key, value, relation, **options, **dropout
            )
        )
        if not wants_weights:
            return out, None, root
        # PyG keeps them before it drops any.
        weight, _ = functional.graph_attention_weights(query, key, relation, **options)
        weight = in_parents_dtype(weight)
        return out, edges_with_weights(edge_index, relation, weight), root

    def _edge_features(
        self, edge_attr: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Edge features and their projection, under autocast in its dtype."""
        weight = module_of(self, "lin_edge").weight  # [H * C, D]
        proj = weight.view(*head_shape(self), weight.size(1))
        return {"edge_attr": edge_attr.to(dtype), "edge_proj": proj.to(dtype)}

    def _finish(self, out: Tensor, root: Tensor | None, x_dst: Tensor) -> Tensor:
        """Join the heads of ``[N_dst, H, C]`` and add the node itself, or gate it."""
        out = join_heads(self, out)
        if not self.root_weight:
            return out
        if root is None:
            root = module_of(self, "lin_skip")(x_dst)  # [N_dst, H * C] or [N_dst, C]
        gate = module_of(self, "lin_beta")
        if gate is None:
            return out + root
        beta = gate(torch.cat([out, root, out - root], dim=-1)).sigmoid()  # [N_dst, 1]
        return beta * root + (1 - beta) * out
