"""What all drop-in layers share: when to take the parent's path, and saying so.

A drop-in subclasses its PyG namesake and overrides ``forward``. Where the semantics of
the module cannot be honoured by a fused call (hooks, overridden methods, unusual
options), ``forward`` is the parent's own; the reason is kept for
:meth:`DropIn.explain_plan`, logged once, and raised under ``PYG_TIGA_STRICT=1``.
"""

from __future__ import annotations

import functools
import inspect
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._C import _are_functorch_transforms_active, _get_tracing_state
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import MessagePassing, aggr

from pyg_tiga._settings import settings
from pyg_tiga.errors import UnsupportedError, log_fallback
from pyg_tiga.functional import last_plan
from pyg_tiga.nn._linear import is_plain, is_untouched, module_of

if TYPE_CHECKING:
    from pyg_tiga.planner import Plan

__all__ = ["DropIn", "ParentSignature"]

FUSED_AGGREGATIONS: dict[str, type[torch.nn.Module]] = {
    "sum": aggr.SumAggregation,
    "add": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
}

_METHODS = ("message", "aggregate", "update", "message_and_aggregate", "edge_update")
_REPLACEABLE = frozenset((*_METHODS, "propagate", "edge_updater"))
_HOOKS = tuple(
    f"_{name}_forward_{kind}"
    for name in (
        "propagate",
        "message",
        "aggregate",
        "message_and_aggregate",
        "edge_update",
    )
    for kind in ("pre_hooks", "hooks")
)
# One call for many attributes: lookups one by one are half of a usual call's checks.
_methods_of = attrgetter(*_METHODS)
_listeners_in = itemgetter(*_HOOKS, "_explain")


class ParentSignature:
    """The arguments that a layer's parent passes to ``propagate`` or ``edge_updater``.

    PyG writes these methods of a class from comments in the class's source, and looks
    sources up by the bare name of a class. A subclass that has its parent's name, or no
    such comment, would get methods without arguments; this class attribute, which PyG
    asks first, gives all of them the right ones. A subclass that does write the
    comment, because it calls the method in its own way, is left to PyG.
    """

    def __init__(self, name: str, **types: str) -> None:
        self._comment = f"{name}_type:"
        self._types = types

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: object, cls: type) -> dict[str, str]:
        heirs = cls.__mro__[: cls.__mro__.index(self._owner)]
        if any(self._comment in _source(heir) for heir in heirs):
            raise AttributeError(f"'{cls.__name__}' writes its own '{self._comment}'")
        return self._types


@functools.cache
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""  # Typed at a prompt or made at run time: it cannot hold comments.


class _Record:
    """What a layer did in its last call.

    Copies and pickles keep the words only: a saved model must not depend on how the
    planner looks inside.
    """

    __slots__ = ("_text", "plan", "reasons")

    def __init__(self, text: str = "") -> None:
        self.plan: Plan | None = None
        self.reasons: list[str] = []
        self._text = text

    def __reduce__(self) -> tuple[type[_Record], tuple[str]]:
        return _Record, (self.text(),)

    def text(self) -> str:
        if self.reasons:
            lines = ["runs: the PyG parent's own path"]
            return "\n".join(lines + [f"because: {reason}" for reason in self.reasons])
        if self.plan is not None:
            return self.plan.explain()
        return self._text or "has not run yet"


class _Explain:
    """PyG's ``explain`` attribute while it is unset: falsy, but callable."""

    __slots__ = ("_layer",)

    def __init__(self, layer: DropIn) -> None:
        self._layer = layer

    def __bool__(self) -> bool:
        return False

    def __call__(self) -> str:
        return self._layer.explain_plan()


