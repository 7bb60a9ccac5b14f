"""Random views of an image: crop, mirror, colour, blur; each a pure function of numbers in
[0, 1).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import OptionError

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

CHANCES = 12  # numbers that a view takes
LARGEST_RATIO = 4 / 3  # of a random crop's sides, unless the image is longer
LONGEST_STRIP = 16  # ratio of an image's sides beyond which its ends are cut off before resizing
RESIZES = ("shortest", "squash", "longest")
INTERPOLATIONS = ("bicubic", "bilinear", "random")  # the last is open_clip's: bicubic, but in timm


@dataclass(frozen=True)
class View:
    """How an image becomes (3, size, size) bytes; the defaults change nothing but its size.

    resize says how one that is not square does, unless a random part of it is taken: "shortest"
    takes the square in its middle, "squash" all of it with another ratio of sides, "longest" all of
    it with bars of brightness `fill`. As open_clip's names say it, and `interpolation` too.
    """

    size: int
    crop_scale: float = 1.0
    flip: bool = False
    jitter: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0
    resize: str = "shortest"
    interpolation: str = "bicubic"
    fill: int = 0

    def __post_init__(self) -> None:
        for name, known in (("resize", RESIZES), ("interpolation", INTERPOLATIONS)):
            if (got := getattr(self, name)) not in known:
                raise OptionError(
                    f"{name} of images must be one of {', '.join(known)}, got {got!r}"
                )

    def __call__(self, image: "Image", chances: NDArray[np.float64]) -> NDArray[np.uint8]:
        """chances: (CHANCES,) in [0, 1)."""
        from PIL.Image import Transpose  # noqa: PLC0415

        image = self._resized(image, chances[:4])
        if self.flip and chances[4] < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        image = self._recoloured(image, chances[5:])
        planes: NDArray[np.uint8] = np.asarray(image, np.uint8).transpose(2, 0, 1)
        return planes

    def _resized(self, image: "Image", chances: NDArray[np.float64]) -> "Image":
        from PIL import Image as images  # noqa: N813, PLC0415

        linear = self.interpolation == "bilinear"
        kernel = images.Resampling.BILINEAR if linear else images.Resampling.BICUBIC
        if self.crop_scale < 1:
            box = self._box(image.size, chances)
            return image.resize((self.size, self.size), kernel, box=box)
        if self.resize == "squash":
            return image.resize((self.size, self.size), kernel)
        if self.resize == "shortest":
            return self._middle(image, kernel)
        ratio = max(image.size) / self.size
        width, height = (max(1, round(side / ratio)) for side in image.size)
        canvas = images.new("RGB", (self.size, self.size), (self.fill,) * 3)
        corner = (self.size - width) // 2, (self.size - height) // 2
        canvas.paste(image.resize((width, height), kernel), corner)
        return canvas

    def _middle(self, image: "Image", kernel: "Resampling") -> "Image":
        """The square in the middle, cut out of the resized image at whole pixels, as torchvision's
        Resize and CenterCrop do, which open_clip takes.
        """
        # The ends of a long strip are cut off anyway, and enlarged they might not fit into memory.
        short = min(image.size)
        image = _cut(image, *(min(side, LONGEST_STRIP * short) for side in image.size))
        width, height = (self.size * side // short for side in image.size)
        return _cut(image.resize((width, height), kernel), self.size, self.size)

    def _box(
        self, size: tuple[int, int], chances: NDArray[np.float64]
    ) -> tuple[float, float, float, float]:
        """A random part of the image."""
        width, height = size
        area = width * height * (self.crop_scale + (1 - self.crop_scale) * chances[0])
        ratio = LARGEST_RATIO ** (2 * chances[1] - 1)
        # A part that would be wider or higher than the image takes another form, not another area.
        ratio = min(max(ratio, area / height**2), width**2 / area)
        w = min(float(width), math.sqrt(area * ratio))
        h = min(float(height), math.sqrt(area / ratio))
        left, top = (width - w) * chances[2], (height - h) * chances[3]
        return left, top, left + w, top + h

    def _recoloured(self, image: "Image", chances: NDArray[np.float64]) -> "Image":
        from PIL import ImageEnhance, ImageFilter  # noqa: PLC0415

        if self.jitter:
            kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
            for kind, chance in zip(kinds, chances, strict=False):
                image = kind(image).enhance(1 + self.jitter * (2 * float(chance) - 1))
        if chances[3] < self.grayscale:
            image = image.convert("L").convert("RGB")
        if chances[4] < self.blur:
            radius = (0.1 + 1.9 * float(chances[5])) * self.size / 224
            image = image.filter(ImageFilter.GaussianBlur(radius))
        return image


def _cut(image: "Image", width: int, height: int) -> "Image":
    """The middle of an image."""
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))
