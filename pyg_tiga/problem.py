"""What a planner is asked (`Problem`) and the launch choices it makes (`Schedule`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, described by what decides which implementation and schedule fit it.

    Two calls with equal problems get the same plan. Everything in it is known on the
    host before a kernel runs.

    Args:
        op: The operation: ``"spmm"``, ``"spmm_extremum"``, ``"sddmm"``, ...
        num_dst: N_dst, rows of the relation.
        num_src: N_src, columns of the relation.
        num_edges: E.
        features: F, columns of the dense operand.
        dtype: Storage dtype of the dense operand.
        out_dtype: Storage dtype of the result.
        index_dtype: Dtype of the relation's index arrays.
        device: Device type, ``"cuda"`` or ``"cpu"``.
        capability: CUDA compute capability, (0, 0) elsewhere.
        relation: Kind of the relation; ``"csr"`` for explicit edges.
        reduce: ``"sum"``, ``"max"`` or ``"min"``.
        normalize: ``"none"``, ``"dst"`` (mean) or ``"src"``.
        weighted: Whether every edge carries a weight.
        heads: H; `features` counts the columns of all heads.
        form: Name of the score, of attention.
        ties: How gradients go at ties of a maximum: ``"none"`` where no gradient is
            wanted, ``"split"`` or ``"first"``.
        deterministic: Whether results must be bit-identical from run to run.
        objective: ``"time"`` or ``"memory"``.
    """

    op: str
    num_dst: int
    num_src: int
    num_edges: int
    features: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    index_dtype: torch.dtype
    device: str
    capability: tuple[int, int] = (0, 0)
    relation: str = "csr"
    reduce: str = "sum"
    normalize: str = "none"
    weighted: bool = False
    heads: int = 1
    form: str = ""
    ties: str = "none"
    deterministic: bool = False
    objective: str = "time"
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A problem is looked up at every call and made once.
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @property
    def mean_degree(self) -> float:
        """Edges per row."""
        return self.num_edges / max(self.num_dst, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the dense operand."""
        return self.features * self.dtype.itemsize

    def __str__(self) -> str:
        what = self.op if self.reduce == "sum" else f"{self.op}[{self.reduce}]"
        if self.form:
            what += f"[{self.form}, {self.heads} heads]"
        if self.normalize != "none":
            what += f", normalised by {self.normalize} degree"
        if self.weighted:
            what += ", weighted"
        if self.ties != "none":
            what += f", ties {self.ties}"
        return (
            f"{what}: {self.num_edges} edges, {self.num_src} -> {self.num_dst} nodes, "
            f"F={self.features}, {str(self.dtype).removeprefix('torch.')}, "
            f"{self.device}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Launch choices of a kernel that walks grouped edges.

    Args:
        rows: Units of work (short rows or pieces of long ones) per program.
        edges: Edges per step and unit.
        slice: Feature columns per program; the slices are the outer grid axis.
        warps: Warps per program.
        chunk: Rows with more edges than this are cut into pieces of this many.
        prescale: Scale the dense operand by its nodes' degrees in a pass of its own,
            instead of at every edge.
        registers: Registers per thread at most, on NVIDIA's GPUs; 0 leaves them to the
            compiler.
    """

    rows: int
    edges: int
    slice: int
    warps: int
    chunk: int
    prescale: bool = False
    registers: int = 0

    def __str__(self) -> str:
        return (
            f"rows={self.rows} edges={self.edges} slice={self.slice} "
            f"warps={self.warps} chunk={self.chunk} prescale={self.prescale} "
            f"registers={self.registers}"
        )


def power_of_2(n: int) -> int:
    """The least power of 2 that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
