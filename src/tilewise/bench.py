"""Ours against dense PyTorch on the machine this runs on: speed, memory and gradient error."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise import clip_loss, measure, siglip_loss
from tilewise.errors import OptionError

OURS, DENSE = "tilewise", "dense PyTorch"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_DIM = 64  # small features, so that the memory curve shows what grows with B x B
ERROR_BATCH = 1024  # the largest batch whose gradient is compared with float64
SHARE_S = 1.0  # seconds below which filling the matrices, on one thread, blurs the share
DENSE_MATRICES = 5  # B x B float32 matrices that dense PyTorch holds at its peak, about


class Inputs(NamedTuple):
    """What a loss is called with: unit features (B, D) and scalars that want gradients too."""

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None

    def wanted(self) -> list[Tensor]:
        """The tensors to differentiate in."""
        return [x for x in self if x is not None and x.requires_grad]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype, as fresh leaves."""
        image, text, scale = (_like(x, dtype) for x in self[:3])
        return Inputs(image, text, scale, None if self.bias is None else _like(self.bias, dtype))


def _our_clip(x: Inputs) -> Tensor:
    return clip_loss(x.image, x.text, x.scale)


def _our_siglip(x: Inputs) -> Tensor:
    return siglip_loss(x.image, x.text, x.scale, x.bias)


def _dense_clip(x: Inputs) -> Tensor:
    """open_clip's formula, with the cross entropy in float32 at least, as autocast has it."""
    logits = x.scale * x.image @ x.text.T
    logits = logits.to(_sum_dtype(logits))
    labels = torch.arange(len(logits), device=logits.device)
    of_images = functional.cross_entropy(logits, labels)
    of_texts = functional.cross_entropy(logits.T, labels)
    return (of_images + of_texts) / 2


def _dense_siglip(x: Inputs) -> Tensor:
    """open_clip's formula, with the sum in float32 at least, as autocast has it."""
    assert x.bias is not None
    logits = x.scale * x.image @ x.text.T + x.bias
    labels = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    return -functional.logsigmoid(labels * logits).sum(dtype=_sum_dtype(logits)) / len(logits)


def _sum_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


class Task(NamedTuple):
    """A loss as a benchmark: its contenders, its products of 2*B*B*D FLOP, its usual scalars."""

    title: str
    contenders: dict[str, Callable[[Inputs], Tensor]]
    num_products: int
    scale: float
    bias: float | None


TASKS = {
    "clip": Task("CLIP loss", {OURS: _our_clip, DENSE: _dense_clip}, 4, 1 / 0.07, None),
    "siglip": Task("SigLIP loss", {OURS: _our_siglip, DENSE: _dense_siglip}, 3, 10.0, -10.0),
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What `tilewise bench` measures; checked on construction."""

    batches: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Batch sizes B to time."""
    dim: int = 512
    """Feature size D of the timed cases."""
    dtype: str = "float32"
    """Of the features: float32, bfloat16 or float16."""
    loss: str = "clip"
    """clip or siglip."""
    repeats: int = 3
    """Timed steps for each case; the median counts."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes CUDA where there is one."""
    memory_batches: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Batch sizes of the memory curve, at D = 64."""
    gemm_size: int | None = None
    """Side of the matrix product that efficiency is relative to; 4096 (CPU) or 8192 (CUDA)."""
    out: str = "bench-results"
    """Folder for bench.csv and bench.png."""

    def __post_init__(self) -> None:
        """Raise `OptionError` on a value that cannot be measured."""
        for name, choice, known in (("dtype", self.dtype, DTYPES), ("loss", self.loss, TASKS)):
            if choice not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, got {choice!r}")
        _check_sizes("batches", self.batches)
        _check_sizes("memory_batches", self.memory_batches)
        _check_sizes("dim", (self.dim,))
        _check_sizes("repeats", (self.repeats,))
        if self.gemm_size is not None:
            _check_sizes("gemm_size", (self.gemm_size,))
        if not self.out:
            raise OptionError("out must name a folder, got an empty name")
        _check_device(self.device)

    @property
    def where(self) -> torch.device:
        """The device that is measured."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


QUICK: dict[str, object] = {
    "batches": (256, 512),
    "dim": 64,
    "repeats": 1,
    "memory_batches": (256, 512, 1024),
    "gemm_size": 512,
}
"""Options of a run that takes a moment: to see that it works, not to measure."""


class Case(NamedTuple):
    """One contender at one size; a case that is not timed only has its peak memory measured."""

    contender: str
    batch: int
    dim: int
    timed: bool

    def __str__(self) -> str:
        return f"{self.contender}, B = {self.batch}, D = {self.dim}"


class Row(NamedTuple):
    """What was measured of a case; None where it was not."""

    case: Case
    time_ms: float | None = None  # of one forward and backward
    gemm_tflops: float | None = None  # mean of the speeds before and after the case
    cpu_share: float | None = None  # of the threads' time, see `Gemm`
    efficiency: float | None = None  # the loss's products at that speed, over the time
    peak_mib: float | None = None  # above the inputs, so gradients are counted
    gradient_error: float | None = None  # norm(got - truth) / norm(truth) of the image gradient
    skipped: str = ""  # why nothing was measured


class Gemm(NamedTuple):
    """The yardstick: matrix products right before or after a case."""

    tflops: float
    cpu_share: float | None
    """Part of its threads' time that the process got; low when other work runs. None on CUDA and
    for products too short to tell."""


def cases(config: BenchConfig) -> list[Case]:
    """What `run` measures, in its order."""
    contenders = TASKS[config.loss].contenders
    timed = [Case(name, b, config.dim, True) for b in config.batches for name in contenders]
    return timed + [
        Case(name, b, MEMORY_DIM, False) for b in config.memory_batches for name in contenders
    ]


def run(config: BenchConfig) -> Iterator[Row]:
    """Measure the cases one by one; each row is yielded as soon as it is known."""
    device = config.where
    before = _gemm(config)
    for case in cases(config):
        reason = _too_large(case, device)
        if reason:
            yield Row(case, skipped=reason)
            continue
        step = _step(config, case)
        if not case.timed:
            yield Row(case, peak_mib=_peak_mib(step, device))
            continue
        seconds = measure.median_s(step, config.repeats, device)
        # A shared machine is slower for seconds at a time: the yardstick is taken on both sides.
        sides = before, _gemm(config)
        before = sides[1]
        tflops = (sides[0].tflops + sides[1].tflops) / 2
        flop = 2 * TASKS[config.loss].num_products * case.batch**2 * case.dim
        yield Row(
            case,
            time_ms=1e3 * seconds,
            gemm_tflops=tflops,
            cpu_share=min((x.cpu_share for x in sides if x.cpu_share is not None), default=None),
            efficiency=flop / seconds / (1e12 * tflops),
            peak_mib=_peak_mib(step, device),
            gradient_error=_gradient_error(config, case),
        )


def inputs_bytes(config: BenchConfig, case: Case) -> int:
    """Bytes of both feature tensors of a case."""
    return 2 * case.batch * case.dim * DTYPES[config.dtype].itemsize


def contract_bytes(config: BenchConfig, case: Case) -> float:
    """The most memory ours may take, inputs counted: 1.25 x (inputs + gradients) + 256 MiB."""
    return 1.25 * 2 * inputs_bytes(config, case) + 256 * 2**20


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise OptionError(f"{name} must name at least one size, got none")
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise OptionError(f"{name} must be a whole number of at least 1, got {size!r}")


def _check_device(device: str) -> None:
    if device == "auto":
        return
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in measure.GEMM_SIZES:
        raise OptionError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device {device!r} is not there, PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; use cpu, or install PyTorch with CUDA"
        )


