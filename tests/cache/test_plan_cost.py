"""Planner `cost`: its prediction in closed form, its choice against trying everything."""

import itertools
import math

import numpy as np
import pytest

from clo_jax.cache.plan_cost import StepModel, cost_plan, miss_probability, predict

ALL = (0, (0, 1, 2))


def model(miss, new_rows=1.0, layer_s=10.0, resident_s=1.0, search_s=0.0, set_s=8.0, batch=1):
    miss = np.asarray(miss, float)
    return StepModel(miss, np.broadcast_to(new_rows, miss.shape), layer_s, resident_s, search_s, set_s, batch)


def test_heads_that_always_hit_cost_only_their_layers():
    found = predict(model(np.zeros((4, 3))), ())
    assert found.step_s == pytest.approx(40)
    assert (found.hit_rate, found.link_s.sum(), found.wait_s.sum()) == (1, 0, 0)


def test_sure_misses_wait_for_what_the_layer_before_does_not_cover():
    # Three whole sets of 8 s against 10 s of the layer before: 14 s of waiting in layer 1; a third of a set each: none.
    whole = predict(model([[0] * 3, [1] * 3]), ())
    np.testing.assert_allclose(whole.link_s, [0, 24])
    np.testing.assert_allclose(whole.wait_s, [0, 14])
    assert whole.hit_rate == 0.5
    parts = predict(model([[0] * 3, [1] * 3], new_rows=1 / 3), ())
    np.testing.assert_allclose(parts.wait_s, [0, 0])


def test_layer_0_has_no_cover():
    np.testing.assert_allclose(predict(model([[1, 0, 0], [1, 0, 0]]), ()).wait_s, [8, 0])


def test_resident_heads_are_read_whole_and_never_wait():
    found = predict(model([[1] * 3, [1] * 3]), (ALL, (1, (0, 2))))
    np.testing.assert_allclose(found.device_s, [13, 12])
    np.testing.assert_allclose(found.link_s, [0, 8])
    assert (found.wait_s.sum(), found.hit_rate) == (0, 0)


def test_the_search_of_missed_heads_takes_device_time():
    np.testing.assert_allclose(predict(model([[0, 0], [1, 0.5]], search_s=2), ()).device_s, [10, 13])


def test_expected_wait_is_that_of_a_random_number_of_misses():
    """Against the exact expectation over all outcomes of 16 sequences with 3 heads each."""
    many = model([[0] * 3, [0.3] * 3], set_s=1.0, batch=16)
    exact = sum(
        math.comb(48, n) * 0.3**n * 0.7 ** (48 - n) * max(n - 10.0, 0.0) for n in range(49)
    )  # fmt: skip
    assert predict(many, ()).wait_s[1] == pytest.approx(exact, rel=0.01)
    assert exact > 48 * 0.3 - 10  # more than the excess of the mean


def numbers(plan, layers):
    found = dict(plan)
    return tuple(len(found.get(layer, ())) for layer in range(layers))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_set_is_faster(seed):
    rng = np.random.default_rng(seed)
    miss, new_rows = rng.uniform(0, 1, (3, 3)), rng.uniform(0.2, 1, (3, 3))
    step = model(miss, new_rows, layer_s=10, resident_s=rng.uniform(0, 3), set_s=rng.uniform(2, 12))
    for room in (3, 4, 6, 9):
        found = cost_plan(step, room)
        assert dict(found)[0] == (0, 1, 2)
        assert sum(numbers(found, 3)) <= room
        best = math.inf
        for sizes in itertools.product(range(8), repeat=2):
            heads = [tuple(h for h in range(3) if size >> h & 1) for size in sizes]
            if 3 + sum(map(len, heads)) <= room:
                best = min(best, predict(step, (ALL, (1, heads[0]), (2, heads[1]))).step_s)
        # Heads are taken in the order of their mean rows: another order can gain a little through the variance.
        assert predict(step, found).step_s <= best * 1.01


def test_nothing_becomes_resident_that_does_not_pay():
    assert cost_plan(model(np.zeros((3, 3))), 9) == (ALL,)
    assert cost_plan(model(np.zeros((3, 3)), resident_s=0.0), 9) == (ALL,)  # ties: fewer heads
    assert numbers(cost_plan(model(np.ones((3, 3)), resident_s=0.0, set_s=100.0), 9), 3) == (3, 3, 3)


def test_the_heads_that_move_most_become_resident_first():
    step = model([[0] * 3, [0.9, 1.0, 0.5], [0.1, 0.1, 0.1]], new_rows=[[1] * 3, [0.2, 0.9, 1.0], [1] * 3], set_s=40)
    assert cost_plan(step, 4) == (ALL, (1, (1,)))
    assert cost_plan(step, 5) == (ALL, (1, (1, 2)))


def test_layer_0_must_fit():
    with pytest.raises(ValueError, match="most_heads: got 2, wanted at least 3"):
        cost_plan(model(np.zeros((2, 3))), 2)


def test_miss_probability():
    tau = np.array([[0.8, 0.8, 0.7, -1.0, 2.0]])
    miss = miss_probability(tau, np.array([[0.8, 0.9, 0.9, -0.9, 0.9]]), 0.1, None)
    np.testing.assert_allclose(miss, [[0.5, 0.158655, 0.0227501, 0, 1]], atol=1e-6)
    # Refreshed at least every 64 steps.
    often = miss_probability(tau, np.array([[0.8, 0.9, 0.9, -0.9, 0.9]]), 0.1, 64)
    np.testing.assert_allclose(often[0, [0, 3, 4]], [1 - 0.5 * 63 / 64, 1 / 64, 1])


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"miss": [[1.5]]}, "miss: got values outside"),
        ({"miss": [[np.nan]]}, "miss: got values outside"),
        ({"miss": [1.0]}, r"wanted that of miss, \(1,\) = \[L, K\]"),
        ({"layer_s": -1.0}, "layer_s: got -1.0"),
        ({"set_s": np.inf}, "set_s: got inf"),
        ({"batch": 0}, "batch: got 0"),
    ],
)
def test_figures_are_checked(changes, named):
    with pytest.raises(ValueError, match=named):
        model(**{"miss": [[0.0]], **changes})
    with pytest.raises(ValueError, match="spread: got 0"):
        miss_probability(np.ones((1, 1)), np.ones((1, 1)), 0.0, None)
