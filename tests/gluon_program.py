"""One program of a kernel that `gluon_on_cpu` runs: its groups of warps, and what they share.

They run in turns, drawn at random: a group up to its next word to the others, a copy as a whole.
What the device may do late is done late.
"""

import threading
from types import SimpleNamespace

import torch

from gluon_numbers import DTYPES, NAMES, RaceError, block


class DeadlockError(AssertionError):
    """Everything waits for something else."""


class _Stopped(BaseException):
    """Raised in groups of warps whose kernel has failed elsewhere."""


def _same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


# Groups of warps


class Group:
    """A group of warps: a thread that runs while it has its turn."""

    def __init__(self, program, body, args):
        self.go, self.ready, self.error = threading.Semaphore(0), lambda: True, None
        self.products, self.stores, self.fenced, self.done = [], [], True, False
        self.thread = threading.Thread(target=self._run, args=(program, body, args), daemon=True)

    def _run(self, program, body, args):
        self.go.acquire()
        try:
            if not program.stopped:
                body(*args)
                if self.products or self.stores:
                    raise RaceError("a group ended before what it had begun")
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        program.baton.release()


class Program:
    """One program: its groups, and copies under way.

    `owners` has, by tensor, which group of which program wrote a number: nobody else may.
    """

    current: "Program"

    def __init__(self, place, draw, owners):
        self.number, self.count = place
        self.draw, self.owners = draw, owners
        self.copies, self.leaving, self.stopped = [], [], False
        self.baton = threading.Semaphore(0)
        # Whoever prepares the others, alone.
        self.group = Group(self, None, ())
        self.groups = []

    def run(self, parts):
        if not self.group.fenced:
            raise RaceError("others do not see barriers that were made before them without a fence")
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
        # A wait for stores is one for their source: where they went it shows at the end only.
        for leave in self.leaving:
            leave()

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

    def own(self, tensor, at):
        """Note who writes to numbers of a tensor's memory."""
        memory = tensor.untyped_storage()
        size = memory.nbytes() // tensor.element_size()
        owners = self.owners.setdefault(memory.data_ptr(), torch.zeros(size, dtype=torch.int32))
        me = 1 + 3 * self.number + (self.group in self.groups and self.groups.index(self.group))
        before = owners[at]
        if ((before != 0) & (before != me)).any():
            raise RaceError("two groups of warps write to one place")
        owners[at] = me


def store(pointer, x, mask=None):
    memory, at = pointer.memory(mask)
    x, at = (value.as_subclass(torch.Tensor) for value in torch.broadcast_tensors(x, at))
    chosen = slice(None) if mask is None else mask.as_subclass(torch.Tensor).expand(at.shape)
    Program.current.own(pointer.tensor, at[chosen])
    memory[at[chosen]] = x[chosen].to(memory.dtype)


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
        Program.current.group.fenced = False


class Barrier:
    """It changes phase when all have arrived and all expected bytes are there."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count
        Program.current.group.fenced = False

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
    Program.current.group.fenced = True


def wait(barrier, phase):
    parity = int(phase)
    Program.current.pause(lambda: barrier.phase != parity)


def expect(barrier, num_bytes):
    barrier.change(1, num_bytes)
    Program.current.pause()


def arrive(barrier, pred=True):
    if pred:
        barrier.change(1, 0)
    Program.current.pause()


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


def copy_to_shared(source, where, barrier, place):
    assert place.shape == source.block_type.shape
    place.data.fill_(torch.nan)

    def arrive():
        there, inside = source.part(where)
        place.data.zero_()
        place.data[inside] = there
        barrier.change(0, -place.data.numel() * place.data.element_size())

    Program.current.copies.append(arrive)
    Program.current.pause()


def copy_to_global(out, where, place):
    if not Program.current.group.fenced:
        raise RaceError("a copy does not see what was stored before it without a fence")
    assert place.shape == out.block_type.shape
    seen = place.data.clone()

    def finish():
        if not _same_bits(seen, place.data):
            raise RaceError("a place was stored to while it was copied")
        Program.current.leaving.append(leave)

    def leave():
        there, inside = out.part(where)
        there.copy_(seen[inside])

    there, _ = out.part(where)
    numbers = torch.arange(there.shape[0])[:, None] * there.stride(0) + torch.arange(there.shape[1])
    Program.current.own(there, there.storage_offset() + numbers)
    Program.current.group.stores.append(finish)
    Program.current.pause()


def _finish(begun, most):
    while len(begun) > most:
        begun.pop(0)()
    Program.current.pause()


def store_wait(pendings):
    _finish(Program.current.group.stores, pendings)


def multiply(a, b, so_far):
    """so_far + a @ b; what else a device makes of it, tests may put in its place."""
    return (so_far + a.double() @ b.double()).float()


class Accumulator:
    """What a product under way will be; nothing may look at it before."""

    def __init__(self):
        self.value = None

    def _early(self, _):
        raise RaceError("a product was looked at before it was waited for")

    __getattr__ = __radd__ = _early


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    seen, made = (a.data.clone(), b.data.clone()), Accumulator()

    def finish():
        if not all(_same_bits(x, y.data) for x, y in zip(seen, (a, b), strict=True)):
            raise RaceError("features were overwritten while they were multiplied")
        so_far = acc.value if isinstance(acc, Accumulator) else acc
        so_far = so_far if use_acc else torch.zeros_like(so_far)
        made.value = block(multiply(*seen, so_far.as_subclass(torch.Tensor)))

    Program.current.group.products.append(finish)
    Program.current.pause()
    return made


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    _finish(Program.current.group.products, num_outstanding)
    (made,) = deps
    return made if made.value is None else made.value
