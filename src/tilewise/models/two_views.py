"""Two views of each image (SimCLR): an image tower of timm or open_clip with a projector."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilewise.data.loader import Form, Inputs
from tilewise.data.samples import Sample
from tilewise.data.views import CHANCES, View
from tilewise.errors import DataError, OptionError
from tilewise.models.base import PairModel, evaluating
from tilewise.models.libraries import need
from tilewise.models.patches import multiply_patches
from tilewise.models.weights import load_strictly, read_pretrained, write_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # as timm finds them


class TwoViews(PairModel):
    """(first, second) views -> rows, cols, scale.

    What is evaluated are features before the projector.

    Args:
        name: a model of timm.
        projector: widths of its layers.
        image_size: pixels a side; 0 for timm's.
        pretrained: file of weights of the backbone, or a checkpoint's, whose projector is left out.
    """

    def __init__(
        self, name: str, projector: Sequence[int], *, image_size: int = 0, pretrained: str = ""
    ) -> None:
        super().__init__()
        timm = need("timm")
        if not timm.is_model(name):
            near = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "see timm.list_models()"
            raise OptionError(
                f"model must be a name that timm knows, got {name!r}; near it: {near}"
            )
        self.name = name
        self.backbone: Any = timm.create_model(name, num_classes=0)
        # What timm must be told beside the name: a ViT has a weight for each place of the image.
        self.model_args: dict[str, Any] = {}
        if image_size and hasattr(self.backbone, "set_input_size"):
            self.backbone.set_input_size(image_size)
            self.model_args = {"img_size": image_size}
        multiply_patches(self.backbone)
        if pretrained:
            load_strictly(self.backbone, read_pretrained(Path(pretrained)), Path(pretrained))
        self.image_size = image_size or int(self.backbone.default_cfg["input_size"][1])
        self.projector = _projector([self._pooled(), *projector])
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.set_pixels(*(self.backbone.default_cfg[key] for key in ("mean", "std")))

    def _pooled(self) -> int:
        """How many features come out: some models widen or narrow what they pool, and what timm
        knows of that is not true of all. Weights that are drawn after it are as without it.
        """
        size = self.image_size
        try:
            with evaluating(self.backbone), torch.random.fork_rng(devices=[]):
                return int(self.backbone(torch.zeros(1, 3, size, size)).shape[1])
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise OptionError(
                f"{self.name} does not take images of {size} x {size} pixels: {error}; set "
                "--image-size"
            ) from error

    @property
    def log_scale(self) -> nn.Parameter:
        return self.logit_scale

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        """first, second: (n, 3, size, size) bytes."""
        projected = self.projector(self._features(torch.cat((first, second))))
        rows, cols = functional.normalize(projected, dim=-1).chunk(2)
        return {"rows": rows, "cols": cols, "scale": self.logit_scale.exp()}

    def _features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.backbone(self.normalised(pixels))
        return features

    def images(self, pixels: Tensor) -> Tensor:
        return functional.normalize(self._features(pixels).float(), dim=-1)

    def form(self, view: View) -> Form:
        return Form(_TwoViews(view), _collate, 2 * CHANCES)

    def export(self, folder: Path) -> None:
        """The backbone, for `timm.create_model("local-dir:" + folder, pretrained=True)`; or, for a
        timm that does not know folders, with what config.json holds:
        `timm.create_model(architecture, num_classes=0, checkpoint_path=file, **model_args)`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / WEIGHTS, self.backbone.state_dict())
        pixels = {key: self.backbone.default_cfg[key] for key in ("mean", "std")}
        size = [3, self.image_size, self.image_size]
        about = {
            "architecture": self.name,
            "num_classes": 0,
            "image_size": self.image_size,
            **pixels,
            "model_args": self.model_args,
            "pretrained_cfg": {"input_size": size, **pixels},  # as timm reads a folder
        }
        (folder / CONFIG).write_text(json.dumps(about, indent=2))


def read_export(folder: Path) -> dict[str, Any]:
    """Name, image size and weights of a backbone that was exported."""
    try:
        about = json.loads((folder / CONFIG).read_text())
        size = about["pretrained_cfg"]["input_size"][-1]
        return {
            "model": about["architecture"],
            "image_size": size,
            "pretrained": str(folder / WEIGHTS),
        }
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise OptionError(
            f"{folder / CONFIG} must tell of a model of timm, as tilewise export writes it, and "
            f"does not: {error!r}"
        ) from error


class _TwoViews:
    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, sample: Sample, chances: NDArray[np.float64]) -> dict[str, Any]:
        if "image" not in sample:
            raise DataError(f"a sample must have an image, got {', '.join(sample)}", "fields")
        first, second = (self.view(sample["image"], chances[i * CHANCES :]) for i in range(2))
        return {"first": first, "second": second}


def _collate(prepared: list[dict[str, Any]]) -> Inputs:
    return {
        name: torch.from_numpy(np.stack([each[name] for each in prepared]))
        for name in ("first", "second")
    }


def _projector(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
