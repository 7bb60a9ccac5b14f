"""What a run is: one frozen, checked dataclass for each table of its TOML file.

Field names differ from table to table, so that each is a flag of its own on the command line.
Where a flag means what it means in open_clip it is spelled as there.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from tilewise import Pool
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
    """Save memory: recompute activations in the backward instead of keeping them."""
    torchcompile: bool = False
    """Compile the model with torch.compile."""
    query_prefix: str = ""
    """text: put before every query, as some models want it; by default the prompt that the folder
    tells of, if any; "none" for none."""
    document_prefix: str = ""
    """text: put before every document, likewise."""
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
    a JSONL, CSV or TSV table, or a folder of class folders.
    An ending such as @0-95 takes the samples whose id falls into these hundredths."""
    workers: int = 0
    """Processes that load; 0 loads beside the training, in a thread."""
    index_folder: str = ""
    """Folder where indexes of shards are kept, so that their headers are read once and samples take
    no memory: for many millions of them."""
    shuffle_window: int = 0
    """Shuffle within windows of so many stored samples, for slow disks; 0 shuffles all."""
    crop_scale: float = 0.9
    """Smallest share of an image's area that a random crop takes; 1 for no crops."""
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
    """clip: both directions. siglip: a sigmoid per pair. info_nce: queries to documents.
    nt_xent: two views (kind = simclr)."""
    backend: Literal["auto", "fused", "chunked", "dense"] = "auto"
    """Which implementation of the loss runs; auto picks the fastest exact one."""
    temperature: float = 0.07
    """Initial temperature; ignored if the pretrained weights bring one. One that is learned stays
    between 1 / max_scale and 1."""
    learn_temperature: bool = True
    """Whether the temperature is learned."""
    max_scale: float = 100.0
    """Largest scale = 1 / temperature: while learned, it is clamped to [1, max_scale] after every
    step."""
    init_bias: float = -10.0
    """siglip: initial bias, which is learned."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all pairs; not with siglip."""

    def __post_init__(self) -> None:
        _check_above(0, temperature=self.temperature)
        _check(self.max_scale > 0, f"max_scale must be above 0, got {self.max_scale}")
        _check(math.isfinite(self.init_bias), f"init_bias must be finite, got {self.init_bias}")
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
    """MiB for activations that are kept, so that their micro-batches need not be run twice; auto:
    what is free."""
    features: Literal["device", "host"] = "device"
    """Where features of the batch are held; host for batches whose features do not fit."""
    pool: int = 0
    """How many features of earlier batches are further negatives, on each rank;
    needs loss = 'info_nce'."""
    pool_where: str = "host"
    """Where the pool is held: device, host, or a file (./NAME for one here)."""
    batch_norm: bool = False
    """Accept models with BatchNorm, whose statistics are then those of micro-batches."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    """fp32, or mixed precision under autocast."""

    def __post_init__(self) -> None:
        _check_above(0, batch_size=self.batch_size, micro_batch=self.micro_batch)
        where = self.pool_where
        _check(
            where in ("device", "host") or Pool.is_path(where),
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
    """AdamW; AdaFactor with a momentum ("Scaling Vision Transformers"); Lion; LAMB."""
    lr: float = 1e-3
    """Largest learning rate, reached after the warm-up; meant for a batch of lr_batch."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with batch_size / lr_batch."""
    lr_batch: int = 0
    """Batch size that lr is meant for; 0 for batch_size."""
    lr_scheduler: Literal["cosine", "const"] = "cosine"
    """Learning rate after the warm-up: cosine decay to 0, or constant."""
    warmup: int = 20
    """Steps in which the learning rate grows from 0."""
    wd: float = 0.2
    """Weight decay of matrices; vectors and scales have none."""
    beta1: float = 0.9
    """Decay of the gradient's average; AdaFactor: of the update's."""
    beta2: float = 0.98
    """Decay of the squared gradient's average; Lion: of its momentum; AdaFactor: the largest that
    its decay grows to."""
    eps: float = 1e-6
    """Added to the denominator of an update (AdamW, LAMB)."""
    grad_clip_norm: float = 1.0
    """Gradients are scaled down to this norm, that of all weights together; 0 for no limit."""
    ema: float = 0.0
    """Decay of an average of the weights, evaluated and saved beside them; 0 for none."""
    max_skipped: int = 20
    """How many steps in a row may be skipped, their loss or gradient not being finite."""

    def __post_init__(self) -> None:
        _check_above(0, lr=self.lr, eps=self.eps)
        _check(self.lr_batch >= 0, f"lr_batch must not be negative, got {self.lr_batch}")
        _check(
            self.warmup >= 0 and 0 <= self.wd < math.inf,
            f"warmup and wd must be finite and not negative, got {self.warmup}, {self.wd}",
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
    """Images with texts, composed into scenes: does the model find what a text names?"""
    captions: Literal["first", "all"] = "first"
    """Which captions of a sample retrieval ranks: the first, or all."""
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
    """Seed of weights, order, crops and dropout: two runs with one seed are equal bit for bit."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dist: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun or SLURM: weights on every rank, or sharded over them (FSDP2)."""
    timeout_s: float = 600.0
    """Seconds after which a rank gives up waiting for another."""
    runs: str = "runs"
    """Folder for run folders."""
    name: str = ""
    """Name of the run folder; by default the model and the time."""
    resume: str = ""
    """Go on from a checkpoint folder, from the newest one of a run's folder, or from latest: the
    newest one of the run of this name."""
    save_every: int = 0
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept."""
    eval_every: int = 0
    """Steps between evaluations; the last step is always evaluated."""
    log_every: int = 10
    """Steps between lines of the log."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where numbers go besides metrics.jsonl, which is always written."""

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
            "/" not in self.name and self.name not in (".", "..") and self.name.isprintable(),
            "name must be the name of a folder, not a path and without control characters, got "
            f"{self.name!r}; set runs for the place",
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
            not self.model.pretrained or kind != "text",
            "kind = 'text' brings its weights in the folder that model names; leave pretrained out",
        )
        _check(
            self.run.resume != "latest" or bool(self.run.name),
            "resume = 'latest' goes on with the run of a name; give --name",
        )
