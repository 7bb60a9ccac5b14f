"""Random views of an image: crop, mirror, colour, blur; each a pure function of numbers in
[0, 1).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

CHANCES = 12  # numbers that a view takes
LARGEST_RATIO = 4 / 3  # of a crop's sides


@dataclass(frozen=True)
class View:
    """How an image becomes (3, size, size) bytes; the defaults change nothing but its size."""

    size: int
    crop_scale: float = 1.0
    flip: bool = False
    jitter: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0

    def __call__(self, image: "Image", chances: NDArray[np.float64]) -> NDArray[np.uint8]:
        """chances: (CHANCES,) in [0, 1)."""
        from PIL.Image import Resampling, Transpose  # noqa: PLC0415

        box = self._box(image.size, chances[:4])
        image = image.resize((self.size, self.size), Resampling.BICUBIC, box=box)
        if self.flip and chances[4] < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        image = self._recoloured(image, chances[5:])
        planes: NDArray[np.uint8] = np.asarray(image, np.uint8).transpose(2, 0, 1)
        return planes

    def _box(
        self, size: tuple[int, int], chances: NDArray[np.float64]
    ) -> tuple[float, float, float, float]:
        """The largest square in the middle, or a random part of the image."""
        width, height = size
        if self.crop_scale >= 1:
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            return left, top, left + side, top + side
        area = width * height * (self.crop_scale + (1 - self.crop_scale) * chances[0])
        ratio = LARGEST_RATIO ** (2 * chances[1] - 1)
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
