"""Layers that run as one node of compiled code (`native/node.h`), and its other road.

A layer is a `Replay` of its forward, a function that gives its gradients from Python,
and one that finds what its backward records. Its node and its
`torch.autograd.Function` keep the same tensors in the same order: of what the forward
is called with, and of all that it gives but its first result, what wanted gradients
read (`keeping`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pyg_tiga import native
from pyg_tiga.impls.launch import current_stream, is_current, is_watched
from pyg_tiga.impls.replay import Recorded, Replay
from pyg_tiga.ops.keeping import Reads

Gradients = Callable[[Any, Tensor], Sequence[Tensor | None]]
# Which of the tensors are None.
Absent = tuple[bool, ...]


class Kept:
    """What a call kept, as autograd's context of a function has it.

    Args:
        owner: The relation, and whatever else the layer's functions look for.
        saved: The tensors, None where one is not kept. Where gradients are to be
            differentiated again, inputs of which one is wanted have an anchor instead.
        needs: Which gradients are wanted.
        edited: Whether the result was kept and is not as it was.
    """

    __slots__ = ("edited", "needs_input_grad", "owner", "saved_tensors")

    def __init__(
        self, owner: Any, saved: list[Any], needs: list[bool], edited: bool
    ) -> None:
        self.owner, self.saved_tensors = owner, saved
        self.needs_input_grad, self.edited = tuple(needs), edited

    def maybe_clear_saved_tensors(self) -> None:
        """Let go of them: compiled code keeps them if they are needed again."""
        self.saved_tensors.clear()


def make_formula(
    forward: Replay,
    reads: Reads,
    gradients: Gradients,
    find: Callable[[Any, Tensor, Absent], Recorded | None],
    name: str,
) -> Any:
    """A layer as a function of a stream, an owner and tensors; see `run_as_node`.

    Args:
        forward: Its work.
        reads: For each of the first tensors that it is called with, which may have
            gradients: what these read, as places among all that may be kept.
        gradients: Gives them for a context (`Kept`, or that of a function) and the
            gradient of the result.
        find: Gives, after that and for the same arguments and which tensors are None,
            the work that forms the gradients of the result's and of all that is kept,
            or None.
        name: Of the node.

    Returns:
        None as long as the forward is not recorded.
    """
    module = None if forward.steps is None else native.compiled()
    if module is None:
        return None

    def otherwise(
        owner: Any,
        saved: list[Any],
        grad: Tensor,
        needs: list[bool],
        edited: bool,
        usual: bool,
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Gradients for which there are no steps, and steps for the next ones."""
        absent = tuple([value is None for value in saved])
        kept = Kept(owner, saved, needs, edited)
        found = tuple(gradients(kept, grad))
        work = find(kept, grad, absent) if usual else None
        if work is None:
            return found, None
        there = [True, *[not gone for gone in absent]]
        return found, work.make(grad.get_device(), there)

    return module.Formula(forward.steps, reads, otherwise, name)


def run_as_node(
    formula: Any, owner: Any, x: Tensor, *rest: Tensor | None
) -> Tensor | None:
    """The result with its backward in compiled code; None where that cannot be.

    What the kernels read of the relation must be safe to read on the current stream.
    """
    index = x.get_device()
    if formula is None or not is_current(index) or is_watched():
        return None
    return formula(current_stream(index), owner, x, *rest)
