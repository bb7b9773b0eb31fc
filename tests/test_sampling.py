"""Sampling: filters against brute force, frequencies, independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.sampling import Sampling, greedy, sample


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, seeds=None):
    return Sampling(
        jnp.full((rows,), temperature, jnp.float32),
        jnp.full((rows,), top_k, jnp.int32),
        jnp.full((rows,), top_p, jnp.float32),
        jnp.asarray(np.arange(rows) if seeds is None else seeds, jnp.uint32),
    )


def draws(logits, n=4000, **kw):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    return np.asarray(sample(rows, settings(n, **kw), jnp.zeros((n,), jnp.int32)))


LOGITS = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.2]))


def test_greedy_takes_the_lowest_id_on_ties():
    assert greedy(jnp.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]


def test_frequencies_follow_the_softmax():
    counts = np.bincount(draws(LOGITS), minlength=5) / 4000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.03)


def test_temperature_sharpens():
    counts = np.bincount(draws(LOGITS, temperature=0.5), minlength=5) / 4000
    want = np.exp(LOGITS) ** 2
    np.testing.assert_allclose(counts, want / want.sum(), atol=0.03)


def test_top_k_and_top_p_keep_exactly_the_right_tokens():
    assert set(draws(LOGITS, top_k=2)) == {1, 3}
    assert set(draws(LOGITS, top_k=1)) == {1}
    assert set(draws(LOGITS, top_p=0.7)) == {1, 3}
    assert set(draws(LOGITS, top_p=0.71)) == {1, 3, 4}
    assert set(draws(LOGITS, top_p=1e-6)) == {1}
    assert set(draws(LOGITS, top_k=3, top_p=0.75)) == {1, 3}  # 0.4 and 0.3 of the 0.9 that top-k left are 0.78


def test_a_row_draws_as_it_would_alone():
    logits = jax.random.normal(jax.random.key(0), (3, 50), jnp.float32)
    count = jnp.array([4, 0, 9], jnp.int32)
    together = sample(logits, settings(3, seeds=[7, 7, 8]), count)
    for row, seed in enumerate([7, 7, 8]):
        alone = sample(logits[row : row + 1], settings(1, seeds=[seed]), count[row : row + 1])
        assert int(alone[0]) == int(together[row])


def test_draws_change_with_seed_and_position():
    rows = jnp.zeros((64, 1000), jnp.float32)
    by_seed = sample(rows, settings(64), jnp.zeros((64,), jnp.int32))
    by_count = sample(rows, settings(64, seeds=np.zeros(64)), jnp.arange(64, dtype=jnp.int32))
    assert len(set(by_seed.tolist())) > 50 and len(set(by_count.tolist())) > 50
