"""When gradients are averaged over ranks: once a step, by DDP or FSDP2 themselves."""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from tilewise.errors import OptionError


def modules_of(encoder: Any, depth: int = 4) -> list[nn.Module]:
    """The modules that a callable is made of, as far as can be seen.

    Itself, the owner of a method, what a partial holds, what a function closes over or takes from
    its globals, what an object has as attributes.
    """
    if isinstance(encoder, nn.Module):
        return [encoder]
    if depth == 0 or isinstance(encoder, (type, types.ModuleType)):
        return []
    return [module for part in _parts_of(encoder) for module in modules_of(part, depth - 1)]


def _parts_of(encoder: Any) -> Iterator[Any]:
    if isinstance(encoder, partial):
        yield from (encoder.func, *encoder.args, *encoder.keywords.values())
    elif isinstance(encoder, types.MethodType):
        yield from (encoder.__self__, encoder.__func__)
    elif isinstance(encoder, types.FunctionType):
        names, known = encoder.__code__.co_names, encoder.__globals__
        yield from (known[name] for name in names if name in known)
        yield from (cell.cell_contents for cell in encoder.__closure__ or () if _is_filled(cell))
        yield from (*(encoder.__defaults__ or ()), *(encoder.__kwdefaults__ or {}).values())
    elif isinstance(encoder, (list, tuple)):
        yield from encoder
    elif isinstance(encoder, dict):
        yield from encoder.values()
    else:
        yield from getattr(encoder, "__dict__", {}).values()


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


class Averager:
    """A module that averages its gradients over ranks in its backward, unless it is told not to.

    DDP decides when the forward is run, FSDP2 when the backward is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.by_forward = hasattr(module, "no_sync")
        # A DDP that looks for unused parameters looks at one forward: that must be of one part.
        self.one_by_one = bool(getattr(module, "find_unused_parameters", False))
        if getattr(module, "static_graph", False):
            raise OptionError(
                "a DDP module with static_graph=True expects every backward to be averaged, and a "
                "cached step averages the last; build it without that option"
            )
        self.parameters = {id(p): name for name, p in module.named_parameters()}

    @property
    def group(self) -> Any:
        """The ranks, where it tells them."""
        return getattr(self.module, "process_group", None)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """For forwards whose backward does not average."""
        if not self.by_forward:
            yield
            return
        with self.module.no_sync():
            yield

    def set_average(self, wanted: bool) -> None:
        """For the backwards to come."""
        if not self.by_forward:
            self.module.set_requires_gradient_sync(wanted)
            self.module.set_is_last_backward(wanted)

    def check_owns(self, parameters: Iterable[Any]) -> None:
        """Raise if the loss uses a parameter in a way that the module would not average."""
        if not self.one_by_one:
            return
        names = [self.parameters[id(p)] for p in parameters if id(p) in self.parameters]
        if names:
            raise OptionError(
                f"the loss uses {names[0]} outside of the forward of a DDP module that was built "
                "with find_unused_parameters=True, which then does not average it; return it from "
                "the forward, or build the module without that option"
            )


def averagers(encoders: Sequence[Any]) -> list[list[Averager]]:
    """Those of each encoder; a module in several of them has one."""
    known: dict[int, Averager] = {}

    def find(module: nn.Module) -> Iterator[Averager]:
        if _averages(module):
            yield known.setdefault(id(module), Averager(module))
            return
        for child in module.children():
            yield from find(child)

    return [[a for module in modules_of(encoder) for a in find(module)] for encoder in encoders]


def _averages(module: Any) -> bool:
    ddp = hasattr(module, "no_sync") and hasattr(module, "require_backward_grad_sync")
    return ddp or hasattr(module, "set_requires_gradient_sync")


@contextmanager
def forward_of(owners: Sequence[Averager], final: Callable[[Averager], bool]) -> Iterator[None]:
    """Run a forward with a graph; those whose `final` it is average in its backward."""
    with ExitStack() as stack:
        for owner in owners:
            if not final(owner):
                stack.enter_context(owner.quiet())
        yield
