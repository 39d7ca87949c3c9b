from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from pyg_tiga.ops import projections
from pyg_tiga.ops.projections import project

ROWS, WIDTH = 7, 5
BIASED = ((3, True), (4, True), (3, True))
MIXED = ((3, True), (4, False), (2, True), (5, False))


@pytest.fixture(autouse=True)
def on_all_devices(monkeypatch):
    """The step on the CPU too, where it gains nothing."""
    monkeypatch.setattr(projections, "_DEVICES", frozenset(("cpu", "cuda")))


@pytest.fixture(params=[False, True], ids=["reduced", "product"])
def way_of_sums(request, monkeypatch):
    """Both ways in which gradients of biases are summed, on every device."""
    monkeypatch.setattr(projections, "_sums_by_product", lambda grad: request.param)


def operands(widths, dtype=torch.float64, device="cpu", rows=ROWS, width=WIDTH):
    """Features and maps, all of which want gradients."""

    def drawn(*shape):
        value = torch.randn(shape, dtype=torch.float64).to(device, dtype)
        return value.requires_grad_()

    x = drawn(rows, width)
    return x, [(drawn(n, width), drawn(n) if biased else None) for n, biased in widths]


def one_by_one(x, maps):
    return tuple(F.linear(x, *one) for one in maps)


def leaves_of(x, maps):
    return [one for one in (x, *sum(maps, ())) if one is not None and one.requires_grad]


def is_one_step(found):
    return len({y.grad_fn for y in found if y.grad_fn is not None}) == 1


def gradients(outputs, leaves, **options):
    """Gradients of a loss that is not linear in the outputs; None for those unused."""
    loss = sum((y * y.sin()).sum() for y in outputs)
    return torch.autograd.grad(loss, leaves, allow_unused=True, **options)


def assert_same(found, expected, **options):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("widths", [BIASED, MIXED], ids=["biased", "mixed"])
def test_maps_one_by_one(widths, dtype, device, way_of_sums):
    x, maps = operands(widths, dtype, device)
    leaves = leaves_of(x, maps)
    found, expected = project(x, maps), one_by_one(x, maps)
    assert is_one_step(found)
    assert all(map(torch.equal, found, expected))
    assert_same(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.usefixtures("way_of_sums")
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    x, maps = operands(MIXED, rows=rows)
    leaves = leaves_of(x, maps)
    found, expected = (
        gradients(call(x, maps), leaves) for call in (project, one_by_one)
    )
    assert_same(found, expected)


@pytest.mark.usefixtures("way_of_sums")
def test_derivatives_of_every_order():
    x, maps = operands(MIXED)
    count = len(maps)

    def call(x, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        return project(x, list(zip(weights, biases, strict=True)))

    given = (x, *(w for w, _ in maps), *(b for _, b in maps))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_second_derivatives():
    x, maps = operands(MIXED)
    leaves = leaves_of(x, maps)
    found, expected = (
        torch.autograd.grad(
            sum(g.pow(3).sum() for g in gradients(y, leaves, create_graph=True)), leaves
        )
        for y in (project(x, maps), one_by_one(x, maps))
    )
    assert_same(found, expected)


@pytest.mark.usefixtures("way_of_sums")
@pytest.mark.parametrize("used", [(), (1,), (0, 3), (0, 1, 2)], ids=str)
def test_unused_results_have_no_gradients(used):
    x, maps = operands(MIXED)
    leaves = leaves_of(x, maps)
    found, expected = (
        gradients([y[i] for i in used] or [x], leaves)
        for y in (project(x, maps), one_by_one(x, maps))
    )
    assert_same(found, expected)


@pytest.mark.usefixtures("way_of_sums")
@pytest.mark.parametrize("frozen", ["x", "weights", "biases", "x and one", "maps"])
def test_frozen_operands(frozen):
    x, maps = operands(MIXED)
    chosen = {
        "x": [x],
        "weights": [w for w, _ in maps],
        "biases": [b for _, b in maps if b is not None],
        "x and one": [x, *maps[0]],
        "maps": [one for one in sum(maps, ()) if one is not None],
    }[frozen]
    for one in chosen:
        one.requires_grad_(False)
    leaves = leaves_of(x, maps)
    found, expected = project(x, maps), one_by_one(x, maps)
    assert is_one_step(found)
    assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
    assert_same(gradients(found, leaves), gradients(expected, leaves))


def test_nothing_is_kept_for_gradients_that_nobody_wants():
    x, maps = operands(BIASED)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda value: value):
        project(x.detach(), maps)
        assert [one.shape for one in kept] == [x.shape]
        kept.clear()
        project(x, [(w.detach(), b) for w, b in maps])
        assert [one.shape for one in kept] == [w.shape for w, _ in maps]


@pytest.mark.usefixtures("way_of_sums")
def test_one_map_for_all():
    x, ((weight, bias), *_) = operands(BIASED)
    maps = [(weight, bias), (weight, bias), (weight, None)]
    leaves = [x, weight, bias]
    found, expected = project(x, maps), one_by_one(x, maps)
    assert is_one_step(found)
    assert_same(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 2)], ids=str)
