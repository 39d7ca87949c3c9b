"""Edge attention's `torch.library` ops: opcheck, what is kept, eager gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyg_tiga import functional, planner
from pyg_tiga.impls import vendor_attention
from pyg_tiga.impls.attention_types import State, Wanted
from pyg_tiga.ops import attention_library as library
from pyg_tiga.ops.attention_run import Run
from pyg_tiga.planner import Plan, dispatch
from pyg_tiga.problem import Schedule
from pyg_tiga.testing import Case, make_case, row

HEADS, CHANNELS = 2, 4
NAMES = ("value", "alpha_src", "alpha_dst", "edge_term", "loop_term")
PROBLEMS = ("hub_row", "hub_column", "isolated", "unsorted", "more_sources", "no_edges")
HALF = torch.bfloat16
FAMILIES = (
    ("triton", torch.float32),
    ("triton", HALF),
    ("vendor", torch.float32),
    ("vendor", torch.float64),
    ("vendor", HALF),
    ("scatter", torch.float32),
    ("scatter", torch.float64),
)
DEFAULTS = {"objective": "time", "terms": False, "dropout": 0.0, "masked": False}
OPTIONS = [
    {},
    {"terms": True, "masked": True},
    {"dropout": 0.5},
    {"objective": "memory"},
]


def _name(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


def _every_kind() -> list[Any]:
    """Families, dtypes and options; fewest of interpreted kernels, which are slow."""
    return [
        pytest.param(family, dtype, options, id=f"{family}-{dtype}-{_name(options)}")
        for family, dtype in FAMILIES
        for options in (OPTIONS[:1] if family == "triton" else OPTIONS)
    ]


EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=_name)
EVERY_KIND = pytest.mark.parametrize(("family", "dtype", "options"), _every_kind())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any family, however small the problem; hubs are longer than a piece."""
    chosen = Schedule(rows=4, edges=16, slice=16, warps=1, chunk=64)
    monkeypatch.setattr(dispatch, "default_schedule", lambda problem: chosen)
    monkeypatch.setattr(vendor_attention, "FEWEST", 0)
    torch._dynamo.reset()
    dispatch._plan.cache_clear()
    yield
    dispatch._plan.cache_clear()


class Asked:
    """What implementations were asked for."""

    def __init__(self) -> None:
        self.positive: list[bool] = []
        self.states: list[State] = []
        self.wanted: list[Wanted] = []

    def note(self, op: str, args: tuple[Any, ...]) -> None:
        if op == "edge_attention":
            self.positive.append(args[-1])
        else:
            self.states.append(args[4])
            self.wanted.append(args[5])

    def kept(self) -> bool:
        """Whether P and p were formed once, and given to the backward if it ran."""
        (positive,) = self.positive
        for state in self.states:
            assert (state.positive is not None) == positive
            assert (state.positive_sum is not None) == positive
        return positive


@contextmanager
def spied() -> Iterator[Asked]:
    """Note every run of a plan within the context, and of what stands for one."""
    asked, run, state = Asked(), Plan.run, Run.state

    def noted(plan: Plan, *args: Any) -> Any:
        asked.note(plan.problem.op, args)
        return run(plan, *args)

    def noted_state(run: Run, *args: Any) -> State:
        asked.note("edge_attention", (run.positive,))
        return state(run, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "run", noted)
        patch.setattr(Run, "state", noted_state)
        yield asked


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    loops = min(case.num_src, case.num_dst)
    return {
        "value": (case.num_src, HEADS, CHANNELS),
        "alpha_src": (case.num_src, HEADS),
        "alpha_dst": (case.num_dst, HEADS),
        "edge_term": (case.edge_index.size(1), HEADS),
        "loop_term": (loops, HEADS),
    }


