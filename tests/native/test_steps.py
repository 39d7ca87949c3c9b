"""The compiled steps: what each does, what a launch gets, and how they are built."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga.impls.replay import (
    Replay,
    Slot,
    column,
    empty_like,
    linear,
    part,
    record,
    sum_rows,
)
from pyg_tiga.native import build

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def steps_class(compiled: Any) -> Any:
    return compiled.Steps


def replayed(steps_class: Any, work: Any, *tensors: Tensor | None) -> Any:
    steps = record(steps_class(len(tensors)), work, 0, there(*tensors))
    return steps.run(0, *tensors)


def there(*tensors: Tensor | None) -> list[bool]:
    return [tensor is not None for tensor in tensors]


def same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_pytorch(steps_class: Any, dtype: torch.dtype) -> None:
    x, w, b, g = (
        torch.randn(shape, dtype=dtype) for shape in ((5, 3), (4, 3), (4,), (5, 4))
    )

    def work(
        stream: Any, x: Any, w: Any, b: Any, g: Any, nothing: None
    ) -> tuple[Any, ...]:
        out = linear(x, w, b)
        plain = linear(x, w)
        out.addmm_(x, w.t())
        return out, plain, nothing, g.t().mm(x), g.mm(w), sum_rows(g)

    tensors = (x, w, b, g, None)
    same(replayed(steps_class, work, *tensors), work(0, *tensors))


def test_rooms_and_parts(steps_class: Any) -> None:
    x = torch.randn(6, 4)

    def work(stream: Any, x: Any) -> tuple[Any, ...]:
        half = x.to(torch.float16)
        wide = part(x, 3, (2, 2, 1))
        return part(x, 2, (2, 2)), half, part(half, 5, (1, 4)), column(wide, 1)

    same(replayed(steps_class, work, x), work(0, x))

    def rooms(stream: Any, x: Any) -> tuple[Any, ...]:
        return (
            empty_like(x),
            x.new_empty(7, dtype=torch.int32),
            x.new_empty((2, 3)),
            x.new_empty(0, 5),
        )

    found = replayed(steps_class, rooms, x)
    expected = [(t.shape, t.dtype) for t in rooms(0, x)]
    assert [(t.shape, t.dtype) for t in found] == expected


def test_an_error_of_pytorch_stays_one(steps_class: Any) -> None:
    steps = steps_class(2)
    steps.finish([steps.mm(0, 1)], [True, True])
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        steps.run(0, torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="expected 2 tensors"):
        steps.run(0, torch.ones(2, 3))


def test_what_nothing_needs_is_freed() -> None:
    noted: list[tuple[str, int]] = []

    class Noted:
        def __init__(self) -> None:
            self.places = iter(range(1, 9))

        def empty(self, *args: Any) -> int:
            noted.append(("made", place := next(self.places)))
            return place

        def release(self, place: int) -> None:
            noted.append(("freed", place))

        def finish(self, places: list[int], needed: list[bool]) -> None:
            noted.append(("gives", places[0]))

    def work(stream: Any, x: Any) -> tuple[Any, ...]:
        first = empty_like(x)
        second = empty_like(first)
        del first
        return (empty_like(second),)

    record(Noted(), work, 0, [True])
    wanted = [("made", 1), ("made", 2), ("freed", 1), ("made", 3), ("freed", 2)]
    assert noted[:6] == [*wanted, ("gives", 3)]


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class Driver:
    """Stands for the driver's launch, and notes what it gets."""

    def __init__(self, kinds: str) -> None:
        self.status, self.launches = 0, []
        self._kinds = kinds
        self._call = LAUNCH(self._launch)
        self.address = ctypes.cast(self._call, ctypes.c_void_p).value

    def _launch(self, function: int, *rest: Any) -> int:
        *grid, stream, parameters, _ = rest
        words = [
            struct.unpack(kind, ctypes.string_at(parameters[i], struct.calcsize(kind)))
            for i, kind in enumerate(self._kinds)
        ]
        self.launches.append((function, grid, stream, [word for (word,) in words]))
        return self.status


@pytest.fixture
def launched(steps_class: Any) -> Iterator[tuple[Driver, Any]]:
    driver = Driver("QiqfQ")
    steps = steps_class(2, driver.address)
    room = steps.empty(0, [8], torch.float32)
    minus_one = (1 << 64) - 1
    half = int.from_bytes(struct.pack("<f", 0.5), "little")
    words = [0, minus_one - 6, minus_one, half, 0]
    pointers = [(0, 1, 0), (4, room, 128)]
    made = (99, [3, 2, 1], 64, 1024, words, [], pointers, False)
    assert steps.kernel(*made) is None
    steps.finish([room], [True, True])
    return driver, steps


