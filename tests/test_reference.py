from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric.utils import scatter

from pyg_tiga import reference, testing

ROWS = pytest.mark.parametrize("row", testing.ROWS, ids=str)
# Numerical derivatives cost two calls per input element.
SMALL = pytest.mark.parametrize(
    "row",
    [
        testing.Row("duplicates", 6, 6, testing.row("duplicates").edges, width=2),
        testing.Row("rectangular", 5, 3, testing.random_edges(5, 3, 9), width=3),
        testing.Row("other_way", 3, 5, testing.random_edges(3, 5, 9), width=3),
        testing.Row("no_edges", 3, 2, testing.row("no_edges").edges, width=2),
    ],
    ids=str,
)
NORMALIZE = pytest.mark.parametrize("normalize", ["none", "src", "dst"])
REDUCE = pytest.mark.parametrize("reduce", ["max", "min"])
TIES = pytest.mark.parametrize("ties", ["split", "first"])
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def double_case(row, *, tied=False):
    case = testing.make_case(row).double()
    return case.tied() if tied else case


def leaves(*tensors):
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def messages(case, weight):
    message = case.x[case.edge_index[0].long()]
    return message if weight is None else message * weight[:, None]


def dense(case, weight, normalize):
    """The relation as a dense [N_dst, N_src] matrix."""
    src, dst = case.edge_index.long()
    matrix = case.x.new_zeros(case.num_dst, case.num_src)
    count = matrix.index_put((dst, src), matrix.new_ones(()), accumulate=True)
    value = matrix.new_ones(src.numel()) if weight is None else weight
    matrix = matrix.index_put((dst, src), value, accumulate=True)
    if normalize == "dst":
        matrix = matrix / count.sum(1, keepdim=True).clamp(min=1)
    if normalize == "src":
        matrix = matrix / count.sum(0, keepdim=True).clamp(min=1)
    return matrix


@ROWS
@NORMALIZE
@WEIGHTED
def test_spmm_is_a_matrix_product(row, normalize, weighted):
    case = double_case(row)
    weight = case.weight if weighted else None
    out = reference.spmm(case.graph(), case.x, weight, normalize)
    torch.testing.assert_close(out, dense(case, weight, normalize) @ case.x)


@SMALL
@NORMALIZE
def test_spmm_derivatives(row, normalize):
    case = double_case(row)
    graph = case.graph()

    def function(x, weight):
        return reference.spmm(graph, x, weight, normalize)

    inputs = leaves(case.x, case.weight)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@ROWS
@pytest.mark.parametrize(
    ("normalize", "transposed"), [("none", "none"), ("dst", "src"), ("src", "dst")]
)
def test_gradient_of_spmm_is_spmm_of_the_reverse(row, normalize, transposed):
    case = double_case(row)
    graph = case.graph()
    x, weight = leaves(case.x, case.weight)
    reference.spmm(graph, x, weight, normalize).backward(case.grad)
    grad = reference.spmm(graph.reverse(), case.grad, case.weight, transposed)
    torch.testing.assert_close(grad, x.grad)


@ROWS
def test_gradient_of_the_weights_is_sddmm(row):
    case = double_case(row)
    x, weight = leaves(case.x, case.weight)
    reference.spmm(case.graph(), x, weight).backward(case.grad)
    grad = reference.sddmm(case.graph(), case.grad, case.x)
    torch.testing.assert_close(grad, weight.grad)


@ROWS
def test_sddmm_keeps_the_order_of_the_caller(row):
    case = double_case(row)
    src, dst = case.edge_index.long()
    out = reference.sddmm(case.graph(), case.x_dst, case.x)
    torch.testing.assert_close(out, (case.x_dst[dst] * case.x[src]).sum(1))


@SMALL
def test_sddmm_derivatives(row):
    case = double_case(row)
    graph = case.graph()
    inputs = leaves(case.x_dst, case.x)
    assert gradcheck(lambda a, b: reference.sddmm(graph, a, b), inputs)
    assert gradgradcheck(lambda a, b: reference.sddmm(graph, a, b), inputs)


@ROWS
@REDUCE
@TIES
@WEIGHTED
def test_extremum_values(row, reduce, ties, weighted):
    case = double_case(row, tied=True)
    weight = case.weight if weighted else None
    out, aux = reference.spmm_extremum(case.graph(), case.x, reduce, weight, ties)
    expected = scatter(
        messages(case, weight), case.edge_index[1].long(), 0, case.num_dst, reduce
    )
    assert torch.equal(out, expected)
    assert aux.dtype == torch.int32
    assert aux.shape == out.shape


@ROWS
@REDUCE
@WEIGHTED
def test_split_ties_are_those_of_scatter_reduce(row, reduce, weighted):
    case = double_case(row, tied=True)
    x, weight = leaves(case.x, case.weight)
    used = weight if weighted else None
    out, aux = reference.spmm_extremum(case.graph(), x, reduce, used, "split")
    out.backward(case.grad)

    theirs, their_weight = leaves(case.x, case.weight)
    message = theirs[case.edge_index[0].long()]
    if weighted:
        message = message * their_weight[:, None]
    scatter(message, case.edge_index[1].long(), 0, case.num_dst, reduce).backward(
        case.grad
    )
    torch.testing.assert_close(x.grad, theirs.grad)
    if weighted:
        torch.testing.assert_close(weight.grad, their_weight.grad)
    assert (aux >= 1).all()


