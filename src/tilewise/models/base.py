"""What every model to train has in common."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.data.loader import Form, Inputs
from tilewise.data.views import View
from tilewise.errors import OptionError


class PairModel(nn.Module):
    """One encoder of pairs: inputs by name, each with a row for each pair, to what a loss takes.

    `forward(**inputs)` returns "rows" and "cols", unit features (n, D), and "scale"; some return
    "bias" or "negatives" (n, H, D) too. It runs both towers, so that it can be wrapped, sharded and
    compiled as a whole.
    """

    image_size: int = 0  # pixels a side; 0 if it takes no images

    def can(self, what: str) -> bool:
        """Whether it has "images", "texts" or "patches"."""
        return getattr(type(self), what) is not getattr(PairModel, what)

    def view(self) -> View:
        """How it takes a whole image."""
        return View(self.image_size or 1)

    def form(self, view: View) -> Form:
        """How samples become its inputs."""
        raise NotImplementedError

    def precompute(self, inputs: Inputs) -> Inputs:
        """Inputs with what a locked tower makes of them, once; without gradient."""
        return inputs

    def frozen_state(self) -> list[Tensor]:
        """All that `precompute` depends on."""
        return []

    def images(self, pixels: Tensor) -> Tensor:
        """(n, 3, size, size) bytes -> (n, D) unit features."""
        raise OptionError(f"{type(self).__name__} does not embed images")

    def texts(self, texts: Sequence[str], *, queries: bool = False) -> Tensor:
        """n texts -> (n, D) unit features; as queries, where a model tells them from documents."""
        raise OptionError(f"{type(self).__name__} does not embed texts")

    def patches(self, pixels: Tensor) -> Tensor:
        """(n, 3, H, W) bytes -> (n, D, h, w) unit features of places in the image."""
        raise OptionError(f"{type(self).__name__} has no features of places in an image")

    @property
    def log_scale(self) -> nn.Parameter:
        """Logarithm of the scale that features are compared with."""
        raise NotImplementedError

    def set_scale(self, scale: float, *, learn: bool) -> None:
        """Begin with this scale."""
        with torch.no_grad():
            self.log_scale.fill_(math.log(scale))
        self.log_scale.requires_grad_(learn)

    def clamp(self, max_scale: float) -> None:
        """Keep a scale that is learned within [1, max_scale]."""
        with torch.no_grad():
            if self.log_scale.requires_grad:
                self.log_scale.clamp_(0, math.log(max_scale))

    def set_pixels(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """What pixels are normalised by, on the device: images travel as bytes."""
        for name, values in (("pixel_mean", mean), ("pixel_std", std)):
            self.register_buffer(
                name, torch.tensor(values).view(1, 3, 1, 1) * 255, persistent=False
            )

    def normalised(self, pixels: Tensor) -> Tensor:
        """Bytes as a tower takes them."""
        mean, std = self.get_buffer("pixel_mean"), self.get_buffer("pixel_std")
        return (pixels.to(mean.dtype) - mean) / std

    def facts(self) -> dict[str, Any]:
        """What a checkpoint tells of it, as JSON, so that it can be built again; nothing where the
        configuration is enough.
        """
        return {}

    def export(self, folder: Path) -> None:
        """Write the model as the library that it comes from reads it."""
        raise OptionError(f"{type(self).__name__} cannot be exported")

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)
