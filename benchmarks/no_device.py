"""A CUDA device that is not there: kernels are compiled for it and launched, and nothing runs.

For what a GPU is too fast or too rare to show: whether every launch compiles and finds the
arguments that it needs (Triton's interpreter runs no Gluon, and forgives what the compiler does
not), how many there are, how long Python takes for them, and whether the host would wait for the
device. Tensors are on the CPU; what products and kernels would have written is whatever lies there.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction

from tilewise import autograd, pairs
from tilewise.backends import fused, fused_attend, fused_backward, products, ready, tuning

# Bytes of shared memory that a program may have.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# What reads a tensor's values on the host, or copies Python's numbers to a device.
WAITS = {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal"}


class NoUtils:
    """What Triton asks of a driver about binaries and devices."""

    def __init__(self, capability: int) -> None:
        self.shared = SHARED[capability]

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads that may run."""
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Of the one device."""
        return {"max_shared_mem": self.shared}


class NoDriver(CudaDriver):
    """Triton's driver of such a device; keeps the names of what it was to launch."""

    def __init__(self, capability: int) -> None:
        self.capability, self.launched = capability, []
        self.utils = NoUtils(capability)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, source: Any, _: Any) -> Any:
        """A launch of a kernel."""
        name = source.fn.__name__
        return lambda *_: self.launched.append(name)


class Compilations(list[tuple[str, float]]):
    """Kernels that were compiled, and the seconds each took."""

    def listen(self) -> None:
        """From now on."""
        compile_one = JITFunction._do_compile

        def timed(function: Any, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            kernel = compile_one(function, *args, **options)
            self.append((function.__name__, time.perf_counter() - start))
            return kernel

        JITFunction._do_compile = timed


def pretend(capability: int) -> tuple[NoDriver, Compilations]:
    """Let the fused backend take CPU tensors for those of such a device, in this process."""
    driver, compilations = NoDriver(capability), Compilations()
    triton.runtime.driver.set_active(driver)
    compilations.listen()
    fused.INTERPRETED = True
    ready.target_of = lambda _: tuning.Target("cuda", capability)
    # A CPU's tensors would be looked at, and multiplied.
    autograd.check_values = lambda _: None
    pairs.is_readable = lambda _: False

    def no_product(acc: Tensor, *_: Any) -> None:
        driver.launched.append("product")

    for module in (products, fused_attend, fused_backward):
        module.add_product = no_product
    torch.set_num_threads(1)
    return driver, compilations


def waits(step: Callable[[], None]) -> list[str]:
    """Operations of a step for which the host would wait, and which no CUDA graph can hold."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    names = {event.name.removeprefix("aten::") for event in profiler.events()}
    return sorted(names & WAITS)
