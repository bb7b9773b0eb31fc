"""Soft selection, its gradient, and the terms of HATA's objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.cache.projections import projections
from clo_jax.calibrate import mass, objectives
from clo_jax.calibrate.objectives import Batch, hata_loss, lost_mass, off_orthogonal, soft_topk
from tests.calibrate import planted

D = 16


def batch(seed=0):
    one = planted.samples(seed)
    keys = one.keys[0]
    seen = jnp.arange(keys.shape[0], dtype=jnp.int32)[None] <= one.positions[:, None]
    return Batch(one.queries.reshape(-1, 2, 2, D)[:, 0], keys, seen, mass.key_mean(keys, jnp.int32(one.length)))


@pytest.mark.parametrize("temperature", [0.02, 0.1, 0.5])
def test_soft_topk_adds_up(temperature):
    rng = np.random.default_rng(0)
    score = jnp.asarray(rng.standard_normal((5, 400)) * np.array([[0.1], [1], [3], [10], [1]]), jnp.float32)
    k = jnp.array([[1.0, 2.5, 8.0, 12.0, 20.0], [40.0, 30.0, 33.3, 120.0, 1.0]])
    seen = jnp.asarray(np.arange(400)[None] < np.array([400, 300, 200, 400, 400])[:, None])
    gates = soft_topk(score, seen, k, temperature)
    assert np.allclose(gates.sum(axis=2), k, rtol=0.01) and not np.any(np.asarray(gates)[:, ~np.asarray(seen)])


def test_sharp_gates_are_the_top_k():
    score = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40)), jnp.float32)
    gates = soft_topk(score, jnp.ones((1, 40), bool), jnp.array([[12.0]]), 1e-4)[0, 0]
    best = np.argsort(-np.asarray(score[0]))
    assert np.all(gates[best[:11]] > 0.9) and np.all(gates[best[13:]] < 0.1)


def test_soft_topk_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(1)
    score, value = (jnp.asarray(rng.standard_normal((1, 12)), jnp.float32) for _ in range(2))
    seen, k = jnp.ones((1, 12), bool), jnp.array([[4.0]])

    def f(s):
        return jnp.sum(soft_topk(s, seen, k, 0.5)[0] * value)

    gradient = np.asarray(jax.grad(f)(score))[0]
    for i in range(12):
        step = jnp.zeros_like(score).at[0, i].set(1e-2)
        assert gradient[i] == pytest.approx(float(f(score + step) - f(score - step)) / 2e-2, abs=2e-3)
    assert gradient.sum() == pytest.approx(0, abs=1e-4), "raising all scores changes nothing"


@pytest.mark.parametrize("retriever", ["sign", "hata"])
def test_lost_mass_at_a_low_temperature_is_what_the_yardstick_says(retriever):
    one = planted.samples()
    weights = np.stack([projections(retriever, D, 64, 0)] * 2)
    kept = mass.selection_mass(one, jnp.asarray(weights), retriever, (0.1,))[0, 0]
    data = batch()
    if retriever == "sign":
        data = data._replace(mean=mass.key_mean(one.keys[0], jnp.int32(one.length)))
    lost = lost_mass(retriever, jnp.asarray(weights[0]), data, (0.1,), 1e-3)
    assert float(lost) == pytest.approx(1 - kept.mean(), abs=0.04)
    assert 0.02 < float(lost) < 0.9


@pytest.mark.parametrize("R", [8, 16, 32, 48])
def test_off_orthogonal(R):
    blocks = jnp.asarray(projections("sign", D, 64, 0))
    rows = blocks[:, :R]
    assert float(off_orthogonal(rows)) < 1e-4
    assert float(off_orthogonal(rows * 1.5)) > 0.5
    assert float(off_orthogonal(rows.at[:, 1].set(rows[:, 0]))) > 0.3
    assert np.isfinite(jax.grad(off_orthogonal)(rows)).all()


def test_hata_loss_is_the_formula_of_the_reference():
    data, weights = batch(), np.asarray(projections("hata", D, 32, 1))
    q, k, seen = (np.asarray(x, np.float64) for x in (data.queries, data.keys, data.seen))

    def h(x):
        return 2 / (1 + np.exp(-0.1 * (x @ weights))) - 1

    pair, balance, n = 0.0, np.zeros(32), 0
    for m in range(len(q)):
        visible = np.where(seen[m])[0]
        for g in range(2):
            order = visible[np.argsort(-(k[visible] @ q[m, g]), kind="stable")]
            best = int(np.ceil(0.1 * len(visible)))
            label = np.full(len(order), -1.0)
            label[:best] = np.linspace(20, 1, best)
            pair += (label * ((h(q[m, g])[None] - h(k[order])) ** 2).sum(1)).sum()
            balance += (h(q[m, g])[None] + h(k[order])).sum(0)
            n += len(order)
    gram = weights @ weights.T * (D / 32) - np.eye(D)
    wanted = 0.01 * pair / n + ((balance / (n * 32)) ** 2).sum() + 2 * np.sqrt((gram**2).sum())
    assert float(hata_loss(jnp.asarray(weights), data)) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("retriever", ["sign", "hata"])
def test_gradients_point_downhill(retriever):
    data, weights = batch(), jnp.asarray(projections("sign", D, 32, 0))

    def loss(weights):
        return lost_mass(retriever, weights, data, (0.1,), 0.3)

    before, gradient = jax.value_and_grad(loss)(weights)
    gradient = gradient / jnp.linalg.norm(gradient)
    assert min(float(loss(weights - step * gradient)) for step in (0.1, 0.3, 0.6)) < float(before)


def test_soft_sign():
    x = jnp.array([[-2.0, 0.5], [1.0, -0.25]])
    assert np.array_equal(objectives.soft_sign(x), np.sign(x))
    assert np.all(np.asarray(jax.grad(lambda x: objectives.soft_sign(x).sum())(x)) > 0)
