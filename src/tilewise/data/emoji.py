"""The embedded set: 5,097 emoji in three drawing styles, with labels and tags.

Training takes two styles of four fifths of the concepts. Held out are the third style, and a fifth
of the concepts in the styles that were trained on: the same concept is never on both sides.
"""

import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.data.samples import Sample
from tilewise.errors import OptionError

SIZE = 32
TRAIN_STYLES = ("noto", "fluent-emoji-flat")
HELD_OUT_STYLE = "twemoji"
PARTS = ("train", "style", "concepts")
HELD_OUT_SHARE = 5  # one concept in so many

# How captions would say the groups of the Unicode standard.
GROUPS = {
    "activities": "sport, game, activity",
    "animals & nature": "animal, plant, nature",
    "flags": "flag",
    "food & drink": "food, drink",
    "objects": "object, tool, clothing",
    "people & body": "person, hand",
    "smileys & emotion": "face, emotion",
    "symbols": "symbol, sign, arrow",
    "travel & places": "vehicle, place, building, weather",
}


class Emoji:
    """One part: "train"; "style", trained concepts as a style not trained on draws them;
    "concepts".

    Labels are the groups of the Unicode standard, in the order of GROUPS.
    """

    def __init__(self, part: str) -> None:
        if part not in PARTS:
            raise OptionError(f"the emoji have the parts {', '.join(PARTS)}, got {part!r}")
        self.concepts, sheets = _concepts()
        self.classes = list(GROUPS.values())
        styles = (HELD_OUT_STYLE,) if part == "style" else TRAIN_STYLES
        trained = {concept for style in TRAIN_STYLES for concept in sheets[style]}
        self.rows = [
            (style, place, concept)
            for style in styles
            for place, concept in enumerate(sheets[style])
            if concept in trained
            and _is_held_out(self.concepts[concept][0]) == (part == "concepts")
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image  # noqa: PLC0415

        style, place, concept = self.rows[index]
        label, tags, group, _ = self.concepts[concept]
        return {
            "image": Image.fromarray(_sheet(style)[place]),
            "text": captions(label, tags),
            "id": concept,
            "label": list(GROUPS).index(group),
        }


def captions(label: str, tags: list[str]) -> tuple[str, ...]:
    """The label with all its tags, and with some or none."""
    half = len(tags) // 2
    choices: tuple[list[str], ...] = (tags, [], tags[:half], tags[half:])
    return tuple(dict.fromkeys(", ".join([label, *some]) for some in choices))


def _is_held_out(label: str) -> bool:
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


@cache
def _concepts() -> tuple[list[Any], dict[str, list[int]]]:
    """[label, tags, group, subgroup] of each; of each style, which concepts its sheet shows."""
    found = json.loads(
        (resources.files("tilewise.data") / "emoji_images/concepts.json").read_text("utf-8")
    )
    return found["concepts"], found["sheets"]


@cache
def _sheet(style: str) -> NDArray[np.uint8]:
    """(n, SIZE, SIZE, 3), row by row of the sheet."""
    from PIL import Image  # noqa: PLC0415

    with (resources.files("tilewise.data") / f"emoji_images/{style}.webp").open("rb") as file:
        sheet = np.asarray(Image.open(file, formats=["WEBP"]).convert("RGB"))
    rows, columns = (side // SIZE for side in sheet.shape[:2])
    tiles = sheet.reshape(rows, SIZE, columns, SIZE, 3).swapaxes(1, 2)
    return tiles.reshape(-1, SIZE, SIZE, 3)
