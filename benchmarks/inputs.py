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


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _distinct(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    # Without ties a maximum has one gradient, whichever edge an implementation picks.
    num_nodes, width = shape
    device = generator.device
    order = torch.randperm(num_nodes, generator=generator, device=device)
    base = (order.double() * 2 + 1) / num_nodes - 1
    shift = torch.randint(num_nodes, (width,), generator=generator, device=device)
    place = torch.arange(num_nodes, device=device)[:, None] + shift
    return base.float()[place.remainder_(num_nodes)]  # [N, F]


def runner(
    forward: Forward, inputs: Inputs, phase: str, parameters: Sequence[Tensor] = ()
) -> Callable[[int], Results]:
    """A call on input set i: the output, and the gradients when training."""

    def infer(i: int) -> Results:
        with torch.no_grad():
            return (forward(inputs.x[i]),)

    def train(i: int) -> Results:
        x = inputs.x[i]
        out = forward(x)
        return (out, *torch.autograd.grad(out, (x, *parameters), inputs.grad[i]))

    return infer if phase == "forward" else train