def _too_large(case: Case, device: torch.device) -> str:
    """Why dense PyTorch is not run: its matrices would fill over half of the free memory."""
    needed_bytes = DENSE_MATRICES * 4 * case.batch**2
    free_bytes = measure.free_bytes(device)
    if case.contender != DENSE or needed_bytes <= free_bytes / 2:
        return ""
    return (
        f"needs about {needed_bytes / 2**30:.1f} GiB for the matrix, "
        f"{free_bytes / 2**30:.1f} GiB are free"
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def _inputs(config: BenchConfig, batch: int, dim: int) -> Inputs:
    """Random unit features, the same for every contender."""
    generator = torch.Generator().manual_seed(batch)
    image, text = (
        functional.normalize(torch.randn(batch, dim, generator=generator), dim=1).to(
            config.where, DTYPES[config.dtype]
        )
        for _ in range(2)
    )
    task = TASKS[config.loss]
    scale = torch.tensor(task.scale, device=config.where)
    bias = None if task.bias is None else _leaf(torch.tensor(task.bias, device=config.where))
    return Inputs(_leaf(image), _leaf(text), _leaf(scale), bias)


def _step(config: BenchConfig, case: Case) -> Callable[[], object]:
    """Forward and backward of the case, with gradients of features, scale and bias."""
    loss = TASKS[config.loss].contenders[case.contender]
    inputs = _inputs(config, case.batch, case.dim)
    return lambda: torch.autograd.grad(loss(inputs), inputs.wanted())


def _gemm(config: BenchConfig) -> Gemm:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    tflops = measure.gemm_tflops(config.where, DTYPES[config.dtype], config.gemm_size)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    if config.where.type == "cuda" or wall_s < SHARE_S:
        return Gemm(tflops, None)
    return Gemm(tflops, cpu_s / (wall_s * torch.get_num_threads()))


def _peak_mib(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        step()  # what kernels allocate once and keep is no part of a step
    return measure.peak_bytes(step, device) / 2**20


def _gradient_error(config: BenchConfig, case: Case) -> float:
    """Error of the image gradient against the dense formula in float64, at a small batch."""
    contenders = TASKS[config.loss].contenders
    batch = min(case.batch, ERROR_BATCH)
    inputs = _inputs(config, batch, case.dim)
    exact = inputs.to(torch.float64)
    # The sum over the batch and not its mean: float16 would underflow, as it does in training
    # without a loss scale.
    got, truth = (
        torch.autograd.grad(batch * contenders[name](x), x.image)[0].double()
        for name, x in ((case.contender, inputs), (DENSE, exact))
    )
    return float((got - truth).norm() / truth.norm())