class Given:
    """A call's tensors: leaves that want gradients, except those that are `frozen`."""

    def __init__(
        self,
        problem: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        frozen: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.options = {**DEFAULTS, **options}
        self.case = case = make_case(row(problem), device=device)
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(device, dtype)

        self.leaves: dict[str, Tensor | None] = {}
        for name, shape in _shapes(case).items():
            drawn = draw(*shape).requires_grad_(name not in frozen)
            is_term = name.endswith("term")
            self.leaves[name] = None if is_term and not self.options["terms"] else drawn
        self.grad = draw(case.num_dst, HEADS, CHANNELS)
        dropout = self.options["dropout"]
        self.seed = torch.tensor([7], device=device) if dropout > 0 else None
        places = torch.arange(case.edge_index.size(1), device=device)
        self.mask = places % 5 > 0 if self.options["masked"] else None

    def wanted(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.leaves.values() if x is not None and _wants(x))

    def arguments(self, positive: bool) -> tuple[Any, ...]:
        """Those of the forward op."""
        case, loops = self.case, min(self.case.num_src, self.case.num_dst)
        relation = ([case.edge_index], "coo", case.num_src, case.num_dst)
        numbers = (0.2, loops, self.options["dropout"], self.options["objective"])
        leaves = self.leaves.values()
        return (*relation, *leaves, self.mask, self.seed, *numbers, positive)

    def call(self, edge_index: Tensor, *leaves: Tensor | None) -> Tensor:
        """The public function."""
        return functional.additive_attention(
            edge_index,
            *leaves[:3],
            edge_term=leaves[3],
            loop_term=leaves[4],
            self_loops=True,
            dropout=self.options["dropout"],
            seed=self.seed,
            edge_mask=self.mask,
            size=(self.case.num_src, self.case.num_dst),
            objective=self.options["objective"],
        )

    def results(self, call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Output and gradients."""
        out = call(self.case.edge_index, *self.leaves.values())
        return (out.detach(), *torch.autograd.grad(out, self.wanted(), self.grad))

    def compiled(self, **options: Any) -> Callable[..., Tensor]:
        return torch.compile(
            self.call, fullgraph=True, backend="aot_eager", dynamic=False, **options
        )


def _wants(x: Tensor) -> bool:
    return x.requires_grad


def _skip_unless_possible(family: str, device: torch.device) -> None:
    if family == "vendor" and device.type != "cpu":
        pytest.skip("embedding bags are for the CPU")


@pytest.mark.parametrize("positive", [True, False], ids=["kept", "not kept"])
@EVERY_KIND
def test_opcheck(
    family: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    positive: bool,
    device: torch.device,
) -> None:
    _skip_unless_possible(family, device)
    given = Given("more_sources", dtype, device, **options)
    # The last check runs the op many times, which interpreted kernels are too slow for.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if family != "triton" or device.type != "cpu":
        checks += ("test_aot_dispatch_dynamic",)
    with planner.pin(family):
        arguments = given.arguments(positive)
        torch.library.opcheck(library.forward_op, arguments, test_utils=checks)
        state = library.forward_op(*arguments)[: 5 if positive else 3]
        *operands, _ = arguments[4:]
        wanted = (given.options["terms"], False)
        tensors = [given.grad, *operands[:7], list(state), *operands[7:]]
        with torch.no_grad():
            torch.library.opcheck(
                library.backward_op,
                _detached((*arguments[:4], *tensors, *wanted)),
                test_utils=checks,
            )


def _detached(args: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, args)


@pytest.mark.parametrize("problem", PROBLEMS)
@EVERY_KIND
def test_gradients_are_the_eager_ones(
    family: str,
    dtype: torch.dtype,
    problem: str,
    options: dict[str, Any],
    device: torch.device,
) -> None:
    _skip_unless_possible(family, device)
    given = Given(problem, dtype, device, **options)
    with planner.pin(family), spied() as asked:
        eager = given.results(given.call)
        compiled = given.results(given.compiled())
    first, second = asked.positive
    assert first == second
    for one, other in zip(eager, compiled, strict=True):
        assert one.dtype == other.dtype
        if family == "scatter" and device.type != "cpu":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["triton", "vendor"])
def test_training_keeps_and_inference_does_not(family: str) -> None:
    given = Given("isolated")
    call = given.compiled()
    with planner.pin(family):
        with spied() as asked:
            given.results(call)
        assert asked.kept()
        assert asked.wanted == [Wanted(False, False, True)]
        for context in (torch.no_grad, torch.inference_mode):
            with context(), spied() as asked:
                call(given.case.edge_index, *given.leaves.values())
            assert not asked.kept()
        with spied() as asked:
            call(given.case.edge_index, *_detached(tuple(given.leaves.values())))
        assert not asked.kept()


@pytest.mark.parametrize(
    ("frozen", "options", "kept", "wanted"),
    [
        ((), {"objective": "memory"}, False, (False, False, False)),
        ((), {"terms": True}, False, (True, True, True)),
        (("edge_term",), {"terms": True}, False, (False, True, True)),
        (NAMES[3:], {"terms": True}, True, (False, False, True)),
        (NAMES[1:], {"terms": True}, True, (False, False, True)),
    ],
)
@pytest.mark.parametrize("family", ["triton", "vendor"])
def test_what_training_keeps_and_asks_for(
    family: str,
    frozen: tuple[str, ...],
    options: dict[str, Any],
    kept: bool,
    wanted: tuple[bool, bool, bool],
) -> None:
    given = Given("isolated", frozen=frozen, **options)
    with planner.pin(family):
        with spied() as asked:
            compiled = given.results(given.compiled())
        eager = given.results(given.call)
    assert asked.kept() == kept
    assert asked.wanted == [Wanted(*wanted)]
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


@EVERY_OPTION
def test_kept_sums_are_the_same_in_every_family(options: dict[str, Any]) -> None:
    """Also where the implementation has none, and the op forms them."""
    given = Given("hub_row", **options)
    found = {}
    for family in ("triton", "vendor", "scatter"):
        with planner.pin(family), torch.no_grad():
            found[family] = library.forward_op(*given.arguments(positive=True))
            less = library.forward_op(*given.arguments(positive=False))
        assert [x.numel() for x in less[3:]] == [0, 0]
        for one, other in zip(less[:3], found[family][:3], strict=True):
            assert torch.equal(one, other)
    for family in ("triton", "vendor"):
        for one, other in zip(found[family], found["scatter"], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("then", ["triton", "vendor", "scatter"])
def test_a_backward_may_run_elsewhere_than_its_forward(then: str) -> None:
    given = Given("hub_row", dropout=0.3)
    arguments = given.arguments(positive=True)
    with planner.pin("scatter"):
        expected = given.results(given.call)
        out = library.forward_op(*arguments)[0]
    with planner.pin(then):
        found = torch.autograd.grad(out, given.wanted(), given.grad)
    for one, other in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("family", ["triton", "vendor", "scatter"])
def test_gradients_do_not_depend_on_what_was_recorded(
    family: str, positive: bool
) -> None:
    """A graph may be recorded with inputs that want other gradients than its users'."""
    given = Given("unsorted", terms=True)
    with planner.pin(family):
        expected = given.results(given.call)
        out = library.forward_op(*given.arguments(positive))[0]
        found = torch.autograd.grad(out, given.wanted(), given.grad)
    for one, other in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(one, other)


def test_other_sizes_need_no_other_graph() -> None:
    def loss(edge_index: Tensor, *given: Tensor) -> Tensor:
        return functional.additive_attention(edge_index, *given).square().sum()

    call = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for problem in ("unsorted", "isolated", "hub_row"):
            given = Given(problem)
            inputs = (given.case.edge_index, *list(given.leaves.values())[:3])
            with spied() as asked:
                found = torch.autograd.grad(call(*inputs), inputs[1:])
            assert asked.kept()
            expected = torch.autograd.grad(loss(*inputs), inputs[1:])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


class _Layer(torch.nn.Module):
    def __init__(self, given: Given) -> None:
        super().__init__()
        self._call = given.call
        self.weight = torch.nn.Parameter(torch.ones(CHANNELS))

    def forward(self, edge_index: Tensor, *leaves: Tensor | None) -> Tensor:
        return self._call(edge_index, leaves[0] * self.weight, *leaves[1:])


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_do_not_keep_and_can_be_trained(strict: bool) -> None:
    given = Given("unsorted")
    inputs = (given.case.edge_index, *_detached(tuple(given.leaves.values())))
    layer = _Layer(given)
    program = torch.export.export(layer, inputs, strict=strict)
    names = [str(n.target) for n in program.graph.nodes if "pyg_tiga" in str(n.target)]
    assert names == ["pyg_tiga.additive_attention.default"]
    module = program.module()
    with planner.pin("vendor"):
        with spied() as asked:
            (found,) = torch.autograd.grad(module(*inputs).sum(), module.weight)
        # Strict exports of older versions look like compilation.
        assert not asked.kept() or (strict and torch.__version__ < "2.13")
        (expected,) = torch.autograd.grad(layer(*inputs).sum(), layer.weight)
    torch.testing.assert_close(found, expected)


def test_make_fx_records_a_forward_and_a_backward() -> None:
    given = Given("unsorted")
    inputs = (given.case.edge_index, *list(given.leaves.values())[:3])

    def step(edge_index: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        out = given.call(edge_index, *leaves, None, None)
        return torch.autograd.grad(out.square().sum(), leaves)

    traced = make_fx(step)(*inputs)
    ops = [str(n.target) for n in traced.graph.nodes if "pyg_tiga" in str(n.target)]
    assert ops == [
        "pyg_tiga.additive_attention.default",
        "pyg_tiga.additive_attention_backward.default",
    ]
    with torch.no_grad():
        found = traced(*inputs)
    for one, other in zip(found, step(*inputs), strict=True):
        torch.testing.assert_close(one, other)
