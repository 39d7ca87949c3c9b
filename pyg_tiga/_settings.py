"""The settings of the package, read from `PYG_TIGA_*` environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PREFIX = "PYG_TIGA_"


def _choice(*allowed: str) -> Any:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(" or ".join(repr(value) for value in allowed))
        return text

    return field(default=allowed[0], metadata={"parse": parse})


def _flag(default: bool) -> Any:
    def parse(text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError("'0' or '1'")
        return text == "1"

    return field(default=default, metadata={"parse": parse})


def _path(text: str) -> Path:
    return Path(text).expanduser()


@dataclass(frozen=True)
class Settings:
    """The settings in force; the variable is `PYG_TIGA_` and the name in capitals.

    Attributes:
        validate: `"sync"` reads the index check of a new relation at once,
            `"deferred"` at the relation's next use.
        strict: Raise where a layer would fall back to its parent's path.
        native: `"auto"` compiles the host code of fused layers in the background,
            `"wait"` waits for it, `"off"` leaves all of it to Python.
        data: Folder of real data sets for the tests and the example.
    """

    validate: str = _choice("sync", "deferred")
    strict: bool = _flag(False)
    native: str = _choice("auto", "wait", "off")
    data: Path | None = field(default=None, metadata={"parse": _path})

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings; an unset or empty variable leaves the default.

        Raises:
            ValueError: A variable holds a value that is not allowed.
        """
        values = {}
        for name, variable, parse in _VARIABLES:
            text = environ.get(variable, "")
            if text:
                values[name] = _parse(variable, text, parse)
        return cls(**values)


def _parse(variable: str, text: str, parse: Callable[[str], object]) -> object:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(
            f"The environment variable '{variable}' must be {error} (got {text!r})"
        ) from None


_VARIABLES = tuple(
    (entry.name, PREFIX + entry.name.upper(), entry.metadata["parse"])
    for entry in fields(Settings)
)
_KEYS = tuple(os.environ.encodekey(variable) for _, variable, _ in _VARIABLES)
_last: tuple[tuple[object, ...], Settings] | None = None


def settings() -> Settings:
    """The current settings, read anew only when one of their variables changed.

    Raises:
        ValueError: A variable holds a value that is not allowed.
    """
    global _last
    # `os.environ.get` encodes its key and costs a microsecond or more for each
    # variable; the mapping below it holds them encoded.
    raw = tuple(map(os.environ._data.get, _KEYS))
    last = _last
    if last is None or last[0] != raw:
        last = _last = (raw, Settings.from_environ(os.environ))
    return last[1]
