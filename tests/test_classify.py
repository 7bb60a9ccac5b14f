"""Zero-shot, nearest neighbours, linear probe and colours against what they mean, written out."""

import math

import pytest
import torch
from torch.nn import functional

from tilewise.errors import DataError, DtypeError, OptionError, ShapeError
from tilewise.evaluate import classify
from tilewise.evaluate.classify import (
    class_vectors,
    colour_histograms,
    knn,
    labels_by_name,
    linear_probe,
    zero_shot,
)


def unit(n, d=8, seed=0):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    return functional.normalize(x, dim=1)


def blobs(n, classes=4, d=6, spread=0.9, seed=0):
    """Features around one centre for each class, and their labels."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=dice)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    return centres[labels] + spread * torch.randn(n, d, generator=dice), labels


def letters(texts):
    """An encoder: how often each of 26 letters occurs, not of unit norm."""
    rows = [[float(text.count(chr(97 + i))) for i in range(26)] for text in texts]
    return torch.tensor(rows)


CLASSES = ["cat", "dog", "bird", "fish {x}", "newt"]
TEMPLATES = ["a photo of a {}.", "{}", "{} and {}", "drawing {0} of {}"]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_class_vectors(chunk):
    """Each prompt's direction counts the same; braces of other kinds are left alone."""
    sizes, texts = [], []

    def encode(some):
        sizes.append(len(some))
        texts.extend(some)
        return letters(some).bfloat16()

    found = class_vectors(encode, CLASSES, TEMPLATES, chunk=chunk)
    for name, vector in zip(CLASSES, found, strict=True):
        prompts = [template.replace("{}", name) for template in TEMPLATES]
        mean = functional.normalize(letters(prompts).double(), dim=1).mean(0)
        assert (vector - mean / mean.norm()).abs().max() < 1e-6
    assert max(sizes) <= chunk
    assert found.dtype == torch.float32
    assert "fish {x} and fish {x}" in texts
    assert "drawing {0} of cat" in texts


def test_zero_shot():
    features, vectors = unit(300), unit(9, seed=1)
    labels = torch.randint(0, 8, (300,), generator=torch.Generator().manual_seed(1))
    found = zero_shot(features, vectors, labels, tile=7)
    order = (features.double() @ vectors.double().T).argsort(1, descending=True)
    right = order == labels[:, None]
    each = [float(right[labels == c, 0].double().mean()) for c in range(8)]  # class 8: no sample
    assert found == pytest.approx({
        "top1": float(right[:, 0].double().mean()),
        "top5": float(right[:, :5].any(1).double().mean()),
        "mean_per_class": sum(each) / len(each),
    })  # fmt: skip
    assert 0 < found["top1"] < found["top5"] < 1
    assert abs(found["mean_per_class"] - found["top1"]) > 1e-4


def test_labels_by_name():
    labels = torch.tensor([0, 2, 1, 2])
    assert labels_by_name(labels, ["a", "b", "a"], ["b", "c", "a", "a"]).tolist() == [2, 2, 0, 2]
    with pytest.raises(DataError, match=r"from 0 to 1.*got 0 to 2"):
        labels_by_name(labels, ["a", "b"], ["a", "b"])


def test_zero_shot_of_few_classes_and_of_nothing_learnt():
    """Fewer classes than 6 have no top5; equal scores are never right."""
    features, labels = torch.ones(6, 3), torch.zeros(6, dtype=torch.int64)
    assert zero_shot(features, torch.ones(5, 3), labels) == {"top1": 0.0, "mean_per_class": 0.0}
    assert zero_shot(features, torch.ones(6, 3), labels)["top5"] == 0.0
    assert zero_shot(features.half(), torch.eye(3), labels)["top1"] == 0.0
    assert zero_shot(torch.eye(3), torch.eye(3).half(), torch.arange(3))["top1"] == 1.0


def naive_knn(train, train_labels, test, test_labels, k, temperature):
    train, test = (functional.normalize(x.double(), dim=1) for x in (train, test))
    hits = 0
    for x, label in zip(test, test_labels.tolist(), strict=True):
        near = (train @ x).topk(min(k, len(train)))
        votes = {}
        for score, i in zip(near.values.tolist(), near.indices.tolist(), strict=True):
            voted = int(train_labels[i])
            votes[voted] = votes.get(voted, 0.0) + math.exp(score / temperature)
        hits += max(votes, key=votes.get) == label
    return hits / len(test)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 10.0), (500, 0.5)])
