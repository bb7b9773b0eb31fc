"""cache_lookup: native kernel against the plain JAX reference, and the properties of the paper's Eq. 10."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.ops import cache_lookup as op
from tests.cases import DTYPES, GROUPS, HEAD_DIMS
from tests.compare import on_cpu


def inputs(seed, B=2, Ko=3, G=3, D=64, dtype=jnp.float32, tau=0.5):
    r = np.random.default_rng(seed)
    label = r.normal(size=(B, Ko * G, D))
    query = label + r.uniform(0, 3, size=(B, Ko * G, 1)) * r.normal(size=(B, Ko * G, D))
    return (
        jnp.asarray(query, dtype),
        jnp.asarray(label, dtype),
        jnp.asarray(r.integers(-1, 5, size=(B, Ko)), jnp.int32),
        jnp.asarray(r.uniform(0, 1, size=Ko * G), jnp.float32),
        jnp.full((Ko,), tau, jnp.float32),
        jnp.full((B,), 4, jnp.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", GROUPS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_matches_reference(G, D, dtype):
    args = inputs(G * 1000 + D, B=3, Ko=5, G=G, D=D, dtype=dtype)
    want, got = on_cpu(op.reference)(*args), op.cache_lookup(*args)
    assert 0 < int(want[0].sum()) < want[0].size  # both outcomes occur
    for w, g in zip(want, got, strict=True):
        assert w.dtype == g.dtype
        np.testing.assert_array_equal(np.asarray(w, np.float32), np.asarray(g, np.float32))


def test_label_changes_if_and_only_if_missed():
    args = inputs(7, B=4, Ko=8, G=2)
    hit, label, age = op.cache_lookup(*args)
    changed = (np.asarray(label) != np.asarray(args[1])).reshape(4, 8, -1).any(-1)
    np.testing.assert_array_equal(changed, ~np.asarray(hit))
    np.testing.assert_array_equal(np.asarray(age), np.where(hit, args[2] + 1, 0))


def test_threshold_extremes_and_missing_label():
    query, label, _, importance, _, max_age = inputs(3)
    fresh, old = jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3), -1, jnp.int32)
    always, never = jnp.full((3,), -1.0, jnp.float32), jnp.full((3,), 2.0, jnp.float32)
    assert bool(op.cache_lookup(query, label, fresh, importance, always, max_age)[0].all())
    assert not bool(op.cache_lookup(query, query, fresh, importance, never, max_age)[0].any())
    assert not bool(op.cache_lookup(query, label, old, importance, always, max_age)[0].any())
    assert not bool(op.cache_lookup(query, label, fresh, importance, always, jnp.zeros((2,), jnp.int32))[0].any())


def test_equal_similarities_and_zero_importance():
    query, label, age, importance, thresholds, max_age = inputs(5, G=4)
    age = jnp.zeros_like(age)
    same = op.cache_lookup(label * 2, label, age, importance, jnp.full((3,), 0.999, jnp.float32), max_age)
    assert bool(same[0].all())
    none = op.cache_lookup(query, label, age, jnp.zeros_like(importance), thresholds, max_age)
    np.testing.assert_array_equal(
        np.asarray(none[0]),
        np.asarray(on_cpu(op.reference)(query, label, age, jnp.ones_like(importance), thresholds, max_age)[0]),
    )


def test_zero_query_misses():
    query, label, age, importance, thresholds, max_age = inputs(9)
    hit, new, _ = op.cache_lookup(jnp.zeros_like(query), label, jnp.zeros_like(age), importance, thresholds, max_age)
    assert not bool(hit.any()) and not bool(new.any())


def test_donated_state_is_updated_in_place():
    args = inputs(11)
    step = jax.jit(lambda q, label, age, *rest: op.cache_lookup(q, label, age, *rest), donate_argnums=(1, 2))
    label, age = jnp.array(args[1]), jnp.array(args[2])
    _, new_label, _ = step(args[0], label, age, *args[3:])
    assert label.is_deleted() and age.is_deleted() and not new_label.is_deleted()


@pytest.mark.parametrize(
    "position, bad, message",
    [
        (0, lambda x: x[0], r"query: got shape \(9, 64\), wanted \[B, H, D\]"),
        (0, lambda x: x.astype(jnp.int32), "query: got dtype int32, wanted float32 or bfloat16 or float16"),
        (0, lambda x: x[:, :8], "query heads: got 8, wanted a positive multiple of KV heads = 3"),
        (1, lambda x: x[:1], r"label: got shape \(1, 9, 64\), wanted \[B, H, D\] = \[2, 9, 64\]"),
        (2, lambda x: x.astype(jnp.float32), "age: got dtype float32, wanted int32"),
        (3, lambda x: x[:3], r"importance: got shape \(3,\)"),
        (5, lambda x: x[:1], r"max_age: got shape \(1,\)"),
    ],
)
def test_bad_arguments_are_named(position, bad, message):
    args = list(inputs(0))
    args[position] = bad(args[position])
    with pytest.raises(ValueError, match=message):
        op.cache_lookup(*args)
