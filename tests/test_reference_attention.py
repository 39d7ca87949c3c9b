from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import softmax

from pyg_tiga import reference_attention as reference
from pyg_tiga import testing

ROWS = pytest.mark.parametrize("row", testing.ROWS, ids=str)
SMALL = pytest.mark.parametrize(
    "row",
    [
        testing.Row("self_loops", 4, 4, testing._with_loops(4, 5)),
        testing.Row("rectangular", 4, 3, testing.random_edges(4, 3, 7)),
        testing.Row("no_edges", 3, 2, testing.row("no_edges").edges),
    ],
    ids=str,
)
LOOPS = pytest.mark.parametrize("loops", [False, True], ids=["stored", "implicit"])
TERMS = pytest.mark.parametrize("terms", [False, True], ids=["bare", "terms"])
HEADS, CHANNELS = 2, 3


class Inputs:
    """Random operands of a row, with a mask of edges and one of dropout."""

    def __init__(
        self, row, *, loops=True, terms=True, dropout=0.0, dtype=torch.float64
    ):
        case = testing.make_case(row)
        generator = torch.Generator().manual_seed(1)
        self.graph, self.edge_index = case.graph(), case.edge_index.long()
        self.num_edges = self.edge_index.size(1)
        self.num_loops = min(row.num_src, row.num_dst) if loops else 0
        self.dropout = dropout
        count = self.num_edges + self.num_loops

        def normal(*size):
            drawn = torch.randn(*size, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).requires_grad_()

        self.value = normal(row.num_src, HEADS, CHANNELS)
        self.alpha_src = normal(row.num_src, HEADS)
        self.alpha_dst = normal(row.num_dst, HEADS)
        self.edge_term = normal(self.num_edges, HEADS) if terms else None
        self.loop_term = normal(self.num_loops, HEADS) if terms else None
        self.grad = normal(row.num_dst, HEADS, CHANNELS).detach()
        drawn = torch.rand(count, HEADS, generator=generator)
        self.keep = drawn >= dropout if dropout else None

    @property
    def leaves(self):
        every = (self.value, *self.scores, self.edge_term, self.loop_term)
        return tuple(part for part in every if part is not None)

    @property
    def scores(self):
        return self.alpha_src, self.alpha_dst

    @property
    def options(self):
        return {
            "edge_term": self.edge_term,
            "loop_term": self.loop_term,
            "num_loops": self.num_loops,
            "keep": self.keep,
            "dropout": self.dropout,
        }

    def attend(self, **options):
        options = self.options | options
        return reference.additive_attention(
            self.graph, self.value, *self.scores, **options
        )

    def weights(self, **options):
        options = self.options | options
        return reference.attention_weights(self.graph, *self.scores, **options)


def live_edges(given, edge_mask=None):
    """Ends and places of the edges that take part, made as PyG makes them."""
    src, dst = given.edge_index
    live = torch.ones_like(src, dtype=torch.bool)
    if given.num_loops:
        live = src != dst
    if edge_mask is not None:
        live = live & edge_mask
    loop = torch.arange(given.num_loops)
    place = torch.cat([live.nonzero().view(-1), given.num_edges + loop])
    return torch.cat([src[live], loop]), torch.cat([dst[live], loop]), place


def pyg_formula(given, slope=0.2, edge_mask=None):
    """Scores before the LeakyReLU, weights with dropout, output: by PyG's functions."""
    src, dst, place = live_edges(given, edge_mask)
    before = given.alpha_src[src] + given.alpha_dst[dst]
    if given.edge_term is not None:
        before = before + torch.cat([given.edge_term, given.loop_term])[place]
    weight = softmax(F.leaky_relu(before, slope), dst, num_nodes=given.graph.num_dst)
    if given.keep is not None:
        weight = weight * given.keep[place] / (1 - given.dropout)
    out = given.grad.new_zeros(given.grad.shape)
    out = out.index_add(0, dst, weight.unsqueeze(-1) * given.value[src])
    return before, weight, out


@ROWS
@LOOPS
@TERMS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_is_the_formula_of_pyg(row, loops, terms, dropout):
    given = Inputs(row, loops=loops, terms=terms, dropout=dropout)
    assert_is_the_formula(given, 0.2)


@pytest.mark.parametrize("slope", [0.0, -0.5, 1.5])
def test_any_slope(slope):
    assert_is_the_formula(Inputs(testing.row("unsorted")), slope)


