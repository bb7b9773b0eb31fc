"""Thresholds against the paper's worked table (Eq. 7-9, eta = 0.8, n = 3)."""

import numpy as np
import pytest

from clo_jax.cache.thresholds import ALWAYS_MISS, thresholds

ORACLE = {
    0: -1.000, 0.25: -0.999, 0.5: -0.952, 0.6: -0.858, 0.7: -0.655, 0.8: -0.288, 0.85: -0.037,
    0.9: 0.248, 0.95: 0.540, 0.97: 0.651, 0.98: 0.704, 0.99: 0.753, 1: 0.800,
}  # fmt: skip


def test_oracle_table():
    got = thresholds(np.array(list(ORACLE)), sim_threshold=0.8, importance_power=3)
    np.testing.assert_allclose(got, list(ORACLE.values()), atol=1e-3)


def test_monotone_in_importance_and_exact_at_the_ends():
    tau = thresholds(np.linspace(0, 1, 101), 0.8, 3)
    assert (np.diff(tau) >= 0).all()
    assert tau[0] == -1.0 and abs(tau[-1] - 0.8) < 1e-7


def test_a_threshold_of_one_refreshes_always():
    assert (thresholds(np.array([0.0, 0.5, 1.0]), 1.0, 3) == ALWAYS_MISS).all()


@pytest.mark.parametrize("bad", [-0.1, 1.1, np.nan])
def test_importance_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="importance: got values in"):
        thresholds(np.array([0.5, bad]), 0.8, 3)
