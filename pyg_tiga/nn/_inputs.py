"""What PyG accepts as layer input, read by PyG's rules, checked before launches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch_geometric import EdgeIndex
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor

from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import known_relation, relation_of

__all__: list[str] = []

INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SOURCE_TO_TARGET = "source_to_target"
_PLAIN_TENSORS = (Tensor, Parameter)


def usual_shape(x: Any) -> torch.Size | None:
    """The shape ``[N, F]`` of features like most; None says nothing.

    They are a plain tensor with data, and no mode is on in which it is not read as it
    stands. For calls that are neither compiled nor traced.
    """
    if (
        type(x) not in _PLAIN_TENSORS
        or x.layout is not torch.strided
        or x.is_meta
        or is_in_torch_dispatch_mode()
        or _is_any_autocast_enabled()
    ):
        return None
    shape = x.shape
    return shape if len(shape) == 2 else None


def usual_graph(edge_index: Any, x: Tensor, num_nodes: int, flow: str) -> Graph | None:
    """The graph of edges like most between as many nodes; None says nothing.

    They are a plain edge list on the device of the features. This is the last of all
    checks: it builds the graph of one that is new.

    Raises:
        ValueError: An index is out of range.
    """
    graph = known_relation(edge_index, num_nodes, num_nodes, flow)
    if graph is not None:
        # Its edges have passed the checks below.
        return graph if x.device == graph.device else None
    if (
        type(edge_index) is not Tensor
        or edge_index.layout is not torch.strided
        or edge_index.dtype not in INT_DTYPES
        or edge_index.device != x.device
        or edge_index.dim() != 2
        or edge_index.size(0) != 2
    ):
        return None
    return relation_of(edge_index, num_nodes, num_nodes, flow)


def is_edge_list(edge_index: Any) -> bool:
    """Whether the edges come as a plain ``[2, E]`` tensor or an ``EdgeIndex``."""
    return isinstance(edge_index, Tensor) and edge_index.layout is torch.strided


def is_sparse_tensor(edge_index: Any) -> bool:
    """Whether the edges come as a ``SparseTensor`` of torch_sparse."""
    return isinstance(edge_index, SparseTensor)


def pair_of(x: Any) -> tuple[Any, Any]:
    """Features of sources and destinations, of what a layer is called with.

    Raises:
        ValueError: It is neither a tensor nor a pair.
    """
    if isinstance(x, Tensor):
        return x, x
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise ValueError(
            f"'x' must be a tensor or a pair (sources, destinations or None) (got "
            f"{type(x).__name__})"
        )
    return x[0], x[1]


def name_of(x_src: Any, x_dst: Any) -> str:
    """What to call the features of destinations, which may be those of sources."""
    return "x" if x_dst is x_src else "x[1]"


def is_matrix(edge_index: Any) -> bool:
    """Whether the edges come as a sparse matrix, whose rows are destinations."""
    if isinstance(edge_index, Tensor):
        return edge_index.layout is not torch.strided
    return is_sparse_tensor(edge_index)


def check_edges(edge_index: Any) -> None:
    """Hold edges to the forms that there are, without a look at the data.

    Raises:
        ValueError: Their kind, and of an edge list the shape or dtype.
    """
    if isinstance(edge_index, (Graph, EdgeIndex, SparseTensor)) or (
        is_matrix(edge_index)
    ):
        return
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"'edge_index' must be an integer tensor of shape [2, num_edges], an "
            f"'EdgeIndex', a 'SparseTensor', a torch sparse tensor or a "
            f"'pyg_tiga.Graph' (got '{type(edge_index).__name__}')"
        )
    if edge_index.dtype not in INT_DTYPES:
        raise no_integers(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"'edge_index' must have shape [2, num_edges] (got "
            f"{list(edge_index.shape)})"
        )


def no_integers(edge_index: Tensor) -> ValueError:
    """The error of an edge list of another dtype."""
    return ValueError(
        f"'edge_index' must hold integers (got '{edge_index.dtype}'). Convert it with "
        f"'edge_index.long()'"
    )


def reads_size(edge_index: Any) -> bool:
    """Whether PyG reads ``size`` with these edges; others say it themselves."""
    return isinstance(edge_index, Graph) or (
        is_edge_list(edge_index) and not isinstance(edge_index, EdgeIndex)
    )


def size_of(size: Any) -> tuple[int | None, int | None] | None:
    """``size`` as two numbers of nodes, either of which may be ``None``.

    PyG reads a tensor like a tuple.

    Raises:
        ValueError: It is something else.
    """
    if size is None:
        return None
    given = size
    if isinstance(size, Tensor) and size.dim() == 1:
        size = size.tolist()
    if (
        not isinstance(size, (tuple, list))
        or len(size) != 2
        or not all(n is None or _is_count(n) for n in size)
    ):
        raise ValueError(
            f"'size' must be a pair of node counts, each an integer not below 0 or "
            f"None (got {given!r})"
        )
    return tuple(size)


def _is_count(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, torch.SymInt)):
        return value >= 0
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False


def node_counts(
    edge_index: Any,
    x_src: Tensor,  # [..., N_src, F]
    x_dst: Tensor | None,  # [..., N_dst, F]
    size: tuple[int | None, int | None] | None,
    flow: str,
    num_loops: int | None = None,
) -> tuple[int, int]:
    """Find (N_src, N_dst) as PyG's propagate would, or say what does not fit.

    Edges and ``size`` have passed :func:`check_edges` and :func:`size_of`.
    ``size`` and the pair (x_src, x_dst) follow the rows of ``edge_index``, whatever the
    flow; with ``flow="target_to_source"`` PyG still gathers from the first of the pair.
    ``num_loops`` is the number of self-loops, if PyG would add some before.

    Raises:
        ValueError: Sizes that differ, or a matrix or graph with the other flow.
    """
    if isinstance(edge_index, EdgeIndex):
        size, rule = edge_index.sparse_size(), "'sparse_size' of 'edge_index'"
        if num_loops is not None:
            # PyG joins the sizes of both parts, whatever the edges.
            size = [None if n is None else max(n, num_loops) for n in size]
        return _edge_list_counts(rule, x_src, x_dst, size, flow)
    if is_edge_list(edge_index):
        return _edge_list_counts("'size'", x_src, x_dst, size, flow)
    if isinstance(edge_index, Graph):
        num_src, num_dst = edge_index.num_src, edge_index.num_dst
        check_own_size((num_src, num_dst), size)
    else:
        num_dst, num_src = edge_index.size(0), edge_index.size(1)
    if flow != SOURCE_TO_TARGET:
        raise ValueError(
            f"'flow' must be 'source_to_target' with a '{type(edge_index).__name__}', "
            f"whose rows are destinations (got '{flow}'). Pass the transposed matrix "
            f"or 'graph.reverse()' instead"
        )
    _check_rows(edge_index, (num_src, num_dst), x_src, x_dst)
    return num_src, num_dst


def check_graph_rows(x: Any, edge_index: Any, reads_dst: bool = True) -> None:
    """Hold features to a graph's nodes where PyG is not told of these.

    It takes plain edges in place of the graph, and some layers no size beside them.

    Raises:
        ValueError: There are others, or `x` is neither a tensor nor a pair.
    """
    if not isinstance(edge_index, Graph):
        return
    x_src, x_dst = pair_of(x)
    parts = (x_src, x_dst) if reads_dst else (x_src,)
    if all(isinstance(part, Tensor) and part.dim() > 1 for part in parts):
        sizes = (edge_index.num_src, edge_index.num_dst)
        _check_rows(edge_index, sizes, x_src, x_dst if reads_dst else None)


def _check_rows(
    edge_index: Any, sizes: tuple[int, int], x_src: Tensor, x_dst: Tensor | None
) -> None:
    """Hold features to the nodes of a matrix or graph."""
    num_src, num_dst = sizes
    rows = x_src.size(-2)
    if x_dst is x_src and num_src != num_dst:
        raise ValueError(
            f"'x' must have a row for each source and for each destination of "
            f"'edge_index', (num_src, num_dst) = {sizes} (got {rows} rows in shape "
            f"{list(x_src.shape)}). Pass a pair (sources, destinations) instead"
        )
    rules = "columns of 'edge_index'", "rows of 'edge_index'"
    if isinstance(edge_index, Graph):
        rules = "'num_src' of 'edge_index'", "'num_dst' of 'edge_index'"
    check_count("x", x_src, num_src, rules[0])
    if x_dst is not None and x_dst is not x_src:
        check_count("x[1]", x_dst, num_dst, rules[1])


def check_own_size(
    own: tuple[int, int], size: tuple[int | None, int | None] | None
) -> None:
    """Hold ``size`` to that of a graph, which knows its own.

    Raises:
        ValueError: It says something else.
    """
    if size is not None and any(
        n is not None and n != known for n, known in zip(size, own, strict=True)
    ):
        raise ValueError(
            f"'size' must be that of the graph, (num_src, num_dst) = {own} (got {size})"
        )


def _edge_list_counts(
    rule: str,
    x_src: Tensor,
    x_dst: Tensor | None,
    size: Sequence[int | None] | None,
    flow: str,
) -> tuple[int, int]:
    first, second = (None, None) if size is None else size
    num_src = x_src.size(-2)
    if first is not None:
        check_count("x", x_src, first, rule)
    if x_dst is None:
        num_dst = num_src if second is None else second
    else:
        if second is not None:
            check_count(name_of(x_src, x_dst), x_dst, second, rule)
        num_dst = x_dst.size(-2)
    return num_src, num_dst if flow == SOURCE_TO_TARGET else num_src


def check_count(name: str, x: Tensor, count: int, rule: str) -> None:
    """Hold features to a number of rows.

    Raises:
        ValueError: There are others.
    """
    if x.size(-2) != count:
        raise ValueError(
            f"'{name}' must have {count} rows by {rule} (got {x.size(-2)} in shape "
            f"{list(x.shape)})"
        )


def check_features(
    name: str, x: Any, module: torch.nn.Module | None, leading: str = "..., "
) -> None:
    """Hold features to what the linear map that reads them was built for.

    Args:
        name: What to call them.
        x: The features.
        module: The map; one that is not PyG's, or has not seen its input yet, takes
            what it takes.
        leading: What may stand before the nodes, as the message says it.

    Raises:
        ValueError: Wrong shape or dtype.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"'{name}' must be a tensor (got '{type(x).__name__}')")
    known = type(module) is Linear and not module._forward_pre_hooks
    width = module.in_channels if known else -1
    if x.dim() < 2 or (known and x.size(-1) != width):
        raise ValueError(
            f"'{name}' must have shape [{leading}num_nodes, "
            f"{width if known else 'in_channels'}] (got {list(x.shape)})"
        )
    if known:
        check_dtype(name, x, module, x.dtype)


