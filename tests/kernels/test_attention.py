"""The edge-attention template against the reference, interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_tiga import functional, reference_attention
from pyg_tiga.impls import triton_attention, triton_attention_backward
from pyg_tiga.impls.attention_types import Options
from pyg_tiga.ops.attention import Call, attention_plan
from pyg_tiga.problem import Problem, Schedule
from pyg_tiga.testing import (
    ROWS,
    Row,
    assert_accurate,
    assert_gradient_accurate,
    make_case,
    row,
)
from tests.attention_checks import HUBS, NAMES, check, draw, run

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.mark.parametrize("shape", [(4, 8), (1, 16), (3, 5), (2, 33)])
@pytest.mark.parametrize(("edges", "columns"), [(1, 64), (2, 8), (32, 64)])
def test_tiles_of_any_size(
    edges: int,
    columns: int,
    shape: tuple[int, int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes that share out edges, and tiles longer than most rows."""
    from pyg_tiga.planner import dispatch

    chosen = Schedule(rows=1, edges=edges, slice=columns, warps=1, chunk=64)
    monkeypatch.setattr(dispatch, "default_schedule", lambda problem: chosen)
    drawn = draw(row("hub_row"), *shape, device=device)
    check(*drawn, self_loops=True)


@pytest.mark.parametrize("problem", ["unsorted", "hub_row"])
def test_scores_of_minus_infinity(problem: str, device: torch.device) -> None:
    """No weight beside other scores, NaN alone, and 0 where there is no edge at all."""
    graph, drawn, _ = draw(row(problem), 2, 4, device=device, terms=True)
    drawn.pop("loop_term")
    rows = graph.rows()
    degree = (rows.ptr[1:] - rows.ptr[:-1]).long()
    target = graph.edge_index()[1].long()
    lost = degree.argmax()  # All of them, in several pieces if it is a hub.
    drawn["edge_term"][target == lost] = -torch.inf
    others = (target != lost).nonzero().flatten()
    drawn["edge_term"][others[::3]] = -torch.inf
    mask = torch.ones_like(target, dtype=torch.bool)
    empty = int(target[others[0]])
    mask[target == empty] = False
    operands = [drawn[name] for name in NAMES[:3]]
    found = functional.additive_attention(
        graph, *operands, edge_term=drawn["edge_term"], edge_mask=mask
    )
    term = torch.where(mask.unsqueeze(1), drawn["edge_term"], -torch.inf)
    source = graph.edge_index()[0].long()
    pre = operands[1][source] + operands[2][target] + term
    scores = torch.nn.functional.leaky_relu(pre, 0.2).double()
    for node in range(graph.num_dst):
        edges = (target == node) & mask
        if not bool(edges.any()):
            assert bool((found[node] == 0).all())
            continue
        weight = scores[edges].softmax(0).unsqueeze(-1)
        wanted = (weight * operands[0][source[edges]].double()).sum(0)
        torch.testing.assert_close(
            found[node].double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-5
        )
    assert bool(found[lost].isnan().all())


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("problem", ROWS, ids=str)
def test_every_row(problem: Row, objective: str, device: torch.device) -> None:
    drawn = draw(problem, 2, 4, device=device)
    check(*drawn, self_loops=problem.square, objective=objective)


@pytest.mark.parametrize("shape", [(4, 8), (3, 5), (1, 16), (8, 4), (2, 33), (5, 1)])
def test_heads_and_channels_of_any_size(
    shape: tuple[int, int], device: torch.device
) -> None:
    check(*draw(row("power_law"), *shape, device=device), self_loops=True)


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize(
    ("name", "slope"),
    [*((name, 0.2) for name in HUBS), *(("hub_row", s) for s in (0.0, -0.5, 1.5))],
)
def test_terms_and_slopes(
    name: str, slope: float, objective: str, device: torch.device
) -> None:
    graph, drawn, grad = draw(row(name), 2, 4, device=device, terms=True)
    check(
        graph,
        drawn,
        grad,
        self_loops=True,
        negative_slope=slope,
        objective=objective,
    )
    del drawn["loop_term"]
    check(graph, drawn, grad, negative_slope=slope, objective=objective)


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize(
    ("name", "p"), [*((name, 0.3) for name in HUBS), ("hub_row", 1.0)]
)
def test_dropout_and_masks(
    name: str, p: float, objective: str, device: torch.device
) -> None:
    graph, drawn, grad = draw(row(name), 3, 4, device=device, terms=True)
    mask = torch.rand(graph.num_edges, device=device) < 0.7
    seed = torch.tensor([2**40 + 17], device=device)
    check(
        graph,
        drawn,
        grad,
        self_loops=True,
        dropout=p,
        seed=seed,
        edge_mask=mask,
        objective=objective,
    )


