"""Where the Triton kernels will stand. For now: what they need, and that they refuse."""

import importlib.util

import torch

MIN_TORCH = (2, 6)
MIN_TRITON = (3, 2)


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run on `device`, most basic reason first."""
    if device.type != "cuda":
        return f"it needs a CUDA or ROCm device, got {device.type}"
    if _version(torch.__version__) < MIN_TORCH:
        return f"it needs torch >= {_text(MIN_TORCH)}, got {torch.__version__}; upgrade torch"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton, which is not installed; pip install 'tilewise[fused]'"
    triton = importlib.import_module("triton")
    if _version(triton.__version__) < MIN_TRITON:
        return f"it needs triton >= {_text(MIN_TRITON)}, got {triton.__version__}; upgrade triton"
    return "its kernels are not part of this version"


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
