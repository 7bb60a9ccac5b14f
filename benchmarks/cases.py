"""What `run.py` measures: the cases, with their bars on one H200, and the contenders.

A contender turns inputs into a step: a callable that does one forward and backward and returns the
gradients. Peers are imported when their turn comes, so that a missing one is a row of the results.
"""

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise.bench import DENSE, OURS, TASKS, Inputs
from tilewise.measure import free_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE, BIAS = 14.3, -10.0
MIB = 2**20

Loss = Callable[[Inputs], Tensor]
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loss at one size; its name says all of it, as clip-bf16-65536x768."""

    loss: str
    """clip or siglip."""
    batch: int
    """B: images, and texts."""
    dim: int
    """D: features of each."""
    dtype: str
    """Of the features: bf16, fp16 or fp32."""
    autocast: bool = False
    """Whether the loss is called under bf16 autocast."""
    learnable: bool = False
    """Whether gradients of scale and bias are wanted too."""
    bar: float | None = None
    """Efficiency to reach on one H200."""
    note: str = ""
    """What else the case must show."""

    def __post_init__(self) -> None:
        """Raise `ValueError` on what cannot be measured."""
        for name, choice, known in (("loss", self.loss, TASKS), ("dtype", self.dtype, DTYPES)):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {choice!r}")
        if self.batch < 1 or self.dim < 1:
            raise ValueError(f"batch and dim must be at least 1, got {self.batch} and {self.dim}")

    @property
    def name(self) -> str:
        """As `--cases` takes it."""
        kind = f"{self.dtype}-autocast" if self.autocast else self.dtype
        kind = f"{kind}-learnable" if self.learnable else kind
        return f"{self.loss}-{kind}-{self.batch}x{self.dim}"

    @property
    def flop(self) -> int:
        """The floor of the exact loss without storing scores: 8*B*B*D, for SigLIP 6*B*B*D."""
        return 2 * TASKS[self.loss].num_products * self.batch**2 * self.dim

    @property
    def input_bytes(self) -> int:
        """Of both features; their gradients take as much again."""
        return 2 * self.batch * self.dim * DTYPES[self.dtype].itemsize

    @property
    def limit_bytes(self) -> float:
        """Most that may be taken above the inputs: 1.25 x (inputs + gradients) + 256 MiB in all."""
        return 1.25 * 2 * self.input_bytes + 256 * MIB - self.input_bytes

    def autocasting(self, device: torch.device) -> AbstractContextManager[object]:
        """The context to call the loss in."""
        if not self.autocast:
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def inputs(self, device: torch.device) -> Inputs:
        """Random unit features (B, D), the same in every run, scale 14.3; SigLIP has a bias.

        Both are constants unless the case is a learnable one.
        """
        generator = torch.Generator(device).manual_seed(self.batch)
        image, text = (
            functional.normalize(
                torch.randn(self.batch, self.dim, generator=generator, device=device), dim=1
            )
            .to(DTYPES[self.dtype])
            .requires_grad_()
            for _ in range(2)
        )
        bias = torch.tensor(BIAS, device=device, requires_grad=self.learnable)
        scale = torch.tensor(SCALE, device=device, requires_grad=self.learnable)
        return Inputs(image, text, scale, bias if self.loss == "siglip" else None)


CASES = (
    Case(loss="clip", batch=65536, dim=768, dtype="bf16", bar=0.95),
    Case(loss="clip", batch=32768, dim=512, dtype="bf16", bar=0.92),
    Case(loss="clip", batch=32768, dim=1024, dtype="bf16", bar=0.97),
    Case(loss="clip", batch=8192, dim=768, dtype="bf16", bar=0.90),
    Case(loss="clip", batch=262144, dim=768, dtype="bf16", bar=0.95),
    Case(loss="siglip", batch=65536, dim=768, dtype="bf16", bar=0.93),
    Case(loss="clip", batch=65536, dim=768, dtype="bf16", learnable=True),
    Case(loss="siglip", batch=65536, dim=768, dtype="bf16", learnable=True),
    Case(loss="clip", batch=32768, dim=768, dtype="fp32", note="3x the speed of dense PyTorch"),
    Case(
        loss="clip", batch=65536, dim=768, dtype="fp32", autocast=True,
        note="within 5 % of the bf16 row",
    ),
    Case(loss="clip", batch=1048576, dim=768, dtype="bf16", note="at most 10.7 s"),
)  # fmt: skip
"""What a CUDA machine measures unless told otherwise."""

ON_REQUEST = (Case(loss="clip", batch=4194304, dim=768, dtype="bf16", note="runs"),)
"""Minutes a step: measured only by name."""

CPU_CASES = (
    Case(loss="clip", batch=4096, dim=512, dtype="fp32"),
    Case(loss="siglip", batch=4096, dim=512, dtype="fp32"),
)
"""What a machine without CUDA measures unless told otherwise."""


def find_case(name: str) -> Case:
    """The case of that name; one that is in no table has no bar."""
    for case in (*CASES, *ON_REQUEST, *CPU_CASES):
        if case.name == name:
            return case
    parts = re.fullmatch(r"(\w+)-(\w+?)(-autocast)?(-learnable)?-(\d+)x(\d+)", name)
    if parts is None:
        raise ValueError(f"a case is named as clip-bf16-65536x768, got {name!r}")
    loss, dtype, autocast, learnable, batch, dim = parts.groups()
    flags = {"autocast": bool(autocast), "learnable": bool(learnable)}
    return Case(loss=loss, batch=int(batch), dim=int(dim), dtype=dtype, **flags)


def eager(case: Case, loss: Loss, inputs: Inputs) -> Step:
    """The step as PyTorch runs it, call by call."""

    def step() -> tuple[Tensor, ...]:
        with case.autocasting(inputs.image.device):
            value = loss(inputs)
        return torch.autograd.grad(value, inputs.wanted())

    return step


def captured(case: Case, loss: Loss, inputs: Inputs) -> Step:
    """The step recorded once as a CUDA graph; each call replays it."""
    plain = eager(case, loss, inputs)
    # Kernels are compiled and handles made before the recording, on a stream of its own.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = plain()

    def step() -> tuple[Tensor, ...]:
        graph.replay()
        return gradients

    return step


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody's loss, and where it can run."""

    name: str
    """As `--contenders` takes it."""
    load: Callable[[Case], Loss]
    """Imports what is needed and returns the loss of the case."""
    wrap: Callable[[Case, Loss, Inputs], Step] = eager
    """`eager`, or `captured` for a CUDA graph."""
    losses: tuple[str, ...] = ("clip", "siglip")
    """Losses it has."""
    module: str = ""
    """The package it needs; empty for none beyond PyTorch and tilewise."""
    needs_cuda: bool = False
    """Whether there is nothing to measure on a CPU."""
    num_squares: int = 0
    """B x B float32 matrices it holds, about."""
    max_batch: int | None = None
    """The largest batch whose step does not take minutes."""

    def refusal(self, case: Case, device: torch.device) -> str:
        """Why the case is not measured; empty when it can be tried."""
        if self.needs_cuda and device.type != "cuda":
            return "needs CUDA"
        if self.module and importlib.util.find_spec(self.module) is None:
            return "not installed"
        if self.max_batch is not None and case.batch > self.max_batch:
            return f"skipped: minutes a step beyond B = {self.max_batch:,}"
        # A GPU refuses what it cannot hold; Linux kills the process instead.
        squares_bytes = 4 * self.num_squares * case.batch**2
        if device.type == "cpu" and squares_bytes > free_bytes(device) / 2:
            return f"out of memory: needs about {squares_bytes / 2**30:.0f} GiB"
        return ""

    def step(self, case: Case, inputs: Inputs) -> Step:
        """The step on these inputs; may import, and for a graph runs the loss."""
        return self.wrap(case, self.load(case), inputs)


