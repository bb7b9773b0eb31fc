"""The yardstick: the same selection as the op's, and masses that can be worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.cache.projections import projections
from clo_jax.calibrate import mass
from clo_jax.calibrate.collect import LayerSamples
from clo_jax.calibrate.mass import selection_mass, selection_quality
from clo_jax.ops.hash_encode import hash_encode
from clo_jax.ops.select_topk import select_topk
from tests.calibrate import planted

D = 16


@pytest.mark.parametrize("retriever", ["sign", "hata"])
def test_selects_what_the_op_selects(retriever):
    one = planted.samples(length=250)
    K, N, _ = one.keys.shape
    queries = one.queries.reshape(-1, K, 2, D)
    weights = jnp.asarray(np.stack([projections(retriever, D, 64, seed) for seed in range(K)]))
    length = jnp.int32(one.length)
    for head in range(K):
        mean = mass.key_mean(one.keys[head], length) * float(retriever == "sign")
        _, lse = mass.attention(queries[:, head], one.keys[head], one.positions)
        encoded = mass.encode(one.keys[head], mean, weights[head])
        rank = np.asarray(
            mass.ranks(mass.scores(retriever, queries[:, head], encoded, weights[head], lse), one.positions)
        )
        codes, factors = hash_encode(one.keys[None, head : head + 1], weights[head : head + 1], mean[None, None])
        different = 0
        for m in range(0, 24, 5):
            got = select_topk(
                queries[m, head][None], weights[head : head + 1], mean[None, None], lse[m][None], codes, factors,
                jnp.zeros(1, jnp.int32), one.positions[m][None] + 1, jnp.array([20], jnp.int32),
                jnp.zeros((1, 1), bool), k_max=20, retriever=retriever, scale=D**-0.5,
            )  # fmt: skip
            different += len(set(np.asarray(got)[0, 0].tolist()) ^ set(np.where(rank[m] < 20)[0].tolist()))
        # The op compares 16 leading bits of `sign` scores, so that neighbours at the boundary may change places.
        assert different <= (0 if retriever == "hata" else 4)


def test_mass_by_hand():
    # One head, one query; attention weights 8, 4, 2, 1, ... / total; the codes (bit 0 alone) prefer odd tokens.
    logits = -np.arange(8) * np.log(2.0)
    keys = np.zeros((1, 8, D), np.float32)
    keys[0, :, 0] = logits * D**0.5
    keys[0, :, 1] = np.where(np.arange(8) % 2 == 1, 1.0, -1.0)
    query = np.zeros((1, 1, D), np.float32)
    query[0, 0, 0], query[0, 0, 1] = 1.0, 1e-6
    weights = np.zeros((1, D, 32), np.float32)
    weights[0, 1, :] = 1.0
    one = LayerSamples(jnp.asarray(query), jnp.asarray(query), jnp.asarray(keys), jnp.array([7], jnp.int32), 8)
    got = selection_mass(one, jnp.asarray(weights), "hata", (0.25, 0.5))
    assert got.shape == (2, 1, 1)
    mass_again, recall = selection_quality(one, jnp.asarray(weights), "hata", (0.25, 0.5))
    np.testing.assert_array_equal(mass_again, got)
    np.testing.assert_allclose(recall[:, 0, 0], [1 / 2, 2 / 4])  # of tokens 0, 1 and 0 to 3: those that are odd
    assert got[0, 0, 0] == pytest.approx((1 / 2 + 1 / 8) / (1 + 1 / 2), rel=1e-4)
    assert got[1, 0, 0] == pytest.approx((1 / 2 + 1 / 8 + 1 / 32 + 1 / 128) / (1 + 1 / 2 + 1 / 4 + 1 / 8), rel=1e-4)


def test_exact_is_one_and_nothing_beyond_the_position_counts():
    one = planted.samples(length=200)
    assert selection_mass(one, jnp.zeros((2, D, 32)), "exact", (0.1, 0.02)) == pytest.approx(1.0)
    garbage = one._replace(keys=one.keys.at[:, 200:].set(1e3))
    weights = jnp.asarray(np.broadcast_to(projections("sign", D, 64, 0), (2, D, 64)))
    same = [selection_mass(each, weights, "sign", (0.1,)) for each in (one, garbage)]
    assert np.array_equal(*same)


def test_more_bits_keep_more():
    one = planted.samples(N=512)
    kept = [
        selection_mass(
            one, jnp.asarray(np.broadcast_to(projections("sign", D, R, 0), (2, D, R))), "sign", (0.1,)
        ).mean()
        for R in (32, 128, 512)
    ]
    assert 0.3 < kept[0] < kept[1] < kept[2] < 1
