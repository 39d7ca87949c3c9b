"""Errors about arguments name the argument and what was got."""

from __future__ import annotations

import pytest
import torch

import pyg_tiga as tg
from pyg_tiga import functional
from pyg_tiga.nn import GATConv, SAGEConv

X = torch.randn(3, 4)
EDGES = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize("relation", [None, [[0], [1]], "edges"])
def test_relation_of_the_wrong_type(relation):
    with pytest.raises(TypeError, match="'relation' must be"):
        functional.spmm(relation, X)


@pytest.mark.parametrize("x", [None, [[1.0]], X.to_sparse()])
def test_features_of_the_wrong_type(x):
    with pytest.raises(TypeError, match="'x' must be a dense tensor"):
        functional.spmm(EDGES, x)


def test_a_sparse_operand_is_named_by_its_layout():
    with pytest.raises(TypeError, match=r"'x' must be .*layout 'torch.sparse_coo'"):
        functional.spmm(EDGES, X.to_sparse())


@pytest.mark.parametrize("reduce", [["sum"], None, {}, "median"])
def test_a_reduction_that_is_none(reduce):
    with pytest.raises(ValueError, match="'reduce' must be one of"):
        functional.spmm(EDGES, X, reduce=reduce)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (None, X, TypeError, "'a' must be a dense tensor"),
        (X, [X], TypeError, "'b' must be a dense tensor"),
        (X[:, 0], X[:, 0], ValueError, r"'a' must have shape \[nodes, F\]"),
        (X[None], X[None], ValueError, r"'a' must have shape \[nodes, F\]"),
        (X, X[:, :2], ValueError, r"'a' must have shape \[num_dst, F\] = \[3, 2\]"),
    ],
)
def test_operands_of_products(a, b, error, message):
    with pytest.raises(error, match=message):
        functional.sddmm(EDGES, a, b)


CROW, COL = torch.tensor([0, 1, 2, 2]), torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("crow", "col", "val", "error", "message"),
    [
        (CROW.float(), COL, None, TypeError, "'crow' must hold integers"),
        (None, COL, None, TypeError, "'crow' must be a dense tensor"),
        (CROW[None], COL, None, ValueError, "'crow' must have one dimension"),
        (CROW[:0], COL, None, ValueError, "'crow' must have one entry more"),
        (CROW.flip(0), COL, None, ValueError, "'crow' must rise from 0"),
        (CROW, COL + 1, None, ValueError, "'col' holds the source index 3"),
        (CROW, COL, X[0], ValueError, r"'val' must have shape \[num_edges\] = \[2\]"),
        (CROW, COL, 2.0, TypeError, "'val' must be a dense tensor"),
    ],
)
def test_parts_of_a_csr_matrix(crow, col, val, error, message):
    with pytest.raises(error, match=message):
        tg.spmm_csr(crow, col, val, X)


MATRIX = torch.eye(3).to_sparse()
OF_RELATIONS = [
    lambda relation, **options: functional.spmm(relation, X, **options),
    lambda relation, **options: functional.plan_spmm(relation, X, **options),
    lambda relation, **options: functional.additive_attention(
        relation, X[:, None], X[:, :1], X[:, :1], **options
    ),
    lambda relation, **options: functional.graph_attention(
        X[:, None], X[:, None], X[:, None], relation, **options
    ),
]
KNOWING = [tg.Graph.from_edge_index(EDGES, 3), MATRIX]


@pytest.mark.parametrize("call", OF_RELATIONS)
@pytest.mark.parametrize("relation", KNOWING)
def test_options_that_are_for_edge_lists(call, relation):
    with pytest.raises(ValueError, match=r"'flow' is for a plain 'edge_index'.*got 't"):
        call(relation, flow="target_to_source")
    with pytest.raises(ValueError, match=r"'size' is for a plain.*\(3, 3\) \(got"):
        call(relation, size=(7, 9))
    call(relation, size=(3, 3), flow="source_to_target")


@pytest.mark.parametrize("call", OF_RELATIONS)
@pytest.mark.parametrize("relation", [EDGES, *KNOWING])
def test_a_flow_that_is_none(call, relation):
    with pytest.raises(ValueError, match=r"'flow' must be .* \(got 'nonsense'\)"):
        call(relation, flow="nonsense")


def test_an_option_in_the_place_of_the_weight():
    with pytest.raises(TypeError, match="'weight' must be a dense tensor"):
        functional.spmm(EDGES, X, "mean")


def test_features_without_dimensions():
    with pytest.raises(ValueError, match="'x' must have at least one dimension"):
        functional.spmm(EDGES, torch.tensor(1.0))


@pytest.mark.parametrize("size", [(3,), 3, (3, 3, 3)])
def test_size_of_the_wrong_form(size):
    with pytest.raises(ValueError, match="'size' must be a pair"):
        functional.spmm(EDGES, X, size=size)
    with pytest.raises(ValueError, match="'size' must be a pair"):
        SAGEConv(4, 2)(X, EDGES, size=size)


@pytest.mark.parametrize("layer", [SAGEConv(4, 2), GATConv(4, 2)])
@pytest.mark.parametrize("x", [None, (X,), (X, X, X), [[1.0]]])
def test_features_that_are_no_pair(layer, x):
    with pytest.raises(ValueError, match="'x' must be a tensor or a pair"):
        layer(x, EDGES)