def _ours(case: Case, **how: str) -> Loss:
    if case.loss == "clip":
        return lambda x: tilewise.clip_loss(x.image, x.text, x.scale, **how)
    return lambda x: tilewise.siglip_loss(x.image, x.text, x.scale, x.bias, **how)


def _ours_kept(case: Case) -> Loss:
    """With exponentials kept in all memory that is free when it is first called."""
    budget: list[float] = []

    def loss(x: Inputs) -> Tensor:
        if not budget:  # free memory cannot be asked for while a graph is recorded
            kept = tilewise.explain_keep(x.image, x.text, "auto")
            print(f"{case.name}: {kept}", flush=True)
            budget.append(kept.mib + 1)
        return tilewise.clip_loss(x.image, x.text, x.scale, keep_mib=budget[0])

    return loss


def _ours_compiled(case: Case) -> Loss:
    torch._dynamo.reset()
    return torch.compile(_ours(case), dynamic=False)


def dense(case: Case) -> Loss:
    """The plain formula, summed in float32 at least; in float64 it is the truth."""
    return TASKS[case.loss].contenders[DENSE]


def _compiled(case: Case) -> Loss:
    # Without the reset a few sizes use up Dynamo's limit, and the next runs eagerly in silence.
    torch._dynamo.reset()
    return torch.compile(dense(case), dynamic=False)


