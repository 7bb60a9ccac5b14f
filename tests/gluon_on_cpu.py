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
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.language as tl

from tilewise import backends

DTYPES = {
    tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64, tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RaceError(AssertionError):
    """Memory was written while something else read it, or read before it was there."""


class DeadlockError(AssertionError):
    """Everything waits for something else."""


class _Stopped(BaseException):
    """Raised in groups of warps whose kernel has failed elsewhere."""


# Numbers


class Block(torch.Tensor):
    """A tile or a scalar, of which a kernel asks what Triton's tensors answer."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if dtype == tl.uint32:
            # PyTorch shifts none of these: an integer with room for all of their bits.
            assert bitcast
            return self.view(torch.int32).to(tl.int64) & 0xFFFFFFFF
        if dtype == tl.int16 and self.dtype == torch.int64:
            return super().to(torch.int32).to(tl.int16)
        return super().to(DTYPES[dtype])

    def __iadd__(self, other):
        return self + other  # a value, that others may hold too


def block(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Block)


class Pointer:
    """Somewhere in a tensor's memory, or many such places."""

    def __init__(self, tensor, offset=None):
        self.tensor = tensor
        self.offset = block(tensor.storage_offset()) if offset is None else offset

    def __add__(self, step):
        return Pointer(self.tensor, self.offset + step)

    def memory(self, mask):
        """All of it side by side, and where in it; what is masked is at 0."""
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        at = self.offset.long() if mask is None else torch.where(mask, self.offset.long(), 0)
        wanted = at if mask is None else at[mask.expand(at.shape)]
        if wanted.numel() and not (wanted.min() >= 0 and wanted.max() < size):
            raise RaceError(f"memory beyond {size} numbers: {wanted.min()} to {wanted.max()}")
        return self.tensor.as_strided((size,), (1,), 0), at


def load(pointer, mask=None, other=None):
    if mask is not None and not mask.any():
        return torch.full(mask.shape, other, dtype=pointer.tensor.dtype).as_subclass(Block)
    memory, at = pointer.memory(mask)
    found = memory[at.as_subclass(torch.Tensor)].as_subclass(Block)
    return found if mask is None else torch.where(mask, found, other)


def store(pointer, x, mask=None):
    memory, at = pointer.memory(mask)
    x, at = (value.as_subclass(torch.Tensor) for value in torch.broadcast_tensors(x, at))
    chosen = slice(None) if mask is None else mask.as_subclass(torch.Tensor).expand(at.shape)
    memory[at[chosen]] = x[chosen].to(memory.dtype)


def _same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


# Groups of warps


class Group:
    """A group of warps: a thread that runs while it has its turn."""

    def __init__(self, machine, body, args):
        self.go, self.ready, self.error = threading.Semaphore(0), lambda: True, None
        self.products, self.stores, self.fenced, self.done = [], [], True, False
        self.thread = threading.Thread(target=self._run, args=(machine, body, args), daemon=True)

    def _run(self, machine, body, args):
        self.go.acquire()
        try:
            if not machine.stopped:
                body(*args)
                if self.products or self.stores:
                    raise RaceError("a group ended before what it had begun")
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        machine.baton.release()


class Machine:
    """One program: its groups, and copies under way."""

    def __init__(self, program, draw):
        self.program, self.draw = program, draw
        self.copies, self.stopped, self.baton = [], False, threading.Semaphore(0)
        # Whoever prepares the others, alone.
        self.group = Group(self, None, ())
        self.groups = []

    def run(self, parts):
        self.groups = [Group(self, body, args) for body, args in parts]
        for group in self.groups:
            group.thread.start()
        try:
            while not all(group.done for group in self.groups):
                self._turn()
        finally:
            self.stopped = True
            for group in self.groups:
                group.go.release()
                group.thread.join()
        if self.copies:
            raise RaceError("a copy was never waited for")

    def _turn(self):
        ready = [group for group in self.groups if not group.done and group.ready()]
        if not ready and not self.copies:
            raise DeadlockError("all groups wait")
        chosen = self.draw.choice(ready + self.copies)
        if not isinstance(chosen, Group):
            self.copies.remove(chosen)
            chosen()
            return
        self.group = chosen
        chosen.go.release()
        self.baton.acquire()
        if chosen.error is not None:
            raise chosen.error

    def pause(self, ready=lambda: True):
        """Let others run, until it is this group's turn again and it can go on."""
        group = self.group
        if group not in self.groups:
            return
        group.ready = ready
        self.baton.release()
        group.go.acquire()
        if self.stopped:
            raise _Stopped


MACHINE = Machine(0, random.Random(0))


# Shared memory


class Shared:
    """A piece of shared memory."""

    def __init__(self, data):
        self.data, self.shape = data, list(data.shape)

    @classmethod
    def fresh(cls, dtype, shape):
        spoilt = torch.nan if dtype.is_floating() else 0x7FFF
        return cls(torch.full(shape, spoilt, dtype=DTYPES[dtype]))

    def index(self, i):
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def store(self, x):
        assert x.dtype == self.data.dtype
        self.data.copy_(x)
        MACHINE.group.fenced = False


class Barrier:
    """It changes phase when all have arrived and all expected bytes are there."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrived, more):
        if self.count == 0:
            raise RaceError("a barrier was used before it was made")
        self.pending -= arrived
        self.bytes += more
        if self.pending < 0:
            raise RaceError("more arrived than a barrier counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = 1 - self.phase, self.count


class Barriers:
    def __init__(self, count):
        self.all = [Barrier() for _ in range(count)]

    def index(self, i):
        return self.all[int(i)]


def allocate_shared_memory(dtype, shape, layout):
    return Barriers(shape[0]) if layout == "barriers" else Shared.fresh(dtype, shape)


def fence_async_shared():
    MACHINE.group.fenced = True


def _wait(barrier, phase):
    parity = int(phase)
    MACHINE.pause(lambda: barrier.phase != parity)


def _expect(barrier, num_bytes):
    barrier.change(1, num_bytes)
    MACHINE.pause()


def _arrive(barrier, pred=True):
    if pred:
        barrier.change(1, 0)
    MACHINE.pause()


# Copies and products


class Descriptor:
    """A matrix that is copied tile by tile."""

    def __init__(self, made):
        self.matrix, self.layout = made.base, made.layout
        self.dtype = NAMES[made.base.dtype]
        self.block_type = SimpleNamespace(shape=list(made.block_shape))
        # What the device asks of addresses.
        assert made.base.data_ptr() % 16 == 0
        assert made.base.stride(0) * made.base.element_size() % 16 == 0
        assert made.base.stride(1) == 1

    def part(self, where):
        """What there is of the tile that begins at a place, and how much of a tile that is."""
        row, col = (int(x) for x in where)
        height, width = self.block_type.shape
        there = self.matrix[row : row + height, col : col + width]
        return there, (slice(there.shape[0]), slice(there.shape[1]))


def _copy_to_shared(source, where, barrier, place):
    assert place.shape == source.block_type.shape
    place.data.fill_(torch.nan)

    def arrive():
        there, inside = source.part(where)
        place.data.zero_()
        place.data[inside] = there
        barrier.change(0, -place.data.numel() * place.data.element_size())

    MACHINE.copies.append(arrive)
    MACHINE.pause()


def _copy_to_global(out, where, place):
    if not MACHINE.group.fenced:
        raise RaceError("a copy does not see what was stored before it without a fence")
    assert place.shape == out.block_type.shape
    seen = place.data.clone()

    def finish():
        if not _same_bits(seen, place.data):
            raise RaceError("a place was stored to while it was copied")
        there, inside = out.part(where)
        there.copy_(seen[inside])

    MACHINE.group.stores.append(finish)
    MACHINE.pause()


def _finish(begun, most):
    while len(begun) > most:
        begun.pop(0)()
    MACHINE.pause()


def multiply(a, b, so_far):
    """so_far + a @ b; what else a device makes of it, tests may put in its place."""
    return so_far + a.float() @ b.float()


class Accumulator:
    """What a product under way will be; nothing may look at it before."""

    def __init__(self):
        self.value = None


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    seen, made = (a.data.clone(), b.data.clone()), Accumulator()

    def finish():
        if not all(_same_bits(x, y.data) for x, y in zip(seen, (a, b), strict=True)):
            raise RaceError("features were overwritten while they were multiplied")
        so_far = acc.value if isinstance(acc, Accumulator) else acc
        so_far = so_far if use_acc else torch.zeros_like(so_far)
        made.value = block(multiply(*seen, so_far.as_subclass(torch.Tensor)))

    MACHINE.group.products.append(finish)
    MACHINE.pause()
    return made


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    _finish(MACHINE.group.products, num_outstanding)
    (made,) = deps
    return made if made.value is None else made.value


# The language


class Constant:
    """gl.constexpr: what it wraps."""

    def __new__(cls, value):
        return value.value if isinstance(value, (tl.constexpr, cls)) else value


def _range(*bounds):
    for i in range(*map(int, bounds)):
        yield block(i, torch.int32)


def _extreme(of):
    return lambda a, b: of(*(x if isinstance(x, torch.Tensor) else block(x) for x in (a, b)))


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
            global MACHINE  # noqa: PLW0603
            Kernel.heard(self.fn.__name__)
            given = dict(zip(self.parameters, args, strict=False))
            given |= {name: x for name, x in kwargs.items() if name in self.parameters}
            taken = {name: self._taken(name, x) for name, x in given.items()}
            for program in range(grid[0]):
                MACHINE = Machine(program, random.Random(f"{Kernel.seed} {program}"))
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
    program_id=lambda _: block(MACHINE.program, torch.int32),
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
    fma=lambda a, b, c: (a.double() * b + c.double()).float(),
    abs=torch.abs,
    sum=torch.sum,
    max=torch.amax,
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda a, b: torch.stack((a, b), -1),
    reshape=torch.reshape,
    permute=torch.permute,
    expand_dims=torch.unsqueeze,
    broadcast=torch.broadcast_tensors,
    NVMMADistributedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=lambda parts, *_: MACHINE.run(parts),
    **{name: getattr(tl, name) for name in ("int16", "int32", "int64", "uint32", "float32")},
)
HOPPER = SimpleNamespace(
    fence_async_shared=fence_async_shared,
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=Barrier.init,
        wait=_wait,
        expect=_expect,
        arrive=_arrive,
    ),
    tma=SimpleNamespace(
        async_copy_global_to_shared=_copy_to_shared,
        async_copy_shared_to_global=_copy_to_global,
        store_wait=lambda pendings: _finish(MACHINE.group.stores, pendings),
    ),
)
GLUON = SimpleNamespace(jit=jit, language=LANGUAGE)
INSTEAD = {
    "triton.experimental": SimpleNamespace(gluon=GLUON),
    "triton.experimental.gluon": GLUON,
    "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
}


def emulated(changes=(), launched=lambda _: None):
    """`hopper` and `hopper_dz` in this language, with (old, new) in their text.

    Whenever one of their kernels is launched, `launched` hears its name.
    """
    made = dict(INSTEAD)
    Kernel.heard = staticmethod(launched)

    def import_(name, *args):
        return made[name] if name in made else builtins.__import__(name, *args)

    changed = not changes
    for name in ("hopper", "hopper_dz"):
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
    return made["tilewise.backends.hopper"], made["tilewise.backends.hopper_dz"]
