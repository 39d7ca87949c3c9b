"""Set-up of all tests: interpreter, private caches, poisoned memory, markers."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Triton looks at this when a kernel is decorated, so it must stand before any import of
# kernels. Tests that compile for other devices do so in a subprocess without it.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

KEPT_SETTINGS = ("PYG_TIGA_DATA",)
CACHE_VARIABLES = ("PYG_TIGA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
EMPTY_FACTORIES = ("empty", "empty_like", "empty_strided")
EMPTY_METHODS = ("new_empty", "new_empty_strided")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compile-all",
        action="store_true",
        help="compile every kernel configuration for every target, not a selection",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    # The tests' own environment: a developer's settings and caches stay outside.
    for name in list(os.environ):
        if name.startswith("PYG_TIGA_") and name not in KEPT_SETTINGS:
            del os.environ[name]
    config._pyg_tiga_cache = tempfile.TemporaryDirectory(prefix="pyg_tiga_tests_")
    for name in CACHE_VARIABLES:
        os.environ[name] = str(Path(config._pyg_tiga_cache.name) / name.lower())
    # In PyTorch's deterministic mode cuBLAS wants a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Problems are tiny, and workers may run side by side.
    torch.set_num_threads(1)
    _poison_uninitialised_memory()


def pytest_unconfigure(config: pytest.Config) -> None:
    config._pyg_tiga_cache.cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _poison_uninitialised_memory() -> None:
    """Fill what PyTorch leaves uninitialised, so that reading it shows.

    Floats become NaN; integers the largest value of their type, which as an index is
    out of range.
    """
    for owner, names in ((torch, EMPTY_FACTORIES), (torch.Tensor, EMPTY_METHODS)):
        for name in names:
            setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = make(*args, **kwargs)
        if value.layout != torch.strided or value.is_quantized:
            return value
        if value.is_floating_point() or value.is_complex():
            value.detach().fill_(float("nan"))
        elif value.dtype != torch.bool:
            value.fill_(torch.iinfo(value.dtype).max)
        return value

    return wrapper


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory as PyTorch gives it: to fill it would be timed."""
    for owner, names in ((torch, EMPTY_FACTORIES), (torch.Tensor, EMPTY_METHODS)):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention by our kernels alone, with hubs of the rows longer than a piece."""
    from pyg_tiga import planner
    from pyg_tiga.planner import dispatch
    from pyg_tiga.problem import Schedule

    chosen = Schedule(rows=2, edges=4, slice=16, warps=1, chunk=64)
    monkeypatch.setattr(dispatch, "default_schedule", lambda problem: chosen)
    dispatch._plan.cache_clear()
    with planner.pin("triton"):
        yield
    dispatch._plan.cache_clear()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of one.

    It outlives what a test wraps in it: freed by a wrapped model instead, it can wait
    for a thread that waits for Python's lock.
    """
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets, or a skip that says what is missing."""
    text = os.environ.get("PYG_TIGA_DATA", "")
    if not text:
        pytest.skip("PYG_TIGA_DATA is not set: no real data sets to test on")
    if not Path(text).is_dir():
        pytest.skip(f"PYG_TIGA_DATA is not a folder: {text}")
    return Path(text)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device at hand."""
    return torch.device(request.param)
