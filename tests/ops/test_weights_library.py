"""Attention weights on the compiled road: opcheck, and what the eager road gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from pyg_tiga import functional
from pyg_tiga.nn import GATConv
from pyg_tiga.ops import weights_library as library

NODES, EDGES, HEADS = 9, 30, 2
KINDS = {
    "plain": {},
    "terms": {"terms": True},
    "masked": {"masked": True, "dropout": 0.5},
    "no loops": {"loops": False},
}


class Given:
    """A call's tensors."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        terms: bool = False,
        masked: bool = False,
        dropout: float = 0.0,
        loops: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).requires_grad_()

        self.edge_index = torch.randint(NODES, (2, EDGES), generator=generator)
        self.alphas = (draw(NODES, HEADS), draw(NODES, HEADS))
        both = (draw(EDGES, HEADS), draw(NODES, HEADS) if loops else None)
        self.terms = both if terms else (None, None)
        self.mask = torch.arange(EDGES) % 4 > 0 if masked else None
        self.seed = torch.tensor([9]) if dropout else None
        self.loops, self.dropout = loops, dropout

    def leaves(self) -> list[Tensor]:
        return [x for x in (*self.alphas, *self.terms) if x is not None]

    def call(self, edge_index: Tensor, *leaves: Tensor | None) -> Any:
        return functional.additive_attention_weights(
            edge_index,
            *leaves[:2],
            edge_term=leaves[2],
            loop_term=leaves[3],
            self_loops=self.loops,
            edge_mask=self.mask,
            dropout=self.dropout,
            seed=self.seed,
        )

    def arguments(self) -> tuple[Any, ...]:
        relation = ([self.edge_index], "coo", NODES, NODES)
        numbers = (0.2, NODES if self.loops else 0, self.dropout)
        return (*relation, *self.alphas, *self.terms, self.mask, self.seed, *numbers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str, dtype: torch.dtype) -> None:
    arguments = Given(dtype, **KINDS[kind]).arguments()
    torch.library.opcheck(library.forward_op, arguments)
    found = library.forward_op(*arguments)
    given = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, arguments)
    grads = [torch.ones_like(x) for x in found]
    with torch.no_grad():
        args = (*given[:4], *grads, *given[4:])
        torch.library.opcheck(library.backward_op, args)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_weights_are_the_eager_ones(kind: str) -> None:
    given = Given(**KINDS[kind])
    compiled = torch.compile(given.call, fullgraph=True, backend="aot_eager")
    results = []
    for call in (given.call, compiled):
        out = call(given.edge_index, *given.alphas, *given.terms)
        loss = sum((x * x.detach().cumsum(0)).sum() for x in out)
        results.append([*out, *torch.autograd.grad(loss, given.leaves())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("loops", [True, False])
def test_a_layer_gives_weights_in_one_graph(loops: bool) -> None:
    layer = GATConv(4, 3, heads=2, add_self_loops=loops)
    theirs = pyg.GATConv(4, 3, heads=2, add_self_loops=loops)
    theirs.load_state_dict(layer.state_dict())
    x, edge_index = torch.randn(NODES, 4), Given().edge_index
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, (edges, weights) = compiled(x, edge_index, return_attention_weights=True)
    expected, (their_edges, their_weights) = theirs(
        x, edge_index, return_attention_weights=True
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(edges, their_edges)
    torch.testing.assert_close(weights, their_weights)
    inputs = [layer.lin.weight, layer.att_src, layer.att_dst]
    others = [theirs.lin.weight, theirs.att_src, theirs.att_dst]
    grads = torch.autograd.grad(weights.square().sum(), inputs)
    their_grads = torch.autograd.grad(their_weights.square().sum(), others)
    torch.testing.assert_close(grads, their_grads)
