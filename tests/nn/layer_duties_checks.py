"""What every attention layer owes as a drop-in, as tests to inherit: state and edges.

A test class names its layer and what is its own; all tests compare with PyG.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any, ClassVar

import pytest
import torch

from pyg_tiga import _features, testing
from tests.nn.layer_checks import (
    BIPARTITE,
    EDGE_DIM,
    EDGE_LISTS,
    LOOPED,
    MATRICES,
    SQUARE,
    assert_parents_path,
    assert_same,
    coo,
    features,
    ignore_sparse_warnings,
    is_fused,
    pair_of_layers,
    plain_edges,
    weights_in,
)
from tests.nn.test_replicas import replica

WEIGHTS = pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])


class Base:
    layer: ClassVar[type]
    rich: ClassVar[dict[str, Any]]
    """Options with which all parameters exist but those of edge features."""
    autocast_dtype: ClassVar[torch.dtype]


class StateDuties(Base):
    def test_state_dict_loads_both_ways(self):
        for options in ({}, self.rich, {**self.rich, "edge_dim": EDGE_DIM}):
            theirs = self.layer._pyg_class(8, 3, **options)
            ours = self.layer(8, 3, **options)
            assert list(ours.state_dict()) == list(theirs.state_dict())
            ours.load_state_dict(theirs.state_dict())
            theirs.load_state_dict(ours.state_dict())

    def test_repr_and_initialisation(self):
        layers, states = [], []
        for cls in (self.layer._pyg_class, self.layer):
            torch.manual_seed(5)
            layers.append(cls((8, 4), 3, heads=2, edge_dim=5, **self.rich))
            states.append(torch.get_rng_state())
        theirs, ours = layers
        assert repr(ours) == repr(theirs)
        assert torch.equal(*states)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("method", ["__init__", "forward"])
    def test_signature_is_the_parents(self, method):
        def form(cls):
            parameters = inspect.signature(getattr(cls, method)).parameters.values()
            return [(p.name, p.kind, p.default) for p in parameters]

        assert form(self.layer) == form(self.layer._pyg_class)

    @pytest.mark.parametrize("in_channels", [-1, (-1, -1)], ids=str)
    def test_lazy_initialisation(self, in_channels):
        case, x, _ = features(SQUARE, torch.float32)
        outs, layers = [], []
        for cls in (self.layer, self.layer._pyg_class):
            torch.manual_seed(3)
            layers.append(cls(in_channels, 5, heads=2, **self.rich))
            outs.append(layers[-1](x, case.edge_index))
        torch.testing.assert_close(*outs)
        assert is_fused(layers[0])
        layers[1].load_state_dict(layers[0].state_dict())
        layers = [layer.double() for layer in layers]
        assert_same(*layers, x.double(), case.edge_index)
        assert repr(layers[0]) == repr(layers[1])

    def test_copies_and_pickles(self):
        case, x, _ = features(SQUARE, torch.float32)
        layer = self.layer(8, 3, heads=2, **self.rich)
        out = layer(x, case.edge_index)
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        twins = [
            copy.deepcopy(layer),
            copy.copy(layer),
            pickle.loads(pickle.dumps(layer)),
            torch.load(buffer, weights_only=False),
        ]
        for twin in twins:
            assert twin.explain_plan() == layer.explain_plan()
            assert torch.equal(twin(x, case.edge_index), out)

    def test_replicas_are_layers(self):
        case, x, _ = features(SQUARE)
        ours, theirs = pair_of_layers(self.layer, 8, 3, heads=2, **self.rich)
        outs = [replica(layer)(x, case.edge_index) for layer in (ours, theirs)]
        torch.testing.assert_close(*outs)
        grads = [
            torch.autograd.grad(out.sum(), [*layer.parameters()], allow_unused=True)
            for out, layer in zip(outs, (ours, theirs), strict=True)
        ]
        torch.testing.assert_close(*grads)
        assert "PyG" not in ours.explain_plan()

    def test_submodule_hooks_are_heard(self):
        case, x, _ = features(SQUARE)
        layers = pair_of_layers(self.layer, 8, 6, heads=2, **self.rich)
        heard = [[], []]
        for layer, calls in zip(layers, heard, strict=True):
            for name, module in layer.named_children():
                if name == "aggr_module":
                    continue
                module.register_forward_hook(
                    lambda module, args, out, name=name, calls=calls: (
                        calls.append(name) or 2 * out
                    )
                )
        torch.testing.assert_close(*(layer(x, case.edge_index) for layer in layers))
        assert len(heard[0]) >= 3
        assert sorted(heard[0]) == sorted(heard[1])
        assert is_fused(layers[0])

    def test_frozen_parts(self):
        case, x, _ = features(SQUARE)
        ours, theirs = pair_of_layers(self.layer, 8, 3, heads=2, **self.rich)
        for layer in (ours, theirs):
            next(layer.parameters()).requires_grad_(False)
        assert_same(ours, theirs, x, case.edge_index)
        ours.requires_grad_(False)
        assert not ours(x, case.edge_index).requires_grad
        with torch.inference_mode():
            ours(x, case.edge_index)


class EdgeDuties(Base):
    @pytest.mark.parametrize("row", testing.ROWS, ids=str)
    @WEIGHTS
    def test_equals_the_parent_on_every_row(self, row, weights):
        case, x, _ = features(row)
        widths = (row.width, row.width)
        ours, theirs = pair_of_layers(self.layer, widths, 5, heads=2, **self.rich)
        plain = case.edge_index.long()
        assert_same(ours, theirs, x, case.edge_index, weights=weights, plain=plain)
        assert is_fused(ours)

    @pytest.mark.parametrize("form", EDGE_LISTS)
    @pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
    @WEIGHTS
    def test_every_form_of_an_edge_list(self, form, row, weights):
        case, x, _ = features(row)
        ours, theirs = pair_of_layers(self.layer, (8, 8), 5, heads=2)
        edges = EDGE_LISTS[form](case)
        plain = plain_edges(form, case, edges)
        assert_same(ours, theirs, x, edges, weights=weights, plain=plain)
        assert is_fused(ours)

    @pytest.mark.parametrize("form", EDGE_LISTS)
    @WEIGHTS
    def test_target_to_source(self, form, weights):
        case, x, _ = features(LOOPED)
        options = {"heads": 2, "flow": "target_to_source"}
        ours, theirs = pair_of_layers(self.layer, 8, 5, **options)
        edges = EDGE_LISTS[form](case)
        plain = plain_edges(form, case, edges)
        for given in (x, (x, case.x_dst)):
            assert_same(ours, theirs, given, edges, weights=weights, plain=plain)
            assert is_fused(ours)

    # Without self-loops to add, PyG gathers by int64 and int32 only.
    @pytest.mark.parametrize("form", [form for form in EDGE_LISTS if form != "int16"])
    @pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
    def test_returned_edges_are_those_of_pyg(self, form, row):
        case, x, _ = features(row)
        edges = EDGE_LISTS[form](case)
        layers = pair_of_layers(self.layer, (8, 8), 5, heads=2)
        found = [layer(x, edges, None, True) for layer in layers]
        (_, (ours, weight)), (_, (theirs, plain)) = found
        assert type(ours) is type(theirs)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(weight, plain)

    @ignore_sparse_warnings
    @pytest.mark.parametrize("form", MATRICES)
    @pytest.mark.parametrize("row", [SQUARE, LOOPED, BIPARTITE], ids=str)
    def test_torch_sparse_matrices(self, form, row):
        case, x, _ = features(row)
        ours, theirs = pair_of_layers(self.layer, (8, 8), 5, heads=2)
        edges = MATRICES[form](case)
        # PyG takes an uncoalesced matrix only where it adds self-loops.
        plain = edges.coalesce() if form == "coo_uncoalesced" else edges
        assert_same(ours, theirs, x, edges, plain=plain)
        assert is_fused(ours)

    @ignore_sparse_warnings
    def test_weights_of_a_matrix(self):
        case, x, _ = features(LOOPED)
        ours, theirs = pair_of_layers(self.layer, 8, 5, heads=2)
        for layer in (ours, theirs):
            layer.add_self_loops = False
        for form in ("coo", "csr"):
            edges = MATRICES[form](case)
            assert_same(ours, theirs, x, edges, weights=True)
            assert is_fused(ours)
            found = [layer(x, edges, None, True)[1][0] for layer in (ours, theirs)]
            assert found[0].layout is found[1].layout
            torch.testing.assert_close(*(matrix.to_dense() for matrix in found))

    @ignore_sparse_warnings
    def test_matrices_that_pyg_refuses_or_reads(self):
        case, x, _ = features(LOOPED)
        ours, theirs = pair_of_layers(self.layer, 8, 5)
        for layer in (ours, theirs):
            layer.add_self_loops = False
            with pytest.raises(ValueError, match="layout"):
                layer(x, coo(case).to_sparse_csc())
        assert_parents_path(ours, "refuses the layout torch.sparse_csc")
        options = {"edge_dim": EDGE_DIM}
        layers = pair_of_layers(self.layer, 8, 5, **options)
        for layer in layers:
            layer.add_self_loops = False
        matrix = coo(case, width=EDGE_DIM)
        assert torch.equal(*(layer(x, matrix) for layer in layers))
        assert_parents_path(layers[0], "a row of values per entry")

    @pytest.mark.skipif(
        _features.torch_sparse() is None, reason="torch_sparse is not installed"
    )
    @pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
    @WEIGHTS
    def test_sparse_tensor(self, row, weights):
        sparse = _features.torch_sparse()
        case, x, _ = features(row)
        src, dst = case.edge_index
        size = (case.num_dst, case.num_src)
        adj_t = sparse.SparseTensor(row=dst, col=src, sparse_sizes=size)
        ours, theirs = pair_of_layers(self.layer, (8, 8), 5, heads=2)
        outs = [layer(x, adj_t, None, True) for layer in (ours, theirs)]
        torch.testing.assert_close(*map(weights_in, outs))
        for layer in (ours, theirs):
            layer.add_self_loops = False
        assert_same(ours, theirs, x, adj_t, weights=weights)
        assert is_fused(ours)

    @pytest.mark.parametrize("row", [LOOPED, BIPARTITE], ids=str)
    @WEIGHTS
    def test_graph_counts_as_its_edges(self, row, weights):
        case, x, _ = features(row)
        ours, theirs = pair_of_layers(self.layer, (8, 8), 5, heads=2)
        graph, plain = case.graph(), case.edge_index
        assert_same(ours, theirs, x, graph, weights=weights, plain=plain)
        assert is_fused(ours)
        ours.register_message_forward_hook(lambda *_: None)
        assert_same(ours, theirs, x, graph, weights=weights, plain=plain)
        assert not is_fused(ours)

    def test_edges_that_the_parents_path_returns(self):
        case, x, _ = features(LOOPED)
        ours, theirs = pair_of_layers(self.layer, 8, 5, aggr="mean")
        for layer in (ours, theirs):
            layer.add_self_loops = False
        edges = case.edge_index.int()
        out, (found, weight) = ours(x, edges, None, True)
        plain, (_, plain_weight) = theirs(x, case.edge_index, None, True)
        assert found is edges
        torch.testing.assert_close((out, weight), (plain, plain_weight))