class DropIn(MessagePassing):
    """Mixin of the drop-in layers; stands before the PyG layer among the bases."""

    _pyg_class: ClassVar[type[MessagePassing]]
    """The PyG layer."""
    _fused_aggregations: ClassVar[tuple[str, ...]] = tuple(FUSED_AGGREGATIONS)
    """Values of ``aggr`` that have a fused form."""
    _fused_node_dim: ClassVar[int] = -2
    """The value of ``node_dim`` that the fused form stands for."""
    _generated: ClassVar[tuple[str, ...]] = ("propagate",)
    """The methods that the parent calls and PyG generates."""
    _overrides: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Later is too late: PyG generates these methods for each class that is used.
        mixins = [base for base in cls.__mro__ if not issubclass(base, MessagePassing)]
        found = {
            name
            for name in cls._generated
            if any(name in vars(base) for base in (cls, *mixins))
        }
        cls._overrides = tuple({*cls._overrides, *found})

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Generate PyG's methods, and keep the right originals beside them.

        Explain mode and decomposed layers run the originals. What PyG keeps as such, in
        a class whose parent is used already, is what it generated for the parent.
        """
        super()._set_jittable_templates(raise_on_error)
        cls = type(self)
        for name in self._generated:
            known = getattr(cls, f"_orig_{name}")
            original = _original(cls, name, known)
            if original is not known:
                setattr(cls, f"_orig_{name}", original)

    def _finish_init(self) -> None:
        """Call at the end of a layer's constructor."""
        self._record = _Record()
        reasons = self._option_reasons()
        if reasons and settings().strict:
            raise UnsupportedError(
                f"'{type(self).__name__}' cannot run fused with these options",
                {"fused": reasons},
            )

    def explain_plan(self) -> str:
        """Say which path and which plan the last call took, and why."""
        return f"{self!r}\n{self._record.text()}"

    @property
    def explain(self) -> bool | _Explain:
        """PyG's explanation mode; while it is unset, also callable.

        ``layer.explain()`` is :meth:`explain_plan`. As soon as an explainer of PyG has
        set the mode, the attribute is the plain bool again that PyG expects.
        """
        mode = self._explain
        return _Explain(self) if mode is None else mode

    @explain.setter
    def explain(self, mode: bool | None) -> None:
        MessagePassing.explain.fset(self, mode)

    def _is_usual(self) -> bool:
        """Whether there is certainly no reason for the parent's path.

        :meth:`_parent_reasons` in one condition: this runs at every call, while the
        words are looked for where there is something to say. For eager calls only.
        """
        cls, state, aggr = type(self), self.__dict__, self.aggr
        return not (
            aggr not in cls._fused_aggregations
            or not is_untouched(
                state["_modules"].get("aggr_module"), FUSED_AGGREGATIONS[aggr]
            )
            or _has_any_global_hook()
            or state["_decomposed_layers"] != 1
            or self.node_dim != cls._fused_node_dim
            or any(_listeners_in(state))
            or _methods_of(cls) != _methods_of(cls._pyg_class)
            or cls.propagate is not cls._jinja_propagate
            or (
                "edge_updater" in cls._generated
                and cls.edge_updater is not cls._jinja_edge_updater
            )
            or cls._overrides
            or not state.keys().isdisjoint(_REPLACEABLE)
            or _get_tracing_state() is not None
            or _are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        )

    def _has_hooks(self) -> bool:
        """Whether somebody listens to message passing."""
        return any(getattr(self, name) for name in _HOOKS)

    def _parent_reasons(self) -> list[str]:
        """Every reason for which this call must be the parent's; empty if fused.

        Runs at every call, so it looks at attributes only.
        """
        if not torch.compiler.is_compiling() and self._is_usual():
            return []
        reasons = self._option_reasons()
        if self._has_hooks():
            reasons.append("message passing hooks are registered")
        if self._explain:
            reasons.append("explain mode is on")
        reasons += self._override_reasons()
        if not torch.compiler.is_compiling():
            reasons += _mode_reasons()
        elif torch.onnx.is_in_onnx_export():
            reasons.append("the model is exported to ONNX")
        return reasons

    def _option_reasons(self) -> list[str]:
        """Reasons that lie in constructor options (or the attributes they became)."""
        reasons = []
        name = self.aggr
        stock = FUSED_AGGREGATIONS.get(name) if isinstance(name, str) else None
        if stock is None or name not in self._fused_aggregations:
            reasons.append(f"aggr={name!r} has no fused form")
        elif not is_plain(module_of(self, "aggr_module"), stock):
            reasons.append(f"'aggr_module' is not the plain {stock.__name__}")
        if self._decomposed_layers != 1:
            reasons.append(f"decomposed_layers={self._decomposed_layers}")
        if self.node_dim != self._fused_node_dim:
            reasons.append(f"node_dim={self.node_dim}")
        return reasons

    def _override_reasons(self) -> list[str]:
        """Names the methods that a subclass or an instance has replaced."""
        cls, stock, own = type(self), self._pyg_class, self.__dict__
        names = [
            name
            for name in _METHODS
            if name in own or getattr(cls, name) is not getattr(stock, name)
        ]
        for name in self._generated:
            method = getattr(cls, f"_jinja_{name}")
            if (
                name in cls._overrides
                or getattr(cls, name) is not method
                or (name in own and self._is_replaced(name))
            ):
                names.append(name)
        return [f"'{name}' is overridden" for name in names]

    def _is_replaced(self, name: str) -> bool:
        """Whether a generated method in the instance is not one that PyG put there.

        PyG switches between two in explain mode and for decomposed layers.
        """
        cls = type(self)
        stock = (getattr(cls, f"_jinja_{name}"), getattr(cls, f"_orig_{name}"))
        return getattr(self.__dict__[name], "__func__", None) not in stock

    def _note_fused(self) -> None:
        """Keep the plan that has just run."""
        record = self._record
        record.plan = last_plan()
        if record.reasons:
            record.reasons = []

    def _note_parent(self, reasons: list[str]) -> None:
        """Keep, log and, in strict mode, raise the reasons for the parent's path.

        Raises:
            UnsupportedError: ``PYG_TIGA_STRICT`` is set.
        """
        self._record.reasons = reasons
        name = type(self).__name__
        if settings().strict:
            raise UnsupportedError(f"'{name}' cannot run fused", {"fused": reasons})
        for reason in reasons:
            log_fallback(name, reason)

    def __prepare_scriptable__(self) -> MessagePassing:
        """Give TorchScript a twin that runs PyG's own ``forward``.

        The twin shares all parameters and keeps what subclasses override. A subclass
        with its own ``forward`` is scripted as it stands.
        """
        twin_class = _scriptable_class(type(self))
        if twin_class is None:
            return self
        twin = twin_class.__new__(twin_class)
        twin.__dict__.update(self.__dict__)
        # TorchScript puts scripted submodules into this dictionary.
        twin.__dict__["_modules"] = dict(self._modules)
        del twin.__dict__["_record"]
        return twin


