from __future__ import annotations

import pytest
import torch

from pyg_tiga import testing

ROWS = pytest.mark.parametrize("row", testing.ROWS, ids=str)


def test_names_are_unique():
    names = [row.name for row in testing.ROWS]
    assert len(set(names)) == len(names)
    assert testing.row("hub_row").name == "hub_row"


@ROWS
def test_rows_are_small_and_repeatable(row):
    case, again = testing.make_case(row), testing.make_case(row)
    assert max(row.num_src, row.num_dst) <= 40
    assert case.edge_index.size(1) <= 300
    assert case.x.shape == (row.num_src, row.width)
    assert case.grad.shape == case.x_dst.shape == (row.num_dst, row.width)
    assert torch.equal(case.edge_index, again.edge_index)
    assert torch.equal(case.x, again.x)
    if case.edge_index.numel():
        assert (case.edge_index.amin(1) >= 0).all()
        assert case.edge_index[0].max() < row.num_src
        assert case.edge_index[1].max() < row.num_dst


@pytest.mark.parametrize(
    ("layout", "stride", "offset"),
    [
        ("contiguous", (16, 1), 0),
        ("transposed", (1, 24), 0),
        ("sliced", (21, 1), 3),
        ("offset", (16, 1), 1),
        ("expanded", (0, 1), 0),
    ],
)
def test_layouts(layout, stride, offset):
    edges = testing.random_edges(24, 24, 50)
    case = testing.make_case(testing.Row("", 24, 24, edges, 16, layout=layout))
    assert case.x.stride() == stride
    assert case.x.storage_offset() == offset
    assert not case.x.isnan().any()
    assert case.tied().x.stride() == stride


def test_double_keeps_the_values():
    case = testing.make_case(testing.row("unsorted"), torch.bfloat16)
    double = case.double()
    assert double.x.dtype == double.weight.dtype == torch.float64
    assert torch.equal(double.x, case.x.double())


def test_tied_features_tie():
    case = testing.make_case(testing.row("hub_row")).tied()
    assert (case.x == 0).float().mean() > 0.3
    assert case.x.unique().numel() < 20


def test_power_law_has_the_wanted_tail():
    make = testing.power_law_edges(5000, 100_000, 900.0)
    edge_index = make(torch.Generator().manual_seed(0))
    for ends in edge_index:
        degree = torch.bincount(ends, minlength=5000)
        assert 700 < degree.max() < 1100
        assert degree.argmax() > 0


def test_a_result_may_be_twice_as_far_off_as_plain_pytorch():
    truth = torch.linspace(1, 2, 10, dtype=torch.float64)
    plain = (truth + 1e-3).float()
    testing.assert_accurate((truth - 1.9e-3).float(), plain, truth)
    with pytest.raises(AssertionError, match="largest error"):
        testing.assert_accurate((truth - 2.1e-3).float(), plain, truth)


def test_a_result_may_be_off_by_the_floor():
    truth = torch.ones(3, dtype=torch.float64)
    testing.assert_accurate((truth + 4e-7).float(), truth.float(), truth)
    with pytest.raises(AssertionError, match="largest error"):
        testing.assert_accurate((truth + 6e-7).float(), truth.float(), truth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_match(value):
    truth = torch.tensor([1.0, value], dtype=torch.float64)
    testing.assert_accurate(truth.float(), truth.float(), truth)
    with pytest.raises(AssertionError, match="largest error"):
        testing.assert_accurate(torch.ones(2), truth.float(), truth)
    with pytest.raises(AssertionError, match="largest error"):
        testing.assert_accurate(truth.float(), torch.ones(2), torch.ones(2).double())


def test_shape_and_dtype_must_match():
    truth = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"torch\.float16"):
        testing.assert_accurate(truth.half(), truth.float(), truth)
    with pytest.raises(AssertionError, match="expected"):
        testing.assert_accurate(truth[:2].float(), truth.float(), truth)


def test_gradients_are_vectors_too():
    truth = torch.zeros(1000, dtype=torch.float64)
    truth[0] = 1
    plain = truth.float()
    plain[0] += 1e-3
    # Each entry is within the plain error, all together are not.
    actual = (truth + 1e-3).float()
    testing.assert_accurate(actual, plain, truth)
    with pytest.raises(AssertionError, match="relative L2"):
        testing.assert_gradient_accurate(actual, plain, truth)


def test_distances():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    assert testing.relative_l2(a, a) == 0
    assert testing.cosine(a, 2 * a) == pytest.approx(1)
    assert testing.cosine(a, b) == pytest.approx(0)
    assert testing.relative_l2(a, torch.zeros(2)) == pytest.approx(5)
    assert testing.cosine(a, torch.zeros(2)) == 1


def test_uninitialised_memory_is_poisoned():
    floats = torch.empty(3)
    for value in (floats, torch.empty_like(floats), floats.new_empty(2)):
        assert value.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
