"""What a folder of shards should hold, written beside them, so that a loss is noticed."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewise.data.decode import decode_json
from tilewise.errors import DataError

NAME = "manifest.json"
FORMAT = "tilewise shards"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """What a shard should be."""

    bytes: int
    samples: int
    sha256: str | None = None  # of the whole file


Manifest = Mapping[str, ShardFacts]  # by file name


def write_manifest(folder: Path, shards: Manifest) -> None:
    """Write `folder`/manifest.json: whole, or not at all."""
    facts = {
        name: {key: value for key, value in asdict(shard).items() if value is not None}
        for name, shard in sorted(shards.items())
    }
    told = {"format": FORMAT, "version": VERSION, "shards": facts}
    new = folder / f".{NAME}.new"
    with new.open("w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(told, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / NAME)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder of shards, None if there is none."""
    path = folder / NAME
    try:
        told = decode_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except DataError as error:
        raise _refused(path, str(error)) from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise _refused(path, f"its format must be {FORMAT!r}")
    if told.get("version") != VERSION:
        raise _refused(path, f"its version must be {VERSION}, got {told.get('version')!r}")
    shards = told.get("shards")
    if not isinstance(shards, dict):
        raise _refused(path, "it must name its shards")
    return {name: _facts(path, name, shard) for name, shard in shards.items()}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _facts(path: Path, name: str, shard: Any) -> ShardFacts:
    if not isinstance(shard, dict):
        raise _refused(path, f"{name!r} must have bytes and samples, got {shard!r}")
    for key in ("bytes", "samples"):
        value = shard.get(key)
        if not isinstance(value, int) or value < 0:
            raise _refused(path, f"{key} of {name!r} must be a whole number, got {value!r}")
    digest = shard.get("sha256")
    if not isinstance(digest, str | None):
        raise _refused(path, f"sha256 of {name!r} must be text, got {digest!r}")
    return ShardFacts(bytes=shard["bytes"], samples=shard["samples"], sha256=digest)


def _refused(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is no manifest of ours: {why}; pack the shards again, or delete it to go without",
        "manifest",
    )