@pytest.mark.parametrize("reduce", ["max", "min"])
@WEIGHTED
def test_first_ties_are_those_of_sparse_mm(reduce, weighted):
    # A matrix holds an edge once, so duplicates are left to the next test.
    src, dst = torch.ones(9, 7).tril(3).nonzero().t()
    case = testing.make_case(
        testing.Row("triangle", 9, 7, lambda _: torch.stack([src, dst]))
    ).tied()
    value = case.weight if weighted else torch.ones_like(case.weight)
    coo = torch.sparse_coo_tensor(torch.stack([dst, src]), value, (7, 9))
    adjacency = coo.to_sparse_csr().requires_grad_()
    theirs, x, weight = leaves(case.x, case.x, case.weight)
    torch.sparse.mm(adjacency, theirs, f"a{reduce}").backward(case.grad)

    used = weight if weighted else None
    out, _ = reference.spmm_extremum(case.graph(), x, reduce, used, "first")
    out.backward(case.grad)
    torch.testing.assert_close(x.grad, theirs.grad)
    if weighted:
        ours = torch.sparse_coo_tensor(coo._indices(), weight.grad, (7, 9))
        torch.testing.assert_close(ours.to_dense(), adjacency.grad.to_dense())


def test_first_tie_is_the_first_edge_of_the_row():
    edge_index = torch.tensor([[0, 1, 2, 1], [1, 1, 0, 1]])
    row = testing.Row("", 3, 3, lambda _: edge_index, width=1)
    graph = testing.make_case(row).graph()
    x = torch.tensor([[5.0], [5.0], [float("nan")]])
    _, winner = reference.spmm_extremum(graph, x, "max", None, "first")
    assert winner.flatten().tolist() == [0, 0, -1]


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_tie_at_zero_is_shared_with_the_initial_zero(reduce):
    edge_index = torch.tensor([[0, 1, 2], [0, 0, 0]])
    row = testing.Row("", 3, 1, lambda _: edge_index, width=1)
    graph = testing.make_case(row).graph()
    x = torch.zeros(3, 1, requires_grad=True)
    out, shares = reference.spmm_extremum(graph, x, reduce)
    out.sum().backward()
    assert shares.item() == 4
    assert x.grad.flatten().tolist() == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("ties", ["split", "first"])
def test_nan_reaches_the_result(ties):
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    row = testing.Row("", 4, 2, lambda _: edge_index, width=1)
    graph = testing.make_case(row).graph()
    nan = float("nan")
    x = torch.tensor([[1.0], [nan], [nan], [3.0]], requires_grad=True)
    out, aux = reference.spmm_extremum(graph, x, "max", None, ties)
    out.sum().backward()
    assert out[0].isnan()
    assert out[1] == 3
    expected = [nan, nan, nan, 1] if ties == "split" else [0, 1, 0, 1]
    expected = torch.tensor(expected, dtype=x.dtype).unsqueeze(1)
    torch.testing.assert_close(x.grad, expected, equal_nan=True)
    grad = reference.spmm_extremum_backward(
        graph, torch.ones(2, 1), x.detach(), out.detach(), aux, ties
    )
    torch.testing.assert_close(grad, expected, equal_nan=True)


@SMALL
@REDUCE
@TIES
@WEIGHTED
def test_extremum_derivatives(row, reduce, ties, weighted):
    # Without ties: at a tie the two sides of a numerical derivative differ.
    case = double_case(row)
    graph = case.graph()

    def function(x, weight=None):
        return reference.spmm_extremum(graph, x, reduce, weight, ties)[0]

    inputs = leaves(case.x, case.weight) if weighted else leaves(case.x)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@ROWS
@REDUCE
@TIES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_explicit_extremum_backward_equals_autograd(row, reduce, ties, dtype):
    case = testing.make_case(row, dtype).tied()
    graph = case.graph()
    (x,) = leaves(case.x)
    out, aux = reference.spmm_extremum(graph, x, reduce, None, ties)
    out.backward(case.grad)
    saved = (case.x, out.detach(), aux, ties)
    grad = reference.spmm_extremum_backward(graph, case.grad, *saved)
    torch.testing.assert_close(grad, x.grad)


@ROWS
@TIES
def test_select_is_the_transpose_of_the_backward(row, ties):
    case = double_case(row, tied=True)
    graph = case.graph()
    out, aux = reference.spmm_extremum(graph, case.x, "max", None, ties)
    value = torch.randn_like(case.x)
    saved = (case.x, out, aux, ties)
    spread = reference.spmm_extremum_backward(graph, case.grad, *saved)
    taken = reference.spmm_extremum_select(graph, value, *saved)
    torch.testing.assert_close((spread * value).sum(), (case.grad * taken).sum())


@SMALL
@TIES
def test_explicit_extremum_backward_is_differentiable(row, ties):
    case = double_case(row)
    graph = case.graph()
    out, aux = reference.spmm_extremum(graph, case.x, "max", None, ties)

    def backward(grad):
        return reference.spmm_extremum_backward(graph, grad, case.x, out, aux, ties)

    (grad,) = leaves(case.grad)
    assert gradcheck(backward, (grad,))
    assert gradgradcheck(backward, (grad,))


@ROWS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(row, dtype):
    case = testing.make_case(row, dtype)
    out = reference.spmm(case.graph(), case.x, case.weight, "dst")
    double = case.double()
    truth = reference.spmm(double.graph(), double.x, double.weight, "dst")
    assert out.dtype == dtype
    bound = torch.finfo(dtype).eps * truth.abs() * 0.51 + 1e-6
    assert ((out.double() - truth).abs() <= bound).all()


def test_integer_features_are_summed():
    edge_index = torch.tensor([[0, 1], [0, 0]])
    graph = testing.make_case(testing.Row("", 2, 2, lambda _: edge_index)).graph()
    out = reference.spmm(graph, torch.tensor([[2], [3]]))
    assert out.dtype == torch.int64
    assert out.tolist() == [[5], [0]]
