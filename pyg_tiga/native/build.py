"""Compiling `module.cpp`, once on a machine, beside whatever else goes on.

A compiler takes half a minute, and PyTorch keeps what it makes for the next
process. Nothing waits for it: until it is there, and where it cannot be, the same work
is done from Python.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch

from pyg_tiga._settings import settings
from pyg_tiga.errors import log_fallback

_SOURCE = Path(__file__).with_name("module.cpp")
_HEADERS = (_SOURCE.with_name("node.h"), _SOURCE.with_name("steps.h"))


class _Build:
    """The state of the build in this process."""

    def __init__(self) -> None:
        self.made: Any = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> threading.Thread:
        """Start it, the first time."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        try:
            self.made = _load()
        except (
            ImportError,
            OSError,
            RuntimeError,
            subprocess.SubprocessError,
        ) as error:
            log_fallback("the compiled host code to Python", _last_line(str(error)))


def compiled() -> Any:
    """The module with `Steps` and `Formula`, or None as long as there is none.

    The first question starts the build. With ``PYG_TIGA_NATIVE=wait`` it waits for it,
    and with ``off`` the answer is None.
    """
    mode = settings().native
    if mode == "off":
        return None
    if _build.made is None:
        thread = _build.start()
        if mode == "wait":
            thread.join()
    return _build.made


def wait() -> bool:
    """Wait for the build, and say whether there is something to show for it."""
    _build.start().join()
    return _build.made is not None


def _load() -> Any:
    """What the compiler makes of the source, found again if it was made before."""
    from torch.utils.cpp_extension import load

    # PyTorch looks for edits, but not for another PyTorch in the same folder.
    sources = [path.read_bytes() for path in (_SOURCE, *_HEADERS)]
    text = b"".join(sources) + torch.__version__.encode()
    name = f"pyg_tiga_steps_{hashlib.sha256(text).hexdigest()[:12]}"
    return load(name, [str(_SOURCE)], extra_cflags=["-O2"], with_cuda=False)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the compiler failed"


_build = _Build()
