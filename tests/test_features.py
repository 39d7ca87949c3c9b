from __future__ import annotations

import builtins
import importlib
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from pyg_tiga import _features

PROBES = [
    _features.has_triton,
    _features.triton_interpreted,
    _features.torch_scatter,
    _features.torch_sparse,
    _features.cuda_capability,
]


@pytest.fixture
def fresh_probes():
    """Forget what was probed, before the test and after it."""
    for probe in PROBES:
        probe.cache_clear()
    yield
    for probe in PROBES:
        probe.cache_clear()


def fail_import(monkeypatch, name, error):
    real = importlib.import_module

    def import_module(wanted, *args):
        if wanted == name:
            raise error
        return real(wanted, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize("name", ["torch_scatter", "torch_sparse"])
def test_absent_package_is_none_without_a_word(monkeypatch, fresh_probes, caplog, name):
    fail_import(monkeypatch, name, ModuleNotFoundError("absent", name=name))
    assert getattr(_features, name)() is None
    assert not caplog.records


@pytest.mark.parametrize(
    "error",
    [
        OSError("undefined symbol"),
        ImportError("cannot import name"),
        ModuleNotFoundError("No module named 'dependency'", name="dependency"),
    ],
    ids=["binary", "import", "dependency"],
)
def test_broken_package_is_none_and_said(monkeypatch, fresh_probes, caplog, error):
    fail_import(monkeypatch, "torch_scatter", error)
    with caplog.at_level(logging.WARNING, logger="pyg_tiga"):
        assert _features.torch_scatter() is None
        assert _features.torch_scatter() is None
    assert len(caplog.records) == 1
    assert "torch_scatter" in caplog.text
    assert str(error) in caplog.text


def test_installed_package_is_the_module(monkeypatch, fresh_probes):
    module = types.ModuleType("torch_scatter")
    monkeypatch.setitem(sys.modules, "torch_scatter", module)
    assert _features.torch_scatter() is module


@pytest.mark.parametrize(
    "version, usable",
    [("3.5.1", False), ("3.6.0", True), ("3.6.0+git1a2b", True), ("4.0", True)],
)
def test_triton_is_used_from_a_version_on(monkeypatch, fresh_probes, version, usable):
    module = types.ModuleType("triton")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", module)
    assert _features.has_triton() is usable


def test_without_triton_nothing_is_interpreted(monkeypatch, fresh_probes):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert _features.has_triton() is False
    assert _features.triton_interpreted() is False


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False)])
def test_interpreter_switch(value, expected):
    pytest.importorskip("triton", reason="Triton is not installed")
    code = "from pyg_tiga import _features as f; assert f.triton_interpreted() is {}"
    environment = {**os.environ, "TRITON_INTERPRET": value}
    subprocess.run(
        [sys.executable, "-c", code.format(expected)],
        env=environment,
        cwd=Path(__file__).parents[1],
        check=True,
    )


def test_probes_are_cached(monkeypatch, fresh_probes):
    first = _features.has_triton()
    monkeypatch.setattr(
        builtins, "__import__", lambda *_: pytest.fail("a cached probe imports")
    )
    assert _features.has_triton() is first


@pytest.mark.gpu
def test_capability_of_the_device():
    assert _features.cuda_capability(0) == torch.cuda.get_device_capability(0)
