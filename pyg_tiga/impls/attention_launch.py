"""What the launchers of the edge-attention template share.

A launcher ("pass") is made once for a relation and a `Form` of operands. It holds its
kernels with all that does not change from call to call; a call gives tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyg_tiga._features import speaks_ptx
from pyg_tiga.impls.attention_types import Operands, Options, State
from pyg_tiga.impls.prepared import Room
from pyg_tiga.problem import Schedule, power_of_2
from pyg_tiga.relation.csr import Grouping, WorkItems
from pyg_tiga.relation.graph import Graph

MERGE_ITEMS = 8
MERGE_WARPS = 1
# Most long rows have a few pieces only, and there are many long rows.
_MERGE_ELEMENTS = 512
_MOST_ITEMS = 16
NODE_ELEMENTS = 1024
SUM_WARPS = 4
_MOST_CHANNELS = 256
_WARP = 32
_VECTOR = 16  # bytes
# Numbers of a tile in each thread, where an edge brings vectors to its score: forward,
# and backward, which holds a second row for every edge.
_THREAD_ELEMENTS = {False: 32, True: 16}

Pass = TypeVar("Pass")


class Operand(NamedTuple):
    """A node operand without its data."""

    dtype: torch.dtype
    stride_n: int
    stride_h: int


class Form(NamedTuple):
    """What kernels depend on besides a relation and a schedule; of no tensor."""

    heads: int
    channels: int
    width: int
    value: Operand
    row: Operand
    col: Operand
    term: torch.dtype | None
    loop_term: torch.dtype | None
    is_masked: bool
    options: Options
    param: torch.dtype | None = None
    shared: bool = False
    has_share: bool = False


def form_of(operands: Operands, options: Options) -> Form:
    """The form of operands that are laid out."""
    value, row, col, term, loop_term, mask, _, param, share = operands
    assert (param is not None) == has_param(options)
    return Form(
        value.size(1),
        value.size(2),
        1 if row.dim() == 2 else row.size(2),
        operand_of(value),
        operand_of(row),
        operand_of(col),
        None if term is None else term.dtype,
        None if loop_term is None else loop_term.dtype,
        mask is not None,
        options,
        None if param is None else param.dtype,
        operands.is_shared,
        share is not None,
    )


def operand_of(x: Tensor) -> Operand:
    """A node operand without its data."""
    return Operand(x.dtype, x.stride(0), x.stride(1))


def laid_out(operands: Operands) -> Operands:
    """Operands with the strides that the kernels take; as they are, as a rule."""
    value, row = _readable(operands.value), _readable(operands.row)
    col = value if operands.is_shared else _readable(operands.col)
    rest = [None if part is None else part.contiguous() for part in operands[3:]]
    if rest[2] is not None:
        rest[2] = rest[2].view(torch.uint8)
    return Operands(value, row, col, *rest)


def _readable(x: Tensor) -> Tensor:
    """A node operand as kernels read it."""
    if x.dim() == 2:
        # Numbers of half the size would cost registers that hold values.
        return x.float()
    return x.contiguous() if x.stride(2) != 1 and x.size(2) > 1 else x


def given(operands: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Those that are there, in order."""
    return tuple([part for part in operands if part is not None])


def operand_names(form: Form) -> tuple[str, ...]:
    """Names of the operands of a form, in the order of `Operands`."""
    names = ["value_ptr", "row_ptr", "col_ptr"]
    names += ["term_ptr"] if form.term is not None else []
    names += ["loop_term_ptr"] if form.loop_term is not None else []
    names += ["mask_ptr"] if form.is_masked else []
    names += ["seed_ptr"] if form.options.dropout > 0 else []
    names += ["param_ptr"] if form.param is not None else []
    names += ["share_ptr"] if form.has_share else []
    return tuple(names)


def state_names(positive: bool, prefix: str = "") -> tuple[str, ...]:
    """Names of the parts of a `State`."""
    names = ["m_ptr", "l_ptr"]
    names += ["positive_ptr", "sum_ptr"] if positive else []
    if prefix:
        return (f"{prefix}_ptr", *(f"{prefix}_{name}" for name in names))
    names = [name.replace("sum_ptr", "positive_sum_ptr") for name in names]
    return ("out_ptr", *names)


