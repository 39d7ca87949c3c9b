"""Attention by dot products with projected edge features in keys and values.

With e [D] the features of an edge and P [H, C, D] their projection, P e is added to key
and value of the edge. Both additions factor: <q, P e> = <u, e> with one u = P^T q
[H, D] for each destination, and sum w P e = P z with z = sum w e [H, D]. So nothing has
a row of H C for every edge.

Backward, with g the gradient of the result: y = P^T g takes the place of u beside the
weights. t_e = <g, v_j> + <y, e>, and ds_e = w_e (t_e - delta) as ever, delta = <g, out>
with all of the result. The gradient of e is sum over heads of ds u + w y; that of q has
P sum ds e added, and that of P is g z^T + q (sum ds e)^T, summed over the nodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_tiga import reference_attention as reference
from pyg_tiga.impls.attention_types import State, Wanted
from pyg_tiga.impls.edge_order import take_edges
from pyg_tiga.impls.triton_edge_features import multiply
from pyg_tiga.ops import attention, edge_attention, transformed, vector_library
from pyg_tiga.ops.attention import Call, Inputs
from pyg_tiga.ops.batched import batchable
from pyg_tiga.ops.eager import apply_function, wants_grad
from pyg_tiga.ops.edge_features import product
from pyg_tiga.ops.keeping import Watched
from pyg_tiga.ops.library import Handle

_multiply = partial(multiply, by_row=True)
# So many heads may share one product, of which each uses its own block.
_MOST_SHARING = 8
_HALF = (torch.float16, torch.bfloat16)
# u is kept where it is at most this share of a result, and else formed again.
_MOST_KEPT = 0.5


class Features(NamedTuple):
    """Features of the edges and what projects them.

    Args:
        attr: ``[E, D]`` in the relation's own order.
        proj: ``[H, C, D]``.
    """

    attr: Tensor
    proj: Tensor


def with_terms(call: Call, inputs: Inputs, features: Features) -> Inputs:
    """Inputs with what the features add to the scores among their terms, ``[E, H]``."""
    attr, proj = features
    dtype = reference.promoted(inputs.row, proj)
    # The scale goes into the vectors, of which there are fewer than edges.
    vectors = torch.einsum("nhc,hcd->nhd", inputs.row.to(dtype), proj.to(dtype))
    vectors = vectors * call.options.scale
    real = reference.widened(torch.promote_types(dtype, attr.dtype))
    term = product("feature_dots", call.graph, vectors, attr, real)
    if inputs.term is not None:
        term = term + inputs.term
    return inputs._replace(term=term)


def attend(call: Call, inputs: Inputs, features: Features) -> Tensor:
    """Attention whose keys and values have the projected features of the edge added."""
    features = features._replace(attr=_of_live_edges(call, features.attr))
    if not _is_joint(call, inputs, features):
        return _in_parts(call, inputs, features)
    if wants_grad(*inputs, *features):
        return apply_function(_FeatureAttention, *inputs, *features, call)
    return _forward(call, inputs, features).out


def _is_joint(call: Call, inputs: Inputs, features: Features) -> bool:
    """Whether one function may do all of it, of one dtype, by kernels."""
    if isinstance(call.graph, Handle) or transformed.is_active(*inputs, *features):
        return False
    operands = (inputs.value, inputs.row, inputs.col, *features)
    if len({x.dtype for x in operands}) > 1 or not all(x.numel() for x in operands):
        return False
    return _is_fused("edge_attention", call, inputs.value)


def _is_fused(op: str, call: Call, value: Tensor) -> bool:
    """Whether kernels run an operation; a backward may be pinned to something else."""
    plan = attention.attention_plan(op, call, value, value.dtype)
    return plan.implementation.family == "triton"


def _in_parts(call: Call, inputs: Inputs, features: Features) -> Tensor:
    """The same of functions that can be differentiated at will, on any road."""
    attr, proj = features
    dtype = reference.promoted(*inputs, *features)
    out, weights = _both(call, with_terms(call, inputs, features), dtype)
    sums = product("feature_sums", call.graph, weights, attr, dtype)  # [N, H, D]
    return out + torch.einsum("nhd,hcd->nhc", sums, proj.to(dtype))


def _both(call: Call, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Averages of values and the weights ``[E, H]``."""
    if isinstance(call.graph, Handle):
        return vector_library.attend_with_weights(call, inputs, dtype)
    if transformed.is_active(*inputs):
        out = attention.by_reference(call, inputs)
        return out.to(dtype), attention.weights(call, inputs)[0]
    return edge_attention.with_weights(call, inputs, dtype)


