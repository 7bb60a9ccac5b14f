"""What is had without learning, to hold figures against.

python studies/baselines.py emoji                     colour histograms: image to text, top 1
python studies/baselines.py pixels TRAIN TEST         kNN on raw pixels: top 1
"""

import argparse
import sys

import numpy as np
import torch
from torch import Tensor

from tilewise.data.samples import Source
from tilewise.data.sources import open_source
from tilewise.data.views import CHANCES, View
from tilewise.evaluate.classify import colour_histograms, knn
from tilewise.evaluate.ranking import top

NEIGHBOURS = 20


def main() -> None:
    """Print one figure a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("emoji")
    pixels = parts.add_parser("pixels")
    pixels.add_argument("train")
    pixels.add_argument("test")
    pixels.add_argument("--size", type=int, default=32)
    args = parser.parse_args()
    if args.part == "emoji":
        for name in ("emoji:style", "emoji:concepts"):
            share, chance = histograms(open_source("emoji:train"), open_source(name))
            sys.stdout.write(f"{name}: top 1 {share:.4f}, chance {chance:.5f}\n")
        return
    train, test = (raw(open_source(name), args.size) for name in (args.train, args.test))
    sys.stdout.write(f"kNN on pixels: {knn(*train, *test)['knn_top1']:.4f}\n")


def histograms(train: Source, test: Source) -> tuple[float, float]:
    """Share of images whose caption is found first, and chance.

    A caption's score is how many words it shares with captions of the training images whose colours
    are most like the image's, each weighted by how much they are, rare words counting more.
    """
    texts: dict[int, str] = {}
    for i in range(len(test)):
        texts.setdefault(test[i]["id"], test[i]["text"][0])
    names, gallery = list(texts), list(texts.values())
    captions = [train[i]["text"][0] for i in range(len(train))]
    words = sorted({word for text in (*captions, *gallery) for word in _words(text)})
    place = {word: i for i, word in enumerate(words)}
    bags = _bags(captions, place)
    rarity = torch.log(len(captions) / (1 + (bags > 0).sum(0)))
    known, own = (_histograms(source) for source in (train, test))
    scores, near = top(own, known, NEIGHBOURS)
    wanted = torch.einsum("nk,nkw->nw", torch.softmax(scores * 20, 1), bags[near] * rarity)
    offered = _bags(gallery, place) * rarity
    offered = offered / offered.norm(dim=1, keepdim=True).clamp(min=1e-9)
    found = (wanted @ offered.T).argmax(1)
    right = [names[int(i)] == test[row]["id"] for row, i in enumerate(found)]
    return float(np.mean(right)), 1 / len(gallery)


def _words(text: str) -> list[str]:
    return text.lower().replace(",", " ").replace(":", " ").split()


def _bags(texts: list[str], place: dict[str, int]) -> Tensor:
    """(n, words): 1 where a text has a word."""
    bags = torch.zeros(len(texts), len(place))
    for row, text in enumerate(texts):
        bags[row, [place[word] for word in _words(text)]] = 1
    return bags


def _histograms(source: Source) -> Tensor:
    images = np.stack([np.asarray(source[i]["image"]) for i in range(len(source))])
    return colour_histograms(torch.from_numpy(images))


def raw(source: Source, size: int) -> tuple[Tensor, Tensor]:
    """Pixels, centred a sample, and labels."""
    view, chances = View(size), np.full(CHANCES, 0.5)
    samples = [source[i] for i in range(len(source))]
    pixels = np.stack([view(each["image"], chances) for each in samples]).astype(np.float32)
    flat = torch.from_numpy(pixels).flatten(1)
    return flat - flat.mean(1, keepdim=True), torch.tensor([each["label"] for each in samples])


if __name__ == "__main__":
    main()