def test_knn(k, temperature, monkeypatch):
    """Features of any norm, also with more neighbours than samples, and votes in pieces."""
    monkeypatch.setattr(classify, "VOTES", 40**2)
    case = (*blobs(40), *blobs(60, seed=1))
    found = knn(*case, k=k, temperature=temperature)
    assert found == {"knn_top1": naive_knn(*case, k, temperature)}
    assert 0.3 < found["knn_top1"] < 1


def test_the_temperature_of_knn_matters():
    """One near neighbour against two far ones."""
    train = torch.tensor([[1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    case = (train, torch.tensor([7, 8, 8]), torch.tensor([[1.0, 0.0]]), torch.tensor([7]))
    assert knn(*case)["knn_top1"] == 1.0
    assert knn(*case, temperature=1e3)["knn_top1"] == 0.0
    assert knn(*case, k=1, temperature=1e3)["knn_top1"] == 1.0


def test_a_draw_between_neighbours_is_lost():
    same = torch.ones(4, 3)
    for label in (0, 1):
        labels = torch.tensor([0, 1, 0, 1])
        assert knn(same, labels, same[:1], torch.tensor([label]))["knn_top1"] == 0.0


def newton(x, y, penalty):
    """Weights (C, D + 1) of the same problem in float64, by Newton's method."""
    x = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    shape = (int(y.max()) + 1, x.shape[1] + 1)

    def loss(flat):
        w = flat.view(shape)
        z = x @ w[:, :-1].T + w[:, -1]
        return functional.cross_entropy(z, y) + penalty / 2 * w[:, :-1].square().sum()

    flat = torch.zeros(shape, dtype=torch.float64).flatten()
    for _ in range(12):
        slope = torch.autograd.functional.jacobian(loss, flat)
        curve = torch.autograd.functional.hessian(loss, flat)
        flat = flat - torch.linalg.lstsq(curve, slope, driver="gelsd").solution
    return flat.view(shape)


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("tile", [16384, 7])
def test_the_probe_minimises_what_it_says(penalty, tile):
    """Features of very different sizes, one after the other and all at once."""
    x, y = blobs(80, classes=3, d=4)
    x = x * torch.tensor([1.0, 1e-3, 50.0, 1.0]) + torch.tensor([0.0, 0.0, 300.0, -5.0])
    model = classify._Linear(x, y, penalty, tile=tile)
    truth = newton(x, y, penalty)
    # Biases are told only up to what all classes share.
    ours, theirs = (w - w.mean(0) for w in (model.weight.detach().double(), truth))
    assert (ours - theirs).norm() / theirs.norm() < 2e-3


def test_linear_probe():
    """Labels may be any integers, and some of the test none that was learnt."""
    train, labels = blobs(200)
    test, test_labels = blobs(300, seed=1)
    found = linear_probe(train, labels, test, test_labels)
    assert 0.7 < found["linear_probe_top1"] < 1
    renamed = linear_probe(train, labels * 1000 - 7, test, test_labels * 1000 - 7)
    assert renamed == found
    assert linear_probe(train.bfloat16(), labels, test.bfloat16(), test_labels)[
        "linear_probe_top1"
    ] == pytest.approx(found["linear_probe_top1"], abs=0.03)
    unknown = test_labels.masked_fill(test_labels == 0, 17)
    assert linear_probe(train, labels, test, unknown)["linear_probe_top1"] == pytest.approx(
        found["linear_probe_top1"] - 0.25, abs=0.1
    )


def test_the_penalty_is_chosen_on_samples_held_back():
    """Noise in a hundred features: with the smaller penalty it is fitted to, and harms.

    Samples that were fitted to would choose that one.
    """
    dice = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    both = torch.randn(2, 200, 101, generator=dice)
    both[:, :, 0] += 2 * labels
    train, test = both
    alone = {
        penalty: linear_probe(train, labels, test, labels, penalties=[penalty])
        for penalty in (1e-6, 10.0)
    }
    assert alone[10.0]["linear_probe_top1"] > alone[1e-6]["linear_probe_top1"] + 0.05
    assert linear_probe(train, labels, test, labels, penalties=[1e-6, 10.0]) == alone[10.0]


def test_the_test_set_chooses_nothing():
    train, labels = blobs(60)
    case = blobs(50, seed=1)
    other = blobs(50, spread=9.0, seed=2)
    both = [linear_probe(train, labels, *each)["penalty"] for each in (case, other)]
    assert both[0] == both[1]


def test_the_probe_is_repeatable_whatever_surrounds_it():
    """Same bits; under inference_mode and no_grad too, and the global seed is left alone."""
    case = (*blobs(300, spread=2.0), *blobs(3000, spread=2.0, seed=1))
    expected = linear_probe(*case, penalties=[1e-2])
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        twin = tuple(x.clone() for x in case)
        assert linear_probe(*twin, penalties=[1e-2]) == expected
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear_probe(*case, penalties=[1e-2]) == expected
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_feature_that_never_changes():
    train, labels = blobs(60)
    test, test_labels = blobs(50, seed=1)
    expected = linear_probe(train, labels, test, test_labels, penalties=[1e-2])
    for value in (0.0, 0.1, 1234.567):
        more = [torch.cat([x, torch.full((len(x), 1), value)], 1) for x in (train, test)]
        found = linear_probe(more[0], labels, more[1], test_labels, penalties=[1e-2])
        assert found == pytest.approx(expected, abs=0.021)


@pytest.mark.parametrize("bins", [1, 3, 4, 16])
def test_colour_histograms(bins, monkeypatch):
    monkeypatch.setattr(classify, "PIXELS", 100)
    dice = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 5, 6, 3), generator=dice).to(torch.uint8)
    images[0] = 255
    images[1] = 0
    found = colour_histograms(images, bins)
    truth = torch.zeros(7, bins, bins, bins, dtype=torch.float64)
    for i, image in enumerate(images):
        for pixel in image.flatten(0, 1).tolist():
            truth[i][tuple(int(channel / 256 * bins) for channel in pixel)] += 1 / 30
    assert found.shape == (7, bins**3)
    assert found.dtype == torch.float32
    assert (found - truth.flatten(1).sqrt()).abs().max() < 1e-6
    assert (found.norm(dim=1) - 1).abs().max() < 1e-6


X, Y = unit(4), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: class_vectors(letters, ["a"], ["{}", "a photo"]), OptionError, "got 'a photo'"),
        (lambda: class_vectors(letters, ["a"], "a {}"), OptionError, "lists of at least one"),
        (lambda: class_vectors(letters, [], ["{}"]), OptionError, "0 classes"),
        (lambda: class_vectors(letters, ["a"], ["{}"], chunk=0), OptionError, "chunk"),
        (lambda: class_vectors(lambda _: X, ["a"], ["{}"]), ShapeError, "each of 1 texts, got 4"),
        (lambda: zero_shot(X, X, Y + 1), DataError, "from 0 to 3.*got 1 to 4"),
        (lambda: zero_shot(X, X, Y - 1), DataError, "got -1 to 2"),
        (lambda: zero_shot(X, unit(4, 3), Y), ShapeError, "features and vectors must share"),
        (lambda: knn(X, Y, X, Y, k=0), OptionError, "above 0, got 0"),
        (lambda: knn(X, Y, X, Y, temperature=0.0), OptionError, "above 0"),
        (lambda: knn(X, Y[:3], X, Y), ShapeError, "train_labels"),
        (lambda: knn(X, Y, X / 0, Y), DataError, "test must be finite"),
        (lambda: linear_probe(X, Y, X, Y, penalties=[]), OptionError, "at least one"),
        (lambda: linear_probe(X, Y, X, Y, penalties=[-1.0]), OptionError, "0 or more"),
        (lambda: linear_probe(X[:1], Y[:1], X, Y), DataError, "2 samples"),
        (lambda: linear_probe(X, Y, X, Y.float()), DtypeError, "test_labels"),
        (lambda: colour_histograms(torch.zeros(1, 2, 2, 3)), DtypeError, "uint8"),
        (lambda: colour_histograms(torch.zeros(1, 3, 2, 2).byte()), ShapeError, "channels last"),
        (lambda: colour_histograms(torch.zeros(1, 2, 2, 3).byte(), 0), OptionError, "1 to 256"),
    ],
)
def test_what_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
