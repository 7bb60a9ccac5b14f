"""Time, peak memory and matrix-product speed, measured the same way everywhere."""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from tilewise.trees import is_dense

Result = TypeVar("Result")

# Large enough that a product runs at the machine's full speed, small enough to take a moment.
GEMM_SIZES = {"cpu": 4096, "cuda": 8192}

# Taken where the system does not say what is free: a small laptop.
ASSUMED_FREE_BYTES = 8 * 2**30


class Machine(NamedTuple):
    """What a measurement was taken on."""

    device: str  # the GPU's name, or the CPU's model and how many threads torch uses
    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.device}; Python {self.python}, PyTorch {self.torch}"


def machine(device: torch.device | None = None) -> Machine:
    """The machine's description; `device` is the CPU unless given."""
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        model = _proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()
        name = f"{model}, {torch.get_num_threads()} threads"
    return Machine(name, platform.python_version(), torch.__version__)


def commit() -> str:
    """The commit of the checkout this runs from; empty for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors on `device` can take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    available = _proc_field("meminfo", "MemAvailable")
    return int(available.split()[0]) * 1024 if available else ASSUMED_FREE_BYTES


def median_s(call: Callable[[], object], repeats: int, device: torch.device | None = None) -> float:
    """Median wall time of call() in seconds, after one call to warm up.

    With a CUDA `device` each reading waits for the work it started there.
    """
    _timed_s(call, device)
    return statistics.median(_timed_s(call, device) for _ in range(repeats))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most memory that tensors made during call() took at one time, above what there was before.

    On the CPU this adds up the profiler's allocation events, so it is exact and repeatable; it
    sees what PyTorch allocates, not the small buffers inside a BLAS library. Memory from before
    that is freed during the call is not subtracted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    events = [
        event
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def gemm_tflops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Speed of a (size, size) matrix product in 10^12 FLOP/s, median of 5.

    `size` is 4096 on the CPU and 8192 on CUDA unless given.
    """
    size = size or GEMM_SIZES[device.type]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    seconds = median_s(lambda: torch.mm(left, right, out=out), 5, device)
    return 2 * size**3 / seconds / 1e12


def _timed_s(call: Callable[[], object], device: torch.device | None) -> float:
    wait = device is not None and device.type == "cuda"
    if wait:
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    call()
    if wait:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def _proc_field(file: str, key: str) -> str:
    """The first value of `key` in a file of /proc; empty where there is none, as off Linux."""
    path = Path("/proc") / file
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


class Held:
    """Memory that something left in use."""

    bytes: float = 0.0


def _untraced(call: Callable[..., Result]) -> Callable[..., Result]:
    """Left alone by torch.compile, which is not imported for it."""
    if "torch._dynamo" not in sys.modules:
        return call
    untraced: Callable[..., Result] = torch.compiler.disable(call)
    return untraced


def _numbers_of(x: Tensor) -> Tensor:
    """Itself, or the values of a sparse or nested one, which has no storage of its own."""
    if is_dense(x):
        return x
    return x._values() if x.layout == torch.sparse_coo else x.values()


@contextmanager
def held_bytes(device: torch.device) -> Iterator[Held]:
    """What the graph made inside holds: memory still in use, or, off CUDA, the saved tensors."""
    held = Held()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield held
        held.bytes = torch.cuda.memory_allocated(device) - before
        return
    saved: dict[int, int] = {}

    def note(x: Tensor) -> tuple[Tensor, int]:
        source = x if x._base is None else x._base
        if not (source.is_leaf and source.requires_grad):  # parameters are there anyway
            storage = _numbers_of(x).untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        # Not x itself: a node that saves its own output would hold itself.
        return x.detach(), x._version

    def hand_out(noted: tuple[Tensor, int]) -> Tensor:
        x, version = noted
        # Autograd's own check of versions is off where there are hooks.
        if x._version != version:
            raise RuntimeError(
                f"a tensor {tuple(x.shape)} that the gradient needs was modified by an inplace "
                "operation; do that on a copy"
            )
        return x

    with torch.autograd.graph.saved_tensors_hooks(_untraced(note), _untraced(hand_out)):
        yield held
    held.bytes = sum(saved.values())
