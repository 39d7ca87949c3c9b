"""What users pass as edges, taken apart into tensors, a layout and sizes."""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functionaltensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

from pyg_tiga.relation.edges import COO, COO_BY_COL, COO_BY_ROW, CSR
from pyg_tiga.relation.origin import copied, origin_of

Flow = Literal["source_to_target", "target_to_source"]

_MOST_NODES = 2**63 - 1
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_BY = {"row": COO_BY_ROW, "col": COO_BY_COL}
_UNSUPPORTED = (
    (is_batchedtensor, "torch.func.vmap"),
    (is_functionaltensor, "torch.func.functionalize"),
)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class Parts(NamedTuple):
    """Edges taken apart; `dst_end` is the end that is the destination."""

    tensors: tuple[Tensor, ...]
    layout: str
    dst_end: int
    sizes: tuple[int, int]
    value: Tensor | None = None


def plain(edge_index: Tensor) -> tuple[Tensor, str]:
    """The tensor of an `edge_index`, and the layout that its sort order gives."""
    if type(edge_index) is Tensor:
        return unwrapped(edge_index), COO
    if isinstance(edge_index, EdgeIndex):
        order = edge_index._sort_order
        layout = COO if order is None else _BY[order.value]
        return _data_of(edge_index), layout
    require_tensor(edge_index, "edge_index")
    if isinstance(edge_index, FakeTensor):
        # It stands for a plain tensor; tracers do not see through a change of class.
        return edge_index, COO
    return edge_index.as_subclass(Tensor), COO


def unwrapped(indices: Tensor) -> Tensor:
    """Indices without what differentiating transforms of `torch.func` wrap around them.

    They have no gradients for these to follow.

    Raises:
        RuntimeError: They differ within a batch, or stand for later values.
    """
    if torch.compiler.is_compiling():
        return indices
    while is_gradtrackingtensor(indices):
        indices = get_unwrapped(indices)
    for is_wrapped, transform in _UNSUPPORTED:
        if is_wrapped(indices):
            raise RuntimeError(
                f"'{transform}' over the 'edge_index' of a fused operation is not "
                f"supported. Call it over the features only, loop over the edges, or "
                f"call a layer, which takes PyG's own path"
            )
    return indices


def _data_of(edge_index: EdgeIndex) -> Tensor:
    """The tensor inside; its counter misses edits through the wrapper, so add them."""
    data = edge_index._data
    if torch.compiler.is_compiling():
        return copied(data)
    if data.is_inference():
        return data
    origin = origin_of(edge_index)
    if origin is None:
        # The wrapper counts no edits either: to the memo this is an inference tensor.
        with torch.inference_mode():
            return data.clone()
    origin.count_edits(data)
    return data


def dst_end_of(flow: Flow) -> int:
    """The row of `edge_index` that holds the destinations."""
    if flow == "source_to_target":
        return 1
    if flow == "target_to_source":
        return 0
    raise ValueError(
        f"'flow' must be 'source_to_target' or 'target_to_source' (got {flow!r})"
    )


def check_edge_index(edge_index: Tensor) -> None:
    """Raise unless it is an integer tensor `[2, E]`.

    Raises:
        TypeError: It is no tensor, sparse, or does not hold integers.
        ValueError: It has another shape.
    """
    require_tensor(edge_index, "edge_index")
    require_integers(edge_index, "edge_index")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = ""
        if edge_index.dim() == 2 and edge_index.size(1) == 2:
            hint = ". Call 'edge_index.t()'"
        raise ValueError(
            f"'edge_index' must have the shape [2, num_edges] (got "
            f"{list(edge_index.shape)}){hint}"
        )


def check_parts(parts: Parts) -> None:
    """Raise unless tensors and sizes have the form that their layout asks for.

    Raises:
        TypeError: A tensor or size is no integer.
        ValueError: A shape, device or size does not fit.
    """
    names = ("num_src", "num_dst") if parts.dst_end == 1 else ("num_dst", "num_src")
    for size, name in zip(parts.sizes, names, strict=True):
        size_of(size, name)
    if parts.layout == CSR:
        check_csr(*parts.tensors)
    else:
        check_edge_index(parts.tensors[0])


def check_csr(rowptr: Tensor, col: Tensor) -> None:
    """Raise unless both are integer vectors of one device that fit together.

    Raises:
        TypeError: One is no tensor, sparse, or does not hold integers.
        ValueError: Shapes or devices do not fit.
    """
    for name, tensor in (("rowptr", rowptr), ("col", col)):
        require_tensor(tensor, name)
        require_integers(tensor, name)
        if tensor.dim() != 1:
            raise ValueError(
                f"'{name}' must have one dimension (got {list(tensor.shape)})"
            )
    if rowptr.numel() == 0:
        raise ValueError("'rowptr' must have one entry more than rows (got none)")
    if rowptr.device != col.device:
        raise ValueError(
            f"'rowptr' and 'col' must be on the same device (got '{rowptr.device}' and "
            f"'{col.device}')"
        )


