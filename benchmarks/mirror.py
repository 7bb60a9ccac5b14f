"""A process group whose other ranks are all the same as this one: one rank of many, on one GPU.

    dist.init_process_group("mirror", rank=0, world_size=32, store=dist.HashStore())

What is sent to any rank comes from any rank, copied on a stream of its own as NCCL's messages are:
the real ring, the real kernels and the real memory of one rank. A loss over it is the loss of its
features repeated as often as there are ranks, which is how `tests/test_one_rank.py` checks it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Copied(dist.Work):
    """Copies on their way."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream, not the host, wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True


class Mirror(dist.ProcessGroup):
    """All ranks of it send, at any time, what this one sends."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.world = world
        self.sent: list[Tensor] = []
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def getBackendName(self) -> str:  # noqa: N802
        """As torch asks for it."""
        return "mirror"

    @property
    def group_name(self) -> str:
        """Under which torch has it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _get_backend(self, _device: torch.device) -> "Mirror":
        """What torch 2.15 asks whether messages may be posted together."""
        return self

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        """(to, from) of each, on the stream of messages."""
        if self.stream is None:
            for out, x in pairs:
                out.copy_(x)
            return Copied(None)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for out, x in pairs:
                out.copy_(x)
            return Copied(self.stream.record_event())

    def send(self, tensors: list[Tensor], *_: Any) -> Copied:
        """To whom does not matter."""
        self.sent += tensors
        return Copied(None)

    def recv(self, tensors: list[Tensor], *_: Any) -> Copied:
        """What was sent first."""
        pairs = [(x, self.sent.pop(0)) for x in tensors]
        assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
        return self._copy(pairs)

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], *_: Any) -> Copied:
        """The same from every rank."""
        return self._copy([(out, x) for all_of_it, x in zip(outs, xs, strict=True)
                           for out in all_of_it])  # fmt: skip

    def all_gather_single(self, out: Tensor, x: Tensor, *_: Any) -> Copied:
        """Likewise, in one tensor."""
        return self._copy([(part, x) for part in out.split(len(x))])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, *_: Any) -> Copied:
        """What this rank found for all ranks is what they found for it."""
        torch.sum(x.view(self.world, *out.shape), 0, out=out)
        return Copied(None)

    def all_to_all_single(self, out: Tensor, x: Tensor, *_: Any) -> Copied:
        """Likewise."""
        return self._copy([(out, x)])

    def allreduce(self, xs: list[Tensor], *_: Any) -> Copied:
        """A sum of equal numbers."""
        for x in xs:
            x.mul_(self.world)
        return Copied(None)

    # The names that older versions of torch call them by.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _make(_store: Any, rank: int, world: int, _timeout: Any) -> Mirror:
    return Mirror(rank, world)


dist.Backend.register_backend("mirror", _make, devices=["cpu", "cuda"])
