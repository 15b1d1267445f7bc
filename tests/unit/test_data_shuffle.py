from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.shuffle import derive_key, permute


def keys(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("size", [*range(1, 40), 97, 256, 257, 1000, 4099])
def test_every_size_and_key_gives_a_bijection(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(permute(np.arange(size), size, keys(key))), np.arange(size))


def test_random_access_equals_the_whole_list() -> None:
    whole = permute(np.arange(1001), 1001, keys(7))
    places = np.array([1000, 3, 500, 3])
    assert np.array_equal(permute(places, 1001, keys(7)), whole[places])


def test_keys_go_place_by_place() -> None:
    mixed = permute(np.array([5, 5, 6]), 50, keys(1, 2, 2))
    assert mixed.tolist() == [permute(np.array([p]), 50, keys(k))[0] for p, k in ((5, 1), (5, 2), (6, 2))]


def test_order_is_spread_evenly() -> None:
    """Over many keys each of 5 places goes to each other one equally often, within five standard deviations."""
    trials = 4000
    places = np.tile(np.arange(5), trials)
    results = permute(places, 5, np.repeat(np.random.default_rng(0).integers(2**63, size=trials, dtype=np.uint64), 5))
    counts = np.zeros((5, 5))
    np.add.at(counts, (places, results), 1)
    assert np.abs(counts - trials / 5).max() < 5 * (trials * 0.2 * 0.8) ** 0.5


def test_neighbours_part() -> None:
    order = permute(np.arange(10_000), 10_000, keys(3))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert np.mean(np.diff(order) == 1) < 0.01


def test_key_is_the_same_on_every_machine() -> None:
    assert derive_key("order", "abc", 1) == 336471158888962061