def size_of(value: int, name: str) -> int:
    """A number of nodes as a plain int.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    if isinstance(value, bool):
        raise TypeError(f"'{name}' must be an integer (got {value!r})")
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"'{name}' must be an integer (got {value!r})") from None
    if size < 0:
        raise ValueError(f"'{name}' must not be negative (got {size})")
    if size > _MOST_NODES:
        raise ValueError(f"'{name}' must be below 2 ** 63 (got {size})")
    return size


def infer_sizes(
    edge_index: Tensor,
    num_nodes: int | None,
    sizes: tuple[int | None, int | None],
) -> tuple[int, int]:
    """Nodes at either end of an edge list; reads the largest index if nobody says.

    Raises:
        TypeError: `num_nodes` is no integer.
        ValueError: It is negative.
    """
    if num_nodes is not None:
        num_nodes = size_of(num_nodes, "num_nodes")
    stated = (None, None)
    if isinstance(edge_index, EdgeIndex):
        stated = edge_index.sparse_size()
    first, second = (
        next((n for n in (size, num_nodes, said) if n is not None), None)
        for size, said in zip(sizes, stated, strict=True)
    )
    if first is None or second is None:
        # As many nodes at both ends, unless one is known.
        found = _largest(plain(edge_index)[0])
        if first is None and second is None:
            return max(found), max(found)
        first = found[0] if first is None else first
        second = found[1] if second is None else second
    return first, second


def _largest(edge_index: Tensor) -> tuple[int, int]:
    """How many nodes the largest index at either end asks for."""
    if edge_index.size(1) == 0:
        return 0, 0
    first, second = edge_index.amax(1).tolist()
    return max(0, first + 1), max(0, second + 1)


def take_adjacency(adj_t: Tensor | SparseTensor) -> Parts:
    """Take a sparse matrix apart whose rows are destinations.

    Its indices are used as they are stored: entries that occur twice stay two edges.

    Raises:
        TypeError: It is no sparse matrix of a known layout.
        ValueError: It does not have two dimensions, or requires a gradient without
            being coalesced.
    """
    if isinstance(adj_t, SparseTensor):
        rowptr, col, value = adj_t.csr()
        parts = (unwrapped(rowptr), unwrapped(col))
        return Parts(parts, CSR, 0, tuple(adj_t.sparse_sizes()), value)
    require_tensor(adj_t, "adj_t")
    if adj_t.layout not in _SPARSE:
        raise TypeError(
            f"'adj_t' must be a SparseTensor or a torch.sparse tensor in COO, CSR or "
            f"CSC layout (got '{adj_t.layout}'). Call 'Graph.from_edge_index' for an "
            f"'edge_index'"
        )
    if adj_t.dim() != 2 or (adj_t.layout == torch.sparse_coo and adj_t.dense_dim()):
        raise ValueError(
            f"'adj_t' must have the shape [num_dst, num_src] (got {list(adj_t.shape)})"
        )
    if _are_functorch_transforms_active() and not is_functorch_wrapped_tensor(adj_t):
        # Transforms ask for strides, which a compressed matrix has none of.
        with torch._C._DisableFuncTorch():
            return _take_tensor(adj_t)
    return _take_tensor(adj_t)


def _take_tensor(adj_t: Tensor) -> Parts:
    sizes = (adj_t.size(0), adj_t.size(1))
    if adj_t.layout == torch.sparse_csr:
        parts = (unwrapped(adj_t.crow_indices()), unwrapped(adj_t.col_indices()))
        return Parts(parts, CSR, 0, sizes, _alias(adj_t.values()))
    if adj_t.layout == torch.sparse_csc:
        parts = (unwrapped(adj_t.ccol_indices()), unwrapped(adj_t.row_indices()))
        return Parts(parts, CSR, 1, sizes[::-1], _alias(adj_t.values()))
    # "Coalesced" proves no order: PyG sets the flag on tensors that it did not sort.
    parts = (unwrapped(adj_t._indices()),)
    return Parts(parts, COO, 0, sizes, _alias(_coo_values(adj_t)))


def check_value(value: object, num_edges: int, device: torch.device) -> None:
    """Raise unless stored values fit the edges of a graph.

    Raises:
        TypeError: They are no dense tensor.
        ValueError: Their shape or device does not fit.
    """
    require_tensor(value, "value")
    if value.layout != torch.strided:
        raise TypeError(
            f"'value' must be a dense tensor (got layout '{value.layout}'). Call "
            f"'value.to_dense()'"
        )
    if value.dim() == 0 or value.size(0) != num_edges:
        raise ValueError(
            f"'value' must have one entry for each of {num_edges} edges (got the shape "
            f"{list(value.shape)})"
        )
    if value.device != device:
        raise ValueError(
            f"'value' must be on the device of the edges, '{device}' (got "
            f"'{value.device}')"
        )


def require_tensor(value: object, name: str) -> None:
    """Raise unless it is a tensor.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"'{name}' must be a tensor (got {type(value).__name__})")


def require_integers(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is dense and of an integer dtype.

    Raises:
        TypeError: It is not.
    """
    if tensor.layout != torch.strided:
        raise TypeError(
            f"'{name}' must be a dense tensor (got layout '{tensor.layout}'). Call "
            f"'Graph.from_adj' for a sparse one"
        )
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"'{name}' must hold integers (got {tensor.dtype}). Call '{name}.long()' "
            f"if its values are node indices"
        )


def _coo_values(adj_t: Tensor) -> Tensor:
    if adj_t.is_coalesced():
        return adj_t.values()
    if adj_t.requires_grad:
        # Its gradient is of the same sparse form, where the shares of entries that
        # occur twice cannot be told apart.
        raise ValueError(
            "'adj_t' must be coalesced where it requires a gradient. Call "
            "'adj_t.coalesce()'"
        )
    return adj_t._values()


class _Alias(torch.autograd.Function):
    """The same memory with the same version counter, and the gradient of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _alias(value: Tensor) -> Tensor:
    """Values that are no view of their matrix, which compiled code cannot take.

    Transforms see through views only, and do not compile.
    """
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return value
    needs_grad = value.requires_grad and torch.is_grad_enabled()
    return _Alias.apply(value) if needs_grad else value.detach()