def test_many_gradients_at_once(used, way_of_sums):
    x, maps = operands(MIXED)
    leaves = leaves_of(x, maps)
    outputs = [[call(x, maps)[i] for i in used] for call in (project, one_by_one)]
    grads = [torch.randn(3, *y.shape).double() for y in outputs[0]]
    options = {"is_grads_batched": True, "allow_unused": True, "retain_graph": True}
    assert_same(*(torch.autograd.grad(y, leaves, grads, **options) for y in outputs))

    def backward(y, *grads):
        found = torch.autograd.grad(
            y, leaves, grads, allow_unused=True, retain_graph=True
        )
        return tuple(one for one in found if one is not None)

    assert_same(
        *(torch.func.vmap(lambda *g, y=y: backward(y, *g))(*grads) for y in outputs)
    )


def test_gradients_that_lie_anyhow():
    x, maps = operands(BIASED)
    leaves = leaves_of(x, maps)
    y = project(x, maps), one_by_one(x, maps)
    grads = [torch.ones((), dtype=x.dtype).expand(one.shape) for one in y[0][:2]]
    grads.append(torch.randn(y[0][2].shape[::-1], dtype=x.dtype).t())
    assert_same(*(torch.autograd.grad(one, leaves, grads) for one in y))


def test_tangents_of_gradients():
    x, maps = operands(MIXED)
    leaves = leaves_of(x, maps)
    outputs = project(x, maps), one_by_one(x, maps)
    grads, tangents = ([torch.randn_like(y) for y in outputs[0]] for _ in range(2))
    found = []
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(*pair) for pair in zip(grads, tangents, strict=True)
        ]
        for y in outputs:
            given = torch.autograd.grad(y, leaves, duals)
            found.append([forward_ad.unpack_dual(one).tangent for one in given])
    assert_same(*found)


def test_bias_gradients_are_no_views(way_of_sums):
    x, maps = operands(BIASED)
    sum(y.sum() for y in project(x, maps)).backward()
    assert not any(bias.grad._is_view() for _, bias in maps)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1), (1, 2), (0, 2), (2, 1, 0)])
def test_gradients_that_are_columns_of_one_matrix(order, device, way_of_sums):
    x, maps = operands(((4, True), (2, False), (6, True)), device=device)
    leaves, ends = leaves_of(x, maps), (0, 4, 6, 12)
    matrix = torch.randn(ROWS, 12, dtype=torch.float64, device=device)
    grads = [matrix[:, ends[i] : ends[i + 1]] for i in order]
    found, expected = (
        torch.autograd.grad([y[i] for i in order], leaves, grads, allow_unused=True)
        for y in (project(x, maps), one_by_one(x, maps))
    )
    assert_same(found, expected)
    sum(y.sum() for y in project(x, maps)).backward()
    assert not any(leaf.grad._is_view() for leaf in leaves)


def test_results_are_columns_of_one_matrix_where_they_begin_well():
    for widths, shared in (((4, 2), True), ((3, 2), False)):
        x, maps = operands([(n, True) for n in widths])
        one, other = project(x, maps)
        same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        assert same == shared
        one.mul_(2.0)  # Of its own, though it lies beside the other.
        torch.testing.assert_close(one, 2 * F.linear(x, *maps[0]))
        torch.testing.assert_close(other, F.linear(x, *maps[1]))


@pytest.mark.parametrize(
    "change",
    [
        "one map",
        "no gradient",
        "no gradients wanted",
        "batches",
        "a subclass",
        "another dtype",
        "a wide bias",
        "another device",
    ],
)
def test_plain_calls(change, monkeypatch):
    x, maps = operands(BIASED)
    if change == "one map":
        maps = maps[:1]
    elif change == "no gradient":
        x, maps = x.detach(), [(w.detach(), b.detach()) for w, b in maps]
    elif change == "batches":
        x = x.detach().expand(2, *x.shape).requires_grad_()
    elif change == "a subclass":

        class Named(torch.Tensor):
            pass

        x = x.detach().as_subclass(Named).requires_grad_()
    elif change == "another dtype":
        maps[0] = [one.detach().float() for one in maps[0]]
    elif change == "a wide bias":
        maps[0] = (maps[0][0], maps[0][1].detach()[:1])
    elif change == "another device":
        monkeypatch.setattr(projections, "_DEVICES", frozenset())
    if change == "another dtype":
        with pytest.raises(RuntimeError, match="dtype"):
            project(x, maps)
        return
    with torch.set_grad_enabled(change != "no gradients wanted"):
        found, expected = project(x, maps), one_by_one(x, maps)
    assert isinstance(found, tuple)
    assert all(map(torch.equal, found, expected))
    names = [[y.grad_fn and y.grad_fn.name() for y in ys] for ys in (found, expected)]
    assert names[0] == names[1]


