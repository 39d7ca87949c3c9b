"""What every attention layer owes as a drop-in, as tests: modes of PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from pyg_tiga import testing
from tests.nn.layer_checks import (
    BIPARTITE,
    LOOPED,
    SQUARE,
    assert_accurate,
    assert_parents_path,
    assert_same,
    features,
    is_fused,
    pair_of_layers,
    seeded,
)
from tests.nn.layer_duties_checks import WEIGHTS, Base

HUB = testing.row("hub_row")


class Recorder:
    """A backend that keeps what it was given."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph.code)
        return aot_eager(graph, inputs)


class ModeDuties(Base):
    @pytest.mark.parametrize("row", [LOOPED, BIPARTITE, HUB], ids=str)
    @WEIGHTS
    def test_accuracy_in_single_precision(self, row, weights, device):
        case, x, _ = features(row, torch.float32, device)
        options = {"heads": 2, "dtype": torch.float32, "device": device, **self.rich}
        ours, theirs = pair_of_layers(self.layer, (8, 8), 5, **options)
        assert_accurate(ours, theirs, x, case.edge_index, weights)
        assert is_fused(ours)

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_compiles_to_one_graph(self, dynamic, device):
        recorder = Recorder()
        case, x, _ = features(LOOPED, device=device)
        options = {"heads": 2, "device": device, **self.rich}
        ours, theirs = pair_of_layers(self.layer, 8, 6, **options)
        ours.compile(fullgraph=True, backend=recorder, dynamic=dynamic)
        assert_same(ours, theirs, x, case.edge_index)
        assert "torch.ops.pyg_tiga" in recorder.graphs[-1]

    def test_compiles_with_dropout_and_on_a_pair(self):
        recorder = Recorder()
        case, x, _ = features(BIPARTITE, torch.float32)
        layer = self.layer((8, 8), 6, heads=2, dropout=0.5)
        layer.compile(fullgraph=True, backend=recorder)
        first, second = (layer(x, case.edge_index) for _ in range(2))
        assert not torch.equal(first, second)
        first, second = (seeded(layer, x, case.edge_index) for _ in range(2))
        assert torch.equal(first, second)
        assert len(recorder.graphs) == 1

    def test_compiled_layer_takes_other_sizes_without_more_graphs(self):
        ours, theirs = pair_of_layers(self.layer, 8, 3, heads=2)
        ours.compile(fullgraph=True, backend=Recorder(), dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for name in ("unsorted", "isolated", "self_loops"):
                case, x, _ = features(testing.row(name))
                assert_same(ours, theirs, x, case.edge_index)

    def test_compiles_the_parents_path(self):
        case, x, _ = features(LOOPED)
        ours, theirs = pair_of_layers(self.layer, 8, 3, heads=2, aggr="mean")
        ours.compile(backend=Recorder())
        assert_same(ours, theirs, x, case.edge_index)

    @WEIGHTS
    def test_autocast_gives_the_dtypes_of_the_parent(self, weights, device):
        case, x, _ = features(SQUARE, torch.float32, device)
        options = {"heads": 2, "dtype": torch.float32, "device": device, **self.rich}
        ours, theirs = pair_of_layers(self.layer, 8, 6, **options)
        given = (x, case.edge_index, None, *([True] if weights else []))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out, plain = ours(*given), theirs(*given)
        truth = copy.deepcopy(theirs).double()(x.double(), *given[1:])
        if weights:
            pairs = [
                (out[0], plain[0], truth[0]),
                (out[1][1], plain[1][1], truth[1][1]),
            ]
        else:
            pairs = [(out, plain, truth)]
        # On CUDA, sums and exponentials are float32 under autocast.
        is_cuda = device.type == "cuda"
        expected = torch.float32 if is_cuda else self.autocast_dtype
        assert pairs[0][0].dtype == expected
        assert is_fused(ours)
        for found, expected, true in pairs:
            assert found.dtype == expected.dtype
            error, allowed = ((y - true).abs().max() for y in (found, expected))
            assert error <= 2 * allowed + 1e-3
        pairs[0][0].sum().backward()
        assert all(
            p.grad is None or p.grad.dtype == torch.float32 for p in ours.parameters()
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision(self, dtype, device):
        case, x, _ = features(SQUARE, dtype, device)
        options = {"heads": 2, "dtype": dtype, "device": device}
        ours, theirs = pair_of_layers(self.layer, 8, 6, **options)
        out, plain = ours(x, case.edge_index), theirs(x, case.edge_index)
        truth = theirs.double()(x.double(), case.edge_index)
        testing.assert_accurate(out, plain, truth)
        assert is_fused(ours)

    def test_double_backward(self, device):
        case, x, _ = features(LOOPED, device=device)
        found = []
        options = {"heads": 2, "device": device, **self.rich}
        for layer in pair_of_layers(self.layer, 8, 3, **options):
            leaf = x.detach().requires_grad_()
            out = layer(leaf, case.edge_index).tanh().sum()
            (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
            grad.square().sum().backward()
            found.append([leaf.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found)

    def test_function_transforms(self):
        case, x, _ = features(LOOPED)
        ours, theirs = pair_of_layers(self.layer, 8, 3)
        for layer in (ours, theirs):
            layer.add_self_loops = False

        def loss_of(conv):
            return lambda x: conv(x, case.edge_index).square().sum()

        grads = [torch.func.grad(loss_of(layer))(x) for layer in (ours, theirs)]
        torch.testing.assert_close(*grads)
        assert_parents_path(ours, "torch.func")
        tangent = (torch.ones_like(x),)
        torch.testing.assert_close(
            *(torch.func.jvp(loss_of(conv), (x,), tangent) for conv in (ours, theirs))
        )

    @pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
    def test_tracing_sees_pytorch_operators_only(self):
        case, x, _ = features(LOOPED, torch.float32)
        layer = self.layer(8, 3).eval()
        given = (x, case.edge_index)
        traced = torch.jit.trace(layer, given, check_trace=False)
        assert "pyg_tiga::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(*given), layer(*given))

    def test_recorded_and_run_without_data(self):
        case, x, _ = features(LOOPED, torch.float32)
        edges, others = case.edge_index, case.edge_index.flip(0)
        layer = self.layer(8, 3, heads=2, **self.rich).eval()
        shape = layer(x, edges).shape
        with torch.no_grad():
            traced = make_fx(layer)(x, edges)
            torch.testing.assert_close(traced(x, others), layer(x, others))
        program = torch.export.export(layer, (x, edges))
        torch.testing.assert_close(program.module()(x, edges), layer(x, edges))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = layer(mode.from_tensor(x), mode.from_tensor(edges))
        assert fake.shape == shape
        meta = self.layer(8, 3, heads=2, **self.rich).to("meta")
        assert meta(x.to("meta"), edges.to("meta")).shape == shape

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints_see_the_same_mask(self, reentrant):
        case, x, _ = features(LOOPED, torch.float32)
        layer = self.layer(8, 6, heads=2, dropout=0.5)
        grads = []
        for through in (False, True):
            leaf = x.detach().requires_grad_()
            torch.manual_seed(3)
            args = (leaf, case.edge_index)
            if through:
                out = checkpoint(layer, *args, use_reentrant=reentrant)
            else:
                out = layer(*args)
            out.square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)

    def test_dropout_draws_in_training_only(self):
        case, x, _ = features(LOOPED, torch.float32)
        state = torch.get_rng_state()
        for options in ({"dropout": 0.5}, {}):
            layer = self.layer(8, 6, **options).train(not options)
            torch.set_rng_state(state)
            layer(x, case.edge_index)
            assert torch.equal(torch.get_rng_state(), state)
        layer = self.layer(8, 6, heads=2, dropout=0.5)
        first = seeded(layer, x, case.edge_index)
        assert torch.equal(seeded(layer, x, case.edge_index), first)
        assert not torch.equal(seeded(layer, x, case.edge_index, seed=4), first)

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    def test_dropout_of_nothing_and_everything(self, rate):
        case, x, _ = features(LOOPED)
        layers = pair_of_layers(self.layer, 8, 6, heads=2, dropout=rate, **self.rich)
        assert_same(*layers, x, case.edge_index, weights=True)

    @pytest.mark.parametrize("p", [-0.1, 1.5])
    @pytest.mark.parametrize("training", [False, True])
    def test_impossible_probability(self, p, training):
        case, x, _ = features(LOOPED)
        for layer in pair_of_layers(self.layer, 8, 6, dropout=p):
            with pytest.raises(ValueError):
                layer.train(training)(x, case.edge_index)
