"""Where in a scene is what a text says?

Zero-shot detection by the similarity of places to a text.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tilewise.data.order import permuted, uniforms
from tilewise.data.samples import Sample, Source
from tilewise.errors import DataError, OptionError
from tilewise.evaluate import plots
from tilewise.evaluate.embed import damage, pixels_of
from tilewise.models.base import PairModel, evaluating

GRID = 3  # cells a side of a scene
THINGS, FEWEST = 4, 2  # of them with an image, and where the data have no more
SCENES = 100
AT_ONCE = 10  # scenes embedded together
LEVEL = 0.5  # of the largest similarity above the mean: what is said to belong to the thing
SHOWN = 8

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, the last two outside


@dataclass(frozen=True)
class Scene:
    """Some images of a source on one white canvas, and where the first of them is."""

    pixels: NDArray[np.uint8]  # (side, side, 3)
    text: str
    box: Box
    things: int


def make_scene(
    source: Source,
    number: int,
    size: int,
    seed: int = 0,
    *,
    damaged: dict[int, DataError] | None = None,
) -> Scene:
    """THINGS samples of different ids in cells of a GRID x GRID canvas, each cell `size` pixels,
    moved a little.

    Samples that are damaged are left out; those found are added to `damaged`.
    """
    canvas = np.full((GRID * size, GRID * size, 3), 255, np.uint8)
    key = np.array([number + seed * SCENES], np.uint64)
    cells = permuted(np.arange(GRID * GRID), GRID * GRID, key)[:THINGS]
    order = permuted(np.arange(len(source)), len(source), key + np.uint64(1))
    boxes, texts = list[Box](), list[str]()
    chances = uniforms(seed, np.full(THINGS, number), np.arange(THINGS), 2)
    for sample in _things(source, map(int, order), {} if damaged is None else damaged):
        place = len(boxes)
        # Up to a quarter of a cell away from its middle, inside the canvas.
        top, left = (
            int(np.clip(cell * size + (chance - 0.5) * size / 2, 0, (GRID - 1) * size))
            for cell, chance in zip(divmod(int(cells[place]), GRID), chances[place], strict=True)
        )
        thing = pixels_of([sample], size)[0]
        # White is the canvas: what was drawn before is not wiped out.
        part = canvas[top : top + size, left : left + size]
        np.minimum(part, thing, out=part)
        boxes.append((left, top, left + size, top + size))
        texts.append(sample["text"][0])
        if len(boxes) == THINGS:
            break
    if len(boxes) < FEWEST:
        raise DataError(
            f"a scene needs {FEWEST} sound samples of different ids with image and text, got "
            f"{len(boxes)} of {len(source)} samples; repair the data, or leave localise out"
        )
    return Scene(canvas, texts[0], boxes[0], len(boxes))


def _things(
    source: Source, order: Iterable[int], damaged: dict[int, DataError]
) -> Iterator[Sample]:
    """Sound samples of different ids with image and text; others go to `damaged`, by place."""
    used = set[int]()
    for index in order:
        if index in damaged:
            continue
        try:
            sample = source[index]
            if not {"image", "text"} <= sample.keys():
                has = ", ".join(sorted(sample))
                raise DataError(f"want image and text, got {has}", "fields")
        except DataError as error:
            damaged[index] = error.with_traceback(None)  # which would hold images
            continue
        if sample["id"] not in used:
            used.add(sample["id"])
            yield sample


def localise(
    model: PairModel,
    source: Source,
    *,
    picture: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Pointing accuracy and overlap over scenes.

    Pointing: the most similar place lies in the thing's box. "pointing_chance" is what a random
    place gets, "pointing_any_thing" what one gets that lies in any of the things: a model that has
    learnt nothing may find these before the empty canvas. IoU: of the box around all places that
    are at least half as far above the mean as the most similar one, and connected with it, with the
    thing's box. "damaged": samples that were met and left out, if any, and by kind.

    Args:
        picture: file for some of the scenes.
    """
    size, damaged = model.image_size, dict[int, DataError]()
    hits, overlaps, shares, shown = list[bool](), list[float](), list[float](), list[Any]()
    for first in range(0, SCENES, AT_ONCE):
        numbers = range(first, first + AT_ONCE)
        scenes = [make_scene(source, number, size, damaged=damaged) for number in numbers]
        for scene, heat in zip(scenes, heat_maps(model, scenes), strict=True):
            point, found = read_heat(heat)
            hits.append(_inside(point, scene.box))
            overlaps.append(overlap(found, scene.box))
            shares.append(1 / scene.things)
            if len(shown) < SHOWN:
                shown.append((scene.pixels, heat.numpy(), scene.box, found, scene.text))
        on_progress(first + AT_ONCE, SCENES)
    if picture is not None:
        plots.plot_scenes(picture, shown)
    return {
        "pointing_accuracy": float(np.mean(hits)),
        "pointing_chance": 1 / GRID**2,
        "pointing_any_thing": float(np.mean(shares)),
        "mean_iou": float(np.mean(overlaps)),
        "iou_above_half": float(np.mean(np.array(overlaps) >= 0.5)),
        **damage(Counter(error.kind for error in damaged.values())),
    }


