"""Who the ranks of a run are, and what they agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tilewise.errors import TilewiseError


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def group(self) -> Any:
        """All of them, for the losses; None for one alone."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def all_agree(self, fine: bool) -> bool:
        """Whether it is so on all ranks; all get the same answer."""
        return self.sums(float(not fine)) == [0.0]

    def sums(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks."""
        if self.world == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return [float(number) for number in found.tolist()]

    def tell(self, thing: Any) -> Any:
        """What the first rank has, on all of them."""
        if self.world == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def ask_first(self, question: Callable[[], Any]) -> Any:
        """What the first rank answers, on all of them; what it refuses is raised on all."""
        answer: Any = None
        if self.is_first:
            try:
                answer = question()
            except TilewiseError as error:
                answer = error
        answer = self.tell(answer)
        if isinstance(answer, TilewiseError):
            raise answer
        return answer

    def ask_all(self, question: Callable[[], Any]) -> list[Any]:
        """What each rank answers, on all of them; what one refuses is raised on all."""
        answer: Any = None
        try:
            answer = question()
        except TilewiseError as error:
            answer = error
        answers = self.gather(answer)
        for each in answers:
            if isinstance(each, TilewiseError):
                raise each
        return answers

    def gather(self, thing: Any) -> list[Any]:
        """What each rank has, on all of them, in host memory."""
        if self.world == 1:
            return [thing]
        found = [None] * self.world
        dist.all_gather_object(found, thing)
        return found

    def align(self, model: nn.Module) -> None:
        """Give all ranks what the first has counted in training: running means and the like."""
        for buffer in model.buffers() if self.world > 1 else ():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def stop(self) -> None:
        """Leave, once all are here: a rank that ends early takes its connections with it."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


ALONE = Ranks(0, 1, torch.device("cpu"))
