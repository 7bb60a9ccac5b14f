"""What lies in host memory, on a device in time: the next on its way while this is worked on."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.mapped import copy_into
from tilewise.trees import Tree, is_dense, map_tensors, tensors

Make = Callable[[], Tree]


class Arriving(NamedTuple):
    """A tree of tensors on the device, of which some are still being copied."""

    tree: Tree
    event: torch.cuda.Event | None  # once all have come


class Ahead:
    """Trees of host tensors, one after the other on a device.

    On CUDA a thread reads and pins what is not pinned, and a stream of its own copies: at most two
    are there beside the one that is worked on, however far the host is ahead of the device. What is
    on the device needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def over(self, makers: Iterable[Make]) -> Iterator[Tree]:
        """What each returns, on the device. They are called in order, most in a thread on CUDA."""
        if self.stream is None:
            for make in makers:
                yield map_tensors(lambda x: x.to(self.device), make())
            return
        with ThreadPoolExecutor(1) as thread:
            yield from self._over(iter(makers), thread)

    def _over(self, makers: Iterator[Make], thread: ThreadPoolExecutor) -> Iterator[Tree]:
        coming = deque[Callable[[], Arriving]]()
        done = deque[torch.cuda.Event]()
        current = torch.cuda.current_stream(self.device)
        away = False  # until one had to be copied: the device would wait for a thread to start

        def start() -> None:
            make = next(makers, None)
            if make is not None:
                fetch = partial(self.fetch, make)
                coming.append(thread.submit(fetch).result if away else fetch)

        start()
        while coming:
            arriving = coming.popleft()()
            copied = arriving.event is not None
            away = away or copied
            start()
            yield self.arrived(arriving)
            del arriving
            # The host may be one copy ahead: each has memory of its own until the device is done.
            if copied:
                done.append(current.record_event())
            if len(done) > 1:
                done.popleft().synchronize()

    def fetch(self, make: Make) -> Arriving:
        """Begin to copy what `make` returns."""
        tree = make()
        assert self.stream is not None
        if all(x.device == self.device for x in tensors(tree)):
            return Arriving(tree, None)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            copied = map_tensors(self._copied, tree)
            return Arriving(copied, self.stream.record_event())

    def arrived(self, arriving: Arriving) -> Tree:
        """The copy, to be used on the current stream."""
        if arriving.event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arriving.event)
            for x in tensors(arriving.tree):
                x.record_stream(current)
        return arriving.tree

    def _copied(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not x.is_pinned():
            x = _pinned(x)
        return x.to(self.device, non_blocking=True)

    def send(self, x: Tensor, out: Tensor) -> None:
        """Copy something from the device, in the background and in order with what is fetched."""
        if self.stream is None or out.device == self.device:
            out.copy_(x)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            out.copy_(x, non_blocking=True)
        x.record_stream(self.stream)

    def wait(self) -> None:
        """Until all that was sent is there: the host reads it, or later work on the device."""
        if self.stream is not None:
            self.stream.synchronize()


def _pinned(x: Tensor) -> Tensor:
    """A copy in pinned memory."""
    if type(x) is not Tensor or not is_dense(x):
        return x.pin_memory()
    return copy_into(torch.empty_like(x, pin_memory=True), x)