def test_positive_sums_and_handed_over_gradients_agree(device: torch.device) -> None:
    """Mean degrees on both sides of the number of channels take both forms."""
    for channels in (2, 32):
        graph, drawn, grad = draw(row("power_law"), 2, channels, device=device)
        check(graph, drawn, grad, self_loops=True)


def test_gradient_at_zero_pre_activation_is_the_slope(device: torch.device) -> None:
    graph, drawn, grad = draw(row("unsorted"), 2, 4, device=device)
    drawn["alpha_src"].zero_()
    drawn["alpha_dst"].zero_()
    for objective in ("time", "memory"):
        check(graph, drawn, grad, self_loops=True, objective=objective)


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_bit_identical_over_ten_runs(objective: str, device: torch.device) -> None:
    graph, drawn, grad = draw(row("hub_row"), 2, 4, device=device, terms=True)
    seed = torch.tensor([5], device=device)
    options = {"self_loops": True, "dropout": 0.4, "seed": seed, "objective": objective}
    call = functional.additive_attention
    # The interpreter is slow, and runs one program after the other anyway.
    times = 10 if device.type == "cuda" else 2
    runs = [run(call, graph, drawn, grad, **options) for _ in range(times)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, runs[0], strict=True))


def test_large_scores_keep_their_digits(device: torch.device) -> None:
    graph, drawn, grad = draw(row("hub_row"), 2, 4, device=device)
    drawn["alpha_src"] += 3000.0
    check(graph, drawn, grad, self_loops=True)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("channels", [2, 32])
def test_gat_attention_with_fused_scores(
    same: bool, channels: int, device: torch.device
) -> None:
    """The op that computes the scores itself equals the composition."""
    case = make_case(row("power_law"), torch.float32, device)
    graph = case.graph()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, other = random(40, 3, channels), random(40, 3, channels)
    att_src, att_dst = random(3, channels), random(3, channels)
    grad = random(40, 3, channels)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (x, other, att_src, att_dst)]
        a, b, s, d = leaves
        b = a if same else b
        if dtype == torch.float32:
            out = functional.gat_attention(graph, a, b, s, d, self_loops=True)
        else:
            scores_of = ((a * s).sum(-1), (b * d).sum(-1))
            out, _, _ = reference_attention.additive_attention(
                graph, a, *scores_of, num_loops=40
            )
        wanted = (a, s, d) if same else (a, b, s, d)
        grads = torch.autograd.grad(out, wanted, grad.to(dtype))
        results.append([out, *grads])
    for got, truth in zip(*results, strict=True):
        error = (got.double() - truth).abs().max() / truth.abs().max()
        assert float(error) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values(dtype: torch.dtype, device: torch.device) -> None:
    graph, drawn, grad = draw(row("power_law"), 2, 8, device=device)
    drawn["value"] = drawn["value"].to(dtype)
    call, reference = (
        functional.additive_attention,
        reference_attention.additive_attention,
    )
    found = run(call, graph, drawn, grad, self_loops=True)
    plain = run(reference, graph, drawn, grad, num_loops=40)
    double = {name: x.double() for name, x in drawn.items()}
    truth = run(reference, graph, double, grad.double(), num_loops=40)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == dtype
    assert_accurate(found[0], plain[0], truth[0])
    assert_gradient_accurate(found[1], plain[1], truth[1])


def test_problems_of_attention_name_their_form() -> None:
    graph = make_case(row("unsorted")).graph()
    call = Call(graph, Options(0.2), None, None, "time")
    plan = attention_plan("edge_attention", call, torch.zeros(24, 2, 4), torch.float32)
    assert isinstance(plan.problem, Problem)
    assert "additive, 2 heads" in plan.explain()
    assert plan.implementation is triton_attention.ATTENTION
    assert triton_attention_backward.ATTENTION_BACKWARD.why_not(plan.problem)
