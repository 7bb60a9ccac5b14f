"""What an image tower of open_clip makes of each place in an image."""

import math
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1024  # places that are pooled together: some towers make hundreds of vectors of each


def place_features(visual: Any, pixels: Tensor) -> Tensor:
    """(n, 3, H, W), normalised -> (n, h, w, D): the tower's output if a place were all it pools,
    with the norms, attention and projections that come after its layers.
    """
    if hasattr(visual, "trunk"):
        places, alone = _of_timm(visual.trunk, pixels)
    else:
        out = visual.forward_intermediates(pixels, indices=1, intermediates_only=True)
        places = out["image_intermediates"][-1].permute(0, 2, 3, 1)
        alone = 2, places.shape[-1]  # the class token, too, whichever is taken
    copies = math.prod(alone) // places.shape[-1]
    pooled = [
        _pooled(visual, part.repeat(1, copies).unflatten(1, alone))
        for part in places.flatten(0, 2).split(AT_ONCE)
    ]
    found: Tensor = torch.cat(pooled).unflatten(0, places.shape[:3])
    return found


def _of_timm(trunk: Any, pixels: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(n, h, w, C), and the shape of what is pooled where there is one place."""
    found: Tensor = trunk.forward_features(pixels)
    if found.ndim == 3:  # tokens, some of no place before those of places
        prefix = getattr(trunk, "num_prefix_tokens", 0)
        count, (height, width) = found.shape[1] - prefix, pixels.shape[-2:]
        rows = round(math.sqrt(count * height / width))
        return found[:, prefix:].unflatten(1, (rows, -1)), (prefix + 1, found.shape[2])
    if getattr(trunk, "output_fmt", "NCHW") == "NHWC":
        return found, (1, 1, found.shape[3])
    return found.permute(0, 2, 3, 1), (found.shape[1], 1, 1)


def _pooled(visual: Any, layers: Tensor) -> Tensor:
    """(k, D) of what comes out of the tower's layers."""
    if hasattr(visual, "trunk"):
        out: Tensor = visual.head(visual.trunk.forward_head(layers))
        return out
    out, _ = visual._pool(layers)
    return out if visual.proj is None else out @ visual.proj
