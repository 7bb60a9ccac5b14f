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
    """Who a sample is that does not say so: the positive of its query, else its first caption, else
    its positive, else `index`.
    """
    if "positive" in sample and ("query" in sample or "text" not in sample):
        return text_id(sample["positive"])
    return text_id(sample["text"][0]) if "text" in sample else index


def sample_of(fields: Mapping[str, Any]) -> Sample:
    """A sample of the fields that we know, each checked for its type; None is as if not there.

    Captions and negatives may be one text or a list of them; an id that is no number of 64 bits is
    known by how it is written.
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
        if not is_whole(known["label"]):
            raise DataError(
                f"label must be a whole number of 64 bits, got {_short(known['label'])}; a table's "
                "column is left out as TABLE?columns=label:",
                "field",
            )
        sample["label"] = known["label"]
    if "id" in known:
        told = known["id"]
        # As it is written: "aB" and "Ab" are two names.
        sample["id"] = told if is_whole(told) else hashed(checked_text("id", str(told)))
    return sample


def checked_text(name: str, value: object) -> str:
    """A text without spaces around it, that says something, can be encoded and holds no NUL."""
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, got {_short(value)}", "field")
    text = value.strip()
    if not text:
        raise DataError(f"{name} must not be empty, got {_short(value)}", "empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, as "\ud800" in JSON makes it
        raise DataError(f"{name} must be Unicode text, got {error}", "text") from error
    if "\0" in text:  # as UTF-16 that is read as UTF-8 has them
        raise DataError(f"{name} must hold no NUL character, got {_short(value)}", "text")
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
    # One of several captions may be empty; negatives must be as many in all samples.
    said = [one for one in value if not (isinstance(one, str) and name in CAPTIONS) or one.strip()]
    return tuple(checked_text(name, one) for one in said or value)


def is_whole(value: object) -> bool:
    """Whether it is a whole number of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _short(value: object) -> str:
    """A value in an error: it came from outside and may be of any length."""
    return f"{type(value).__name__} {repr(value)[:60]}"


def light(source: Source, index: int) -> Sample:
    """A sample without its image: not even read, where the source can do that (`row`)."""
    row = getattr(source, "row", None)
    sample: Sample = source[index] if row is None else row(index)
    return {name: value for name, value in sample.items() if name != "image"}
