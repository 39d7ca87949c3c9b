"""What tests of several attention layers share: inputs and the comparison with PyG."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric import EdgeIndex

from pyg_tiga import testing

BIPARTITE = testing.row("more_sources")
SQUARE = testing.row("unsorted")
LOOPED = testing.row("self_loops")
EDGE_DIM = 3
# Two ways to sum the same terms in float64 differ by less.
LIMIT = 1e-9
ignore_sparse_warnings = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:Converting sparse tensor", "ignore:.*invariant checks"
)


def pair_of_layers(cls, *args, dtype=torch.float64, device="cpu", **kwargs):
    """Our layer and PyG's with the same parameters."""
    theirs = cls._pyg_class(*args, **kwargs).to(device, dtype)
    ours = cls(*args, **kwargs).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def twin_of(layer, *args, **kwargs):
    """PyG's layer with the parameters of ours."""
    theirs = type(layer)._pyg_class(*(args or (8, 3)), **kwargs)
    theirs.load_state_dict(layer.state_dict())
    return theirs.to(next(layer.parameters()))


def features(row, dtype=torch.float64, device="cpu"):
    """A case of a row, its node features and edge features."""
    case = testing.make_case(row, dtype, device)
    generator = torch.Generator().manual_seed(2)
    size = (case.edge_index.size(1), EDGE_DIM)
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    x = case.x if row.square else (case.x, case.x_dst)
    return case, x, drawn.to(device, dtype)


def run(layer, x, edges, edge_attr=None, weights=False):
    """Output, attention weights where wanted, and all gradients, by name."""
    layer.zero_grad()
    parts = x if isinstance(x, tuple) else (x,)
    leaves = tuple(part.detach().requires_grad_() for part in parts)
    given = leaves if isinstance(x, tuple) else leaves[0]
    out = layer(given, edges, edge_attr, *([True] if weights else []))
    found = {"output": out}
    if weights:
        found = {"output": out[0], "weights": weights_in(out)}
    sum(map(_cotangent_product, found.values())).backward()
    found |= {f"x[{i}].grad": leaf.grad for i, leaf in enumerate(leaves)}
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    return {name: _plain(value) for name, value in found.items()}


def weights_in(out):
    """The weights, of a pair with edges or in a SparseTensor."""
    return out[1][1] if isinstance(out[1], tuple) else out[1].storage.value()


def _cotangent_product(out):
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out * cotangent.to(out)).sum()


def _plain(value):
    """No gradient and one of zeros say the same."""
    return value.detach() if value is not None and value.any() else None


def assert_same(ours, theirs, x, edges, edge_attr=None, weights=False, plain=None):
    """Hold outputs and gradients of ours to PyG's, on `plain` edges if given."""
    plain = edges if plain is None else plain
    found = run(ours, x, edges, edge_attr, weights)
    expected = run(theirs, x, plain, edge_attr, weights)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            # Of sums that are 0 in exact arithmetic, one can be 0 and one almost.
            rest = [part for part in (value, found[name]) if part is not None]
            assert all(float(part.abs().max()) < LIMIT for part in rest), name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=LIMIT, atol=LIMIT, msg=lambda m, n=name: n + m
            )


def assert_accurate(ours, theirs, x, edges, weights=False):
    """Hold all of a call to twice the error of PyG's, both against float64."""
    found, plain = (run(layer, x, edges, None, weights) for layer in (ours, theirs))
    exact = copy.deepcopy(theirs).double()
    wide = tuple(part.double() for part in x) if isinstance(x, tuple) else x.double()
    truth = run(exact, wide, edges, None, weights)
    largest = max(map(_largest, truth.values()))
    for name, true in truth.items():
        # Derivatives of a softmax sum to 0: their terms have the size of others.
        floor = testing.FLOOR_ULPS * torch.finfo(torch.float32).eps * largest
        error, allowed = (_distance(y[name], true) for y in (found, plain))
        assert error <= testing.SLACK * allowed + floor, (name, error, allowed, floor)
        dtypes = {y[name].dtype for y in (found, plain) if y[name] is not None}
        assert len(dtypes) <= 1, name


def _distance(value, true):
    """Largest difference, where None stands for zeros."""
    if value is None or true is None:
        return max(_largest(value), _largest(true))
    return _largest(value - true)


def _largest(value):
    return 0.0 if value is None else float(value.abs().max())


def is_fused(layer):
    return not layer._record.reasons and layer._record.plan is not None


def assert_parents_path(layer, reason):
    assert any(reason in entry for entry in layer._record.reasons), layer.explain_plan()
    assert reason in layer.explain_plan()


def _edge_index_of(case, order=None):
    edge_index = EdgeIndex(case.edge_index, sparse_size=(case.num_src, case.num_dst))
    return edge_index if order is None else edge_index.sort_by(order).values


EDGE_LISTS = {
    "edge_index": lambda case: case.edge_index,
    "int32": lambda case: case.edge_index.int(),
    "int16": lambda case: case.edge_index.short(),
    "EdgeIndex": _edge_index_of,
    "EdgeIndex_by_row": lambda case: _edge_index_of(case, "row"),
    "EdgeIndex_by_col": lambda case: _edge_index_of(case, "col"),
    "strided": lambda case: case.edge_index.t().contiguous().t(),
}


def plain_edges(form, case, edges):
    """What PyG takes in place of these edges: by narrow indices it goes wrong."""
    return case.edge_index if form.startswith("int") else edges


def coo(case, *, coalesced=True, width=None):
    """The edges as a matrix, whose values, one or a row per edge, say nothing."""
    size = (case.num_dst, case.num_src)
    index = case.edge_index.flip(0)
    shape = (index.size(1),) if width is None else (index.size(1), width)
    value = torch.linspace(0.5, 1.5, index.size(1)).view(-1, *[1] * (len(shape) - 1))
    value = value.expand(shape).contiguous().double()
    matrix = torch.sparse_coo_tensor(index, value, size + shape[1:])
    return matrix.coalesce() if coalesced else matrix


MATRICES = {
    "coo": coo,
    "coo_uncoalesced": lambda case: coo(case, coalesced=False),
    "csr": lambda case: coo(case).to_sparse_csr(),
}


def seeded(layer, *args, seed=3):
    torch.manual_seed(seed)
    return layer(*args)
