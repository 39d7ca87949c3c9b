"""A formula's node: its gradients, its other road, and what it keeps."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyg_tiga.impls.replay import empty_like, free, linear, record

ROWS, IN, OUT = 5, 3, 4


class Affine:
    """y = x W^T + b as a formula, and what its other road was asked."""

    def __init__(self, compiled: Any, gives_alias: bool = True) -> None:
        self.compiled, self.gives_alias = compiled, gives_alias
        self.asked: list[tuple[list[bool], bool, bool]] = []
        self.fails: Exception | None = None
        forward = record(compiled.Steps(3), self.forward, 0, [True] * 3)
        # Gradients read each of the operands and the result.
        reads = [range(4)] * 3
        self.formula = compiled.Formula(
            forward, reads, self.otherwise, "AffineBackward"
        )

    def forward(self, stream: Any, x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        out = linear(x, w, b)
        return (out, out) if self.gives_alias else (out + out, out)

    def backward(
        self, stream: Any, grad: Any, x: Any, w: Any, b: Any, out: Any
    ) -> tuple[Any, ...]:
        room = empty_like(out)
        free(out)
        del room
        return grad.mm(w), grad.t().mm(x), None

    def otherwise(
        self,
        owner: Any,
        saved: list[Any],
        grad: Tensor,
        needs: list[bool],
        edited: bool,
        usual: bool,
    ) -> tuple[tuple[Any, ...], Any]:
        if self.fails is not None:
            raise self.fails
        self.asked.append((needs, edited, usual))
        x, w, _, _ = saved
        scale = 1 if self.gives_alias else 2
        grad = scale * grad
        found = (grad.mm(w), grad.t().mm(x), grad.sum(0))
        found = tuple(
            value if need else None for value, need in zip(found, needs, strict=True)
        )
        saved.clear()
        steps = None
        if usual and not needs[2] and self.gives_alias:
            steps = record(self.compiled.Steps(5), self.backward, 0, [True] * 5)
        return found, steps

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        return self.formula(0, self, *inputs)


@pytest.fixture(params=[True, False], ids=["alias", "apart"])
def affine(request: pytest.FixtureRequest, compiled: Any) -> Affine:
    return Affine(compiled, request.param)


@pytest.fixture
def operands() -> tuple[Tensor, ...]:
    shapes = ((ROWS, IN), (OUT, IN), (OUT,))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def plain(affine: Affine, *operands: Tensor) -> Tensor:
    out = torch.nn.functional.linear(*operands)
    return out if affine.gives_alias else out + out


def same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_both_roads(affine: Affine, operands: Any) -> None:
    grad = torch.randn(ROWS, OUT)
    for wanted in (operands, operands[:2], operands[1:2]):
        expected = torch.autograd.grad(plain(affine, *operands), wanted, grad)
        for _ in range(3):
            out = affine(*operands)
            assert "AffineBackward" in out.grad_fn.name()
            same([out.detach()], [plain(affine, *operands).detach()])
            same(torch.autograd.grad(out, wanted, grad), expected)
    # Steps are there from the second call on, where they can be recorded.
    asked = [needs for needs, _, usual in affine.asked if usual]
    repeated = 3 if not affine.gives_alias else 1
    assert asked == [
        *[[True, True, True]] * 3,
        *[[True, True, False]] * repeated,
        *[[False, True, False]] * repeated,
    ]


def test_parameters_accumulate(affine: Affine, operands: Any) -> None:
    plain(affine, *operands).sum().backward()
    expected = [value.grad.clone() for value in operands]
    for value in operands:
        value.grad = None
    for _ in range(2):
        affine(*operands).sum().backward()
    same([value.grad for value in operands], [2 * value for value in expected])


def test_a_frozen_input_has_no_gradient(affine: Affine, operands: Any) -> None:
    operands[0].requires_grad_(False)
    for _ in range(2):
        affine(*operands).sum().backward()
    assert operands[0].grad is None
    assert affine.asked[0][0] == [False, True, True]
    for value in operands:
        value.requires_grad_(False)
    assert not affine(*operands).requires_grad


def test_a_graph_is_kept_on_request(affine: Affine, operands: Any) -> None:
    wanted = operands[:2]
    out = affine(*operands).sum()
    expected = torch.autograd.grad(plain(affine, *operands).sum(), wanted)
    for _ in range(3):
        same(torch.autograd.grad(out, wanted, retain_graph=True), expected)
    same(torch.autograd.grad(out, wanted), expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, wanted)


def test_gradients_of_gradients(affine: Affine, operands: Any) -> None:
    found = []
    for form in (affine, lambda *args: plain(affine, *args)):
        (grad,) = torch.autograd.grad(
            form(*operands).square().sum(), operands[:1], create_graph=True
        )
        found.append(torch.autograd.grad(grad.square().sum(), operands[:2]))
    same(*found)
    assert affine.asked[0][2] is False


def test_an_edited_result_is_noticed(affine: Affine, operands: Any) -> None:
    out = affine(*operands)
    with torch.no_grad():
        out.mul_(3.0)
    torch.autograd.grad(out.sum(), operands[:2])
    assert affine.asked[0][1:] == (affine.gives_alias, False)


def test_an_edited_operand_is_an_error(affine: Affine, operands: Any) -> None:
    out = affine(*operands)
    with torch.no_grad():
        operands[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_hooks_on_what_is_kept(affine: Affine, operands: Any) -> None:
    packed: list[torch.Size] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value.shape)
        return value.clone()

    expected = torch.autograd.grad(plain(affine, *operands).sum(), operands[:2])
    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            out = affine(*operands)
        same(torch.autograd.grad(out.sum(), operands[:2]), expected)
    assert packed == [(ROWS, IN), (OUT, IN), (OUT,), (ROWS, OUT)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(affine: Affine, operands: Any, use_reentrant: bool) -> None:
    expected = torch.autograd.grad(plain(affine, *operands).sum(), operands)
    for _ in range(2):
        out = checkpoint(affine, *operands, use_reentrant=use_reentrant)
        out.sum().backward()
        same([value.grad for value in operands], expected)
        for value in operands:
            value.grad = None


class Lean:
    """y = x W^T + b, of which gradients of x read W, those of W the result."""

    def __init__(self, compiled: Any) -> None:
        self.kept: list[list[bool]] = []
        forward = record(compiled.Steps(3), self.forward, 0, [True] * 3)
        reads = ((1,), (3,), ())
        self.formula = compiled.Formula(forward, reads, self.otherwise, "LeanBackward")

    def forward(self, stream: Any, x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        out = linear(x, w, b)
        return out, out

    def otherwise(
        self,
        owner: Any,
        saved: list[Any],
        grad: Tensor,
        needs: list[bool],
        edited: bool,
        usual: bool,
    ) -> tuple[tuple[Any, ...], Any]:
        self.kept.append([value is not None for value in saved])
        x, w, _, _ = saved
        grad_x = grad.mm(w) if needs[0] else None
        # What stands for inputs has their gradients, and zeros.
        grad_w = None
        if needs[1] and torch.is_grad_enabled():
            assert x is None or not x.any()
            grad_w = grad.t().mm(x)
        return (grad_x, grad_w, grad.sum(0) if needs[2] else None), None


@pytest.fixture
def lean(compiled: Any) -> Lean:
    return Lean(compiled)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ((True, False, False), [False, True, False, False]),
        ((False, True, True), [False, False, False, True]),
        ((False, False, True), [False] * 4),
    ],
)
def test_what_no_wanted_gradient_reads_is_not_kept(
    lean: Lean, operands: Any, wanted: Any, kept: list[bool]
) -> None:
    for value, want in zip(operands, wanted, strict=True):
        value.requires_grad_(want)
    out = lean.formula(0, lean, *operands)
    with torch.no_grad():
        for value, is_kept in zip(operands, kept, strict=False):
            if not is_kept:
                value.zero_()
    out.sum().backward()
    assert lean.kept == [kept]


def test_an_input_that_is_not_kept_has_second_gradients(
    lean: Lean, operands: Any
) -> None:
    x, w, _ = operands
    for x_ in (x, x * 1.0):
        out = lean.formula(0, lean, x_, *operands[1:])
        grad = torch.randn_like(out)
        (grad_w,) = torch.autograd.grad(out, w, grad, create_graph=True)
        (found,) = torch.autograd.grad(grad_w.sum(), x)
        torch.testing.assert_close(found, grad.sum(1, True).expand_as(x))
    assert lean.kept == [[True] * 4] * 2


def test_hooks_on_the_node(affine: Affine, operands: Any) -> None:
    out, heard = affine(*operands), []
    out.grad_fn.register_hook(lambda grads, _: heard.append(len(grads)))
    out.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    (found,) = torch.autograd.grad(out.sum(), operands[1:2])
    (expected,) = torch.autograd.grad(plain(affine, *operands).sum(), operands[1:2])
    same([found], [2 * expected])
    assert heard == [3]


def test_an_error_of_the_other_road_stays_one(affine: Affine, operands: Any) -> None:
    affine.fails = KeyError("lost")
    with pytest.raises(KeyError, match="lost"):
        affine(*operands).sum().backward()
    affine.fails = None
    affine(*operands).sum().backward()


def test_a_gradient_of_other_strides(affine: Affine, operands: Any) -> None:
    expected = torch.autograd.grad(plain(affine, *operands).sum(), operands[:2])
    ones = (
        torch.ones(ROWS, OUT),
        torch.ones(1, 1).expand(ROWS, OUT),
        torch.ones(ROWS, 2 * OUT)[:, :OUT],
        torch.ones(OUT, ROWS).t(),
    )
    for _ in range(2):
        for grad in ones:
            out = affine(*operands)
            same(torch.autograd.grad(out, operands[:2], grad), expected)
    assert sum(usual for *_, usual in affine.asked) == (2 if affine.gives_alias else 4)


def test_what_no_kernel_can_read(affine: Affine, operands: Any) -> None:
    x, w, b = operands
    assert affine(x, w, None) is None
    assert affine(x.to("meta"), w, b) is None
    assert affine(x.to_sparse(), w, b) is None
    with fw.dual_level():
        assert affine(fw.make_dual(x, torch.ones_like(x)), w, b) is None
    with FlopCounterMode(display=False):
        assert affine(x, w, b) is None
    seen = []
    torch.func.grad(lambda x: seen.append(affine(x, w, b)) or x.sum())(x)
    torch.func.vmap(lambda x: seen.append(affine(x, w, b)) or x)(x[None])
    assert seen == [None, None]


def test_what_is_kept_is_freed(affine: Affine, operands: Any) -> None:
    # An alias of the result holds its memory, so that its end shows by the owner's.
    class Owner:
        pass

    owner = Owner()
    gone = ref(owner)
    out = affine.formula(0, owner, *operands)
    del owner
    assert gone() is not None
    out.sum().backward()
    del out
    assert gone() is None


def test_threads(affine: Affine, operands: Any) -> None:
    expected = torch.autograd.grad(plain(affine, *operands).sum(), operands[:2])
    found: list[Any] = []

    def often() -> None:
        for _ in range(50):
            out = affine(*operands)
            found.append(torch.autograd.grad(out.sum(), operands[:2]))

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    for one in found:
        same(one, expected)


@pytest.mark.filterwarnings("ignore:.*forward call.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomalies_are_traced(affine: Affine, operands: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        out = affine(*operands)
        with pytest.raises(RuntimeError, match=r"AffineBackward.*nan"):
            torch.autograd.grad(
                out, operands[:2], torch.full((ROWS, OUT), float("nan"))
            )
