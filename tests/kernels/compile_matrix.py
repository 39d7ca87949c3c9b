"""Compile every kernel for GPUs that are not here, and report what fails.

Run as a program, because Triton decides once per process whether it interprets:
`python -m tests.kernels.compile_matrix [--all] [--shard K/N]`. One line per failure,
then the number of compilations.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyg_tiga.kernels import build_csr, extremum, sddmm, spmm
from pyg_tiga.planner.schedule.defaults import rules
from pyg_tiga.problem import Problem, Schedule
from tests.kernels import compile_attention

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What runs here most, and then one of the others in turn, for a further set of flags.
MAIN = "sm_90"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FEATURES = 128


@dataclass(frozen=True)
class Case:
    """One kernel with its constexprs; pointer types follow the argument's name."""

    kernel: Any
    constants: dict[str, int]
    dtype: str = "fp32"
    index: str = "i32"
    warps: int = 1
    label: str = field(default="", compare=False)
    types: dict[str, str] = field(default_factory=dict)
    shipped: bool = False  # Its schedule is in the shipped table.

    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        return {name: self._type(name) for name in self.kernel.arg_names}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return self.types[name]
        if name in compile_attention.TYPES:
            return compile_attention.TYPES[name]
        if name in ("ptr_ptr", "index_ptr", "perm_ptr", "slot_ptr", "rowptr_ptr"):
            return f"*{self.index}"
        if name in ("key_ptr", "narrow_ptr", "good_ptr"):
            return f"*{self.index}"
        if name in ("order_ptr", "summary_ptr", "table_ptr"):
            return "*i64"
        if name == "item_start_ptr":
            return f"*{self.index}"
        if name in ("item_row_ptr", "hub_row_ptr", "hub_ptr_ptr"):
            return "*i32"
        if name in ("aux_ptr", "partial_aux_ptr"):
            return "*i32"
        if name in ("partial_ptr", "row_scale_ptr", "col_scale_ptr"):
            return "*fp32"
        return f"*{self.dtype}" if name.endswith("_ptr") else "i32"

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Sixteen-byte alignment, as for the tensors and widths that models use."""
        free = {"num_rows", "num_items", "chunk", *self.kernel.do_not_specialize}
        return {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(self.kernel.arg_names)
            if name not in free and self._type(name) not in ("constexpr", "fp32")
        }

    def compile(self, target: GPUTarget) -> None:
        """Compile for a target; raises what Triton raises."""
        constants = dict(self.constants)
        if "PTX" in constants:
            constants["PTX"] = target.backend == "cuda"
        source = ASTSource(self.kernel, self.signature(), constants, self.attributes())
        triton.compile(source, target=target, options={"num_warps": self.warps})


def cases(everything: bool) -> Iterator[Case]:
    """The shipped table times the flag sets; more dtypes where all is asked for."""
    dtypes = tuple(DTYPES) if everything else (torch.float32,)
    indices = ("i32", "i64") if everything else ("i32",)
    for dtype, index in itertools.product(dtypes, indices):
        seen: Counter[str] = Counter()
        for op, schedule in _schedules(dtype):
            sets = list(_FLAGS.get(op, _nothing)(everything))
            if seen[op] and not everything:
                # All sets for an operation's first schedule, then one each in turn.
                sets = [sets[seen[op] % len(sets)]] if sets else []
            seen[op] += 1
            for kernel, flags in sets:
                blocks = {
                    "BLOCK_R": schedule.rows,
                    "BLOCK_E": schedule.edges,
                    "BLOCK_F": schedule.slice,
                }
                constants = {**flags, **blocks}
                made = (kernel, constants, DTYPES[dtype], index, schedule.warps)
                yield Case(*made, shipped=True)
        yield from _others(DTYPES[dtype], index)
    if not everything:
        yield Case(
            spmm.spmm_rows,
            {**_spmm_flags(1, 1, 1, 1), "BLOCK_R": 1, "BLOCK_E": 8, "BLOCK_F": 64},
            "bf16",
            "i64",
        )
        # Where a bfloat16 is widened by instructions of our own.
        yield from itertools.islice(compile_attention.cases(Case, "bf16", "i32"), 2)


def matrix(everything: bool) -> Iterator[tuple[Case, str]]:
    """Every case and a target to compile it for.

    The shipped table is compiled for all, and so is the first case of each kernel; of
    the other flag sets each is for two, unless everything is asked for.
    """
    seen: Counter[str] = Counter()
    rest = [name for name in TARGETS if name != MAIN]
    for case in cases(everything):
        turn = seen[case.kernel.__name__]
        seen[case.kernel.__name__] += 1
        if everything or case.shipped or not turn:
            yield from ((case, name) for name in TARGETS)
        else:
            yield from ((case, name) for name in (MAIN, rest[turn % len(rest)]))


def _schedules(dtype: torch.dtype) -> list[tuple[str, Schedule]]:
    found = []
    for rule in rules():
        width = min(FEATURES, int(min(rule.row_bytes_at_most, 2**20)) // dtype.itemsize)
        problem = Problem(
            rule.op, 1, 1, 1, width, dtype, dtype, torch.int32, "cuda", (9, 0)
        )
        found.append((rule.op, rule.schedule(problem)))
    return list(dict.fromkeys(found))


def _spmm_flags(split: int, weight: int, row: int, col: int) -> dict[str, int]:
    names = ("SPLIT", "HAS_WEIGHT", "HAS_ROW_SCALE", "HAS_COL_SCALE")
    return dict(zip(names, map(bool, (split, weight, row, col)), strict=True))


def _spmm(everything: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    sets = [(1, 0, 1, 0), (1, 1, 0, 1)]
    for flags in itertools.product((0, 1), repeat=4) if everything else sets:
        yield spmm.spmm_rows, _spmm_flags(*flags)


def _extremum(everything: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    for save, sign in ((0, 1), (1, 1), (2, -1)):
        flags = {"SPLIT": True, "SIGN": sign, "SAVE": save}
        yield extremum.extremum_rows, flags


def _columns(everything: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    for save in (1, 2):
        yield extremum.extremum_columns, {"SPLIT": True, "SAVE": save}


def _sddmm(everything: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    for perm in (False, True):
        yield sddmm.sddmm_rows, {"SPLIT": True, "HAS_PERM": perm}


def _nothing(everything: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    """Operations whose cases `compile_attention` has."""
    yield from ()


_FLAGS = {
    "spmm": _spmm,
    "spmm_extremum": _extremum,
    "spmm_extremum_backward": _columns,
    "sddmm": _sddmm,
}


def _others(dtype: str, index: str) -> Iterator[Case]:
    merge = {"BLOCK_K": 8, "BLOCK_F": 128}
    for scaled in (False, True):
        yield Case(spmm.spmm_merge, {"HAS_ROW_SCALE": scaled, **merge}, dtype, index)
    for save, sign in ((0, 1), (1, 1), (2, -1)):
        flags = {"SIGN": sign, "SAVE": save, **merge}
        yield Case(extremum.extremum_merge, flags, dtype, index)
    winners = {"BLOCK_R": 4, "BLOCK_F": 128}
    yield Case(extremum.extremum_scatter, winners, dtype, index, warps=2)
    yield from compile_attention.cases(Case, dtype, index)
    if dtype == "fp32":
        yield from _builds(index)


def _builds(index: str) -> Iterator[Case]:
    blocks = {"BLOCK_R": 128, "BLOCK_S": 1024}
    for edges, end, is_sorted in (("i64", 1, False), ("i64", 0, True), ("u8", 0, True)):
        flags = {"END": end, "IS_SORTED": is_sorted, "IS_DENSE": edges == "i64"}
        narrow = {**flags, "BLOCK": 1024}
        yield Case(build_csr.narrow, narrow, edges, index, warps=4)
        finish = {"END": end, "IS_SORTED": is_sorted, **blocks, "BLOCK_E": 1024}
        yield Case(build_csr.finish, finish, edges, index, warps=4)
    yield Case(build_csr.summarise, blocks, index=index, warps=4)


def main() -> int:
    """Compile the matrix; the exit status says whether everything compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--shard", default="0/1")
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    mine = list(matrix(options.all))[shard::shards]
    failures = 0
    for case, name in mine:
        try:
            case.compile(TARGETS[name])
        except (RuntimeError, triton.TritonError) as error:
            failures += 1
            flags = " ".join(f"{k}={v}" for k, v in case.constants.items())
            sys.stdout.write(
                f"FAILED {case.kernel.__name__} {case.dtype} {flags} for {name}: "
                f"{error}\n"
            )
    sys.stdout.write(f"{len(mine)} compilations, {failures} failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
