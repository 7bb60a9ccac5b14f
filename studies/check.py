"""Whether what prepare.py made is what it says: python studies/check.py [--out data].

Opens all that is there through tilewise's own readers, compares what is held out with what is not,
and measures what is known of the weights. Some minutes on one core.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fetch import Job
from pictures import is_held_out
from torch import Tensor
from weights import (
    IMAGE_SIZE,
    MEAN,
    STD,
    TOLERANCE,
    largest_error,
    load_minilm,
    new_efficientnet,
    package_efficientnet,
)

from tilewise.data.emoji import HELD_OUT_SHARE, Emoji
from tilewise.data.samples import Sample
from tilewise.data.shards import Shards
from tilewise.data.sources import open_source
from tilewise.evaluate.ranking import retrieval_metrics
from tilewise.models.weights import load_strictly, read_weights

LOOKED_AT = 200  # samples of each split
PHOTOS, DRAWINGS = 24, 8  # that both EfficientNets see


def check_images(folder: Path) -> str:
    """Every sum of every shard, some samples, and that no concept with a name is on both sides."""
    Shards(folder, verify=True, progress=False)
    told, ids = [], {}
    for split in ("train", "test"):
        if any(folder.glob(f"{split}-*.tar")):
            source: Any = open_source(f"{folder}/{split}-*.tar")
            samples = [source[i] for i in spread(len(source), LOOKED_AT)]
            sizes = sorted({max(sample["image"].size) for sample in samples})
            told.append(f"{split} {len(source)} images of {sizes[0]} to {sizes[-1]} px")
            assert all(has_label(sample, source.classes) for sample in samples), folder
            if "text" in samples[0]:
                ids[split] = {source[i]["id"] for i in range(len(source))}
                told[-1] += f", {len(ids[split])} ids, {samples[0]['text']!r}"
    assert len(ids) < 2 or not set.intersection(*ids.values()), folder
    return "; ".join(told)


def has_label(sample: Sample, classes: Sequence[str]) -> bool:
    """Whether a sample's label is one of the classes, if there are any."""
    return 0 <= sample["label"] < len(classes) if classes else "label" not in sample


def check_emoji(folder: Path) -> str:
    """As other images; and the embedded set holds out the same concepts."""
    for part in ("train", "concepts"):
        embedded = Emoji(part)
        labels = {embedded.concepts[concept][0] for _, _, concept in embedded.rows}
        assert {is_held_out(label, HELD_OUT_SHARE) for label in labels} == {part == "concepts"}
    return check_images(folder)


def check_wordnet(folder: Path) -> str:
    """No lemmas on both sides; and what MiniLM finds before it is trained, if it is there."""
    train, test = (open_source(f"{folder}/{split}.jsonl") for split in ("train", "test"))
    sides = [[source[i] for i in range(len(source))] for source in (train, test)]
    for key in ("id", "positive"):
        assert not set.intersection(*({sample[key] for sample in side} for side in sides)), key
    told = f"train {len(train)} glosses, test {len(test)}"
    encoder = folder.parent / "minilm"
    return f"{told}; {zero_shot(encoder, sides[1])}" if encoder.is_dir() else told


def zero_shot(encoder: Path, samples: list[Sample]) -> str:
    """Gloss -> lemmas, with all glosses of a document, and with its first alone."""
    model = load_minilm(encoder)
    documents = {sample["id"]: sample["positive"] for sample in samples}
    gallery = encoded(model, list(documents.values()))
    queries = encoded(model, [sample["query"] for sample in samples])
    ids = torch.tensor([sample["id"] for sample in samples])
    rows = {int(number): row for row, number in reversed(list(enumerate(ids)))}
    firsts = torch.tensor(sorted(rows.values()))
    told = []
    for name, at in (("all", torch.arange(len(ids))), ("first", firsts)):
        found = retrieval_metrics(queries[at], gallery, ids[at], torch.tensor(list(documents)))
        told.append(
            f"{name} {len(at)} glosses -> {len(documents)} documents: R@1 {found['R@1']:.3f} R@10 "
            f"{found['R@10']:.3f} MRR@10 {found['MRR@10']:.3f} nDCG@10 {found['nDCG@10']:.3f}"
        )
    return "; ".join(told)


def encoded(model: Any, texts: list[str]) -> Tensor:
    """Features (n, 384)."""
    found: Tensor = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    return found


def check_minilm(folder: Path) -> str:
    """Unit vectors, and the nearest of some sentences."""
    texts = ["a cat sits on the mat", "a kitten rests on a rug", "interest rates rose again",
             "the central bank tightened its policy", "how to bake bread"]  # fmt: skip
    found = encoded(load_minilm(folder), texts)
    assert (found.norm(dim=1) - 1).abs().max() < 1e-5
    like = (found @ found.T).fill_diagonal_(-1)
    assert like.argmax(1)[:4].tolist() == [1, 0, 3, 2], like
    return f"norms within 1e-5 of 1; cosines {like[0, 1]:.2f} and {like[2, 3]:.2f} of alike texts"


def check_efficientnet(folder: Path) -> str:
    """Features of real images against those of the package's own model."""
    ours = new_efficientnet()
    path = folder / "model.safetensors"
    load_strictly(ours, read_weights(path), path)
    with tempfile.TemporaryDirectory() as scratch:
        theirs = package_efficientnet(Job(folder, Path(scratch), None))
    told = []
    for name, count in (("cifar10/test", PHOTOS), ("stamps/train", DRAWINGS)):
        if (folder.parent / name).parent.is_dir():
            source = open_source(f"{folder.parent / name}-*.tar")
            images = torch.stack([pixels(source[i]) for i in spread(len(source), count)])
            error = largest_error(ours, theirs, images)
            assert error <= TOLERANCE, (name, error)
            with torch.no_grad():
                features = ours(images)
            told.append(
                f"{name}: largest error {error:.1e} over {count} images, features to "
                f"{features.max():.2f}, {(features > 0).double().mean():.2f} of them above 0"
            )
    if not told:
        return "loads; prepare cifar10 or stamps for real images to compare with"
    wrong = largest_error(ours.train(), theirs, images)
    assert wrong > TOLERANCE, "a model in train mode must be told apart"
    return "; ".join(told) + f"; in train mode {wrong:.1e}, as it must differ"


def pixels(sample: Sample) -> Tensor:
    """(3, 224, 224), normalised."""
    image = sample["image"].resize((IMAGE_SIZE, IMAGE_SIZE))
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return (values - mean) / std


def spread(length: int, count: int) -> list[int]:
    """`count` places over all of them."""
    return np.linspace(0, length - 1, min(count, length)).astype(int).tolist()


CHECKS: dict[str, Callable[[Path], str]] = {
    "minilm": check_minilm,
    "wordnet": check_wordnet,
    "cifar10": check_images,
    "efficientnet_lite0": check_efficientnet,
    "stamps": check_images,
    "emoji-packs": check_emoji,
    "iconify": check_images,
    "fashion-mnist": check_images,
}


def main() -> int:
    """Check what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder of all of them")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="folders")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for chatty in ("httpx", "sentence_transformers", "tilewise"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    torch.set_num_threads(1)
    found = [name for name in options.only if (options.out / name).is_dir()]
    for name in found:
        logging.info("%s: %s", name, CHECKS[name](options.out / name))
    if not found:
        logging.error("want what prepare.py makes in %s, got nothing of it", options.out)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
