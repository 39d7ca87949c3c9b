"""Bad input of attention layers, and what their errors must say."""

from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

from tests.nn.layer_checks import SQUARE, features, ignore_sparse_warnings
from tests.nn.layer_duties_checks import WEIGHTS, Base


def bad_calls():
    x, index = torch.randn(6, 8), torch.tensor([[0, 1], [2, 3]])
    wide, matrix = torch.randn(6, 9), torch.eye(6).to_sparse_coo()
    return {
        "width": (x[:, :7], index, r"'x' must have shape .*8\]"),
        "width_of_pair": ((x, wide), index, r"'x\[1\]' must have shape"),
        "no_destinations": ((x, None), index, r"'x\[1\]' must be a tensor"),
        "triple": ((x, x, x), index, "'x' must be a tensor or a pair"),
        "one_dimension": (x[0], index, r"shape \[num_nodes, 8\] \(got \[8"),
        "no_tensor": ((None, x), index, "'x' must be a tensor"),
        "dtype": (x.double(), index, "'x' must have the dtype"),
        "dtype_of_pair": ((x, x.half()), index, r"'x\[1\]' must have the dtype"),
        "integers": (x.long(), index, "'x' must have the dtype"),
        "float_index": (x, index.float(), "must hold integers"),
        "bool_index": (x, index.bool(), "must hold integers"),
        "shape": (x, index.new_zeros(3, 2), r"shape \[2, num_edges\]"),
        "one_row": (x, index[0], r"shape \[2, num_edges\]"),
        "batch": (x, index[None], r"\(got \[1, 2, 2\]"),
        "kind": (x, [[0, 1], [2, 3]], "'edge_index' must be"),
        "nothing": (x, None, "'edge_index' must be .* 'NoneType'"),
        "numpy": (x, index.numpy(), "'edge_index' must be .* 'ndarray'"),
        "columns": (x[:5], matrix, "'x' must have 6 rows"),
        "rows": ((x, x[:5]), matrix, r"'x\[1\]' must have 6 rows"),
        "too_large": (x, index + 4, "index 6 .* 6 destination nodes"),
        "negative": (x, index - 1, "index -1 .* 6 source nodes"),
        "device": (x.to("meta"), index, "device"),
    }


class ErrorDuties(Base):
    @ignore_sparse_warnings
    @pytest.mark.parametrize("name", list(bad_calls()))
    @WEIGHTS
    def test_bad_input_is_named(self, name, weights):
        x, edges, message = bad_calls()[name]
        layer = self.layer((8, 8), 3)
        args = [None, True] if weights and name not in ("columns", "rows") else []
        with pytest.raises(ValueError, match=message):
            layer(x, edges, *args)

    @pytest.mark.parametrize("heads", [0, -1, 1.5, "a", None])
    def test_number_of_heads(self, heads):
        with pytest.raises(ValueError, match="'heads' must be a positive integer"):
            self.layer(8, 3, heads=heads)

    def test_dropout_that_is_no_number(self):
        with pytest.raises(ValueError, match="'dropout' must be a number"):
            self.layer(8, 3, dropout="a")

    @pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
    def test_edge_index_knows_its_size(self, flow):
        case, x, _ = features(SQUARE, torch.float32)
        for size in ((24, 30), (30, 24)):
            edge_index = EdgeIndex(case.edge_index, sparse_size=size)
            for cls in (self.layer, self.layer._pyg_class):
                with pytest.raises(ValueError):
                    cls(8, 3, flow=flow)(x, edge_index)

    @ignore_sparse_warnings
    def test_matrices_that_do_not_fit(self):
        x, matrix = torch.randn(6, 8), torch.ones(4, 6).to_sparse_coo()
        square = torch.eye(6).to_sparse_csr()
        for cls in (self.layer, self.layer._pyg_class):
            with pytest.raises(ValueError):
                cls(8, 3)(x, matrix)
            with pytest.raises(ValueError):
                cls(8, 3, flow="target_to_source")(x, square)

    def test_graph_of_another_size(self):
        case, x, _ = features(SQUARE, torch.float32)
        with pytest.raises(ValueError, match="'x' must have 24 rows"):
            self.layer(8, 3)(x[:20], case.graph())
        with pytest.raises(ValueError, match="'flow' must be"):
            self.layer(8, 3, flow="target_to_source")(x, case.graph())
