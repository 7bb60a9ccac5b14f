"""Order and chance of data are pure functions that do what a shuffle does."""

import numpy as np
import pytest

from tilewise.data.order import Order, uniforms


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
@pytest.mark.parametrize("window", [0, 1, 7, 64])
def test_every_epoch_shows_every_sample_once(count, window):
    order = Order(count, seed=3, window=window)
    for epoch in range(3):
        epochs, indices = order.at(np.arange(epoch * count, (epoch + 1) * count))
        assert (epochs == epoch).all()
        assert sorted(indices) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 5, 77, 100, 257, 1000])
@pytest.mark.parametrize("window", [0, 1, 3, 13, 64, 90, 300])
def test_any_positions_can_be_asked_for_by_themselves(count, window):
    """In chunks of any size, also such as lie in the rest that fills no window."""
    order = Order(count, seed=1, window=window)
    places = np.arange(2 * count + 3)
    together = order.at(places)[1]
    for chunk in (1, 10, 128):
        if len(places) // chunk < 600:
            apart = np.split(places, range(chunk, len(places), chunk))
            assert (np.concatenate([order.at(some)[1] for some in apart]) == together).all()


def test_the_order_is_that_of_earlier_runs():
    """Without a window, and in whole windows: what was trained in an order can be trained again."""
    assert Order(1000, seed=0).at(np.arange(998, 1003))[1].tolist() == [259, 193, 329, 874, 5]
    windows = Order(1000, seed=0, window=300)
    assert windows.at(np.arange(897, 900))[1].tolist() == [861, 681, 628]


def test_epochs_and_seeds_have_different_orders():
    first = Order(1000, seed=0).at(np.arange(2000))[1]
    second = Order(1000, seed=1).at(np.arange(1000))[1]
    assert (first[:1000] != first[1000:]).mean() > 0.9
    assert (first[:1000] != second).mean() > 0.9


def test_a_shuffle_leaves_no_pattern():
    """Where a sample goes is uniform over seeds, and neighbours go different ways."""
    count, seeds = 50, 2000
    places = np.stack([Order(count, seed).at(np.arange(count))[1] for seed in range(seeds)])
    for position in (0, 17, 49):
        seen = np.bincount(places[:, position], minlength=count)
        # Chi-squared with 49 degrees of freedom: 100 is beyond the 99.99th percentile.
        assert ((seen - seeds / count) ** 2 / (seeds / count)).sum() < 100
    steps = np.diff(places.astype(float), axis=1)
    assert abs(np.corrcoef(steps[:, 3], steps[:, 20])[0, 1]) < 0.1


def test_a_window_keeps_reads_near_each_other():
    window = 64
    _, indices = Order(6400, seed=0, window=window).at(np.arange(6400))
    for block in indices.reshape(-1, window):
        assert block.max() - block.min() < window
    starts = indices.reshape(-1, window).min(1)
    assert (np.diff(starts) != window).any()


def test_billions_of_samples_need_no_memory():
    order = Order(2**33, seed=0)
    _, indices = order.at(np.array([0, 1, 2**33 - 1, 2**33]))
    assert len(set(indices.tolist())) >= 3
    assert indices.max() < 2**33


def test_chances_belong_to_seed_epoch_and_sample():
    index = np.arange(10_000)
    some = uniforms(0, np.zeros_like(index), index, 3)
    assert some.min() >= 0
    assert some.max() < 1
    assert abs(some.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(some[:, 0], some[:, 1])[0, 1]) < 0.05
    assert abs(np.corrcoef(some[:-1, 0], some[1:, 0])[0, 1]) < 0.05
    assert (uniforms(0, np.zeros_like(index), index, 3) == some).all()
    assert (uniforms(1, np.zeros_like(index), index, 3) != some).all()
    assert (uniforms(0, np.ones_like(index), index, 3) != some).all()
    assert (uniforms(0, np.zeros(1, int), np.array([7]), 3) == some[7]).all()