def _open_clip_losses() -> ModuleType:
    """open_clip/loss.py alone: the package also imports torchvision and timm."""
    found = importlib.util.find_spec("open_clip")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).with_name("loss.py")
    spec = importlib.util.spec_from_file_location("open_clip_loss_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_clip(case: Case) -> Loss:
    losses = _open_clip_losses()
    loss = losses.ClipLoss() if case.loss == "clip" else losses.SigLipLoss()
    return lambda x: loss(x.image, x.text, x.scale, x.bias)


def _both_directions(cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """CLIP from a linear cross-entropy (rows (B, D), classes (B, D), targets (B,)), used twice."""

    def loss(x: Inputs) -> Tensor:
        targets = torch.arange(len(x.image), device=x.image.device)
        of_images = cross_entropy(x.scale * x.image, x.text, targets)
        of_texts = cross_entropy(x.scale * x.text, x.image, targets)
        return (of_images + of_texts) / 2

    return loss


def _inf_cl(case: Case) -> Loss:
    flash = importlib.import_module("inf_cl").cal_flash_loss
    # Its default of 256 must divide D.
    head_dim = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if case.dim % size == 0)
    return _both_directions(lambda a, b, targets: flash(a, b, targets, head_dim=head_dim).mean())


def _cut(case: Case) -> Loss:
    return _both_directions(importlib.import_module("cut_cross_entropy").linear_cross_entropy)


def _cut_exact(case: Case) -> Loss:
    """Without dropping small gradients."""
    cut = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return _both_directions(lambda a, b, targets: cut(a, b, targets, filter_eps=None))


def _liger(case: Case) -> Loss:
    # The function and not the module around it, whose package also imports transformers.
    ops = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    apply = ops.LigerFusedLinearCrossEntropyFunction.apply
    return _both_directions(lambda a, b, targets: apply(a, b, targets)[0])


def _siglip_kernel(case: Case) -> Loss:
    fused = importlib.import_module("siglip_kernel").fused_siglip_loss
    return lambda x: fused(x.image, x.text, x.scale.log(), x.bias)


CONTENDERS = (
    Contender(name=OURS, load=_ours),
    Contender(name=f"{OURS} graph", load=_ours, wrap=captured, needs_cuda=True),
    Contender(
        name=f"{OURS} compiled graph", load=_ours_compiled, wrap=captured, needs_cuda=True,
    ),
    Contender(
        name=f"{OURS} keep graph", load=_ours_kept, wrap=captured, needs_cuda=True,
        losses=("clip",), max_batch=131072,
    ),
    Contender(
        name=f"{OURS} fused", load=functools.partial(_ours, backend="fused"), needs_cuda=True,
    ),
    Contender(
        name=f"{OURS} fp8", load=functools.partial(_ours, precision="fp8"), needs_cuda=True,
    ),
    Contender(name="dense", load=dense, num_squares=5),
    Contender(name="open_clip", load=_open_clip, module="open_clip", num_squares=5),
    Contender(name="torch.compile", load=_compiled, num_squares=3),
    Contender(
        name="inf_cl", load=_inf_cl, module="inf_cl", losses=("clip",), needs_cuda=True,
        max_batch=131072,
    ),
    Contender(
        name="cut-cross-entropy", load=_cut, module="cut_cross_entropy", losses=("clip",),
        needs_cuda=True,
    ),
    Contender(
        name="cut-cross-entropy exact", load=_cut_exact, module="cut_cross_entropy",
        losses=("clip",), needs_cuda=True, max_batch=262144,
    ),
    Contender(
        name="liger", load=_liger, module="liger_kernel", losses=("clip",), needs_cuda=True,
    ),
    Contender(
        name="siglip-kernel", load=_siglip_kernel, module="siglip_kernel", losses=("siglip",),
        needs_cuda=True,
    ),
)  # fmt: skip


def find_contender(name: str) -> Contender:
    """The contender of that name."""
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    known = ", ".join(x.name for x in CONTENDERS)
    raise ValueError(f"a contender is one of {known}, got {name!r}")


@functools.cache
def gradient_error(case: Case, contender: Contender, device: torch.device) -> float:
    """norm(got - truth) / norm(truth) of d_image, the truth being the formula in float64."""
    inputs = case.inputs(device)
    got = contender.step(case, inputs)()[0].double()
    exact = inputs.to(torch.float64)
    truth = torch.autograd.grad(dense(case)(exact), exact.image)[0]
    return float((got - truth).norm() / truth.norm())
