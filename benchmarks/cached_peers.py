"""What `cached_step.py` measures: pairs of encoders, and steps that need not hold all their graphs.

A contender turns a job into a step: a callable that does one forward and backward of the batch and
adds to `.grad`. Peers are imported when their turn comes, so that a missing one is a row.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise
from tilewise.models.libraries import mend_torchvision

SCALE = 14.3
ERROR_BATCH, ERROR_PARTS = 256, 4  # pairs, and micro-batches, whose gradients are compared
MAKE_AT_ONCE = 1024  # images, so that making them takes little memory

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], object]


class Pixels(nn.Module):
    """An image encoder that takes uint8 images (N, 3, H, W), a quarter of what float32 takes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        """What the body makes of them, between -1 and 1."""
        kind = images.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.body(images.to(low or next(self.parameters()).dtype) / 127.5 - 1)


class Tower(nn.Module):
    """Unit features (N, D) of one side.

    It enters autocast itself: what casts of weights cost, they cost every contender alike.
    """

    def __init__(self, body: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.body, self.autocast = body, autocast

    def forward(self, inputs: Tensor) -> Tensor:
        """Of images (N, 3, H, W) or token ids (N, T)."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.autocast):
            return functional.normalize(self.body(inputs), dim=-1)


class Pair(nn.Module):
    """Two encoders and a scale to learn."""

    def __init__(self, image: nn.Module, text: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.autocast = autocast
        self.image, self.text = Tower(Pixels(image), autocast), Tower(text, autocast)
        self.scale = nn.Parameter(torch.tensor(SCALE))

    def loss(self, image: Tensor, text: Tensor, formula: Formula) -> Tensor:
        """Of features (B, D) of both."""
        with torch.autocast(image.device.type, torch.bfloat16, enabled=self.autocast):
            return formula(image, text, self.scale)

    def exact(self) -> "Pair":
        """A copy without autocast: in float64, on a GPU in float32."""
        made = copy.deepcopy(self)
        made.autocast = made.image.autocast = made.text.autocast = False
        return made.double() if self.scale.device.type == "cpu" else made.float()


class Shape(NamedTuple):
    """What the encoders take."""

    side: int  # pixels
    tokens: int
    words: int  # different ones


class Size(NamedTuple):
    """A built-in pair."""

    shape: Shape
    patch: int
    width: int
    layers: int
    dim: int


BUILT_IN = {
    "tiny": Size(Shape(16, 6, 100), patch=8, width=16, layers=1, dim=8),
    "small": Size(Shape(32, 16, 1000), patch=8, width=192, layers=3, dim=128),
}


class Transformer(nn.Module):
    """Tokens through a few layers; their mean, projected."""

    def __init__(self, embed: nn.Module, tokens: int, size: Size) -> None:
        super().__init__()
        self.embed = embed
        self.places = nn.Parameter(torch.randn(tokens, size.width) / 10)
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(
                size.width, size.width // 16, 4 * size.width,
                dropout=0.0, batch_first=True, norm_first=True,
            )
            for _ in range(size.layers)
        ))  # fmt: skip
        self.project = nn.Linear(size.width, size.dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (N, D)."""
        tokens = self.embed(inputs)  # (N, T, width), or a map of patches (N, width, H, W)
        tokens = tokens.flatten(2).mT if tokens.dim() == 4 else tokens
        return self.project(self.layers(tokens + self.places).mean(dim=1))


def load(name: str) -> ModuleType:
    """A peer's module.

    This folder is hidden from it: transformers would take kernels.py here for a package it knows.
    """
    here = Path(__file__).resolve().parent
    mend_torchvision()
    with mock.patch.object(sys, "path", [x for x in sys.path if Path(x).resolve() != here]):
        return importlib.import_module(name)


def make_pair(name: str, device: torch.device, autocast: bool) -> tuple[Pair, Shape]:
    """A built-in pair, or a model of open_clip, with random weights; and what it takes."""
    torch.manual_seed(0)
    if name in BUILT_IN:
        size = BUILT_IN[name]
        patches = (size.shape.side // size.patch) ** 2
        image = Transformer(nn.Conv2d(3, size.width, size.patch, size.patch), patches, size)
        words = nn.Embedding(size.shape.words, size.width)
        text = Transformer(words, size.shape.tokens, size)
        return Pair(image, text, autocast).to(device), size.shape
    model = load("open_clip").create_model(
        name, device=device, force_custom_text=True, pretrained_text=False
    )
    side = model.visual.image_size
    shape = Shape(
        side[0] if isinstance(side, tuple) else side, model.context_length, model.vocab_size
    )
    return Pair(model.visual, model.text, autocast).to(device), shape


class Data(NamedTuple):
    """A batch."""

    images: Tensor  # (B, 3, H, W), uint8
    texts: Tensor  # (B, T), int64

    def first(self, count: int) -> "Data":
        """The first so many samples, as they lie."""
        return Data(self.images[:count], self.texts[:count])

    def to(self, device: torch.device) -> "Data":
        """Copies, if they are elsewhere."""
        return Data(self.images.to(device), self.texts.to(device))


def make_data(shape: Shape, batch: int, device: torch.device) -> Data:
    """Squares of random colours and random words, made on the device, in (pinned) host memory.

    Noise would give features that are all but equal, and gradients that are all rounding.
    """
    dice = torch.Generator(device).manual_seed(1)
    pinned = device.type == "cuda"
    images = torch.empty(batch, 3, shape.side, shape.side, dtype=torch.uint8, pin_memory=pinned)
    for part in images.split(MAKE_AT_ONCE):
        colours = torch.randint(256, (len(part), 3, 4, 4), generator=dice, device=device)
        part.copy_(functional.interpolate(colours.float(), size=shape.side).to(torch.uint8))
    texts = torch.randint(shape.words, (batch, shape.tokens), generator=dice, device=device).cpu()
    return Data(images, texts.pin_memory() if pinned else texts)


class Job(NamedTuple):
    """What a contender has to do."""

    pair: Pair
    data: Data  # on the device
    micro_batch: int


def dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The CLIP loss with its B x B matrix."""
    z = scale * (image @ text.mT)
    targets = torch.arange(len(z), device=z.device)
    return (functional.cross_entropy(z, targets) + functional.cross_entropy(z.mT, targets)) / 2


def plain(job: Job) -> Step:
    """The whole batch at once, with its graph."""

    def step() -> None:
        image, text = job.pair.image(job.data.images), job.pair.text(job.data.texts)
        job.pair.loss(image, text, dense).backward()

    return step


def ours(job: Job, keep: float | str) -> Step:
    """The cached step with the loss of this library."""
    loss = partial(job.pair.loss, formula=tilewise.clip_loss)
    towers = (job.pair.image, job.pair.text)
    step = tilewise.CachedStep(towers, loss, micro_batch=job.micro_batch, keep=keep, progress=False)  # type: ignore[arg-type]
    return lambda: step(*job.data)


class _Columns(nn.Module):
    """Both towers as sentence-transformers calls a model: a mapping in, a mapping out."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if "input_ids" in inputs:
            return {"sentence_embedding": self.pair.text(inputs["input_ids"])}
        return {"sentence_embedding": self.pair.image(inputs["pixel_values"])}


def sentence_transformers(job: Job) -> Step:
    """Its cached ranking loss in both directions, which is the CLIP loss.

    Its scale is a constant; a parameter in its place is learned.
    """
    losses = load("sentence_transformers.sentence_transformer.losses")
    loss = losses.CachedMultipleNegativesRankingLoss(
        nn.Sequential(_Columns(job.pair)),
        scale=job.pair.scale,
        similarity_fct=load("sentence_transformers.util").dot_score,
        mini_batch_size=job.micro_batch,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    inputs = [{"pixel_values": job.data.images}, {"input_ids": job.data.texts}]

    def step() -> None:
        # As its trainer does: the forward under autocast, the backward, which runs the model again,
        # outside of it.
        kind = job.data.images.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=job.pair.autocast):
            value = loss(inputs, None)
        value.backward()

    return step


def _grad_cache_class() -> Any:
    if importlib.util.find_spec("grad_cache") is None:
        # The package on PyPI is named gradcache, but its modules look for each other in grad_cache.
        sys.modules["grad_cache"] = load("gradcache")
    return load("grad_cache.grad_cache").GradCache


def grad_cache(job: Job) -> Step:
    """The package of the paper, with the plain loss."""
    loss = partial(job.pair.loss, formula=dense)
    cache = _grad_cache_class()([job.pair.image, job.pair.text], job.micro_batch, loss)
    return lambda: cache(*job.data)


def grad_cache_algorithm(job: Job) -> Step:
    """What the paper does (arXiv 2101.06983), for where its package is not.

    Without the random states, which encoders without dropout do not need.
    """
    towers = (job.pair.image, job.pair.text)
    parts = [x.split(job.micro_batch) for x in job.data]

    def step() -> None:
        with torch.no_grad():
            embedded = [
                torch.cat([tower(x) for x in own]) for tower, own in zip(towers, parts, strict=True)
            ]
        leaves = [x.requires_grad_() for x in embedded]
        job.pair.loss(*leaves, dense).backward()
        for tower, own, leaf in zip(towers, parts, leaves, strict=True):
            assert leaf.grad is not None
            for x, grad in zip(own, leaf.grad.split(job.micro_batch), strict=True):
                tower(x).backward(grad)

    return step


def accumulated(job: Job) -> Step:
    """Gradient accumulation as open_clip's `--accum-freq` has it.

    Features of all are remembered; then for each micro-batch its own, with their graph, take their
    place among them, and the whole loss is computed and differentiated once more. A parameter of
    the loss is in each of those graphs, and gets its gradient as often.
    """
    towers = (job.pair.image, job.pair.text)
    parts = [x.split(job.micro_batch) for x in job.data]

    def step() -> None:
        with torch.no_grad():
            known = [[tower(x) for x in own] for tower, own in zip(towers, parts, strict=True)]
        for i in range(len(parts[0])):
            sides = []
            for tower, own, features in zip(towers, parts, known, strict=True):
                sides.append(torch.cat([*features[:i], tower(own[i]), *features[i + 1 :]]))
            job.pair.loss(*sides, dense).backward()

    return step


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody's step."""

    name: str
    """As `--contenders` takes it."""
    make: Callable[[Job], Step]
    """Imports what is needed."""
    module: str = ""
    """The package it needs beyond PyTorch and tilewise."""
    peer: bool = True
    """Whether it is another's way to train on more than fits."""

    def refusal(self) -> str:
        """Why it is not measured; empty where it can be tried."""
        missing = self.module and importlib.util.find_spec(self.module) is None
        return "not installed" if missing else ""


_PACKAGE = any(importlib.util.find_spec(name) for name in ("grad_cache", "gradcache"))
CONTENDERS = (
    Contender(name="plain", make=plain, peer=False),
    Contender(name="tilewise keep=0", make=partial(ours, keep=0), peer=False),
    Contender(name="tilewise keep=auto", make=partial(ours, keep="auto"), peer=False),
    Contender(
        name="sentence-transformers", make=sentence_transformers, module="sentence_transformers",
    ),
    Contender(name="GradCache", make=grad_cache)
    if _PACKAGE
    else Contender(name="GradCache (its algorithm)", make=grad_cache_algorithm),
    Contender(name="open_clip --accum-freq", make=accumulated),
)  # fmt: skip


class Gradients(NamedTuple):
    """What a step left."""

    encoders: Tensor  # (all weights,), float64
    scale: float


def gradients(make: Callable[[Job], Step], job: Job) -> Gradients:
    """Of a few pairs, in four micro-batches."""
    size = min(ERROR_BATCH, len(job.data.images))
    pair, step = job.pair, make(Job(job.pair, job.data.first(size), -(-size // ERROR_PARTS)))
    pair.zero_grad(set_to_none=True)
    # A truth in float32 must not have its convolutions in TF32.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        step()
    parameters = [*pair.image.parameters(), *pair.text.parameters()]
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    assert pair.scale.grad is not None
    found = torch.cat([x.flatten().double().cpu() for x in every])
    return Gradients(found, float(pair.scale.grad))
