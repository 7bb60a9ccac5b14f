"""How well features tell classes apart: zero-shot, nearest neighbours and a linear probe."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.errors import DataError, DtypeError, OptionError, ShapeError
from tilewise.evaluate.ranking import (
    check_features,
    check_finite,
    check_marks,
    check_pair,
    full_float32,
    ranks,
    top,
)

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ITERATIONS = 200  # of LBFGS: far more than well-scaled features need

# What is handled at a time: votes between neighbours, and pixels.
VOTES = 2**22
PIXELS = 2**22


@torch.no_grad()
def class_vectors(
    encode: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[str],
    *,
    chunk: int = 256,
) -> Tensor:
    """One unit vector for each class: the mean of its prompts' unit features.

    Args:
        encode: features (n, D) of n texts; called with at most `chunk` of them.
        classes: names of C classes.
        templates: prompts such as "a photo of a {}.", with "{}" for the class.

    Returns:
        (C, D) float32.
    """
    if not classes or not templates or isinstance(classes, str) or isinstance(templates, str):
        raise OptionError(
            "classes and templates must be lists of at least one text, got "
            f"{len(classes)} classes and templates {templates!r}; ['{{}}'] is the bare name"
        )
    check_templates(templates)
    if chunk < 1:
        raise OptionError(f"chunk must be above 0, got {chunk}; 256 is a good size")
    means = []
    for start in range(0, len(classes), chunk):
        names = classes[start : start + chunk]
        # Not str.format: a name or a template may hold braces of its own.
        texts = ([template.replace("{}", name) for name in names] for template in templates)
        means.append(torch.stack([_unit(_encoded(encode, each)) for each in texts]).mean(0))
    return _unit(torch.cat(means))


def check_templates(templates: Sequence[str]) -> None:
    """Each has a place for the class."""
    without = [template for template in templates if "{}" not in template]
    if without:
        raise OptionError(
            f"a template must hold {{}} where the class goes, got {without[0]!r}; add it"
        )


def zero_shot(
    features: Tensor, vectors: Tensor, labels: Tensor, *, tile: int = 4096
) -> dict[str, float]:
    """Shares of samples whose class scores highest, or among the highest 5.

    Classes that score as high as the right one stand above it.

    Args:
        features: (N, D).
        vectors: (C, D), one for each class.
        labels: (N,), from 0 to C - 1.
        tile: as in `ranks`.

    Returns:
        "top1", "mean_per_class" (the mean over the classes that occur of each one's top1), and
        "top5" where there are more than 5 classes.
    """
    check_pair(("features", features), ("vectors", vectors))
    check_marks("labels", labels, features)
    _check_range(labels, len(vectors))
    own = torch.arange(len(vectors), device=vectors.device)
    place = ranks(features, vectors, labels, own, tile=tile).cpu()
    found = {"top1": _share(place < 1)}
    if len(vectors) > 5:
        found["top5"] = _share(place < 5)
    sizes = labels.cpu().long().bincount(minlength=len(vectors))
    right = labels.cpu().long()[place < 1].bincount(minlength=len(vectors))
    found["mean_per_class"] = float((right.double() / sizes)[sizes > 0].mean())
    return found


def labels_by_name(labels: Tensor, names: Sequence[str], order: Sequence[str]) -> Tensor:
    """Labels (n,) that count through `names` as labels that count through `order`, which has all
    of these names; of those that it has twice, the first is meant.
    """
    _check_range(labels, len(names))
    places = {name: place for place, name in reversed(list(enumerate(order)))}
    return torch.tensor([places[name] for name in names], device=labels.device)[labels]


def _check_range(labels: Tensor, classes: int) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"labels must be from 0 to {classes - 1}, one for each class, got {low} to {high}; "
            "give names or vectors for all classes, in the order of the labels"
        )


@torch.no_grad()
def knn(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> dict[str, float]:
    """Share of `test` whose k nearest of `train`, by cosine, vote for the right class.

    A neighbour's vote weighs exp(cosine / temperature); the right class must win outright.

    Args:
        train, test: features (N, D) and (M, D).
        train_labels, test_labels: (N,) and (M,).
        k: neighbours; all of `train` where it has fewer.

    Returns:
        "knn_top1".
    """
    _check_split(train, train_labels, test, test_labels)
    if k < 1 or not temperature > 0:
        raise OptionError(
            f"k and temperature must be above 0, got {k} and {temperature}; 20 and 0.07 are usual"
        )
    k = min(k, len(train))
    scores, near = top(_unit(test), _unit(train), k)
    right = []
    for at in torch.arange(len(test), device=test.device).split(max(1, VOTES // k**2)):
        weight = ((scores[at] - scores[at, :1]) / temperature).exp()  # (n, k), in (0, 1]
        voted = train_labels[near[at]]
        same = voted[:, :, None] == voted[:, None, :]
        votes = (weight[:, None, :] * same).sum(2)  # (n, k), for the class of each neighbour
        own = voted == test_labels[at, None]
        right.append(votes.where(own, 0).amax(1) > votes.where(~own, 0).amax(1))
    return {"knn_top1": _share(torch.cat(right))}


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    penalties: Sequence[float] = PENALTIES,
) -> dict[str, float]:
    """Share of `test` that a linear classifier, fitted to the features of `train`, gets right.

    Minimises mean cross-entropy + penalty / 2 * |W|^2 over standardised features. The penalty
    is the one that does best on a tenth of `train` (of equal ones the largest), with the rest
    fitted to; then all of it is fitted to. The same input gives the same answer.

    Args:
        train, test: features (N, D) and (M, D).
        train_labels, test_labels: (N,) and (M,).
        penalties: those to choose from.

    Returns:
        "linear_probe_top1", and the "penalty".
    """
    _check_split(train, train_labels, test, test_labels)
    if not penalties or min(penalties) < 0:
        raise OptionError(
            f"penalties must be numbers of 0 or more, at least one, got {list(penalties)}"
        )
    if len(train) < 2:
        raise DataError("train must hold 2 samples or more, one of them held back, got 1; add some")
    # Leaves no_grad too: where either is on, nothing can be fitted.
    with torch.inference_mode(False), full_float32(train):
        # Random but always the same: the order of a data set may go with its classes.
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        held, rest = order.to(train.device).tensor_split([max(1, len(train) // 10)])
        best, penalty = -1.0, 0.0
        for each in sorted(set(penalties), reverse=True):
            model = _Linear(train[rest], train_labels[rest], each)
            share = model.right(train[held], train_labels[held])
            if share > best:
                best, penalty = share, each
        model = _Linear(train, train_labels, penalty)
        return {"linear_probe_top1": model.right(test, test_labels), "penalty": penalty}


class _Linear:
    """A linear classifier of features (N, D), fitted on construction.

    Labels may be any integers.
    """

    def __init__(
        self, features: Tensor, labels: Tensor, penalty: float, *, tile: int = 16384
    ) -> None:
        self.tile = tile
        self.classes = labels.unique()
        self.std, self.mean = torch.std_mean(features.float(), 0, correction=0)
        # A feature that never changes says nothing; what differs is its mean's rounding.
        self.std[self.std <= 1e-6 * self.mean.abs()] = 1.0
        shape = (len(self.classes), features.shape[1] + 1)
        self.weight = torch.zeros(shape, device=features.device, requires_grad=True)
        self._fit(features, torch.searchsorted(self.classes, labels), penalty)

    def right(self, features: Tensor, labels: Tensor) -> float:
        """Share of features (n, D) whose class is found."""
        with torch.no_grad():
            best = [self._logits(part).argmax(1) for part in features.split(self.tile)]
        return _share(self.classes[torch.cat(best)] == labels)

    def _logits(self, features: Tensor) -> Tensor:
        """(n, C), of raw features (n, D)."""
        x = (features.float() - self.mean) / self.std
        return x @ self.weight[:, :-1].T + self.weight[:, -1]

    def _fit(self, features: Tensor, targets: Tensor, penalty: float) -> None:
        solver = torch.optim.LBFGS(
            [self.weight], max_iter=ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
        )

        def loss() -> float:
            solver.zero_grad()
            total = penalty / 2 * self.weight[:, :-1].square().sum()
            total.backward()
            value = float(total.detach())
            # Piece by piece: the logits of all samples may be more than their features.
            for x, y in zip(features.split(self.tile), targets.split(self.tile), strict=True):
                part = functional.cross_entropy(self._logits(x), y, reduction="sum") / len(features)
                part.backward()
                value += float(part.detach())
            return value

        solver.step(loss)


def colour_histograms(images: Tensor, bins: int = 4) -> Tensor:
    """What an encoder must beat: unit vectors of how often each colour occurs.

    Args:
        images: (N, H, W, 3) uint8.
        bins: of each channel, up to 256.

    Returns:
        (N, bins**3) float32, square roots of shares: their product is the Hellinger affinity.
    """
    if images.dtype != torch.uint8:
        raise DtypeError(f"images must be uint8, got {images.dtype}; scale them to 0..255")
    if images.dim() != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise ShapeError(
            f"images must be (N, H, W, 3), got {tuple(images.shape)}; move the channels last"
        )
    if not 1 <= bins <= 256:
        raise OptionError(f"bins must be from 1 to 256, got {bins}; 4 is a good number")
    size, area = bins**3, images.shape[1] * images.shape[2]
    counts = []
    for part in images.split(max(1, PIXELS // area)):
        red, green, blue = (part.long() * bins // 256).flatten(1, 2).unbind(2)  # (n, H * W) each
        colour = (red * bins + green) * bins + blue
        first = torch.arange(len(part), device=part.device)[:, None] * size
        counts.append((first + colour).flatten().bincount(minlength=len(part) * size))
    # Shares add up to 1, so the squares of their roots do, and the norm is 1 already.
    return (torch.cat(counts).view(len(images), size) / area).sqrt()


def _encoded(encode: Callable[[list[str]], Tensor], texts: list[str]) -> Tensor:
    features = encode(texts)
    check_features("what encode returns", features)
    check_finite("what encode returns", features)
    if len(features) != len(texts):
        raise ShapeError(
            f"encode must return one vector for each of {len(texts)} texts, got {len(features)}; "
            "pool over tokens"
        )
    return features


def _check_split(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> None:
    check_pair(("train", train), ("test", test))
    check_marks("train_labels", train_labels, train)
    check_marks("test_labels", test_labels, test)


def _unit(features: Tensor) -> Tensor:
    return functional.normalize(features.float(), dim=1)


def _share(right: Tensor) -> float:
    return float(right.double().mean())