def _of_live_edges(call: Call, attr: Tensor) -> Tensor:
    """Features without those of masked edges, of which not even a NaN is seen."""
    if call.mask is None:
        return attr
    return attr.masked_fill(~call.mask.unsqueeze(1), 0.0)


class _Kept(NamedTuple):
    """What a forward gives and its backward reads.

    Args:
        out: The result, ``[N_dst, H, C]``.
        m: Largest score of each row.
        total: Sum of exp(s - m).
        weights: Of the edges after dropout, ``[E, H]`` in the order of the rows.
        term: Added to the scores of the edges, likewise.
        sums: z, ``[N_dst, H, D]``; None where it is formed again.
        vectors: u, likewise.
    """

    out: Tensor
    m: Tensor
    total: Tensor
    weights: Tensor
    term: Tensor
    sums: Tensor | None
    vectors: Tensor | None


def _forward(call: Call, inputs: Inputs, features: Features) -> _Kept:
    (attr, proj), graph = features, call.graph
    dtype, real = attr.dtype, reference.widened(attr.dtype)
    projection = _Projection(proj)
    vectors = projection.of(inputs.row, call.options.scale)
    term = _multiply(graph, "feature_dots", real, vectors, attr)
    if inputs.term is not None:
        term += take_edges(graph, inputs.term.contiguous(), "caller", "rows")
    made = _by_rows(call, gives_weights=True)
    state = attention.forward(made, inputs._replace(term=term), dtype)
    sums = _multiply(graph, "feature_sums", dtype, state.weights, attr)
    projection.add_back(state.out, sums)
    kept = (state.out, state.m, state.total, state.weights, term)
    if call.objective == "memory":
        # They are cheap to form again.
        return _Kept(*kept, None, None)
    is_small = proj.size(2) <= _MOST_KEPT * proj.size(1)
    return _Kept(*kept, sums, vectors if is_small else None)


class _FeatureAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        row: Tensor,
        col: Tensor,
        param: None,
        term: Tensor | None,
        loop_term: Tensor | None,
        attr: Tensor,
        proj: Tensor,
        call: Call,
    ) -> Tensor:
        inputs = Inputs(value, row, col, param, term, loop_term)
        kept = _forward(call, inputs, Features(attr, proj))
        ctx.call, ctx.watched = call.bare(), Watched(kept.out)
        given = (value, row, col, term, loop_term, attr, proj)
        ctx.save_for_backward(*given, kept.out.data, *kept[1:], *call.drawn())
        return kept.out

    @staticmethod
    @batchable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        value, row, col, term, loop_term, attr, proj, *kept = ctx.saved_tensors
        *kept, mask, seed = kept
        call = ctx.call._replace(mask=mask, seed=seed)
        inputs = (value, row, col, None, term, loop_term, attr, proj)
        if torch.is_grad_enabled():
            return (*_differentiable(call, inputs, grad, needs), None)
        if not _is_fused("edge_attention_backward", call, value):
            with torch.enable_grad():
                found = _differentiable(call, inputs, grad, needs)
            return (*[None if x is None else x.detach() for x in found], None)
        kept, given = _Kept(*kept), (Inputs(*inputs[:6]), Features(attr, proj))
        if ctx.watched.is_edited():
            kept = kept._replace(out=_forward(call, *given).out)
        return (*_gradients(call, *given, grad, kept, needs), None)


