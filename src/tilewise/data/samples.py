"""What a sample is, what a source of samples is, and how fields from outside become a sample."""

import hashlib
import operator
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Protocol, SupportsIndex

from tilewise.errors import DataError

# Keys, those it has: "image" (PIL image, RGB), "text" (tuple of captions, at least one), "query",
# "positive" (str), "negatives" (tuple of str), "features" (float array (D,)), "label" (int), and
# always "id" (int64), equal for samples that are not each other's negatives.
Sample = dict[str, Any]

# Names under which captions come; the first that is there counts.
CAPTIONS = ("captions", "caption", "text")
FIELDS = (*CAPTIONS, "query", "positive", "negatives", "label", "id")


class Source(Protocol):
    """Samples by index; a damaged one raises a DataError with the kind under which to count it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def place_of(index: SupportsIndex, length: int) -> int:
    """A sequence's index as a place in range(length), from the end if it is negative."""
    place = operator.index(index)
    if not -length <= place < length:
        raise IndexError(f"index must be in [{-length}, {length}), got {place}")
    return place % length


def text_id(text: str) -> int:
    """A number below 2**63 for a text: the same on every machine and in every run.

    Texts that differ only in case, spacing or Unicode's spelling of a character share it.
    """
    return hashed(" ".join(unicodedata.normalize("NFKC", text).casefold().split()))


def default_id(sample: Sample, index: int) -> int:
    """Who a sample is that does not say so: its first caption, else its positive, else `index`."""
    if "text" in sample:
        return text_id(sample["text"][0])
    return text_id(sample["positive"]) if "positive" in sample else index


def sample_of(fields: Mapping[str, Any]) -> Sample:
    """A sample of the fields that we know, each checked for its type; None is as if not there.

    Captions and negatives may be one text or a list of them, an id may be a number or a text.
    """
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    sample: Sample = {}
    for name in CAPTIONS:
        if name in known:
            sample["text"] = _texts(name, known[name])
            break
    for name in ("query", "positive"):
        if name in known:
            sample[name] = checked_text(name, known[name])
    if "negatives" in known:
        sample["negatives"] = _texts("negatives", known["negatives"])
    if "label" in known:
        sample["label"] = _whole("label", known["label"])
    if "id" in known:
        told = known["id"]
        # As it is written: "aB" and "Ab" are two names.
        sample["id"] = (
            hashed(checked_text("id", told)) if isinstance(told, str) else _whole("id", told)
        )
    return sample


def checked_text(name: str, value: object) -> str:
    """A text without spaces around it, that says something and can be encoded."""
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, got {_short(value)}", "field")
    text = value.strip()
    if not text:
        raise DataError(f"{name} must not be empty, got {_short(value)}", "empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, as "\ud800" in JSON makes it
        raise DataError(f"{name} must be Unicode text, got {error}", "text") from error
    return text


def whole_of(text: str) -> int | None:
    """The whole number that a text is, or None; Python's int() would take "1_0" and more."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) else None


def hashed(text: str) -> int:
    """A number below 2**63 for a text as it is written."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (checked_text(name, value),)
    if not isinstance(value, list) or (not value and name != "negatives"):
        raise DataError(f"{name} must be a text or a list of texts, got {_short(value)}", "field")
    return tuple(checked_text(name, one) for one in value)


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise DataError(f"{name} must be a whole number of 64 bits, got {_short(value)}", "field")
    return value


def _short(value: object) -> str:
    """A value in an error: it came from outside and may be of any length."""
    return f"{type(value).__name__} {repr(value)[:60]}"


def light(source: Source, index: int) -> Sample:
    """A sample without its image: not even read, where the source can do that (`row`)."""
    row = getattr(source, "row", None)
    sample: Sample = source[index] if row is None else row(index)
    return {name: value for name, value in sample.items() if name != "image"}