def check_scenes(model: PairModel, source: Source) -> None:
    """Raise unless scenes can be made of the data, and the model compares places with texts."""
    scene = make_scene(source, 0, model.image_size)
    try:
        with evaluating(model):
            _similarities(model, _pixels([scene]), model.texts([scene.text]))
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise OptionError(
            "localise needs features of places in an image, and those of this model cannot be had "
            f"or compared with texts: {error}; leave it out"
        ) from error


def _pixels(scenes: list[Scene]) -> Tensor:
    """(n, 3, side, side) of each."""
    return torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)


def heat_maps(model: PairModel, scenes: list[Scene]) -> Tensor:
    """(n, side, side): how similar every pixel of a scene is to its text."""
    pixels = _pixels(scenes)
    side, size = pixels.shape[-1], model.image_size
    texts = model.texts([scene.text for scene in scenes])
    # What any text finds in a place, such as the empty canvas, does not tell this one's.
    texts = texts - texts.mean(0, keepdim=True)
    steps = range(0, size, max(1, size // 2))
    summed = torch.zeros(len(scenes), side, side)
    # A tower's places are coarse, a cell or more: look again with the scene moved, and average.
    for dy in steps:
        for dx in steps:
            moved = functional.pad(pixels, (dx, size - dx, dy, size - dy), value=255)
            near = _similarities(model, moved, texts)
            wide = functional.interpolate(near[:, None], moved.shape[-2:], mode="nearest")[:, 0]
            summed += wide[:, dy : dy + side, dx : dx + side]
    return summed / len(steps) ** 2


def _similarities(model: PairModel, pixels: Tensor, texts: Tensor) -> Tensor:
    """(n, h, w) of each place of (n, 3, H, W) with a text (n, D); cells of the size that a tower
    takes are looked at one by one.
    """
    count, size = len(pixels), model.image_size
    cells = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # n 3 rows size columns size
    rows, columns = cells.shape[2], cells.shape[4]
    flat = cells.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    places = model.patches(flat.to(model.device)).float()  # (n * rows * columns, D, h, w)
    own = texts.repeat_interleave(rows * columns, 0)
    near = torch.einsum("ndhw,nd->nhw", places, own).cpu()
    grid = near.unflatten(0, (count, rows, columns)).permute(0, 1, 3, 2, 4)
    whole: Tensor = grid.flatten(3, 4).flatten(1, 2)
    return whole


def read_heat(heat: Tensor) -> tuple[tuple[int, int], Box]:
    """The most similar place (x, y), and the box around what is connected with it."""
    peak = int(heat.argmax())
    y, x = divmod(peak, heat.shape[1])
    warm = heat >= heat.mean() + LEVEL * (heat.max() - heat.mean())
    # A tower's places are many pixels wide: equal rows, and equal columns, are walked as one.
    warm, row_of = warm.unique_consecutive(dim=0, return_inverse=True)
    warm, column_of = warm.unique_consecutive(dim=1, return_inverse=True)
    connected = torch.zeros_like(warm)
    connected[row_of[y], column_of[x]] = True
    while True:
        grown = functional.max_pool2d(connected[None, None].float(), 3, 1, 1)[0, 0].bool() & warm
        if torch.equal(grown, connected):
            break
        connected = grown
    rows = connected.any(1)[row_of].nonzero().flatten()
    columns = connected.any(0)[column_of].nonzero().flatten()
    return (x, y), (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)


def _inside(point: tuple[int, int], box: Box) -> bool:
    return box[0] <= point[0] < box[2] and box[1] <= point[1] < box[3]


def overlap(first: Box, second: Box) -> float:
    """Intersection over union."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0, width) * max(0, height)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return shared / (areas - shared)
