"""Cached tensors on CUDA: who may read them on which stream, and CUDA-graph capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def lasting() -> Iterator[None]:
    """Where tensors are made that outlive the call, whatever the call runs under.

    Inference tensors could not be saved for a later backward, and what the transforms
    of `torch.func` wrap around tensors is dead behind them.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch():
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise if `what` would be built inside a CUDA graph.

    Its memory would belong to the graph and hold nothing before the first replay, while
    a cache hands it to everyone.

    Raises:
        RuntimeError: A CUDA graph is being captured on the current stream.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"{what} cannot be built while a CUDA graph is captured. Run one step with "
            f"the same 'edge_index' or 'pyg_tiga.Graph' before the capture: what it "
            f"builds is then found again, and stays alive for the graph's replays."
        )


class Stamp:
    """On which stream tensors were written, and whether other streams may read them.

    Args:
        tensors: The tensors, all of one device.
        complete: The host has already waited for the work that writes them.
        event: Recorded behind that work, where there is such an event already.
    """

    __slots__ = ("_device", "_event", "_home", "_index", "_seen", "_tensors")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        complete: bool = False,
        event: torch.cuda.Event | None = None,
    ) -> None:
        self._device = tensors[0].device
        self._home: int | None = None
        if self._device.type != "cuda":
            return
        self._tensors = tuple(tensors)
        self._index = self._device.index
        self._home = torch._C._cuda_getCurrentRawStream(self._index)
        self._seen = {self._home}
        self._event: torch.cuda.Event | None = event
        if event is None and not complete:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def use(self) -> None:
        """Make the tensors safe to read on the current stream from here on."""
        home = self._home
        if home is not None and torch._C._cuda_getCurrentRawStream(self._index) != home:
            self._cross()

    def _cross(self) -> None:
        # A captured stream may neither query nor wait for an event from outside, and
        # the capture begins with a synchronisation; what it reads is pinned.
        if is_capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        if self._event is not None:
            if self._event.query():
                self._event = None
            else:
                stream.wait_event(self._event)
        if stream.cuda_stream not in self._seen:
            # Once is enough: when the memory is freed, the allocator waits for what the
            # stream was given up to then.
            for tensor in self._tensors:
                tensor.record_stream(stream)
            self._seen.add(stream.cuda_stream)