def check_dtype(
    name: str, x: Tensor, module: torch.nn.Module, dtype: torch.dtype
) -> None:
    """Hold features, which the map will read in ``dtype``, to that of the map."""
    wanted = module.weight.dtype
    if dtype != wanted and not (
        dtype.is_floating_point and is_autocast_on(x.device.type)
    ):
        raise ValueError(
            f"'{name}' must have the dtype of the layer's parameters, {wanted} (got "
            f"{x.dtype}). Convert one of them, or use 'torch.autocast'"
        )


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast is on for a device; of the meta device PyTorch does not say."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def check_device(name: str, x: Tensor, edge_index: Any) -> None:
    """Hold features to the device of the edges.

    Raises:
        ValueError: The devices differ.
    """
    device = getattr(edge_index, "device", x.device)
    device = device() if callable(device) else device  # A method in SparseTensor.
    if x.device != device:
        raise ValueError(
            f"'{name}' must be on the device of 'edge_index', {device} (got {x.device})"
        )


def num_edges(edge_index: Any) -> int:
    """E, without a look at the data."""
    if is_edge_list(edge_index):
        return edge_index.size(1)
    if isinstance(edge_index, Graph):
        return edge_index.num_edges
    return edge_index.nnz() if is_sparse_tensor(edge_index) else edge_index._nnz()