@pytest.mark.parametrize("thing", [None, [EDGES], 3])
def test_forgetting_what_was_never_remembered(thing):
    with pytest.raises(TypeError, match="'edge_index' must be"):
        tg.forget(thing)


def test_an_index_out_of_range_names_what_a_layer_takes():
    with pytest.raises(ValueError, match="'size' of a layer"):
        SAGEConv(4, 2)(X, torch.tensor([[0, 3], [1, 2]]))


def test_one_column_may_be_a_vector():
    crow, col = torch.tensor([0, 1, 2, 2]), torch.tensor([2, 0])
    expected = torch.stack([X[2, 0], X[0, 0], torch.tensor(0.0)])
    torch.testing.assert_close(tg.spmm_csr(crow, col, None, X[:, 0]), expected)
    assert functional.plan_spmm(EDGES, X[:, 0]).problem.features == 1


def test_the_mean_of_integers_is_a_fraction():
    x = torch.tensor([[1], [2], [4]])
    edges = torch.tensor([[0, 1], [2, 2]])
    out = functional.spmm(edges, x, reduce="mean")
    assert out[2].item() == 1.5


@pytest.mark.parametrize("size", [(3.0, 3), (3, 3.0), (True, 3), (3, "3")])
def test_sizes_that_equal_integers(size):
    functional.spmm(EDGES, X)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"'size\[[01]\]' must be an integer"):
            functional.spmm(EDGES, X, size=size)


def test_a_truth_value_is_no_number_of_nodes():
    with pytest.raises(TypeError, match="'num_nodes' must be an integer"):
        tg.Graph.from_edge_index(EDGES, True)


@pytest.mark.parametrize("size", [(9, 7), (None, 7), (9, None)])
@pytest.mark.parametrize(
    "layer", [SAGEConv(4, 2), SAGEConv(4, 2, "std"), GATConv(4, 2)]
)
def test_a_size_beside_a_graph(layer, size):
    if isinstance(layer, GATConv):
        layer.add_self_loops = False
    graph = tg.Graph.from_edge_index(EDGES, 3)
    with pytest.raises(ValueError, match=r"'size' must be that of the graph.*\(3, 3\)"):
        layer(X, graph, size=size)
    torch.testing.assert_close(layer(X, graph, size=(3, 3)), layer(X, graph))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (2.0, TypeError, "'value' must be a tensor"),
        (torch.ones(2).to_sparse(), TypeError, "'value' must be a dense tensor"),
        (torch.ones(3), ValueError, "'value' must have one entry for each of 2 edges"),
        (torch.tensor(1.0), ValueError, "'value' must have one entry for each"),
        (torch.ones(2, device="meta"), ValueError, "'value' must be on the device"),
    ],
)
def test_values_of_a_graph(value, error, message):
    with pytest.raises(error, match=message):
        tg.Graph.from_edge_index(EDGES, 3).with_value(value)


def test_products_name_the_operand_with_too_few_rows():
    edges = torch.tensor([[0, 2], [2, 0]])
    with pytest.raises(ValueError, match=r"'a' must have a row for each dest.*got 2"):
        functional.sddmm(edges, X[:2], X)
    with pytest.raises(ValueError, match=r"'b' must have a row for each source.*got 2"):
        functional.sddmm(edges, X, X[:2])


def test_edges_are_called_what_functions_call_them():
    with pytest.raises(TypeError, match=r"'relation' must hold .*'relation.long\(\)'"):
        functional.spmm(EDGES.float(), X)
    with pytest.raises(ValueError, match=r"'relation' must have the shape"):
        functional.spmm(EDGES[0], X)


@pytest.mark.parametrize("thing", [SAGEConv, tg.Graph])
def test_explaining_a_class(thing):
    with pytest.raises(TypeError, match=f"got the class '{thing.__name__}'"):
        tg.explain(thing)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("complex_weight", [False, True])
def test_extrema_of_complex_numbers(reduce, complex_weight):
    x, weight = X.to(torch.complex64), None
    if complex_weight:
        x, weight = X, torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=rf"'reduce' must be .*complex.*'{reduce}' of"):
        functional.spmm(EDGES, x, weight, reduce)
    functional.spmm(EDGES, x, weight, "mean")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_without_sums(dtype):
    narrow, value = X.to(dtype), X[:, None]
    calls = {
        "x": lambda: functional.spmm(EDGES, narrow, reduce="max"),
        "weight": lambda: functional.spmm(EDGES, X, narrow[0, :2]),
        "a": lambda: functional.sddmm(EDGES, narrow, X),
        "value": lambda: functional.graph_attention(
            value, value, narrow[:, None], EDGES
        ),
        "x_src": lambda: functional.gat_attention(
            EDGES, narrow[:, None], value, X[:1], X[:1]
        ),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"'{name}' must have .* \(got {dtype}\)"):
            call()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_integers_without_sums(dtype):
    for reduce in ("sum", "max"):
        with pytest.raises(TypeError, match=rf"'x' must have a dtype .*{dtype}"):
            functional.spmm(EDGES, X.abs().to(dtype), reduce=reduce)
    assert functional.spmm(EDGES, X.abs().to(dtype), reduce="mean").shape == X.shape
