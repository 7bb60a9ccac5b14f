"""The same forward again: random numbers as they were, statistics left alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Dice:
    """The state of every generator that an encoder may draw from, here and on CUDA devices."""

    def __init__(self) -> None:
        self.host = torch.get_rng_state()
        self.devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def roll_on(self) -> None:
        """Go on from this state."""
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)


@contextmanager
def replayed(dice: Dice) -> Iterator[None]:
    """Draw what was drawn from a state, and go on as if nothing had been drawn."""
    now = Dice()
    dice.roll_on()
    try:
        yield
    finally:
        now.roll_on()


@contextmanager
def keep_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave running statistics as they are: those of each micro-batch are counted once."""
    norms = nn.modules.batchnorm._NormBase  # InstanceNorm may track them too
    found = (module for module in modules if isinstance(module, norms) and module.training)
    buffers = [x for norm in found for x in norm.buffers()]
    copies = [x.clone() for x in buffers]
    try:
        yield
    finally:
        for x, copy in zip(buffers, copies, strict=True):
            x.copy_(copy)


def training_norms(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Every BatchNorm that takes the statistics of what it sees."""
    norms = nn.modules.batchnorm._BatchNorm
    return [module for module in modules if isinstance(module, norms) and module.training]


def graph_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that gradients of `outputs` will be added to, as far as the graph shows them.

    Of equal graphs in the same order.
    """
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    found = {id(x): x for x in outputs if x.is_leaf and x.requires_grad}
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        # In an order that all ranks share, who may talk about each of them.
        new = [n for n, _ in dict.fromkeys(node.next_functions) if n not in seen and n is not None]
        seen.update(new)
        todo += new
    return list(found.values())