def new_state(
    value: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, positive: bool
) -> State:
    """Room for a state, of which the result has this shape."""
    scalars = [
        value.new_empty(shape[:2], dtype=torch.float32)
        for _ in range(3 if positive else 2)
    ]
    return State(
        value.new_empty(shape, dtype=dtype),
        scalars[0],
        scalars[1],
        value.new_empty(shape, dtype=dtype) if positive else None,
        scalars[2] if positive else None,
    )


def outside(names: Iterable[str], rooms: tuple[Room, ...]) -> tuple[str, ...]:
    """The names that have no place in any room."""
    placed = {name for room in rooms for name in room.places}
    return tuple([name for name in names if name not in placed])


def unit_arguments(rows: Grouping, items: WorkItems, chunk: int) -> dict[str, Any]:
    """Arguments of a walk over rows and the pieces of long ones (`load_units`)."""
    return {
        "ptr_ptr": rows.ptr,
        "item_row_ptr": items.row,
        "item_start_ptr": items.start,
        "num_rows": rows.num_rows,
        "num_items": items.num_items,
        "chunk": chunk,
        "SPLIT": items.num_items > 0,
    }


def place_arguments(perm: Tensor | None) -> dict[str, Any]:
    """Arguments that say where edges stand that are walked in another order."""
    present = {} if perm is None else {"perm_ptr": perm}
    return {**present, "HAS_PERM": perm is not None}


def walk_arguments(
    graph: Graph,
    rows: Grouping,
    items: WorkItems,
    schedule: Schedule,
    form: Form,
    grad: Operand | None = None,
) -> dict[str, Any]:
    """Arguments of a walk over edges: the edges, sizes, strides, numbers and flags.

    Args:
        graph: The relation.
        rows: What is walked.
        items: Its pieces of long rows.
        schedule: Launch choices.
        form: Form of the operands.
        grad: Form of the result's gradient, where it is read.
    """
    options = form.options
    strides: dict[str, Any] = {}
    if grad is not None:
        strides = {"stride_gn": grad.stride_n, "stride_gh": grad.stride_h}
        strides["PITCH_G"] = _pitch(grad, form.heads, form.channels)
    return {
        **strides,
        **unit_arguments(rows, items, schedule.chunk),
        **place_arguments(rows.perm),
        "index_ptr": rows.index,
        "num_loops": options.num_loops,
        "num_edges": graph.num_edges,
        "HEADS": form.heads,
        "CHANNELS": form.channels,
        "WIDTH": form.width,
        "PITCH_V": _pitch(form.value, form.heads, form.channels),
        "PITCH_R": _pitch(form.row, form.heads, form.width),
        "PITCH_C": _pitch(form.col, form.heads, form.width),
        "PTX": speaks_ptx(graph.device),
        "stride_vn": form.value.stride_n,
        "stride_vh": form.value.stride_h,
        "stride_rn": form.row.stride_n,
        "stride_rh": form.row.stride_h,
        "stride_cn": form.col.stride_n,
        "stride_ch": form.col.stride_h,
        "scale": float(options.scale),
        "drop_p": float(options.dropout),
        "drop_factor": options.factor,
        "HAS_TERM": form.term is not None,
        "HAS_LOOP_TERM": form.loop_term is not None,
        "HAS_MASK": form.is_masked,
        "SELF_LOOPS": options.num_loops > 0,
        "DROPOUT": options.dropout > 0,
        "BY_ROW": options.by_row,
        "HAS_PARAM": form.param is not None,
        "SHARED": form.shared,
        "BLOCK_R": schedule.rows,
    }


def _pitch(part: Operand, heads: int, size: int) -> int:
    """Distance of an operand's rows that kernels are compiled for.

    0 where it is an argument of theirs: each distance is a kernel of its own, so that
    it is compiled in only for rows that follow one another, be it those of a matrix of
    which the operand is a block of columns.
    """
    row = heads * size
    is_usual = row > 0 and (part.stride_h == size or heads == 1)
    return part.stride_n if is_usual and part.stride_n % row == 0 else 0


class GradStrides(NamedTuple):
    """Strides of rows of gradients of node operands; within a row they are dense."""

    value: int
    row: int
    col: int


