"""Probes of the machine and of optional packages; nothing else asks for them."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

import torch
from packaging.version import Version

logger = logging.getLogger("pyg_tiga")

_MIN_TRITON = Version("3.6")


@cache
def has_triton() -> bool:
    """Whether a Triton that can compile our kernels can be imported."""
    triton = _optional("triton")
    if triton is None:
        return False
    found = Version(triton.__version__)
    if found.release < _MIN_TRITON.release:
        logger.warning(
            "Triton %s is too old for pyg_tiga (needs %s or newer); its kernels are "
            "not used",
            found,
            _MIN_TRITON,
        )
        return False
    return True


@cache
def triton_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (`TRITON_INTERPRET=1`).

    Triton looks when a kernel is decorated, which happens once in a process, so
    one answer holds for good.
    """
    if not has_triton():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def speaks_ptx(device: torch.device) -> bool:
    """Whether a device's kernels become PTX, so that they may contain some."""
    return (
        device.type == "cuda" and torch.version.hip is None and not triton_interpreted()
    )


@cache
def torch_scatter() -> ModuleType | None:
    """The `torch_scatter` module, or `None` where it cannot be imported."""
    return _optional("torch_scatter")


@cache
def torch_sparse() -> ModuleType | None:
    """The `torch_sparse` module, or `None` where it cannot be imported."""
    return _optional("torch_sparse")


@cache
def cuda_capability(device_index: int) -> tuple[int, int]:
    """The compute capability (major, minor) of a CUDA device."""
    return torch.cuda.get_device_capability(device_index)


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        reason: Exception = error
    except (ImportError, OSError) as error:
        # A binary built for another PyTorch fails here with an OSError.
        reason = error
    logger.warning("%s is installed but cannot be imported: %s", name, reason)
    return None