def _original(cls: type, name: str, method: Any) -> Any:
    """The method in whose place PyG put a generated one, if it is generated."""
    for base in cls.__mro__:
        own = vars(base)
        if own.get(f"_jinja_{name}") is method:
            original = own[f"_orig_{name}"]
            if original is not method:
                return _original(cls, name, original)
    return method


@functools.cache
def _scriptable_class(cls: type[DropIn]) -> type[MessagePassing] | None:
    own = next(base for base in cls.__mro__ if "_pyg_class" in vars(base))
    if cls.forward is not own.forward:
        return None
    body = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "forward": own._pyg_class.forward,
        "explain": MessagePassing.explain,
        "__annotations__": _annotations(cls, own),
    }
    return type(cls.__name__, (cls,), body)


def _annotations(cls: type[DropIn], own: type[DropIn]) -> dict[str, Any]:
    """The types of attributes that TorchScript has to know.

    It looks no further than at the first class that states any: that is a mixin here,
    and not the layer of PyG.
    """
    heirs = cls.__mro__[: cls.__mro__.index(own)]
    types: dict[str, Any] = {}
    for stated in map(inspect.get_annotations, (own._pyg_class, *reversed(heirs))):
        types |= stated
    return types


def _mode_reasons() -> list[str]:
    """Reasons that lie in the mode PyTorch is in."""
    reasons = []
    if _get_tracing_state() is not None:
        reasons.append("the model is traced by torch.jit")
    if _are_functorch_transforms_active():
        reasons.append("a torch.func transform is active")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode differentiation is active")
    return reasons
