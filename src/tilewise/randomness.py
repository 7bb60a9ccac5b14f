"""The same forward again: random numbers as they were, statistics left alone."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

ADDS = "torch::autograd::AccumulateGrad"  # the node that adds to a leaf's gradient


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


class Place(NamedTuple):
    """A buffer of a module."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is there now."""
        return getattr(self.module, self.name, None)


def all_buffers(modules: Sequence[nn.Module]) -> list[Place]:
    """But for statistics of norms in train mode, which do not depend on what was counted before."""
    return [Place(module, name) for module in modules if not _counts(module)
            for name, x in module._buffers.items()
            if x is None or not x.is_inference()]  # fmt: skip


class State:
    """Buffers that a forward may change, as they were before it: a counter, a spectral norm."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list[Place]()
        self.seen = list[Tensor | None]()  # held, so that none is another
        self.versions, self.values = list[int](), list[Tensor | None]()
        self.unseen = list[Place]()  # that changed and autograd, which may need them, did not see
        self.made = False  # whether some were None before
        self.add(places)

    def add(self, places: Sequence[Place]) -> None:
        """These too, as they are now."""
        self.places += places
        found = [place.tensor for place in places]
        self.seen += found
        self.versions += map(_version, found)
        self.values += map(_copy, found)

    def that_changed(self) -> "State":
        """Of those that did since, and only those; waits for the device."""
        state = State([])
        for place, x, version, value in zip(
            self.places, self.seen, self.versions, self.values, strict=True
        ):
            seen = place.tensor is not x or _version(x) != version
            if seen or not _is_equal(x, value):
                state.places.append(place)
                state.values.append(value)
                state.unseen += [] if seen else [place]
                state.made = state.made or value is None
        return state

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were."""
        for place, value in zip(self.places, self.values, strict=True):
            now = place.tensor
            if now is None or value is None or now.shape != value.shape:
                setattr(*place, _copy(value))
            else:
                now.copy_(value)


def _is_equal(x: Tensor | None, value: Tensor | None) -> bool:
    """Whether it is what it was: `.data` and numpy change it and leave its version alone."""
    if x is None or value is None or type(x) is not Tensor or x.is_meta:
        return True  # or not to be compared
    try:
        return torch.equal(_bytes(x), _bytes(value))  # NaN too
    except (NotImplementedError, RuntimeError):  # sparse, quantised
        return True


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def _version(x: Tensor | None) -> int:
    """Another one after every change that autograd sees."""
    return 0 if x is None else x._version


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


@contextmanager
def replayed(dice: Dice, state: State) -> Iterator[None]:
    """Draw what was drawn from a state, and go on as if nothing had been drawn."""
    now = Dice()
    dice.roll_on()
    state.put_back()
    try:
        yield
    finally:
        now.roll_on()


@contextmanager
def counted_once(modules: Sequence[nn.Module], changing: Iterable[Place]) -> Iterator[None]:
    """Leave buffers as they are, running statistics among them, whatever is run again inside."""
    norms = [Place(module, name) for module in modules if _counts(module)
             for name in module._buffers]  # fmt: skip
    now = State([*norms, *changing])
    try:
        yield
    finally:
        now.put_back()


def _counts(module: nn.Module) -> bool:
    """Whether it keeps running statistics of what it sees; InstanceNorm may too."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


def training_norms(modules: Sequence[nn.Module]) -> list[str]:
    """Kinds of every BatchNorm that takes the statistics of what it sees, scripted ones too."""
    kinds = [
        (module, str(getattr(module, "original_name", type(module).__name__)))
        for module in modules
        if module.training
    ]
    norms = nn.modules.batchnorm._BatchNorm
    return [kind for x, kind in kinds if isinstance(x, norms) or kind.startswith("BatchNorm")]


def graph_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that gradients of `outputs` will be added to, as far as the graph shows them.

    Of equal graphs in the same order.
    """
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    found = {id(x): x for x in outputs if x.is_leaf and x.requires_grad}
    seen = set(todo)
    while todo:
        node = todo.pop()
        # A user's own function may call something else so.
        leaf = getattr(node, "variable", None) if node.name() == ADDS else None
        if leaf is not None:
            found[id(leaf)] = leaf
        # In an order that all ranks share, who may talk about each of them.
        new = [n for n, _ in dict.fromkeys(node.next_functions) if n not in seen and n is not None]
        seen.update(new)
        todo += new
    return list(found.values())
