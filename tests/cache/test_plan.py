"""The paper's planner: closed forms of Eq. 11-13 and the worked numbers for known links."""

import numpy as np
import pytest

from clo_jax.cache import plan


def test_difficulty():
    np.testing.assert_allclose(plan.reuse_difficulty([[0.8, 0.5]], [[0.85, 0.7]], 0.1), [[0.05, -0.1]], atol=1e-12)


@pytest.mark.parametrize(
    "layer_us, gb_per_s, head_mb, want",
    [(1000, 21.21, 6.71, 3), (800, 21.21, 6.71, 2), (140, 50, 6.71, 1), (100, 50, 6.71, 0)],
)
def test_prefetchable_heads_of_the_worked_table(layer_us, gb_per_s, head_mb, want):
    assert plan.prefetchable_heads(layer_us * 1e-6, gb_per_s * 1e9, head_mb * 1e6) == want


def plan_of(difficulty, covered):
    tau = np.asarray(difficulty, float)
    return dict(plan.paper_plan(tau, np.full(tau.shape, 0.1), 0.1, 1.0, max(covered, 0.5), 1.0))


def test_the_hardest_heads_beyond_the_covered_ones_stay():
    layers = [[1, 1, 1, 1], [0.3, -0.1, 0.5, 0.4], [-1, -1, -1, 0.2], [0.2, 0.2, 0.2, 0.2]]
    assert plan_of(layers, 0) == {0: (0, 1, 2, 3), 1: (0, 2, 3), 2: (3,), 3: (0, 1, 2, 3)}
    assert plan_of(layers, 1) == {0: (0, 1, 2, 3), 1: (2, 3), 3: (0, 1, 2)}
    assert plan_of(layers, 4) == {0: (0, 1, 2, 3)}


def test_zero_difficulty_is_not_hard():
    assert plan_of([[0.0, 0.0], [0.0, 0.0]], 0) == {0: (0, 1)}


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_figures_that_are_not_positive_are_named(bad):
    with pytest.raises(ValueError, match="link_bytes_per_s: got"):
        plan.prefetchable_heads(1.0, bad, 1.0)
    with pytest.raises(ValueError, match=r"similarity: got shape \(1, 3\), wanted \(1, 2\)"):
        plan.paper_plan(np.ones((1, 2)), np.ones((1, 3)), 0.1, 1.0, 1.0, 1.0)
