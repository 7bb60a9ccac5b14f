"""Gluon without a GPU: as much of it as the kernels of `hopper` need, run by PyTorch.

What runs at once on a device runs here in turns, drawn at random: each group of warps up to its
next word to the others, each copy as a whole. What the device may do late is done late. Copies to
shared memory spoil their slot until they arrive; products and stores, which read it, look again
when they are waited for. So a barrier that is missing, or waits for the wrong turn, ends in a
`RaceError`, in NaN, or, where all wait for each other, in a `DeadlockError`. Memory beyond a
tensor's own is an error. Layouts mean nothing, and sums are added up as PyTorch does.
"""

import builtins
import inspect
import random
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.language as tl

import gluon_program
from gluon_numbers import DTYPES, Pointer, block, load
from gluon_program import Barrier, Descriptor, Program, store
from tilewise import backends


class Constant:
    """gl.constexpr: what it wraps."""

    def __new__(cls, value):
        return value.value if isinstance(value, (tl.constexpr, cls)) else value


def _range(*bounds):
    for i in range(*map(int, bounds)):
        yield block(i, torch.int32)


def _extreme(of):
    return lambda a, b: of(*(x if isinstance(x, torch.Tensor) else block(x) for x in (a, b)))


def _fma(a, b, c):
    """Rounded once; its numbers are float32."""
    b = torch.as_tensor(b, dtype=torch.float32).double()
    return (a.double() * b + c.double()).float()


class Kernel:
    """A function of a kernel; [grid] launches it."""

    seed = 0
    heard = staticmethod(print)

    def __init__(self, fn):
        self.fn, self.parameters = fn, inspect.signature(fn).parameters

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid) -> Callable[..., None]:
        def launch(*args, **kwargs):
            Kernel.heard(self.fn.__name__)
            given = dict(zip(self.parameters, args, strict=False))
            given |= {name: x for name, x in kwargs.items() if name in self.parameters}
            taken = {name: self._taken(name, x) for name, x in given.items()}
            owners = {}
            for number in range(grid[0]):
                draw = random.Random(f"{Kernel.seed} {number}")
                Program.current = Program((number, *grid), draw, owners)
                self.fn(**taken)

        return launch

    def _taken(self, name, x):
        if isinstance(x, torch.Tensor):
            return Pointer(x)
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        if isinstance(x, int) and self.parameters[name].annotation is not Constant:
            return block(x, torch.int32)  # what overflows there, overflows here
        return x


def jit(fn):
    """A kernel's function, or one that Triton's kernels use too, in this language."""
    if fn.__globals__.get("gl") is LANGUAGE:
        return Kernel(fn)
    names = {
        name: x.value if isinstance(x, tl.constexpr) else x for name, x in fn.__globals__.items()
    }
    return Kernel(types.FunctionType(fn.__code__, {**names, "tl": LANGUAGE}, fn.__name__))


LANGUAGE = SimpleNamespace(
    constexpr=Constant,
    static_range=range,
    program_id=lambda _: block(Program.current.number, torch.int32),
    num_programs=lambda _: block(Program.current.count, torch.int32),
    cdiv=lambda a, b: (a + b - 1) // b,
    minimum=_extreme(torch.fmin),
    maximum=_extreme(torch.fmax),
    arange=lambda start, end, layout: block(torch.arange(start, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=DTYPES[dtype])),
    zeros_like=torch.zeros_like,
    load=load,
    store=store,
    where=torch.where,
    exp2=torch.exp2,
    fma=_fma,
    abs=torch.abs,
    sum=torch.sum,
    max=lambda x, axis: torch.nan_to_num(x, nan=-torch.inf).amax(axis),
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda a, b: torch.stack((a, b), -1),
    reshape=torch.reshape,
    permute=torch.permute,
    expand_dims=torch.unsqueeze,
    broadcast=torch.broadcast_tensors,
    NVMMADistributedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    allocate_shared_memory=gluon_program.allocate_shared_memory,
    warp_specialize=lambda parts, *_: Program.current.run(parts),
    **{
        name: getattr(tl, name)
        for name in ("int16", "int32", "int64", "uint32", "float16", "float32")
    },
)
HOPPER = SimpleNamespace(
    fence_async_shared=gluon_program.fence_async_shared,
    warpgroup_mma=gluon_program.warpgroup_mma,
    warpgroup_mma_wait=gluon_program.warpgroup_mma_wait,
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=Barrier.init,
        wait=gluon_program.wait,
        expect=gluon_program.expect,
        arrive=gluon_program.arrive,
    ),
    tma=SimpleNamespace(
        async_copy_global_to_shared=gluon_program.copy_to_shared,
        async_copy_shared_to_global=gluon_program.copy_to_global,
        store_wait=gluon_program.store_wait,
    ),
)
GLUON = SimpleNamespace(jit=jit, language=LANGUAGE)
INSTEAD = {
    "triton.experimental": SimpleNamespace(gluon=GLUON),
    "triton.experimental.gluon": GLUON,
    "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
}


def emulated(changes=(), launched=lambda _: None):
    """The modules of Gluon's kernels in this language, with (old, new) in their text.

    Whenever one of their kernels is launched, `launched` hears its name.
    """
    made = dict(INSTEAD)
    Kernel.heard = staticmethod(launched)

    def import_(name, *args):
        return made[name] if name in made else builtins.__import__(name, *args)

    changed = not changes
    for name in ("hopper", "hopper_dz", "hopper_split"):
        module = types.ModuleType(f"tilewise.backends.{name}")
        path = Path(backends.__file__).with_name(f"{name}.py")
        text = path.read_text()
        for old, new in changes:
            changed |= old in text
            text = text.replace(old, new)
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_, "range": _range}
        exec(compile(text, path, "exec"), vars(module))
        made[module.__name__] = module
    assert changed
    return [module for name, module in made.items() if name.startswith("tilewise")]
