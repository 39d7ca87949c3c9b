"""The targets, as data."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.attention_targets import attention_targets
from benchmarks.gates import Target
from benchmarks.graphs import SPECS

TRAIN, FORWARD, BACKWARD = "train", "forward", "backward"
MIB = 1 << 20


def _layer_targets() -> Iterable[Target]:
    figures = (
        ("arxiv/F128", 3.5, 2.5),
        ("reddit/F128", 18.0, 8.0),
        ("products/F64", 12.0, 8.0),
    )
    for case, speed, memory in figures:
        cell = ((case, "sage_conv", TRAIN, "fp32"),)
        step = f"SAGEConv training step, {case}"
        yield Target(f"{step}: times PyG eager", "speed", speed, cell, "pyg")
        yield Target(f"{step}: PyG's peak over ours", "memory", memory, cell, "pyg")
        yield Target(f"{step}: times PyG compiled", "speed", 1.0, cell, "pyg_compiled")
    cell = (("arxiv/F128", "sage_aggregate", TRAIN, "fp32"),)
    text = "mean aggregation alone, forward + backward, arxiv/F128: times PyG eager"
    yield Target(text, "speed", 10.0, cell, "pyg")


def _spmm_targets() -> Iterable[Target]:
    for phase in (FORWARD, TRAIN):
        for dtype, mean in (("fp32", 1.5), ("bf16", 2.0)):
            cells = tuple(
                (f"{graph}/F{width}", "spmm", phase, dtype)
                for graph in ("arxiv", "reddit", "products")
                for width in (16, 64, 128, 256)
            )
            text = f"SpMM {phase}, {dtype}, 12 cells over cuSPARSE"
            yield Target(f"{text}: least", "speed", 0.98, cells, "cusparse")
            yield Target(
                f"{text}: geometric mean", "mean speed", mean, cells, "cusparse"
            )


def _max_targets() -> Iterable[Target]:
    for graph, ms in (("arxiv", 0.85), ("reddit", 10.0), ("products", 28.0)):
        case = f"{graph}/F128"
        cells = tuple((case, op, FORWARD, "fp32") for op in ("max_aggregate", "spmm"))
        yield Target(f"max forward over our sum, {case}", "over own", 1.1, cells)
        yield Target(
            f"max training, winner scatter, {case}, ms",
            "milliseconds",
            ms,
            ((case, "max_aggregate", TRAIN, "fp32"),),
            tags=frozenset({"winner scatter"}),
            level="aim",
        )


def _other_targets() -> Iterable[Target]:
    yield Target(
        "host time of a warm SAGEConv call beyond the projections, ms",
        "milliseconds",
        0.080,
        (("tiny/F32", "sage_conv", FORWARD, "fp32"),),
        tags=frozenset({"host"}),
    )
    yield Target(
        "SAGE on Cora, 20 paired seeds: farthest end of the 95 % interval, points",
        "accuracy",
        0.5,
        (("cora/F16", "sage_conv", TRAIN, "fp32"),),
        tags=frozenset({"accuracy"}),
    )
    for phase in (FORWARD, TRAIN):
        yield Target(
            f"SAGEConv {phase} on the CPU, arxiv/F128: times PyG, best of several",
            "best of several",
            0.95,
            (("arxiv/F128", "sage_conv", phase, "fp32"),),
            "pyg",
            frozenset({"cpu"}),
        )


def _gat_layer_targets() -> Iterable[Target]:
    speeds = (("4x32", 13.0), ("8x8", 16.0), ("1x64", 9.0))
    for shape, speed in speeds:
        case = f"arxiv/{shape}"
        cell = ((case, "gat_conv", TRAIN, "fp32"),)
        step = f"GATConv training step, {case}"
        yield Target(f"{step}: times PyG eager", "speed", speed, cell, "pyg")
        yield Target(f"{step}: times PyG compiled", "speed", 2.5, cell, "pyg_compiled")
        yield Target(f"{step}: PyG's peak over ours", "memory", 8.0, cell, "pyg")
    for graph in ("musae_github", "soc_slashdot0902"):
        case = f"{graph}/4x32"
        cell = ((case, "gat_conv", TRAIN, "fp32"),)
        step = f"GATConv training step, {case}"
        yield Target(f"{step}: times PyG eager", "speed", 8.0, cell, "pyg")
        yield Target(f"{step}: times PyG compiled", "speed", 2.5, cell, "pyg_compiled")


def _gat_large_targets() -> Iterable[Target]:
    for graph in ("reddit", "products"):
        for heads, channels, forward, backward in (
            (4, 32, 1.05, 1.4),
            (8, 8, 1.4, 1.8),
        ):
            case = f"{graph}/{heads}x{channels}"
            cell = ((case, "gat_conv", TRAIN, "fp32"),)
            step = f"GATConv training step, {case}"
            yield Target(f"{step}: completes", "completes", 1.0, cell)
            outputs = 7 * SPECS[graph].num_nodes * heads * channels * 4 // MIB
            text = f"{step}: peak in MiB, at most 7 outputs"
            yield Target(text, "peak", outputs, cell)
            for phase, bound in ((FORWARD, forward), (BACKWARD, backward)):
                core = ((case, "gat_attention", phase, "fp32"),)
                text = f"GAT edge kernels, {phase}, {case}: over the floor of a gather"
                yield Target(text, "over floor", bound, core)
        for phase in (FORWARD, BACKWARD, TRAIN):
            cells = tuple(
                (f"{graph}/4x32", "gat_attention", phase, dtype)
                for dtype in ("bf16", "fp32")
            )
            text = f"GAT edge kernels, {phase}, {graph}/4x32: bf16 times our fp32"
            yield Target(text, "speed over own", 1.6, cells)


def _gat_other_targets() -> Iterable[Target]:
    core = (("arxiv/4x32", "gat_attention", TRAIN, "fp32"),)
    text = "GAT edge kernels, forward + backward, arxiv/4x32: over two gathers"
    yield Target(text, "over floor", 1.5, core)
    cora = (("cora/8x8", "gat_conv", TRAIN, "fp32"),)
    yield Target(
        "GAT on Cora, training step with its optimizer: times PyG eager",
        "speed",
        2.0,
        cora,
        "pyg",
        frozenset({"optimizer"}),
    )
    yield Target(
        "GAT on Cora, 20 paired seeds: farthest end of the 95 % interval, points",
        "accuracy",
        0.5,
        cora,
        tags=frozenset({"accuracy"}),
    )
    for phase in (FORWARD, TRAIN):
        yield Target(
            f"GATConv {phase} on the CPU, arxiv/8x8: times PyG, best of several",
            "best of several",
            0.95,
            (("arxiv/8x8", "gat_conv", phase, "fp32"),),
            "pyg",
            frozenset({"cpu"}),
        )


TARGETS: tuple[Target, ...] = (
    *_layer_targets(),
    *_spmm_targets(),
    *_max_targets(),
    *_other_targets(),
    *_gat_layer_targets(),
    *_gat_large_targets(),
    *_gat_other_targets(),
    *attention_targets(),
)