def is_joint(graph: Graph, form: Form) -> bool:
    """Whether gradients of the node operands are columns of one matrix.

    They are where the operands are, as linear maps of the same nodes: products with the
    gradients then read one matrix, too.
    """
    operands = {form.value, form.row, form.col}
    size = form.heads * form.channels
    return (
        len(operands) == 1
        and not form.shared
        and form.width == form.channels
        and (form.value.stride_n > size and form.value.stride_h == form.channels)
        and graph.num_src == graph.num_dst
    )


def grad_strides(graph: Graph, form: Form) -> GradStrides:
    """Strides of the gradients of a form."""
    value, operand = form.heads * form.channels, form.heads * form.width
    if is_joint(graph, form):
        return GradStrides(3 * value, 3 * value, 3 * value)
    return GradStrides(value, operand, operand)


def score_functions(options: Options, *names: str) -> dict[str, Any]:
    """Functions of the score, as constexprs by name."""
    from pyg_tiga.kernels.scores import SCORES

    functions = SCORES[options.score]
    found = {name.upper(): getattr(functions, name) for name in names}
    return {**found, "VECTOR": functions.vector}


def has_slope(options: Options) -> bool:
    """Whether gradients of a score's operands need none of the scores themselves."""
    from pyg_tiga.kernels.scores import SCORES

    return SCORES[options.score].slope is not None


def has_param(options: Options) -> bool:
    """Whether a score has a parameter."""
    from pyg_tiga.kernels.scores import SCORES

    return SCORES[options.score].has_param


def is_vector(options: Options) -> bool:
    """Whether a score's operands are vectors, which have no P and p."""
    from pyg_tiga.kernels.scores import SCORES

    return SCORES[options.score].vector


class Blocks(NamedTuple):
    """A tile: U times S edges, heads and channels of each, and K of its operands."""

    edges: dict[str, int]
    row: dict[str, int]
    operand: dict[str, int]

    @property
    def all(self) -> dict[str, int]:
        """As the walks take them."""
        return {**self.edges, **self.row, **self.operand}


def tile_blocks(form: Form, schedule: Schedule, *, whole: bool = False) -> Blocks:
    """The tile of a schedule; `slice` bounds what it holds of a row.

    With `whole`, it holds all channels of a head, as products over them need it, and
    fewer edges where these are more than the slice. It always holds operands whole.
    """
    block_c = power_of_2(form.channels)
    if not whole:
        block_c = min(block_c, _MOST_CHANNELS)
    block_k = power_of_2(form.width)
    widest = max(block_c, block_k)
    block_h = max(1, schedule.slice // widest)
    block_h = min(block_h, power_of_2(form.heads))
    row = block_h * widest
    edges = max(1, min(schedule.edges, schedule.edges * schedule.slice // row))
    threads = _WARP * schedule.warps
    if form.width > 1:
        edges = max(1, min(edges, threads * _THREAD_ELEMENTS[whole] // row))
    # The edges that one load of 16 bytes by each thread covers.
    lanes = min(edges, max(1, threads * _VECTOR // (row * form.value.dtype.itemsize)))
    return Blocks(
        {"BLOCK_U": edges // lanes, "BLOCK_S": lanes},
        {"BLOCK_H": block_h, "BLOCK_C": block_c},
        {"BLOCK_K": block_k},
    )


def merge_blocks(blocks: Blocks) -> dict[str, int]:
    """A tile of a merge: one head, and as many pieces as have room beside it."""
    block_c = blocks.row["BLOCK_C"]
    items = max(MERGE_ITEMS, min(_MERGE_ELEMENTS // block_c, _MOST_ITEMS))
    return {"BLOCK_P": items, "BLOCK_H": 1, "BLOCK_C": block_c}


def walk_programs(rows: Grouping, items: WorkItems, schedule: Schedule) -> int:
    """Programs along the first axis of a walk."""
    return -(-(rows.num_rows + items.num_items) // schedule.rows)


def found(graph: Graph, key: tuple[Any, ...], make: Callable[..., Pass]) -> Pass:
    """A pass, found again on its graph; `make(graph, *key[1:])` makes it.

    Args:
        graph: The relation.
        key: A name, then all on which the pass depends.
        make: Makes it.
    """
    known = graph.scratch
    value = known.get(key)
    if value is None:
        value = known[key] = make(graph, *key[1:])
    return value
