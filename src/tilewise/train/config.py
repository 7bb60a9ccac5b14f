"""What a run is: one frozen, checked dataclass for each table of its TOML file.

Field names differ from table to table, so that each is a flag of its own on the command line.
Where a flag means what it means in open_clip it is spelled as there.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tilewise.errors import OptionError


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise OptionError(message)


def _check_above(low: float, **values: float) -> None:
    for name, value in values.items():
        fine = value > low and math.isfinite(value)
        _check(fine, f"{name} must be above {low:g} and finite, got {value!r}")


def _check_share(**values: float) -> None:
    for name, value in values.items():
        _check(0 <= value <= 1, f"{name} must be from 0 to 1, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    kind: Literal["clip", "text", "simclr"] = "clip"
    """clip: images with texts. text: queries with documents. simclr: two views of an image."""
    model: str = "tilewise-tiny"
    """clip: an open_clip config by name, or a JSON file of one.
    text: a folder of sentence-transformers or Hugging Face.
    simclr: a timm model by name."""
    pretrained: str = ""
    """File of weights to begin with (safetensors, or a PyTorch file that holds tensors only);
    model.safetensors of a checkpoint is one."""
    lock_image: bool = False
    """Leave the image tower as it is (LiT): it is run once, and its features can be cached."""
    lock_text: bool = False
    """Leave the text tower as it is."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward."""
    torchcompile: bool = False
    """Compile the model."""
    query_prefix: str = ""
    """text: put before queries, as some models want it; by default the folder's prompt, if any, and
    "none" for none."""
    document_prefix: str = ""
    """text: put before documents, likewise."""
    max_length: int = 0
    """Tokens of a text, the rest cut off; 0 for what the model takes."""
    image_size: int = 0
    """Pixels a side; 0 for what the model takes."""
    projector: tuple[int, ...] = (512, 128)
    """simclr: widths of the projector's layers; the last is the feature size of the loss."""
    patch_dropout: float = 0.0
    """Share of patches left out in training (FLIP)."""

    def __post_init__(self) -> None:
        _check(bool(self.model), "model must be a name or a path, got an empty one")
        _check(
            min(self.max_length, self.image_size) >= 0,
            "max_length and image_size must not be negative, "
            f"got {self.max_length}, {self.image_size}",
        )
        _check(
            0 <= self.patch_dropout < 1,
            f"patch_dropout must be in [0, 1), got {self.patch_dropout}",
        )
        if self.kind != "clip":
            _check(
                not (self.lock_image or self.lock_text),
                f"lock_image and lock_text belong to kind = 'clip', got kind = {self.kind!r}",
            )
        _check(
            bool(self.projector) and min(self.projector) > 0,
            f"projector must hold widths above 0, got {self.projector}",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it is trained on."""

    train_data: str = "emoji:train"
    """emoji:train, synthetic:PAIRS, shards (a folder, or a pattern such as data/{000..099}.tar),
    a JSONL or CSV table, or a folder of class folders.
    An ending such as @0-95 takes the samples whose id falls into these hundredths."""
    workers: int = 0
    """Processes that load; 0 loads beside the training, in a thread."""
    index_folder: str = ""
    """Folder where the indexes of shards are kept: headers are read once, and no memory is taken by
    what is in the files; for millions of samples."""
    shuffle_window: int = 0
    """Samples that are shuffled among themselves, in storage order otherwise; 0 for all."""
    crop_scale: float = 0.9
    """Least share of an image's area that a random crop aims at; 1 for none."""
    flip: bool = False
    """Mirror half the images."""
    jitter: float = 0.0
    """Strength of random brightness, contrast and saturation."""
    grayscale: float = 0.0
    """Share of images without colour."""
    blur: float = 0.0
    """Share of images that are blurred."""
    mask_equal: bool = True
    """Samples of equal id (the same caption, unless the data say more)
    are not each other's negatives."""
    feature_cache: str = ""
    """Folder for the features of a locked image tower, computed once for all epochs."""
    max_bad_share: float = 0.01
    """Share of samples that may be damaged before training stops."""

    def __post_init__(self) -> None:
        _check(bool(self.train_data), "train_data must say where the data are, got nothing")
        _check(self.workers >= 0, f"workers must not be negative, got {self.workers}")
        _check(
            self.shuffle_window >= 0,
            f"shuffle_window must not be negative, got {self.shuffle_window}",
        )
        _check(0 < self.crop_scale <= 1, f"crop_scale must be in (0, 1], got {self.crop_scale}")
        _check_share(jitter=self.jitter, grayscale=self.grayscale, blur=self.blur)
        _check_share(max_bad_share=self.max_bad_share)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised."""

    loss: Literal["clip", "siglip", "info_nce", "nt_xent"] = "clip"
    """Both directions; a sigmoid a pair; queries to documents only; two views."""
    backend: Literal["auto", "fused", "chunked", "dense"] = "auto"
    """Of the loss."""
    temperature: float = 0.07
    """To begin with, unless weights bring theirs."""
    learn_temperature: bool = True
    """Train it."""
    max_scale: float = 100.0
    """Largest 1 / temperature: the scale is clamped after every step."""
    init_bias: float = -10.0
    """siglip: bias to begin with."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all pairs; not with siglip."""

    def __post_init__(self) -> None:
        _check_above(0, temperature=self.temperature)
        _check(self.max_scale > 0, f"max_scale must be above 0, got {self.max_scale}")
        _check(
            0 <= self.label_smoothing < 1,
            f"label_smoothing must be in [0, 1), got {self.label_smoothing}",
        )
        _check(
            self.loss != "siglip" or not self.label_smoothing,
            "label_smoothing is not offered for loss = 'siglip'; set it to 0",
        )


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a batch gets through the machine."""

    batch_size: int = 512
    """Pairs of a step, over all ranks."""
    micro_batch: int = 512
    """Pairs that the encoders take at once, on each rank."""
    keep: float | Literal["auto"] = "auto"
    """MiB for graphs that need not be computed twice; auto: what is free."""
    features: Literal["device", "host"] = "device"
    """Where features of the batch are held; host for batches whose features do not fit."""
    pool: int = 0
    """Negatives of earlier batches that queries are held against too, on each rank;
    needs loss = 'info_nce'."""
    pool_where: str = "host"
    """device, host, or a file."""
    batch_norm: bool = False
    """Accept BatchNorm in train mode, with the statistics of micro-batches."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    """amp_*: autocast."""

    def __post_init__(self) -> None:
        _check_above(0, batch_size=self.batch_size, micro_batch=self.micro_batch)
        where = self.pool_where
        _check(
            where in ("device", "host") or Path(where).name != where or bool(Path(where).suffix),
            f"pool_where must be device, host or a path, ./NAME for one here, got {where!r}",
        )
        _check(
            self.keep == "auto" or float(self.keep) >= 0,
            f"keep must be 'auto' or MiB, got {self.keep!r}",
        )
        _check(self.pool >= 0, f"pool must not be negative, got {self.pool}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights change."""

    opt: Literal["adamw", "adafactor", "lion", "lamb"] = "adamw"
    """AdamW and AdaFactor of PyTorch, Lion and LAMB of timm."""
    lr: float = 1e-3
    """Largest learning rate, for `lr_batch` pairs."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How it grows with batch_size / lr_batch."""
    lr_batch: int = 0
    """Batch that `lr` is meant for; 0 for batch_size."""
    lr_scheduler: Literal["cosine", "const"] = "cosine"
    """After the warm-up."""
    warmup: int = 20
    """Steps in which the learning rate grows from 0."""
    wd: float = 0.2
    """Weight decay of matrices; vectors and scales have none."""
    beta1: float = 0.9
    """First moment (not of AdaFactor)."""
    beta2: float = 0.98
    """Second moment (not of AdaFactor)."""
    eps: float = 1e-6
    """Added to the root of the second moment (AdamW, LAMB)."""
    grad_clip_norm: float = 1.0
    """Largest norm of the whole gradient; 0 for no limit."""
    ema: float = 0.0
    """Decay of an average of the weights, evaluated and saved beside them; 0 for none."""
    max_skipped: int = 20
    """Steps in a row that may be skipped because a loss or gradient is not finite."""

    def __post_init__(self) -> None:
        _check_above(0, lr=self.lr, eps=self.eps)
        _check(self.lr_batch >= 0, f"lr_batch must not be negative, got {self.lr_batch}")
        _check(
            self.warmup >= 0 and self.wd >= 0,
            f"warmup and wd must not be negative, got {self.warmup}, {self.wd}",
        )
        _check(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            f"betas must be in [0, 1), got {self.beta1}, {self.beta2}",
        )
        _check(0 <= self.ema < 1, f"ema must be in [0, 1), got {self.ema}")
        _check(
            self.grad_clip_norm >= 0,
            f"grad_clip_norm must not be negative, got {self.grad_clip_norm}",
        )
        _check(self.max_skipped >= 0, f"max_skipped must not be negative, got {self.max_skipped}")
        _check(
            self.lr_scaling == "none" or self.lr_batch > 0,
            f"lr_scaling = {self.lr_scaling!r} needs lr_batch, "
            f"the batch that lr = {self.lr:g} is meant for",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is measured, during training and after; data are named as `train_data` are."""

    retrieval: tuple[str, ...] = ("emoji:style", "emoji:concepts")
    """Pairs: recall, ranks, MRR, nDCG in both directions."""
    zero_shot: tuple[str, ...] = ("emoji:style",)
    """Images with labels, classified by the names of their classes."""
    classes: str = ""
    """File with a class name a line; by default those of the data."""
    templates: tuple[str, ...] = ("{}",)
    """Sentences around a class name, or one file with a sentence a line."""
    probe: tuple[str, ...] = ()
    """Two data sets with labels:
    kNN and a linear probe are fitted on the first, tested on the second."""
    localise: tuple[str, ...] = ()
    """Images with texts, composed into scenes in which a text is to be found."""
    captions: Literal["first", "all"] = "first"
    """Which captions of a sample are looked for and through."""
    eval_batch: int = 256
    """Samples that are embedded at once."""

    def __post_init__(self) -> None:
        _check_above(0, eval_batch=self.eval_batch)
        _check(len(self.probe) in (0, 2), f"probe must name two data sets, got {list(self.probe)}")
        _check(
            bool(self.templates), "templates must hold a sentence, got none; '{}' is the name alone"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, place and records of the run."""

    epochs: float = 40.0
    """Times that the training data are seen."""
    steps: int = 0
    """Steps instead of epochs, if not 0."""
    seed: int = 0
    """Of weights, order, crops and dropout: two runs of one seed are equal bit for bit."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dist: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun or SLURM: weights on every rank, or sharded over them (FSDP2)."""
    timeout_s: float = 600.0
    """After which a rank gives up on another."""
    runs: str = "runs"
    """Folder for run folders."""
    name: str = ""
    """Of the run folder; by default the model and the time."""
    resume: str = ""
    """A checkpoint folder, or latest: the newest one of the run `name`."""
    save_every: int = 0
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """Older ones are removed."""
    eval_every: int = 0
    """Steps between evaluations; the last step is always evaluated."""
    log_every: int = 10
    """Steps between lines of the log."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Beside metrics.jsonl, which is always written."""

    def __post_init__(self) -> None:
        _check_above(0, epochs=self.epochs)
        _check(self.steps >= 0, f"steps must not be negative, got {self.steps}")
        _check(abs(self.seed) < 2**31, f"seed must be below 2**31, got {self.seed}")
        _check_above(0, keep_checkpoints=self.keep_checkpoints, log_every=self.log_every)
        _check_above(0, timeout_s=self.timeout_s)
        _check(
            min(self.save_every, self.eval_every) >= 0,
            "save_every and eval_every must not be negative, "
            f"got {self.save_every}, {self.eval_every}",
        )
        _check(
            "/" not in self.name and self.name not in (".", ".."),
            f"name must be the name of a folder, not a path, got {self.name!r}; "
            "set runs for the place",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        kind, loss = self.model.kind, self.loss.loss
        _check(
            (loss == "nt_xent") == (kind == "simclr"),
            f"loss = 'nt_xent' and kind = 'simclr' belong together, got {loss!r} and {kind!r}",
        )
        _check(
            not self.step.pool or loss == "info_nce",
            f"a pool of negatives needs loss = 'info_nce', got {loss!r}",
        )
        _check(
            not self.data.feature_cache or self.model.lock_image,
            "feature_cache holds features of a locked image tower; set lock_image = true",
        )
        seen = self.data
        changing = (1 - seen.crop_scale, seen.flip, seen.jitter, seen.grayscale, seen.blur)
        _check(
            not seen.feature_cache or not any(changing),
            "features are cached of images as they are; set crop_scale = 1, jitter, grayscale and "
            "blur to 0, flip = false, or leave feature_cache out",
        )
        _check(
            self.run.dist == "ddp" or self.optim.opt != "adafactor",
            "PyTorch's AdaFactor does not take sharded weights; set dist = 'ddp', or another opt",
        )
        _check(
            not self.model.pretrained or kind != "text",
            "kind = 'text' brings its weights in the folder that model names; leave pretrained out",
        )
        _check(
            self.run.resume != "latest" or bool(self.run.name),
            "resume = 'latest' goes on with the run of a name; give --name",
        )
        _check(
            self.step.features == "device" or self.run.dist == "ddp",
            "features = 'host' is for one process; leave it on the device",
        )