def test_a_launch_gets_its_parameters(launched: tuple[Driver, Any]) -> None:
    driver, steps = launched
    x, y = torch.ones(4), torch.ones(8)
    for _ in range(2):
        (room,) = steps.run(17, x, y)
        function, grid, stream, words = driver.launches.pop()
        assert (function, stream) == (99, 17)
        assert grid == [3, 2, 1, 64, 1, 1, 1024]
        assert words == [y.data_ptr(), -7, -1, 0.5, room.data_ptr() + 128]
    assert not driver.launches


def test_operands_of_kernels_are_aligned(launched: tuple[Driver, Any]) -> None:
    driver, steps = launched
    other = torch.ones(9)[1:]
    assert steps.run(0, torch.ones(4), other) is None
    assert steps.run(0, torch.ones(4), None) is None
    assert not driver.launches
    # Kernels do not see the first one.
    assert steps.run(0, other, torch.ones(8)) is not None


def test_which_inputs_are_there_is_part_of_the_steps(steps_class: Any) -> None:
    def work(stream: Any, x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        return (linear(x, w, b),)

    x, w, b = torch.randn(3, 2), torch.randn(4, 2), torch.randn(4)
    for first, second in ((b, None), (None, b)):
        steps = record(steps_class(3), work, 0, there(x, w, first))
        same(steps.run(0, x, w, first), work(0, x, w, first))
        assert steps.run(0, x, w, second) is None


def test_a_refused_launch_is_an_error(launched: tuple[Driver, Any]) -> None:
    driver, steps = launched
    driver.status = 700
    with pytest.raises(RuntimeError, match="status 700"):
        steps.run(0, torch.ones(4), torch.ones(8))


def test_kernels_that_cannot_be_launched(steps_class: Any) -> None:
    driver = Driver("")
    steps = steps_class(0, driver.address)
    many = [0] * 129
    args = (1, [1, 1, 1], 32, 0)
    assert "too many" in steps.kernel(*args, many, [], [], False)
    # Nothing describes the parameters where there is no driver or no such function.
    assert steps.kernel(*args, [0], [8], [], True) is not None
    assert steps.kernel(1, [0, 1, 1], 32, 0, [0], [], [], False) is None
    steps.finish([], [])
    assert steps.run(0) == ()
    assert not driver.launches


def test_a_replay_runs_its_work_once(
    monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    runs: list[type] = []

    def work(stream: Any, x: Any, w: Any) -> tuple[Any, ...]:
        runs.append(type(x))
        return (linear(x, w),)

    monkeypatch.setattr(build._build, "made", compiled)
    replay, x, w = Replay(work), torch.randn(3, 2), torch.randn(4, 2)
    (expected,) = replay(x, w)
    # Work on the CPU is not recorded of itself.
    assert runs == [Tensor]
    replay.make(0, [True, True])
    assert runs == [Tensor, Slot]
    (found,) = replay(x, w)
    assert torch.equal(found, expected)
    assert runs == [Tensor, Slot]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> build._Build:
    made = build._Build()
    monkeypatch.setattr(build, "_build", made)
    return made


def test_no_build_where_it_is_off(
    monkeypatch: pytest.MonkeyPatch, fresh: build._Build
) -> None:
    monkeypatch.setenv("PYG_TIGA_NATIVE", "off")
    monkeypatch.setattr(build, "_load", lambda: pytest.fail("built"))
    assert build.compiled() is None
    assert fresh._thread is None
    fresh.made = object()
    assert build.compiled() is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("first\nNinja is required"),
        OSError("no room"),
        subprocess.CalledProcessError(1, "c++"),
        ImportError("undefined symbol"),
    ],
)
def test_a_failed_build_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fresh: build._Build,
    error: Exception,
) -> None:
    asked = []

    def fail() -> None:
        asked.append(1)
        raise error

    monkeypatch.setattr(build, "_load", fail)
    monkeypatch.setenv("PYG_TIGA_NATIVE", "wait")
    build.log_fallback.cache_clear()
    with caplog.at_level("WARNING"):
        assert build.compiled() is None
        assert build.compiled() is None
        assert not build.wait()
    assert len(asked) == 1
    (text,) = [record.message for record in caplog.records]
    assert str(error).splitlines()[-1] in text


def test_a_build_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, fresh: build._Build, compiled: Any
) -> None:
    monkeypatch.setattr(build, "_load", lambda: compiled)
    monkeypatch.setenv("PYG_TIGA_NATIVE", "wait")
    assert build.compiled() is compiled
    assert build.wait()
