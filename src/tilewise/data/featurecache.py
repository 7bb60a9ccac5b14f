"""Features of a locked image tower, computed once and kept on disk."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.data.loader import Form
from tilewise.data.samples import Sample, Source, light
from tilewise.errors import DataError

PROBED = 64  # samples that data are known again by
DTYPE = np.float16  # half the space, and a tower's features need no more


@dataclass(frozen=True)
class WithFeatures:
    """A source whose images are replaced by features; a row of NaN is a sample that was damaged."""

    source: Source
    features: NDArray[np.float16]  # (n, D), memory-mapped

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        row = np.asarray(self.features[index])
        if np.isnan(row[0]):
            raise DataError(f"sample {index} was damaged when features were computed", "image")
        return {**light(self.source, index), "features": row.astype(np.float32)}


def key_of(*facts: Any) -> str:
    """A name for what features depend on: the data and the tower's weights."""
    digest = hashlib.blake2b(digest_size=12)
    for fact in facts:
        if isinstance(fact, Tensor):
            flat = fact.detach().cpu().contiguous().reshape(-1)  # a scalar has no bytes to view
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(json.dumps(fact).encode())
    return digest.hexdigest()


def fingerprint(source: Source, form: Form) -> str:
    """Of data: how many, and what some of them are."""
    digest = hashlib.blake2b(str(len(source)).encode(), digest_size=12)
    for index in np.unique(np.linspace(0, len(source) - 1, PROBED).astype(int)):
        try:
            sample = source[int(index)]
            image = form.prepare(sample, np.full(form.chances, 0.5))["image"]
            digest.update(str(sample["id"]).encode() + image.tobytes())
        except DataError:
            continue
    return digest.hexdigest()


def cached_features(
    source: Source,
    path: Path,
    embed: Callable[[NDArray[np.uint8]], Tensor],
    *,
    form: Form,
    batch: int = 256,
    on_progress: Callable[[int, int], None] | None = None,
) -> WithFeatures:
    """Features of every sample, from `path` if it is there, else computed and left there.

    Args:
        embed: (n, 3, size, size) bytes -> (n, D).
        form: gives the images ("image" of what it prepares).
    """
    if not path.exists():
        _compute(source, path, embed, (form, batch, on_progress))
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise DataError(
            f"{path} is cut off, or holds no features: {error}; delete it, they are computed again"
        ) from error
    if len(features) != len(source):
        raise DataError(
            f"{path} holds {len(features)} features, the data have {len(source)} samples; delete it"
        )
    return WithFeatures(source, features)


def _compute(
    source: Source,
    path: Path,
    embed: Callable[[NDArray[np.uint8]], Tensor],
    how: tuple[Form, int, Callable[[int, int], None] | None],
) -> None:
    form, batch, on_progress = how
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".draft-{os.getpid()}.npy")
    # NumPy leaves it untyped.
    open_memmap: Callable[..., np.memmap[Any, Any]] = np.lib.format.open_memmap
    out: Any = None
    try:
        for first in range(0, len(source), batch):
            rows = range(first, min(first + batch, len(source)))
            images = dict(_images(source, rows, form))
            if images:
                features = _halved(embed(np.stack(list(images.values()))))
                if out is None:
                    shape = (len(source), features.shape[1])
                    out = open_memmap(draft, mode="w+", dtype=DTYPE, shape=shape)
                    out[:] = np.nan
                out[list(images)] = features
            if on_progress is not None:
                on_progress(rows.stop, len(source))
        if out is None:
            raise DataError("no image could be read, so there are no features to cache")
        out.flush()
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _images(source: Source, rows: range, form: Form) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Of the samples that are not damaged, with their places."""
    for index in rows:
        try:
            yield index, form.prepare(source[index], np.full(form.chances, 0.5))["image"]
        except DataError:
            continue


def _halved(features: Tensor) -> NDArray[np.float16]:
    """(n, D), which half precision must be able to hold."""
    half: NDArray[np.float16] = features.half().cpu().numpy()
    if not np.isfinite(half).all():
        raise DataError(
            "features must be finite and below 65,504 to be kept in half precision, got "
            f"{float(features.abs().max()):,.6g}; train without feature_cache"
        )
    return half
