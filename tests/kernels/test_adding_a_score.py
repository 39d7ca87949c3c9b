"""The score of docs/adding_a_score.md runs, and the document shows what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.nn import SuperGATConv

from pyg_tiga.impls.attention_types import Operands, Options, Wanted
from tests.kernels.vector_cases import run, tangled

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels")
from tests.kernels import supergat_score

ROOT = Path(__file__).parents[2]
HEADS, CHANNELS, SLOPE = 2, 3, 0.2
MOST_LINES = 30


@pytest.mark.parametrize("hands_over", [True, False])
def test_it_is_pygs(hands_over, device, monkeypatch):
    from pyg_tiga.kernels.scores import SCORES

    monkeypatch.setitem(SCORES, "supergat", supergat_score.SUPERGAT)
    graph = tangled(device)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device).requires_grad_()

    x_dst, x_src = (draw(n, HEADS, CHANNELS) for n in (graph.num_dst, graph.num_src))
    layer = SuperGATConv(4, CHANNELS, HEADS, dropout=0.0, negative_slope=SLOPE)
    layer = layer.to(device, torch.float64)
    source, target = (end.long() for end in graph.ends())
    ends = (x_dst[target], x_src[source])
    weight = layer.get_attention(target, *ends, graph.num_dst)
    expected = x_dst.new_zeros(graph.num_dst, HEADS, CHANNELS)
    expected = expected.index_add(0, target, weight.unsqueeze(-1) * x_src[source])
    grad = draw(graph.num_dst, HEADS, CHANNELS).detach()
    wanted = torch.autograd.grad(
        expected, (x_dst, x_src, layer.att_r, layer.att_l), grad
    )

    def operand(x, att):
        number = (x * att).sum(-1, keepdim=True)
        return torch.cat([number, x], dim=-1)  # [N, H, 1 + C]

    row, col = operand(x_dst, layer.att_r), operand(x_src, layer.att_l)
    operands = Operands(*[x.detach().float() for x in (x_src, row, col)])
    state, found = run(
        graph,
        operands,
        grad.float(),
        Options(SLOPE, score="supergat"),
        Wanted(hands_over=hands_over),
    )
    torch.testing.assert_close(state.out.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(
        (row, col, x_src),
        (x_dst, x_src, layer.att_r, layer.att_l),
        [x.double() for x in (found.row, found.col, found.value)],
    )
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)


def test_the_document_shows_it():
    source = Path(supergat_score.__file__).read_text()
    code = source.split("# begin\n")[1].split("# end\n")[0].strip()
    document = (ROOT / "docs" / "adding_a_score.md").read_text()
    assert f"```python\n{code}\n```" in document
    functions = code.split("SUPERGAT = ")[0]
    lines = [line for line in functions.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
