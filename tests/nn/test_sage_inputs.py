"""What lets a call of SAGEConv pass without the checks one by one.

Of each way in which a call may be unusual: it does not pass, and gives what the checks
one by one give, words and all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn.aggr import SumAggregation

from pyg_tiga.nn import SAGEConv
from pyg_tiga.nn._dropin import _HOOKS, _METHODS, _REPLACEABLE
from pyg_tiga.nn._sage_inputs import usual_call
from pyg_tiga.relation.memo import relation_of
from tests.nn.sage_checks import (
    assert_same_one_by_one,
    ignore_sparse_warnings,
    sage_layer,
)

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
X = torch.arange(12.0).view(3, 4) / 7


def _hook(*_: object) -> None:
    pass


class _Tagged(Tensor):
    pass


def _set(name: str, value: Any) -> Callable[[SAGEConv], None]:
    return lambda layer: setattr(layer, name, value)


def _replace(name: str, lin: Callable[[], torch.nn.Module]) -> Callable[..., None]:
    return lambda layer: setattr(layer, name, lin())


def _own_forward(layer: SAGEConv) -> None:
    layer.lin_l.forward = functools.partial(torch.mul, 2)


def _parametrise(layer: SAGEConv) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer.lin_l)


def _plain_linear() -> torch.nn.Linear:
    torch.manual_seed(4)
    return torch.nn.Linear(4, 4)


def _pyg_linear(width: int = 4, **options: Any) -> torch.nn.Module:
    torch.manual_seed(4)
    return torch_geometric.nn.Linear(width, 4, **options)


def _explain_and_stop(layer: SAGEConv) -> None:
    layer.explain = True
    layer.explain = False


# What may happen to a layer whose calls were usual before.
ACTS: dict[str, Callable[[SAGEConv], Any]] = {
    "aggr": _set("aggr", "max"),
    "aggr without a fused form": _set("aggr", "std"),
    "several aggregations": _set("aggr", ["mean", "sum"]),
    "aggr module": _set("aggr_module", SumAggregation()),
    "aggr module hook": lambda layer: layer.aggr_module.register_forward_hook(_hook),
    "decomposed": _set("decomposed_layers", 2),
    "decomposed, unannounced": _set("_decomposed_layers", 2),
    "node_dim": _set("node_dim", 0),
    "explain": _set("explain", True),
    "explain, unannounced": _set("_explain", True),
    "after explain": _explain_and_stop,
    "project": _set("project", True),
    "hook before left": lambda layer: layer.lin_l.register_forward_pre_hook(_hook),
    "hook after left": lambda layer: layer.lin_l.register_forward_hook(_hook),
    "hook before right": lambda layer: layer.lin_r.register_forward_pre_hook(_hook),
    "hook after right": lambda layer: layer.lin_r.register_forward_hook(_hook),
    "backward hook": lambda layer: layer.lin_r.register_full_backward_hook(_hook),
    "backward pre-hook": lambda layer: layer.lin_l.register_full_backward_pre_hook(
        _hook
    ),
    "own forward": _own_forward,
    "parametrised": _parametrise,
    "another left": _replace("lin_l", _plain_linear),
    "another right": _replace("lin_r", _plain_linear),
    "right with a bias": _replace("lin_r", _pyg_linear),
    "wide left": _replace("lin_l", lambda: _pyg_linear(5)),
    "wide right": _replace("lin_r", lambda: _pyg_linear(5, bias=False)),
    "lazy right": _replace("lin_r", lambda: _pyg_linear(-1, bias=False)),
    "no left": lambda layer: delattr(layer, "lin_l"),
    "no right": lambda layer: delattr(layer, "lin_r"),
    "no weight": lambda layer: delattr(layer.lin_l, "weight"),
    "no right weight": lambda layer: delattr(layer.lin_r, "weight"),
    "no bias": lambda layer: delattr(layer.lin_l, "bias"),
    "dtype": lambda layer: layer.double(),
    "dtype of the left": lambda layer: layer.lin_l.double(),
    "dtype of the right": lambda layer: layer.lin_r.double(),
    **{
        name: lambda layer, name=name: getattr(layer, name).update({0: _hook})
        for name in _HOOKS
    },
    **{
        f"own {name}": lambda layer, name=name: setattr(
            layer, name, getattr(layer, name)
        )
        for name in sorted(_REPLACEABLE)
    },
}


def test_message_passing_has_no_other_hooks() -> None:
    # Not an instance of the class itself, in which PyG would put methods for all.
    bare = type("Bare", (torch_geometric.nn.MessagePassing,), {})
    state = vars(bare())
    own = {name for name in state if "_forward_" in name} - set(vars(torch.nn.Module()))
    assert set(_HOOKS) == own


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ACTS)
def test_unusual_layers_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> SAGEConv:
        layer = sage_layer()
        layer(X, EDGES)
        assert usual_call(layer, X, EDGES) is not None
        ACTS[name](layer)
        return layer

    assert usual_call(make(), X, EDGES) is None
    assert_same_one_by_one(monkeypatch, make, X, EDGES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SAGEConv(-1, 4),
        lambda: SAGEConv((4, -1), 4),
        lambda: SAGEConv(4, 4, aggr="min"),
        lambda: SAGEConv(4, 4, aggr="lstm"),
        lambda: SAGEConv(4, 4, project=True),
        lambda: SAGEConv((5, 4), 4),
        lambda: SAGEConv((4, 5), 4),
        lambda: SAGEConv(4, 4, node_dim=0),
    ],
)
def test_unusual_options_are_looked_at(
    make: Callable[[], SAGEConv], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usual_call(make(), X, EDGES) is None
    assert_same_one_by_one(monkeypatch, make, X, EDGES)


@pytest.mark.parametrize("name", [*_METHODS, "propagate"])
def test_overridden_methods_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = getattr(torch_geometric.nn.SAGEConv, name)
    kind = type("Kind", (SAGEConv,), {name: functools.wraps(stock)(_call(stock))})
    assert usual_call(kind(4, 4), X, EDGES) is None
    assert_same_one_by_one(monkeypatch, lambda: kind(4, 4), X, EDGES)
    layer = sage_layer()
    assert usual_call(layer, X, EDGES) is not None
    monkeypatch.setattr(SAGEConv, name, _call(stock), raising=False)
    assert usual_call(layer, X, EDGES) is None
    monkeypatch.undo()
    assert usual_call(layer, X, EDGES) is not None


def _call(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return call


INPUTS: dict[str, tuple[Any, ...]] = {
    "size": (X, EDGES, (3, 3)),
    "wrong size": (X, EDGES, (4, 3)),
    "pair": ((X, X), EDGES),
    "pair without destinations": ((X, None), EDGES),
    "batch": (X.expand(2, 3, 4), EDGES),
    "vector": (X[0], EDGES),
    "no tensor": (X.tolist(), EDGES),
    "nothing": (None, EDGES),
    "subclass": (X.as_subclass(_Tagged), EDGES),
    "narrow": (X[:, :3], EDGES),
    "double": (X.double(), EDGES),
    "integers": (X.long(), EDGES),
    "no data": (X.to("meta"), EDGES),
    "no data at all": (X.to("meta"), EDGES.to("meta")),
    "edges without data": (X, EDGES.to("meta")),
    "float edges": (X, EDGES.float()),
    "bool edges": (X, EDGES.bool()),
    "transposed edges": (X, EDGES.t()),
    "one row of edges": (X, EDGES[0]),
    "three rows of edges": (X, EDGES.repeat(2, 1)[:3]),
    "a batch of edges": (X, EDGES[None]),
    "list of edges": (X, EDGES.tolist()),
    "no edges": (X, None),
    "EdgeIndex": (X, torch_geometric.EdgeIndex(EDGES, sparse_size=(3, 3))),
    "graph": (X, relation_of(EDGES, 3, 3)),
    "matrix": (X, torch.eye(3).to_sparse()),
    "subclass of edges": (X, EDGES.as_subclass(_Tagged)),
    "parameter of edges": (X, torch.nn.Parameter(EDGES, requires_grad=False)),
}


@ignore_sparse_warnings
@pytest.mark.parametrize("name", INPUTS)
def test_unusual_inputs_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = INPUTS[name]
    if len(inputs) == 2:
        assert usual_call(sage_layer(), *inputs) is None
    assert_same_one_by_one(monkeypatch, sage_layer, *inputs)


class _Watched(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _global(register: str, hook: Callable[..., Any] = _hook) -> Iterator[None]:
    handle = getattr(torch.nn.modules.module, register)(hook)
    try:
        yield
    finally:
        handle.remove()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "forward differentiation": torch.autograd.forward_ad.dual_level,
    "dispatch mode": _Watched,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    **{
        name: functools.partial(_global, name)
        for name in (
            "register_module_forward_pre_hook",
            "register_module_forward_hook",
            "register_module_full_backward_pre_hook",
            "register_module_full_backward_hook",
        )
    },
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", MODES)
def test_unusual_modes_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = sage_layer()
    with MODES[name]():
        assert usual_call(layer, X, EDGES) is None
    assert usual_call(layer, X, EDGES) is not None
    if name != "fake tensors":
        assert_same_one_by_one(monkeypatch, sage_layer, X, EDGES, mode=MODES[name])


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:`torch.jit")
def test_transforms_and_tracers_are_looked_at() -> None:
    layer, found = sage_layer(), []

    def call(x: Tensor) -> Tensor:
        found.append(usual_call(layer, x, EDGES))
        return x.sum()

    torch.func.grad(call)(X)
    torch.func.vmap(call)(X.expand(2, 3, 4))
    torch.func.jvp(call, (X,), (X,))
    torch.func.functionalize(call)(X)
    torch.jit.trace(call, (X,), check_trace=False)
    torch.compile(lambda x: torch.compiler.is_compiling() and x, backend="eager")(X)
    assert found == [None] * 5
