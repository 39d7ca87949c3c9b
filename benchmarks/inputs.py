"""Seeded features and cotangents of a case, in as many sets as rotation needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import measure

Results = tuple[Tensor, ...]
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Input sets of one case: features ``[N, F]`` and cotangents ``[N, F]``."""

    x: list[Tensor]
    grad: list[Tensor]

    @property
    def sets(self) -> int:
        """How many sets there are."""
        return len(self.x)

    def to(self, device: torch.device | str) -> Inputs:
        """One set of them on another device, as new leaves."""
        x = self.x[0].detach().to(device).requires_grad_(self.x[0].requires_grad)
        return Inputs([x], [self.grad[0].to(device)])


def draw_inputs(
    num_nodes: int,
    width: int,
    dtype: torch.dtype,
    *,
    phase: str,
    device: torch.device,
    seed: int,
    distinct: bool = False,
) -> Inputs:
    """Draw the inputs of a case; ``distinct`` makes the values of a column differ."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (num_nodes, width)
    sets = measure.input_sets(num_nodes * width * dtype.itemsize, device)
    train = phase != "forward"
    draw = _distinct if distinct else _normal
    x = [draw(shape, generator).to(dtype) for _ in range(sets)]
    for features in x:
        features.requires_grad_(train)
    grad = [_normal(shape, generator).to(dtype) for _ in range(sets if train else 1)]
    return Inputs(x, grad)


@dataclass(frozen=True)
class AttentionInputs:
    """Input sets of an attention core; all but the cotangents require gradients."""

    value: list[Tensor]  # [N, H, C] each
    alpha_src: list[Tensor]  # [N, H] each
    alpha_dst: list[Tensor]  # [N, H] each
    grad: list[Tensor]  # [N, H, C] each

    @property
    def sets(self) -> int:
        """How many sets there are."""
        return len(self.value)

    def leaves(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Values and scores of one set."""
        return self.value[i], self.alpha_src[i], self.alpha_dst[i]


def draw_attention(
    num_nodes: int,
    heads: int,
    channels: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    seed: int,
) -> AttentionInputs:
    """Draw the operands of an attention core, for every phase alike."""
    generator = torch.Generator(device=device).manual_seed(seed)
    wide, narrow = (num_nodes, heads, channels), (num_nodes, heads)
    sets = measure.input_sets(num_nodes * heads * channels * dtype.itemsize, device)

    def drawn(shape: tuple[int, ...], grad: bool) -> list[Tensor]:
        tensors = [_normal(shape, generator).to(dtype) for _ in range(sets)]
        return [tensor.requires_grad_(grad) for tensor in tensors]

    scores = drawn(narrow, True), drawn(narrow, True)
    return AttentionInputs(drawn(wide, True), *scores, drawn(wide, False))


@dataclass(frozen=True)
class VectorInputs:
    """Input sets of a core whose scores come from two vectors, and cotangents."""

    leaves: list[tuple[Tensor, ...]]  # each requires a gradient
    grad: list[Tensor]  # [N, H, C] each

    @property
    def sets(self) -> int:
        """How many sets there are."""
        return len(self.leaves)


def draw_vectors(
    num_nodes: int,
    heads: int,
    channels: int,
    dtype: torch.dtype,
    *,
    count: int,
    has_att: bool,
    device: torch.device,
    seed: int,
) -> VectorInputs:
    """Draw ``count`` vectors a node, for every phase alike.

    With ``has_att`` one parameter ``[1, H, C]`` follows them in every set, the same.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (num_nodes, heads, channels)
    nbytes = (count + 1) * num_nodes * heads * channels * dtype.itemsize
    sets = measure.input_sets(nbytes, device)

    def drawn() -> Tensor:
        return _normal(shape, generator).to(dtype)

    att: tuple[Tensor, ...] = ()
    if has_att:
        # Scores of about unit size, as layers have them at their start.
        weights = _normal((1, heads, channels), generator) * channels**-0.5
        att = (torch.nn.Parameter(weights.to(dtype)),)
    leaves = [
        (*(drawn().requires_grad_() for _ in range(count)), *att) for _ in range(sets)
    ]
    return VectorInputs(leaves, [drawn() for _ in range(sets)])


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _distinct(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    # Without ties a maximum has one gradient, whichever edge an implementation picks.
    num_nodes, width = shape
    device = generator.device
    order = torch.randperm(num_nodes, generator=generator, device=device)
    # And without zeros: PyTorch starts its output at 0, and where the maximum is 0
    # counts that start as one more tie.
    base = (order.double() * 2 + 0.5) / num_nodes - 1
    shift = torch.randint(num_nodes, (width,), generator=generator, device=device)
    place = torch.arange(num_nodes, device=device)[:, None] + shift
    return base.float()[place.remainder_(num_nodes)]  # [N, F]


def runner(
    forward: Forward, inputs: Inputs, phase: str, parameters: Sequence[Tensor] = ()
) -> Callable[[int], Results]:
    """A call on input set i: the output, and the gradients when training."""
    return phase_runner(
        lambda i: forward(inputs.x[i]),
        lambda i: (inputs.x[i], *parameters),
        inputs.grad,
        phase,
    )


def phase_runner(
    forward: Callable[[int], Tensor],
    leaves: Callable[[int], Sequence[Tensor]],
    grad: Sequence[Tensor],
    phase: str,
) -> Callable[[int], Results]:
    """A call of one phase on input set i: the output, and the gradients of the leaves.

    In ``backward``, the forward ran before: once for each set and stream, because a
    capture takes in only what belongs to its stream.
    """
    held: dict[tuple[int, int], Tensor] = {}

    def infer(i: int) -> Results:
        with torch.no_grad():
            return (forward(i),)

    def train(i: int) -> Results:
        out = forward(i)
        return (out, *torch.autograd.grad(out, leaves(i), grad[i]))

    def back(i: int) -> Results:
        place = i, measure.stream_id()
        if place not in held:
            # A graph of another stream would keep the leaves' nodes there, where a
            # capture on this one may not wait for them.
            for other in [key for key in held if key[1] != place[1]]:
                del held[other]
            held[place] = forward(i)
        out = held[place]
        found = torch.autograd.grad(out, leaves(i), grad[i], retain_graph=True)
        return (out, *found)

    return {"forward": infer, "train": train, "backward": back}[phase]
