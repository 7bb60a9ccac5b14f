"""Libraries that models come from, imported when they are needed."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tilewise.errors import OptionError

EXTRA = "pip install 'tilewise[train]'"
_kept: list[torch.library.Library] = []


def need(name: str, remedy: str = EXTRA) -> ModuleType:
    """A module, or an error that says what to install."""
    if name.split(".", maxsplit=1)[0] in (
        "open_clip",
        "timm",
        "sentence_transformers",
        "transformers",
    ):
        mend_torchvision()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).split(".")[0]
        raise OptionError(f"{missing} is needed here and not installed; run {remedy}") from error


def mend_torchvision() -> None:
    """Let torchvision be imported beside a PyTorch of another build, without its own operators.

    Its wheels for CUDA die beside a CPU build of PyTorch because two operators are not there;
    nothing that open_clip and timm use needs them. Their names are declared, so that the import
    goes through and a call of one says that it has no kernel. Where torchvision loads, or is not
    installed, nothing is done.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for half_imported in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[half_imported]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)  # gone with it are its operators
        importlib.import_module("torchvision")
        logging.getLogger(__name__).info(
            "torchvision is of another build than torch: used without its operators"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries say while they load: open_clip that weights are random, not seeing
    those that we load; transformers a bar for its weights.
    """
    root, bars = logging.getLogger(), _bars()
    before = root.level
    root.setLevel(logging.ERROR)
    shown = bars is not None and bars.is_progress_bar_enabled()
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        root.setLevel(before)
        if shown:
            bars.enable_progress_bar()


def _bars() -> Any:
    """Where transformers keeps whether it shows bars; None where it is not installed."""
    found = importlib.util.find_spec("transformers") is not None
    return need("transformers.utils.logging") if found else None