def test_autocast_of_the_forward():
    x, maps = operands(BIASED, torch.float32)
    leaves = leaves_of(x, maps)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = project(x, maps), one_by_one(x, maps)
    assert found[0].dtype == torch.bfloat16
    assert_same(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.usefixtures("way_of_sums")
def test_autocast_of_the_backward():
    x, maps = operands(BIASED, torch.float32)
    leaves = leaves_of(x, maps)
    outputs = project(x, maps), one_by_one(x, maps)
    assert is_one_step(outputs[0])
    grads = [torch.randn_like(y) for y in outputs[0]]
    with torch.autocast("cpu", torch.bfloat16):
        found = [torch.autograd.grad(y, leaves, grads) for y in outputs]
    assert_same(*found, rtol=2e-2, atol=1e-1)


def test_transforms():
    x, maps = operands(BIASED)
    (weight, bias), other, _ = maps

    def loss(call, weight):
        return sum(y.sin().sum() for y in call(x, [(weight, bias), other]))

    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        found, expected = (
            transform(lambda weight, call=call: loss(call, weight))(weight)
            for call in (project, one_by_one)
        )
        torch.testing.assert_close(found, expected)


def test_tangents():
    x, maps = operands(BIASED)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found = [forward_ad.unpack_dual(y).tangent for y in project(dual, maps)]
    for one, (weight, _) in zip(found, maps, strict=True):
        torch.testing.assert_close(one, weight.sum(1).expand_as(one))


def test_compiled():
    x, maps = operands(BIASED)
    leaves = leaves_of(x, maps)
    compiled = torch.compile(project, backend="aot_eager", fullgraph=True)
    found, expected = compiled(x, maps), one_by_one(x, maps)
    assert_same(gradients(found, leaves), gradients(expected, leaves))


def test_checkpoints():
    from torch.utils.checkpoint import checkpoint

    x, maps = operands(MIXED)
    leaves = leaves_of(x, maps)
    found = checkpoint(project, x, maps, use_reentrant=False)
    assert_same(gradients(found, leaves), gradients(one_by_one(x, maps), leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    x, maps = operands(BIASED, dtype, "cuda", rows=20_000, width=64)
    leaves = leaves_of(x, maps)
    wide_x, *wide = (one.detach().double().requires_grad_() for one in leaves)
    wide_maps = list(zip(wide[::2], wide[1::2], strict=True))
    grads = [torch.randn(20_000, n, device="cuda", dtype=dtype) for n, _ in BIASED]
    found = torch.autograd.grad(project(x, maps), leaves, grads)
    plain = torch.autograd.grad(one_by_one(x, maps), leaves, grads)
    exact = torch.autograd.grad(
        one_by_one(wide_x, wide_maps),
        leaves_of(wide_x, wide_maps),
        [one.double() for one in grads],
    )
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        assert ours.dtype == dtype
        allowed = (theirs.double() - true).abs().max()
        floor = torch.finfo(dtype).eps * true.abs().max()
        assert (ours.double() - true).abs().max() <= 2 * allowed + floor


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_sums_of_biases_are_never_rounded(precision, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    x, maps = operands(BIASED, torch.float32, "cuda", rows=20_000, width=64)
    biases = [bias for _, bias in maps]
    grads = [torch.randn(20_000, n, device="cuda") for n, _ in BIASED]
    found = torch.autograd.grad(project(x, maps), biases, grads)
    for one, grad in zip(found, grads, strict=True):
        # TF32 keeps 10 bits of each term: of a sum of these it is off by 0.03.
        torch.testing.assert_close(
            one.double(), grad.double().sum(0), rtol=0, atol=2e-3
        )


@pytest.mark.parametrize(
    ("dtype", "setting", "product"),
    [
        (torch.float64, {}, True),
        (torch.float32, {"fp32_precision": "none"}, True),
        (torch.float32, {"fp32_precision": "ieee"}, True),
        (torch.float32, {"fp32_precision": "tf32"}, False),
        (torch.bfloat16, {"fp32_precision": "tf32"}, True),
        (torch.float16, {"allow_fp16_accumulation": False}, True),
        (torch.float16, {"allow_fp16_accumulation": True}, False),
    ],
)
def test_which_sums_are_products(dtype, setting, product, monkeypatch):
    class Settings:
        fp32_precision = "none"
        allow_fp16_accumulation = False

    class OnCuda:
        is_cuda = True

    for name, value in setting.items():
        monkeypatch.setattr(Settings, name, value)
    monkeypatch.setattr(torch.backends.cuda, "matmul", Settings)
    monkeypatch.setattr(OnCuda, "dtype", dtype, raising=False)
    assert projections._sums_by_product(OnCuda()) is product
    assert not projections._sums_by_product(torch.ones(2, 2))
