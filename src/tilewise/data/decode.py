"""From bytes that anybody may have written to images, texts and arrays; or a DataError.

Nothing here runs what it reads: no pickles, no image formats but five, no sizes believed unchecked.
"""

import functools
import importlib
import io
import json
import os
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise.data.samples import checked_text, whole_of
from tilewise.errors import DataError, OptionError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
PILLOW_FLOOR = 13  # earlier decoders overflow


@functools.cache
def require_pillow() -> None:
    """Raise where Pillow is missing, warn once where it is old."""
    try:
        import PIL  # noqa: PLC0415 - an extra

        # Registered alone; on its first WebP, Pillow would else import every format it knows.
        importlib.import_module("PIL.WebPImagePlugin")
    except ImportError as error:
        raise OptionError(
            "images need Pillow, which is not installed; pip install 'pillow>=13'"
        ) from error
    if int(PIL.__version__.split(".")[0]) < PILLOW_FLOOR:
        warnings.warn(
            f"Pillow {PIL.__version__} has known holes in its decoders, and images may come from "
            f"anybody; pip install 'pillow>={PILLOW_FLOOR}'",
            stacklevel=3,
        )


def decode_image(data: bytes) -> "Image":
    """The first frame of a JPEG, PNG, WebP, GIF or BMP in mode RGB, transparent parts on white.

    More pixels than `PIL.Image.MAX_IMAGE_PIXELS` are refused before they are decoded.
    """
    require_pillow()
    from PIL import Image  # noqa: PLC0415

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError)
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
            if most is not None and pixels > most:  # Pillow only warns up to twice as many
                raise Image.DecompressionBombError(f"{pixels} pixels, at most {most} are allowed")
            return _in_rgb(image)
    except bombs as error:
        raise DataError(
            f"the image is too large: {error}; reduce it, or raise PIL.Image.MAX_IMAGE_PIXELS",
            "too large",
        ) from error
    except Exception as error:  # decoders of damaged data raise whatever comes
        raise DataError(
            f"want an image (JPEG, PNG, WebP, GIF, BMP), got {len(data)} bytes that are none or "
            f"damaged: {type(error).__name__}: {str(error)[:200]}",
            "image",
        ) from error


def _in_rgb(image: "Image") -> "Image":
    from PIL import Image  # noqa: PLC0415

    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert(
            "RGB"
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def decode_text(data: bytes) -> str:
    """Text in UTF-8, without spaces around it; a byte order mark is dropped."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the text must be UTF-8, got {error}", "text") from error
    return checked_text("the text", text)


def decode_captions(data: bytes) -> tuple[str, ...]:
    """Captions, one a line."""
    # Not splitlines, which also parts at characters that stand inside texts.
    return tuple(filter(None, (line.strip() for line in decode_text(data).split("\n"))))


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that say something: names of classes, or templates."""
    try:
        return list(decode_captions(path.read_bytes()))
    except DataError as error:
        raise DataError(f"{path}: {error}; write one a line, in UTF-8", error.kind) from error


def read_image(path: str) -> bytes:
    """The file of an image, as it is."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise DataError(f"the image must be a file, got {path}", "path")
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"the image must be a file to read: {error}", "missing") from error


def decode_json(data: bytes) -> Any:
    """What JSON in UTF-8 says."""
    text = decode_text(data)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"want JSON, got {text[:60]!r}: {error}", "json") from error


def decode_label(data: bytes) -> int:
    """A class as a whole number in text."""
    label = whole_of(text := decode_text(data))
    if label is None:
        raise DataError(f"the label must be a whole number, got {text[:60]!r}", "label")
    return label


def decode_array(data: bytes) -> NDArray[np.floating[Any]]:
    """Finite floats (D,) of 16, 32 or 64 bits from an .npy, without numpy's reading of pickles."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(file)  # type: ignore[no-untyped-call]
    except Exception as error:  # the header is a Python literal, damaged in any way
        raise DataError(
            f"want an .npy array, got {type(error).__name__}: {error}", "array"
        ) from error
    left = len(data) - file.tell()
    # Checked before anything is allocated: the header may claim any size.
    if len(shape) != 1 or dtype.kind != "f" or dtype.itemsize > 8 or shape[0] < 1:
        raise DataError(f"want floats (D,), got {dtype} {shape}; save x.ravel()", "array")
    if left != shape[0] * dtype.itemsize:
        raise DataError(f"want {dtype} {shape} in the array, got {left} bytes", "array")
    found: NDArray[np.floating[Any]] = np.frombuffer(data, dtype, offset=file.tell())
    if not np.isfinite(found).all():
        raise DataError(f"want finite features, got {found[~np.isfinite(found)][0]}", "array")
    return found.astype(dtype.newbyteorder("="))
