"""Products of edge features and vectors of their destinations."""

from __future__ import annotations

import pytest
import torch

from pyg_tiga.impls import scatter_edge_features
from pyg_tiga.impls.triton_edge_features import multiply
from pyg_tiga.ops import edge_features
from pyg_tiga.ops.edge_features import product
from pyg_tiga.planner import pin
from pyg_tiga.relation.graph import Graph

NAMES = ("feature_dots", "feature_sums", "feature_spread")
SHAPES = [(1, 1), (4, 16), (3, 5), (1, 200), (9, 33)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_graph(device="cpu", *, is_sorted=False, hub=300):
    """A hub that is cut into pieces, rows without edges, and short ones."""
    generator = torch.Generator().manual_seed(0)
    short = torch.randint(8, (60,), generator=generator)
    target = torch.cat([torch.full((hub,), 3), short])
    target = target[torch.randperm(hub + 60, generator=generator)]
    target = target.sort().values if is_sorted else target
    source = torch.randint(7, (hub + 60,), generator=generator)
    edge_index = torch.stack([source, target]).to(device)
    return Graph.from_edge_index(edge_index, num_src=7, num_dst=11)


def operands(name, graph, heads, width, dtype=torch.float64, weights=None):
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(graph.num_dst, heads, width, generator=generator)
    features = torch.randn(graph.num_edges, width, generator=generator)
    weight = torch.rand(graph.num_edges, heads, generator=generator)
    given = {
        "feature_dots": (vectors, features),
        "feature_sums": (weight, features),
        "feature_spread": (weight, vectors),
    }[name]
    found = [x.to(graph.device, dtype) for x in given]
    if name != "feature_dots" and weights is not None:
        found[0] = found[0].to(weights)
    return [x.requires_grad_() for x in found]


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_every_order(name):
    graph = make_graph()
    given = operands(name, graph, 2, 3)

    def call(*given):
        return product(name, graph, *given, torch.float64)

    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(device, name, heads, width, is_sorted):
    graph = make_graph(device, is_sorted=is_sorted)
    given = operands(name, graph, heads, width, torch.float32)
    with pin("triton"):
        found = product(name, graph, *given, torch.float32)
        grads = torch.autograd.grad(found.sin().sum(), given)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = scatter_edge_features.product(name, graph, *exact)
    wanted = torch.autograd.grad(expected.sin().sum(), exact)
    for x, y in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 32, 128, 130])
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(device, name, width, dtype):
    # Pieces of long rows are for sums alone.
    graph = make_graph(device, hub=300 if name == "feature_sums" else 20)
    for heads in (1, 2, 4, 5, 8):
        given = [
            x.detach()
            for x in operands(name, graph, heads, width, dtype, torch.float32)
        ]
        with pin("triton"):
            found = product(name, graph, *given, torch.float32)
        exact = [x.double() for x in given]
        expected = scatter_edge_features.product(name, graph, *exact)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (4, 16), (5, 130), (8, 3)])
def test_a_pair_is_a_sum_of_two(device, heads, width, dtype):
    graph = make_graph(device, hub=20)
    name = "feature_spread"
    first = operands(name, graph, heads, width, dtype, torch.float32)
    second = [x.detach().flip(0) for x in first]
    first = [x.detach() for x in first]
    exact = [[x.double() for x in given] for given in (first, second)]
    expected = sum(scatter_edge_features.product(name, graph, *x) for x in exact)
    found = multiply(graph, name, torch.float32, *first, *second)
    rounded = multiply(graph, name, dtype, *first, *second)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, found.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (4, 16), (5, 130), (8, 128)])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_the_order_of_the_rows(device, name, heads, width, dtype):
    graph = make_graph(device, hub=300 if name == "feature_sums" else 20)
    perm = graph.rows().perm.long()
    given = [
        x.detach() for x in operands(name, graph, heads, width, dtype, torch.float32)
    ]
    placed = list(given)
    if name != "feature_dots":
        placed[0] = given[0][perm]
    found = multiply(graph, name, torch.float32, *placed, by_row=True)
    expected = multiply(graph, name, torch.float32, *given)
    expected = expected[perm] if name == "feature_dots" else expected
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_a_pair_of_nothing(device):
    empty = torch.empty(2, 0, dtype=torch.long, device=device)
    graph, name = Graph.from_edge_index(empty, 3), "feature_spread"
    pair = torch.ones(0, 2, device=device), torch.ones(3, 2, 4, device=device)
    assert multiply(graph, name, torch.float32, *pair, *pair).shape == (0, 4)
    graph = make_graph(device)
    size = graph.num_edges
    pair = torch.ones(size, 0, device=device), torch.ones(11, 0, 4, device=device)
    assert not multiply(graph, name, torch.float32, *pair, *pair).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", NAMES)
def test_edges_as_the_caller_has_them(device, name, dtype):
    """Of any dtype and strides, grouped already or not, and in both directions."""
    edges = make_graph(device).edge_index()
    turned = edges.t().contiguous().to(dtype).t()
    graphs = [Graph.from_edge_index(turned, 11)]
    graphs += [Graph.from_csr(graphs[0].rows().ptr, graphs[0].rows().index)]
    for graph in [*graphs, *[graph.reverse() for graph in graphs]]:
        given = [x.detach() for x in operands(name, graph, 2, 3, torch.float32)]
        with pin("triton"):
            found = product(name, graph, *given, torch.float32)
        exact = [x.double() for x in given]
        expected = scatter_edge_features.product(name, graph, *exact)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_adds_in_float32(device, name, dtype):
    graph = make_graph(device)
    given = operands(name, graph, 4, 16, dtype, torch.float32)
    out = torch.float32 if name == "feature_dots" else dtype
    with pin("triton"):
        found = product(name, graph, *given, out)
    expected = scatter_edge_features.product(
        name, graph, *[x.detach().double() for x in given]
    )
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert found.dtype == out
    assert error < (1e-6 if out == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMES)
def test_results_repeat(device, name):
    graph = make_graph(device)
    given = operands(name, graph, 4, 16, torch.float32)
    with pin("triton"):
        first, *rest = (product(name, graph, *given, torch.float32) for _ in range(3))
    assert all(torch.equal(first, again) for again in rest)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_transformed(name):
    graph = make_graph()
    given = operands(name, graph, 2, 3)

    def call(*given):
        return product(name, graph, *given, torch.float64)

    expected = call(*given)
    batched = torch.func.vmap(call)(*[torch.stack([x, x]) for x in given])
    torch.testing.assert_close(batched[1], expected)
    index = graph.edge_index()

    def through_op(*given):
        from pyg_tiga.functional.relations import relation_for_ops

        related = relation_for_ops(index, 7, (7, 11), "source_to_target")
        return product(name, related, *given, torch.float64)

    compiled = torch.compile(through_op, backend="aot_eager", fullgraph=True)
    found = compiled(*given)
    torch.testing.assert_close(found, expected)
    for x, y in zip(
        torch.autograd.grad(found.sin().sum(), given),
        torch.autograd.grad(expected.sin().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, dtype):
    graph = make_graph()
    given = operands(name, graph, 2, 3, dtype)
    out = torch.float32 if dtype == torch.bfloat16 else dtype
    torch.library.opcheck(edge_features._op, (*graph.handle(), *given, name, out))


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do(name, heads):
    edge_index = torch.empty(2, 0, dtype=torch.long)
    graph = Graph.from_edge_index(edge_index, num_src=3, num_dst=3)
    given = operands(name, graph, heads, 4)
    found = product(name, graph, *given, torch.float64)
    assert not found.any()
    torch.autograd.grad(found.sum(), given)