def _differentiable(
    call: Call, inputs: tuple[Any, ...], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    inputs = attention.aliased(inputs)
    again = _in_parts(call, Inputs(*inputs[:6]), Features(*inputs[6:]))
    return attention.differentiate(again, inputs, grad, needs)


def _gradients(
    call: Call,
    inputs: Inputs,
    features: Features,
    grad: Tensor,  # [N_dst, H, C]
    kept: _Kept,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of all inputs and of both features."""
    (attr, proj), graph, scale = features, call.graph, call.options.scale
    dtype, real = attr.dtype, reference.widened(attr.dtype)
    weights, projection = kept.weights, _Projection(proj)
    beside = projection.of(grad)  # y
    share = _multiply(graph, "feature_dots", real, beside, attr)
    state = State(kept.out, kept.m, kept.total, None, None)
    wanted = Wanted(True, needs[5])
    scored = inputs._replace(term=kept.term)
    given = (_by_rows(call), scored, grad, state, wanted, share)
    value, row, col, _, of_scores, loop_term = attention.gradients(*given)
    of_attr = of_proj = None
    if needs[6]:
        vectors = kept.vectors
        if vectors is None:
            vectors = projection.of(inputs.row, scale)
        pairs = (of_scores, vectors, weights, beside)
        of_attr = _multiply(graph, "feature_spread", dtype, *pairs)
        del pairs, vectors
    # They are large where features are wide.
    del beside, given, share
    sums = _multiply(graph, "feature_sums", dtype, of_scores, attr)
    if needs[7]:
        averages = kept.sums
        if averages is None:
            averages = _multiply(graph, "feature_sums", dtype, weights, attr)
        of_proj = _over_nodes(grad, averages) + _over_nodes(inputs.row, sums) * scale
    if needs[1]:
        projection.add_back(row, sums, scale)
    term = None
    if needs[4]:
        of_term = take_edges(graph, of_scores, "rows", "caller")
        term = attention.cast(of_term, inputs.term)
    return value, row, col, None, term, loop_term, of_attr, of_proj


def _by_rows(call: Call, *, gives_weights: bool = False) -> Call:
    """The call with all numbers of edges in the order of the rows."""
    options = call.options._replace(by_row=True, gives_weights=gives_weights)
    return call._replace(options=options)


class _Projection:
    """The projection of every head, ``[H, C, D]``, on nodes.

    On tensor cores the products of all heads are one with a matrix of blocks: it has
    more numbers to multiply, and is the faster, as few columns leave libraries waiting
    for memory.
    """

    def __init__(self, proj: Tensor) -> None:
        heads, channels, width = proj.shape
        self._proj, self._blocks = proj, None
        if proj.is_cuda and proj.dtype in _HALF and heads <= _MOST_SHARING:
            blocks = proj.new_zeros(heads, channels, heads, width)
            blocks.diagonal(dim1=0, dim2=2).copy_(proj.permute(1, 2, 0))
            self._blocks = blocks.view(heads * channels, heads * width)

    def of(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Vectors ``[N, H, C]`` times it and a scale: ``[N, H, D]``."""
        num_nodes, heads, width = x.size(0), x.size(1), self._proj.size(2)
        out = x.new_empty(num_nodes, heads, width)
        with torch.autocast(x.device.type, enabled=False):
            if self._blocks is not None:
                flat, x = out.view(num_nodes, -1), x.reshape(num_nodes, -1)
                torch.addmm(flat, x, self._blocks, beta=0, alpha=scale, out=flat)
                return out
            turned, x = out.transpose(0, 1), x.transpose(0, 1)
            torch.baddbmm(turned, x, self._proj, beta=0, alpha=scale, out=turned)
        return out

    def add_back(self, out: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """Add to ``[N, H, C]`` vectors ``[N, H, D]`` times its transpose and a scale.

        `out` is contiguous.
        """
        num_nodes = out.size(0)
        with torch.autocast(x.device.type, enabled=False):
            if self._blocks is not None:
                flat, x = out.view(num_nodes, -1), x.reshape(num_nodes, -1)
                flat.addmm_(x, self._blocks.t(), alpha=scale)
                return
            turned = self._proj.transpose(1, 2)
            out.transpose(0, 1).baddbmm_(x.transpose(0, 1), turned, alpha=scale)


def _over_nodes(x: Tensor, y: Tensor) -> Tensor:
    """Sum over the nodes of x y^T by head: ``[H, C, D]``.

    A product for each head has few numbers to form and many nodes to walk, which
    libraries do one after another. All heads at once are cut by nodes; of what every
    head makes with every other only its own is used.
    """
    num_nodes, heads, channels = x.shape
    with torch.autocast(x.device.type, enabled=False):
        if heads > _MOST_SHARING:
            return torch.bmm(x.permute(1, 2, 0), y.transpose(0, 1))
        every = x.reshape(num_nodes, -1).t() @ y.reshape(num_nodes, -1)
    blocks = every.view(heads, channels, heads, y.size(2))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
