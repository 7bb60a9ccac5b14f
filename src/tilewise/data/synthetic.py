"""Pairs of known difficulty: mosaics of coloured cells, and the names of their colours.

The text of a pair says its code exactly; the image shows it under noise, so what can be reached is
known: a cell is read wrongly with a probability that follows from the noise alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.data.order import uniforms
from tilewise.data.samples import Sample
from tilewise.errors import OptionError

COLOURS = {
    "black": (32, 32, 32),
    "blue": (32, 32, 224),
    "green": (32, 224, 32),
    "cyan": (32, 224, 224),
    "red": (224, 32, 32),
    "pink": (224, 32, 224),
    "yellow": (224, 224, 32),
    "white": (224, 224, 224),
}
GAP = 192.0  # between two colours that differ in one channel
LOUDEST = 1e6  # noise, of which nothing but noise is left long before


class Synthetic:
    """`pairs` mosaics of cells x cells colours, size x size pixels; `noise` in units of the gap
    between colours.
    """

    def __init__(
        self, pairs: int, *, size: int = 32, cells: int = 3, noise: float = 0.25, seed: int = 0
    ) -> None:
        fine = pairs >= 1 and 1 <= cells <= size and 0 <= noise <= LOUDEST and 0 <= seed < 2**63
        if not fine:
            raise OptionError(
                "synthetic data need pairs and size above 0, cells from 1 to size, noise from 0 to "
                f"{LOUDEST:,.0f} and a seed from 0 to 2**63 - 1, got {pairs}, {size}, {cells}, "
                f"{noise} and {seed}"
            )
        self.pairs, self.size, self.cells, self.noise, self.seed = pairs, size, cells, noise, seed
        self.names = list(COLOURS)
        self.palette = np.array(list(COLOURS.values()), np.float32)

    def __len__(self) -> int:
        return self.pairs

    def code(self, index: int) -> NDArray[np.int64]:
        """(cells * cells,) colours of a pair.

        Drawn at random: among many pairs a few share a code, and then an id.
        """
        where = np.array([index], np.int64)
        chances = uniforms(self.seed, np.zeros_like(where), where, self.cells**2)[0]
        colours: NDArray[np.int64] = (chances * len(self.names)).astype(np.int64)
        return colours

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image  # noqa: PLC0415

        return {"image": Image.fromarray(self._pixels(index)), **self.row(index)}

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        code = self.code(index)
        side = np.arange(self.size) * self.cells // self.size
        mosaic = self.palette[code.reshape(self.cells, self.cells)][side][:, side]
        dice = np.random.default_rng((self.seed, index))
        cell = dice.normal(0, self.noise * GAP, (self.cells, self.cells, 3)).astype(np.float32)
        pixels: NDArray[np.uint8] = np.clip(mosaic + cell[side][:, side], 0, 255).astype(np.uint8)
        return pixels

    def row(self, index: int) -> Sample:
        """A sample without its image, which is not drawn."""
        code = self.code(index)
        words = " ".join(self.names[colour] for colour in code)
        number = 0
        for colour in code:
            number = (number * len(self.names) + int(colour)) % 2**62
        return {"text": (words,), "id": number, "label": int(code[0])}

    @property
    def classes(self) -> list[str]:
        """The colour of the first cell is a pair's label."""
        return self.names


def parse(text: str) -> Synthetic:
    """From "4096" or "4096,size=64,noise=0.5"."""
    pairs, *options = text.split(",")
    kinds: dict[str, Any] = {"size": int, "cells": int, "noise": float, "seed": int}
    try:
        found = dict(option.split("=", 1) for option in options)
        return Synthetic(int(pairs), **{name: kinds[name](value) for name, value in found.items()})
    except (ValueError, KeyError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            "synthetic data are named as synthetic:4096 or "
            f"synthetic:4096,{','.join(f'{k}=...' for k in kinds)}, got synthetic:{text}"
        ) from error