def assert_is_the_formula(given, slope):
    out, _, _ = given.attend(negative_slope=slope)
    _, weight, expected = pyg_formula(given, slope)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(out, given.leaves, given.grad)
    torch.testing.assert_close(
        found, torch.autograd.grad(expected, given.leaves, given.grad)
    )
    place = live_edges(given)[2]
    every = torch.cat(given.weights(negative_slope=slope))
    torch.testing.assert_close(every[place], weight)
    every[place] = 0
    assert not every.any()


@ROWS
def test_masked_edges_are_left_out(row):
    given = Inputs(row)
    mask = torch.arange(given.num_edges) % 3 != 0
    out, _, _ = given.attend(edge_mask=mask)
    torch.testing.assert_close(out, pyg_formula(given, edge_mask=mask)[2])
    weight, _ = given.weights(edge_mask=mask)
    assert not weight[~mask].any()


@ROWS
@LOOPS
def test_state_of_the_softmax(row, loops):
    given = Inputs(row, loops=loops)
    _, largest, total = given.attend()
    before, _, _ = pyg_formula(given)
    dst = live_edges(given)[1]
    assert not largest.requires_grad
    assert not total.requires_grad
    scores = F.leaky_relu(before, 0.2).detach()
    for i in range(row.num_dst):
        mine = scores[dst == i]
        if len(mine):
            torch.testing.assert_close(largest[i], mine.amax(0))
            torch.testing.assert_close(total[i], (mine - mine.amax(0)).exp().sum(0))
        else:
            assert largest[i].tolist() == [0] * HEADS
            assert total[i].tolist() == [1] * HEADS


@SMALL
@LOOPS
@TERMS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_derivatives(row, loops, terms, dropout):
    given = Inputs(row, loops=loops, terms=terms, dropout=dropout)

    def attend(value, alpha_src, alpha_dst, edge_term=None, loop_term=None):
        options = given.options | {"edge_term": edge_term, "loop_term": loop_term}
        return reference.additive_attention(
            given.graph, value, alpha_src, alpha_dst, **options
        )[0]

    def weights(alpha_src, alpha_dst, edge_term=None, loop_term=None):
        options = given.options | {"edge_term": edge_term, "loop_term": loop_term}
        return reference.attention_weights(given.graph, alpha_src, alpha_dst, **options)

    assert gradcheck(attend, given.leaves)
    assert gradgradcheck(attend, given.leaves)
    assert gradcheck(weights, given.leaves[1:])
    assert gradgradcheck(weights, given.leaves[1:])


@ROWS
@LOOPS
@TERMS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_single_sweep_backward(row, loops, terms, dropout):
    given = Inputs(row, loops=loops, terms=terms, dropout=dropout)
    assert_single_sweep(given, 0.2)


@pytest.mark.parametrize("slope", [0.0, -0.5, 1.5])
def test_single_sweep_backward_with_any_slope(slope):
    assert_single_sweep(Inputs(testing.row("unsorted"), dropout=0.4), slope)


def assert_single_sweep(given, slope):
    """All gradients from sums over columns, and two sums kept by the forward."""
    out, _, _ = given.attend(negative_slope=slope)
    names = ("value", "alpha_src", "alpha_dst", "edge_term", "loop_term")
    expected = dict(
        zip(
            [name for name in names if getattr(given, name) is not None],
            torch.autograd.grad(out, given.leaves, given.grad),
            strict=True,
        )
    )
    with torch.no_grad():
        found = single_sweep(given, out, slope)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-13)


