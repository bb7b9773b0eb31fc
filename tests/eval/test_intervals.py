"""Intervals: Wilson's against published values, the bootstrap against what is known of it."""

import numpy as np
import pytest

from clo_jax.eval.intervals import bootstrap, wilson


@pytest.mark.parametrize(
    "right, n, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson(right, n, low, high):
    assert wilson(np.array([1.0] * right + [0.0] * (n - right))) == pytest.approx((low, high), abs=1e-4)


def test_bootstrap_of_one_task_is_that_of_its_mean():
    low, high = bootstrap({"a": np.array([0.0, 1.0] * 200)})
    half = 1.96 * 0.5 / np.sqrt(400)
    assert low == pytest.approx(0.5 - half, abs=0.008) and high == pytest.approx(0.5 + half, abs=0.008)


def test_bootstrap_resamples_within_tasks():
    """Tasks that differ, without spread inside them, leave nothing uncertain."""
    assert bootstrap({"a": np.zeros(5), "b": np.ones(7)}) == (0.5, 0.5)
    spread = {"a": np.array([0.0, 1.0] * 50), "b": np.array([0.0, 1.0] * 50)}
    one, two = bootstrap({"a": spread["a"]}), bootstrap(spread)
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(2**-0.5, rel=0.1)
    assert bootstrap(spread) == two
