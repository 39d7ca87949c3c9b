"""GAT's layer as one step: against the steps one by one, and what it keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn
from torch import Tensor

from pyg_tiga import testing
from pyg_tiga.nn import GATConv
from pyg_tiga.ops import gat_layer

PARAMETERS = ("att_src", "att_dst", "bias", "lin.weight")


pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the step ran."""
    made = []
    step = gat_layer.gat_layer

    def counted(*args: object) -> Tensor | None:
        out = step(*args)
        made.append(out is not None)
        return out

    from pyg_tiga.functional import attention

    monkeypatch.setattr(attention, "run_gat_layer", counted)
    return made


def _layers(
    problem: str = "hub_row",
    heads: int = 2,
    channels: int = 4,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> tuple[GATConv, torch.nn.Module, Tensor, Tensor]:
    """Ours, PyG's, the edges, and features; all parameters are drawn."""
    case = testing.make_case(testing.row(problem), torch.float32, device)
    width = case.x.size(1)
    ours = GATConv(width, channels, heads=heads, **options).to(device)
    theirs = torch_geometric.nn.GATConv(width, channels, heads=heads, **options)
    theirs = theirs.to(device)
    if ours.bias is not None:
        torch.nn.init.normal_(ours.bias)
    ours = ours.to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, case.edge_index, case.x.to(dtype)


def _gradients(
    layer: torch.nn.Module, x: Tensor, edges: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output and all gradients, in a copy of the layer."""
    layer = copy.deepcopy(layer).to(dtype)
    leaf = x.detach().to(dtype).requires_grad_()
    out = layer(leaf, edges)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator).to(x.device, x.dtype).to(dtype)
    leaves = {"x": leaf, **dict(layer.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"output": out.detach(), **dict(zip(leaves, found, strict=True))}


def _assert_like(
    ours: GATConv, theirs: torch.nn.Module, x: Tensor, edges: Tensor, slack: float
) -> None:
    found = _gradients(ours, x, edges, x.dtype)
    truth = _gradients(theirs, x, edges, torch.float64)
    for name, value in found.items():
        error = float((value.double() - truth[name]).abs().max())
        # Gradients of scores cancel: their errors are those of their terms.
        assert error <= slack * max(float(truth[name].abs().max()), 1.0), name
        assert value.dtype == x.dtype, name


@pytest.mark.parametrize("channels", [4, 16, 33])
@pytest.mark.parametrize("problem", ["hub_row", "hub_column", "self_loops", "isolated"])
def test_bias_and_projection_are_those_of_the_parent(
    problem: str, channels: int, device: torch.device, calls: list[bool]
) -> None:
    ours, theirs, edges, x = _layers(problem, 3, channels, device)
    _assert_like(ours, theirs, x, edges, 1e-5)
    assert calls == [True]


@pytest.mark.parametrize("options", [{"bias": False}, {"add_self_loops": False}])
def test_options(
    options: dict[str, bool], device: torch.device, calls: list[bool]
) -> None:
    ours, theirs, edges, x = _layers(channels=16, device=device, **options)
    _assert_like(ours, theirs, x, edges, 1e-5)
    assert calls == [True]


def test_one_head_needs_no_mean(device: torch.device, calls: list[bool]) -> None:
    ours, theirs, edges, x = _layers(heads=1, channels=7, device=device, concat=False)
    _assert_like(ours, theirs, x, edges, 1e-5)
    assert calls == [True]


@pytest.mark.parametrize("channels", [4, 16])
def test_bfloat16(channels: int, device: torch.device, calls: list[bool]) -> None:
    ours, theirs, edges, x = _layers(
        channels=channels, device=device, dtype=torch.bfloat16
    )
    found, plain = (
        _gradients(layer, x, edges, torch.bfloat16) for layer in (ours, theirs)
    )
    truth = _gradients(theirs, x, edges, torch.float64)
    largest = max(float(value.abs().max()) for value in truth.values())
    for name, value in found.items():
        error, allowed = (
            float((v.double() - truth[name]).abs().max()) for v in (value, plain[name])
        )
        # Gradients of scores cancel: their errors are those of their terms.
        assert error <= 2 * allowed + 2**-9 * largest, name
    assert calls == [True]


@pytest.mark.parametrize("channels", [4, 16])
@pytest.mark.parametrize("frozen", [*PARAMETERS, "x", "all but the bias"])
def test_frozen_parameters_have_no_gradient_and_change_no_other(
    frozen: str, channels: int
) -> None:
    ours, _, edges, x = _layers("unsorted", channels=channels)
    everything = _gradients(ours, x, edges, torch.float32)
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(
            name == "bias" if frozen == "all but the bias" else name != frozen
        )
    x.requires_grad_(frozen not in ("x", "all but the bias"))
    leaves = {"x": x, **dict(ours.named_parameters())}
    out = ours(x, edges)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator))
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, everything[name])
        else:
            assert leaf.grad is None


def test_unaligned_features_and_gradients(device: torch.device) -> None:
    ours, theirs, edges, x = _layers(device=device)
    room = x.new_empty(x.numel() + 1)
    shifted = room[1:].view_as(x).copy_(x).requires_grad_()
    wanted = _gradients(theirs, x, edges, torch.float64)
    out = ours(shifted, edges)
    torch.testing.assert_close(out.double(), wanted["output"], rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(out.shape, generator=generator).to(device)
    # A slice of wider gradients, as a concatenation hands them back.
    wide = torch.cat((drawn[:, :1], drawn, drawn[:, :1]), dim=1)[:, 1:-1]
    (found,) = torch.autograd.grad(out, shifted, wide)
    torch.testing.assert_close(found.double(), wanted["x"], rtol=1e-5, atol=1e-5)


def test_widths_and_dtypes_alternate_on_one_graph(device: torch.device) -> None:
    kinds = [
        (2, 4, torch.float32),
        (1, 16, torch.float32),
        (2, 4, torch.bfloat16),
    ]
    layers = [_layers("unsorted", h, c, device, dtype) for h, c, dtype in kinds]
    edges = layers[0][2]
    for _ in range(2):
        for ours, theirs, _, x in layers:
            slack = 0.03 if x.dtype == torch.bfloat16 else 1e-5
            _assert_like(ours, theirs, x, edges, slack)


def test_a_kept_graph_runs_twice(device: torch.device) -> None:
    ours, _, edges, x = _layers("unsorted", 2, 16, device)
    x.requires_grad_()
    out = ours(x, edges)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(*first, *second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("channels", [4, 16])
def test_the_output_may_be_edited_in_place(channels: int, device: torch.device) -> None:
    ours, _, edges, x = _layers("unsorted", 2, channels, device)
    x.requires_grad_()
    wanted = torch.autograd.grad(ours(x, edges).relu().square().sum(), x)
    out = ours(x, edges)
    out.relu_()
    assert torch.equal(*torch.autograd.grad(out.square().sum(), x), *wanted)
    out = ours(x, edges)
    out[:3].zero_()
    wanted = torch.autograd.grad(ours(x, edges)[3:].square().sum(), x)
    found = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(*found, *wanted)


def test_what_is_returned_is_what_is_kept(device: torch.device) -> None:
    ours, _, edges, x = _layers("unsorted", 2, 16, device)
    kept = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = ours(x.requires_grad_(), edges)
    storages = [value.untyped_storage().data_ptr() for value in kept]
    assert storages.count(out.untyped_storage().data_ptr()) == 1
    witness = out.grad_fn.watched._witness
    assert witness.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("place", ["projection", "features"])
def test_what_no_gradient_reads_may_be_edited(
    place: str, device: torch.device, calls: list[bool]
) -> None:
    ours, _, edges, x = _layers("unsorted", 2, 16, device)
    hidden = x.clone()
    if place == "features":
        ours.lin.weight.requires_grad_(False)
        hidden.requires_grad_()
    wanted = [p for p in ours.parameters() if p.requires_grad]
    expected = torch.autograd.grad(ours(hidden, edges).sum(), wanted)
    out = ours(hidden, edges)
    with torch.no_grad():
        (ours.lin.weight if place == "projection" else hidden).zero_()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), wanted), expected)
    assert calls == [True, True]


@pytest.mark.parametrize("frozen", ["", "x", "lin.weight", "att_src", "x lin.weight"])
def test_second_derivatives(frozen: str, device: torch.device) -> None:
    ours, theirs, edges, x = _layers(channels=16, device=device)
    found = []
    for layer, dtype in ((ours, torch.float32), (theirs.double(), torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_("x" not in frozen.split())
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen.split())
        leaves = [leaf, *layer.parameters()]
        leaves = [value for value in leaves if value.requires_grad]
        out = layer(leaf, edges).square().sum()
        grads = torch.autograd.grad(out, leaves, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(total, leaves))
    for got, want in zip(*found, strict=True):
        error = float((got.double() - want).abs().max() / want.abs().max())
        assert error < 1e-4


def test_dropout_drops_the_same_forward_and_backward(device: torch.device) -> None:
    ours, _, edges, x = _layers("unsorted", 2, 16, device, dropout=0.5)
    x.requires_grad_()
    grads = []
    for _ in range(2):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(ours(x, edges).square().sum(), x)[0])
        # From now on the steps run one by one.
        ours.lin.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", ["concat", "hook", "bias", "autocast", "residual"])
def test_what_needs_the_steps_one_by_one(option: str, calls: list[bool]) -> None:
    ours, _, edges, x = _layers(residual=option == "residual")
    if option == "concat":
        ours.concat, ours.bias = False, None
    elif option == "hook":
        ours.lin.register_forward_hook(lambda *_: None)
    elif option == "bias":
        ours.bias = torch.nn.Parameter(ours.bias.detach().double())
    with torch.autocast("cpu", enabled=option == "autocast"):
        ours(x, edges)
    assert not any(calls)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_current() -> None:
    ours, theirs, edges, x = _layers(device="cuda:1")
    with torch.cuda.device(0):
        _assert_like(ours, theirs, x, edges, 1e-5)
