"""Launching prepared kernels: what is compiled anew, and what reaches the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_tiga.impls import launch
from pyg_tiga.impls.launch import Launcher
from pyg_tiga.impls.prepared import NotReplayed, Prepared, room_of

GRID = (3, 1, 1)
NAMES = ("x_ptr", "index_ptr", "out_ptr", "rows", "width", "FLAG")


class Kernel:
    """A stand-in for a kernel on a GPU, which notes how it is launched."""

    def __init__(self) -> None:
        self.arg_names = NAMES
        free = ("rows",)
        self.params = [SimpleNamespace(do_not_specialize=n in free) for n in NAMES]
        self.compiled: list[tuple[Any, ...]] = []
        self.fired: list[tuple[Any, ...]] = []
        self.watched: list[tuple[Any, ...]] = []
        self.options: list[dict[str, int]] = []
        self.function, self.packed_metadata = 17, (1, 1, 0)
        self.__name__ = "kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, stream: int = 0, **options: int) -> Any:
            (self.compiled if options else self.watched).append(args)
            self.options += [options] if options else []
            return self

        return run

    def run(self, *args: Any) -> None:
        *grid, stream, function, metadata, launch_metadata, enter, leave = args[:9]
        assert (*grid,) == GRID
        assert (stream, function, metadata) == (0, 17, (1, 1, 0))
        assert launch_metadata is enter is leave is None
        self.fired.append(args[9:])


class OnDevice(Tensor):
    """A tensor that says it is on the first GPU."""

    @staticmethod
    def __new__(cls, x: Tensor) -> OnDevice:
        return x.as_subclass(cls)

    def get_device(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(launch, "current_device", lambda: 0)


def _prepared(kernel: Kernel, index: Tensor, width: int = 4) -> Prepared:
    given = {"index_ptr": index, "rows": 5, "width": width, "FLAG": True}
    return Prepared(kernel, (3,), given, ("x_ptr", "out_ptr"), index)


def _tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return OnDevice(torch.zeros(8, dtype=dtype)), OnDevice(torch.zeros(8, dtype=dtype))


def _index(offset: int = 0) -> Tensor:
    return OnDevice(torch.zeros(8 + offset, dtype=torch.int32)[offset:])


def test_a_warm_launch_passes_addresses() -> None:
    kernel, index = Kernel(), _index()
    run, (x, out) = _prepared(kernel, index), _tensors()
    run(0, x, out)
    assert kernel.compiled == [(x, index, out, 5, 4, True)]
    run(0, x, out)
    addresses = (x.data_ptr(), index.data_ptr(), out.data_ptr())
    assert kernel.fired == [(*addresses, 5, 4, True)]
    assert len(kernel.compiled) == 1


def test_a_room_holds_several_pointers() -> None:
    """Each on its own line of cache; those of other kernels are passed over."""
    room = room_of({("out_ptr", "alias_ptr"): 3, "other_ptr": 40, "x_ptr": 1})
    assert room.places == {"out_ptr": 0, "alias_ptr": 0, "other_ptr": 32, "x_ptr": 96}
    assert room.size == 128
    kernel, index = Kernel(), _index()
    given = {"index_ptr": index, "rows": 5, "width": 4, "FLAG": True}
    run = Prepared(kernel, (3,), given, (room,), index)
    buffer = OnDevice(torch.zeros(room.size))
    run(0, buffer)
    x, _, out, *_ = kernel.compiled[0]
    assert x.data_ptr() == buffer.data_ptr() + 96 * 4
    assert out.data_ptr() == buffer.data_ptr()
    run(0, buffer)
    addresses = (x.data_ptr(), index.data_ptr(), out.data_ptr())
    assert kernel.fired == [(*addresses, 5, 4, True)]


class Steps:
    """Notes what is made a step."""

    def __init__(self, reason: str | None = None) -> None:
        self.kernels: list[tuple[Any, ...]] = []
        self._reason = reason

    def kernel(self, *args: Any) -> str | None:
        self.kernels.append(args)
        return self._reason


KINDS = ("*fp32", "*i32", "*fp32", "i32", "i64", "constexpr")
PLAIN = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}


def _recordable(
    kinds: tuple[str, ...] = KINDS, width: float = -4, **needs: Any
) -> tuple[Prepared, Tensor]:
    """A prepared kernel of two warps that has run, and its index."""
    kernel, index = Kernel(), _index()
    given = {"index_ptr": index, "rows": 5, "width": width, "FLAG": True}
    room = room_of({"other_ptr": 40, "out_ptr": 3})
    run = Prepared(kernel, (3,), given, ("x_ptr", room), index)
    run(0, _tensors()[0], OnDevice(torch.zeros(room.size)))
    kernel.src = SimpleNamespace(signature=dict(zip(NAMES, kinds, strict=True)))
    plain = SimpleNamespace(**{**PLAIN, **needs})
    metadata = (2, needs.get("num_ctas", 1), 96)
    run._compiled = launch.Compiled(kernel, plain, 17, metadata)
    return run, index


def _slots(*places: int) -> tuple[Any, ...]:
    return tuple(SimpleNamespace(place=place) for place in places)


def test_a_launch_becomes_a_step() -> None:
    run, index = _recordable()
    steps = Steps()
    run(steps, *_slots(2, 6))
    ((function, grid, threads, shared, words, sizes, pointers, described),) = (
        steps.kernels
    )
    assert (function, grid, threads, shared, described) == (17, GRID, 64, 96, True)
    # What is compiled in is not passed; two buffers of Triton's are.
    assert words[1] == index.data_ptr()
    assert words[3:] == [5, (1 << 64) - 4, 0, 0]
    assert sizes == [8, 8, 8, 4, 8, 8, 8]
    assert pointers == [(0, 2, 0), (2, 6, 64 * 4)]


@pytest.mark.parametrize(
    "kind, value, word",
    [
        ("fp32", 1.0, 0x3F800000),
        ("fp32", -0.0, 0x80000000),
        ("i1", True, 1),
        ("i32", -1, (1 << 64) - 1),
        ("u64", 1 << 63, 1 << 63),
    ],
)
def test_numbers_are_passed_as_words(kind: str, value: float, word: int) -> None:
    run, _ = _recordable((*KINDS[:4], kind, "constexpr"), value)
    steps = Steps()
    run(steps, *_slots(0, 1))
    size = {"fp32": 4, "i1": 1, "i32": 4, "u64": 8}[kind]
    assert (steps.kernels[0][4][4], steps.kernels[0][5][4]) == (word, size)


@pytest.mark.parametrize(
    "needs",
    [
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"num_ctas": 2},
    ],
    ids=lambda needs: next(iter(needs)),
)
def test_what_is_more_than_a_launch_is_no_step(needs: dict[str, Any]) -> None:
    run, _ = _recordable(**needs)
    with pytest.raises(NotReplayed, match="more than a plain launch"):
        run(Steps(), *_slots(0, 1))


def test_why_a_launch_is_no_step() -> None:
    run, _ = _recordable((*KINDS[:4], "fp64", "constexpr"))
    with pytest.raises(NotReplayed, match="'fp64'"):
        run(Steps(), *_slots(0, 1))
    run, _ = _recordable()
    with pytest.raises(NotReplayed, match="the driver says no"):
        run(Steps("the driver says no"), *_slots(0, 1))
    with pytest.raises(NotReplayed, match="aligned"):
        _prepared(Kernel(), _index())(Steps(), *_slots(0, 1))
    del run._compiled.kernel.src
    with pytest.raises(NotReplayed, match="does not say"):
        run(Steps(), *_slots(0, 1))


def test_registers_are_bounded_where_the_compiler_can_be_told() -> None:
    kernel, index = Kernel(), _index()
    given = {"index_ptr": index, "rows": 5, "width": 4, "FLAG": True}
    run = Prepared(kernel, (3,), given, ("x_ptr", "out_ptr"), index, 2, 64)
    run(0, *_tensors())
    assert kernel.options == [{"num_warps": 2, "maxnreg": 64}]


def test_another_relation_shares_what_is_compiled() -> None:
    kernel = Kernel()
    _prepared(kernel, _index())(0, *_tensors())
    index, (x, out) = _index(), _tensors()
    _prepared(kernel, index)(0, x, out)
    assert len(kernel.compiled) == 1
    assert kernel.fired[0][1] == index.data_ptr()


@pytest.mark.parametrize("change", ["width", "dtype", "64 bits"])
def test_what_changes_is_compiled_anew(change: str) -> None:
    kernel, index = Kernel(), _index()
    _prepared(kernel, index)(0, *_tensors())
    dtype = torch.bfloat16 if change == "dtype" else torch.float32
    run = _prepared(kernel, index, 8 if change == "width" else 4)
    if change == "64 bits":
        large = {"index_ptr": index, "rows": 2**31, "width": 4, "FLAG": True}
        run = Prepared(kernel, (3,), large, ("x_ptr", "out_ptr"), index)
    run(0, *_tensors(dtype))
    assert len(kernel.compiled) == 2
    assert not kernel.fired


def test_dtypes_may_change_between_the_calls_of_one() -> None:
    kernel = Kernel()
    run = _prepared(kernel, _index())
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32):
        run(0, *_tensors(dtype))
    assert [args[0].dtype for args in kernel.compiled] == [
        torch.float32,
        torch.bfloat16,
    ]
    assert len(kernel.fired) == 2


def test_unaligned_tensors_take_the_road_of_triton() -> None:
    kernel = Kernel()
    run, (x, out) = _prepared(kernel, _index()), _tensors()
    run(0, x, out)
    run(0, x[1:], out)
    assert kernel.compiled[1][0].data_ptr() == x.data_ptr() + 4
    run(0, x, out)
    assert (len(kernel.compiled), len(kernel.fired)) == (2, 1)


def test_unaligned_arrays_of_a_relation_always_do() -> None:
    kernel = Kernel()
    run = _prepared(kernel, _index(1))
    for _ in range(3):
        run(0, *_tensors())
    assert (len(kernel.compiled), len(kernel.fired)) == (3, 0)


def test_on_the_cpu_the_interpreter_gets_tensors() -> None:
    kernel, index = Kernel(), torch.zeros(4, dtype=torch.int32)
    run, x = _prepared(kernel, index), torch.zeros(8)
    for _ in range(2):
        run(0, x, x)
    assert [args[0] is x for args in kernel.compiled] == [True, True]


def test_profilers_see_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    run, tensors = _prepared(kernel, _index()), _tensors()
    run(0, *tensors)
    hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None
    )
    monkeypatch.setattr(launch, "_runtime", lambda: hooks)
    run(0, *tensors)
    assert (len(kernel.fired), len(kernel.watched)) == (0, 1)


def test_triton_has_the_hooks_that_are_looked_at() -> None:
    runtime = launch._runtime()
    assert not runtime.launch_enter_hook.calls
    assert not runtime.launch_exit_hook.calls


def test_unknown_arguments_are_refused() -> None:
    index = _index()
    with pytest.raises(AssertionError, match="'kernel' has no"):
        Prepared(Kernel(), (1,), {"wdith": 4}, (), index)
    with pytest.raises(KeyError, match="rows"):
        Prepared(Kernel(), (1,), {"width": 4, "FLAG": True}, (), index)


def test_launchers_look_at_dtypes_and_alignment() -> None:
    kernel = Kernel()
    run = Launcher(kernel, (3,), (5,), (True,))
    x, out = _tensors()
    index = _index()
    run((x, index, out), (4,))
    run((x, index, out), (4,))
    assert kernel.fired[0][:3] == (x.data_ptr(), index.data_ptr(), out.data_ptr())
    run((x[1:], index, out), (4,))
    run((x.bfloat16(), index, out), (4,))
    assert (len(kernel.compiled), len(kernel.fired)) == (3, 1)