def single_sweep(given, out, slope):
    src, dst, place = live_edges(given)
    value, grad = given.value, given.grad
    before, dropped, _ = pyg_formula(given, slope)
    weight = softmax(F.leaky_relu(before, slope), dst, num_nodes=given.graph.num_dst)

    # Kept by the forward: sums over the edges with a positive pre-activation. The mask
    # of dropout belongs to the first and not to the second.
    positive = (before > 0).double()
    large = torch.zeros_like(out).index_add(
        0, dst, (positive * dropped).unsqueeze(-1) * value[src]
    )
    small = torch.zeros_like(given.alpha_dst).index_add(0, dst, positive * weight)

    # One sweep over the columns, which gathers the output gradient.
    delta = (grad * out).sum(-1)  # [N_dst, H]
    factor = torch.where(weight > 0, dropped / weight, 0.0)
    inner = (grad[dst] * value[src]).sum(-1) * factor - delta[dst]
    score = weight * inner * torch.where(before > 0, positive, slope)  # [K, H]
    terms = torch.zeros(given.num_edges + given.num_loops, HEADS, dtype=score.dtype)
    terms[place] = score
    return {
        "value": torch.zeros_like(value).index_add(
            0, src, dropped.unsqueeze(-1) * grad[dst]
        ),
        "alpha_src": torch.zeros_like(given.alpha_src).index_add(0, src, score),
        "alpha_dst": (1 - slope) * ((grad * large).sum(-1) - delta * small),
        "edge_term": terms[: given.num_edges],
        "loop_term": terms[given.num_edges :],
    }


def test_gradient_at_zero_is_the_slope():
    row = testing.Row("", 3, 1, lambda _: torch.tensor([[0, 1, 2], [0, 0, 0]]))
    given = Inputs(row, loops=False, terms=False)
    given.alpha_src.data.zero_()
    given.alpha_dst.data.zero_()
    out, _, _ = given.attend()
    (found,) = torch.autograd.grad(out, given.alpha_src, given.grad)
    before = 0.2 * given.alpha_src
    linear = softmax(before, torch.zeros(3, dtype=torch.long), num_nodes=1)
    expected = (linear.unsqueeze(-1) * given.value).sum(0, keepdim=True)
    torch.testing.assert_close(
        found, torch.autograd.grad(expected, given.alpha_src, given.grad)[0]
    )


@pytest.mark.parametrize("loops", [False, True])
def test_dropout_of_one_gives_zeros(loops):
    given = Inputs(testing.row("unsorted"), loops=loops, dropout=1.0)
    out, _, _ = given.attend()
    assert out.shape == given.grad.shape
    assert not out.any()
    for grad in torch.autograd.grad(out, given.leaves, given.grad):
        assert grad.isfinite().all()
        assert not grad.any()


@ROWS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(row, dtype):
    given = Inputs(row, dtype=dtype)
    out, largest, total = given.attend()
    assert out.dtype == dtype
    assert largest.dtype == total.dtype == torch.float32
    every = reference.additive_attention(
        given.graph,
        given.value.double(),
        *(part.double() for part in given.scores),
        edge_term=given.edge_term.double(),
        loop_term=given.loop_term.double(),
        num_loops=given.num_loops,
    )[0]
    bound = torch.finfo(dtype).eps * every.abs() * 0.51 + 1e-5
    assert ((out.double() - every).abs() <= bound).all()
    assert all(part.dtype == dtype for part in given.weights())


def test_dtypes_promote():
    given = Inputs(testing.row("unsorted"), dtype=torch.float32)
    half = given.value.bfloat16()
    out, _, _ = reference.additive_attention(given.graph, half, *given.scores)
    assert out.dtype == torch.float32


def test_scores_without_a_destination_part():
    given = Inputs(testing.row("more_sources"))
    out, _, _ = reference.additive_attention(
        given.graph, given.value, given.alpha_src, None, **given.options
    )
    given.alpha_dst.data.zero_()
    torch.testing.assert_close(out, given.attend()[0])


def test_large_scores_keep_their_digits():
    given = Inputs(testing.row("unsorted"))
    given.alpha_dst.data.abs_()
    given.alpha_src.data.abs_()
    given.edge_term.data.abs_()
    given.loop_term.data.abs_()
    out, _, _ = given.attend()
    moved = given.alpha_dst.detach() + 1e4
    shifted, _, _ = reference.additive_attention(
        given.graph, given.value, given.alpha_src, moved, **given.options
    )
    torch.testing.assert_close(out, shifted)


def test_nan_of_an_edge_that_takes_no_part_is_not_seen():
    edges = torch.tensor([[0, 1, 1], [0, 0, 1]])
    given = Inputs(testing.Row("", 2, 2, lambda _: edges))
    given.edge_term.data[0] = float("nan")
    given.edge_term.data[1] = float("nan")
    out, _, _ = given.attend(edge_mask=torch.tensor([True, False, True]))
    assert out.isfinite().all()
    assert given.attend()[0][0].isnan().all()
    assert given.attend()[0][1].isfinite().all()
