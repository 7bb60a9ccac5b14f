"""When gradients are averaged over ranks: once a step, by DDP or FSDP2 themselves."""

import dis
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from tilewise import groups
from tilewise.errors import OptionError

MOST_PARTS = 64  # of a container in which modules are looked for


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
        known = encoder.__globals__
        yield from (known[name] for name in _globals_of(encoder.__code__) if name in known)
        yield from (cell.cell_contents for cell in encoder.__closure__ or () if _is_filled(cell))
        yield from (*(encoder.__defaults__ or ()), *(encoder.__kwdefaults__ or {}).values())
    elif isinstance(encoder, (list, tuple, dict)):
        parts = encoder.values() if isinstance(encoder, dict) else encoder
        yield from parts if len(encoder) <= MOST_PARTS else ()
    else:
        yield from getattr(encoder, "__dict__", {}).values()
        yield getattr(type(encoder), "__call__", None)  # noqa: B004 - what it does, not whether


def _globals_of(code: types.CodeType) -> set[str]:
    """Names that a function, or one inside of it, takes from its globals."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return names.union(*map(_globals_of, inner))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


class Averager:
    """A module that averages its gradients over ranks in its backward, unless it is told not to.

    DDP decides when the forward is run, FSDP2 when the backward is. Of one module all are equal.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.by_forward = hasattr(module, "no_sync")
        if getattr(module, "static_graph", False):
            raise OptionError(
                "a DDP module with static_graph=True expects every backward to be averaged, and a "
                "cached step averages the last; build it without that option"
            )
        self.parameters = {id(p): name for name, p in module.named_parameters()}
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.group = _ranks_of(module)  # now: FSDP2 leaves a root whole after its forward

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Averager) and self.module is other.module

    def __hash__(self) -> int:
        return id(self.module)

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP finds out by itself which parameters a forward does not use."""
        return bool(getattr(self.module, "find_unused_parameters", False))

    @property
    def waits_for_all(self) -> bool:
        """Whether it averages once all its parameters have got a gradient."""
        return self.by_forward and not self.looks_for_unused

    def quiet(self) -> Any:
        """A context for forwards whose backward does not average."""
        return self.module.no_sync() if self.by_forward else nullcontext()

    def set_average(self, wanted: bool) -> None:
        """For the backwards to come."""
        if not self.by_forward:
            self.module.set_requires_gradient_sync(wanted)
            self.module.set_is_last_backward(wanted)

    def forget(self) -> None:
        """Drop what FSDP2 has added up and not yet averaged, of which no `.grad` tells.

        It has no public way to; by names of torch 2.6 to 2.15.
        """
        if self.by_forward:
            return
        for part in self.module.modules():
            state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
            own = getattr(state, "_fsdp_param_group", None)
            for group in getattr(state, "_fsdp_param_groups", [own] if own else []):
                for p in group.fsdp_params:
                    # In torch 2.15 another name of the gradient below.
                    if "unsharded_accumulated_grad" in vars(p):
                        p.unsharded_accumulated_grad = None
                    if hasattr(p, "_unsharded_param"):
                        p._unsharded_param.grad = None

    def look_again(self) -> None:
        """Know what a loss sees: FSDP2 leaves a root's parameters whole after its forward."""
        if not self.by_forward:
            self.parameters |= {id(p): name for name, p in self.module.named_parameters()}

    def check_owns(self, parameters: Iterable[Any]) -> None:
        """Raise if the loss uses a parameter in a way that the module would not average."""
        if not self.looks_for_unused:
            return
        names = [self.parameters[id(p)] for p in parameters if id(p) in self.parameters]
        if names:
            raise OptionError(
                f"the loss uses {names[0]} outside of the forward of a DDP module that was built "
                "with find_unused_parameters=True, which then does not average it; return it from "
                "the forward, or build the module without that option"
            )


def _ranks_of(module: Any) -> Any:
    """The group that a module averages over, where it tells; else all ranks."""
    meshes = [p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")]
    if meshes and meshes[0].ndim == 1:
        return meshes[0].get_group()
    return getattr(module, "process_group", None) or groups.world()


def within(encoder: Any) -> list[Averager] | None:
    """Those of an encoder: none, or itself; None where one must see which of them it runs."""
    if not groups.is_initialized():
        return []
    if not isinstance(encoder, nn.Module):
        return None
    if averages(encoder):
        return [Averager(encoder)]
    return None if any(map(averages, encoder.modules())) else []


@contextmanager
def noticing(found: list[Averager], visible: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Find the modules that average and are run inside; they are told not to.

    One of the `visible` may be run by a method that `register_fsdp_forward_method` made: that is
    seen as soon as a part of it is run.
    """
    thread = threading.get_ident()
    by_method = [module for module in visible if _has_forward_methods(module)]
    with ExitStack() as stack:

        def note(module: nn.Module, _: Any) -> None:
            if threading.get_ident() != thread:  # the hook is everybody's
                return
            for run in (*filter(_is_in_forward, by_method), module):
                inner = (part for owner in found for part in owner.module.modules())
                if averages(run) and all(run is not part for part in inner):
                    found.append(Averager(run))
                    stack.enter_context(found[-1].quiet())

        handle = nn.modules.module.register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()


def _has_forward_methods(module: nn.Module) -> bool:
    """Whether FSDP2 takes methods of it for forwards, by names of torch 2.6 to 2.13."""
    methods = (x for x in vars(module).values() if isinstance(x, types.MethodType))
    return hasattr(module, "_get_fsdp_state") and any(hasattr(x, "__wrapped__") for x in methods)


def _is_in_forward(module: Any) -> bool:
    return bool(module._get_fsdp_state()._training_state.name == "FORWARD")


def averages(module: Any) -> bool:
    """Whether a module averages gradients over ranks: DDP, or FSDP2."""
    ddp = hasattr(module, "no_sync") and hasattr(module, "require_backward_grad_sync")
    return ddp or hasattr(module, "set_requires_gradient_sync")


def share_buffers(modules: Iterable[nn.Module]) -> None:
    """Let DDP modules take over the first rank's buffers now, as their next forward would.

    What is run again begins with the buffers of before its forward: those must be the shared ones.
    """
    for module in modules:
        ddp: Any = module
        if hasattr(ddp, "_check_sync_bufs_pre_fwd") and ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
            ddp.require_forward_param_sync = False  # not twice


@contextmanager
def all_quiet(owners: Iterable[Averager]) -> Iterator[None]:
    """For forwards whose backward averages none of these."""
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(owner.quiet())
        yield
