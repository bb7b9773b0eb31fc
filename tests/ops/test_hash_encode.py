"""hash_encode: native kernel against the plain JAX reference, and what codes and factors are good for."""

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.ops import hash_encode as op
from tests.cases import DTYPES, HEAD_DIMS, LENGTHS
from tests.compare import on_cpu


def inputs(seed, B=2, K=3, N=70, D=64, R=128, dtype=jnp.float32):
    r = np.random.default_rng(seed)
    mean = r.normal(size=(B, K, D))
    return (
        jnp.asarray(mean[:, :, None] + r.normal(size=(B, K, N, D)), dtype),
        jnp.asarray(r.normal(size=(K, D, R)) / np.sqrt(D), jnp.float32),
        jnp.asarray(mean, jnp.float32),
    )


def unpack(codes):
    """[.., R/32] uint32 -> [.., R] bool."""
    codes = np.asarray(codes)
    return (codes[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(*codes.shape[:-1], -1)


def assert_matches(args, got):
    x, weights, mean = (np.asarray(a, np.float64) for a in args)
    codes, factors = got
    centred = x - mean[:, :, None]
    p = np.einsum("bknd,kdr->bknr", centred, weights)
    sizes = np.linalg.norm(centred, axis=-1)[..., None] * np.linalg.norm(weights, axis=1)[None, :, None]
    clear = np.abs(p) > 1e-4 * sizes
    wrong = unpack(codes) != (p > 0)
    assert not (wrong & clear).any()
    assert wrong.mean() < 1e-3
    want = (centred**2).sum(-1) / np.abs(p).sum(-1)
    np.testing.assert_allclose(np.asarray(factors, np.float64), want, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", (32, 96, 256))
@pytest.mark.parametrize("D", (*HEAD_DIMS, 33))
def test_matches_reference(D, R, dtype):
    args = inputs(D + R, D=D, R=R, dtype=dtype)
    got, want = op.hash_encode(*args), on_cpu(op.reference)(*args)
    assert [g.dtype for g in got] == [w.dtype for w in want]
    assert_matches(args, got)
    assert_matches(args, want)
    np.testing.assert_allclose(np.asarray(got[1], np.float32), np.asarray(want[1], np.float32), rtol=2e-3)


@pytest.mark.parametrize("N", (*LENGTHS, 1500))
def test_a_vector_does_not_depend_on_its_neighbours(N):
    args = inputs(N, B=1, K=2, N=N)
    codes, factors = op.hash_encode(*args)
    for n in {0, N // 2, N - 1}:
        one_code, one_factor = op.hash_encode(args[0][:, :, n : n + 1], *args[1:])
        np.testing.assert_array_equal(np.asarray(codes[:, :, n]), np.asarray(one_code[:, :, 0]))
        np.testing.assert_array_equal(np.asarray(factors[:, :, n]), np.asarray(one_factor[:, :, 0]))


def test_no_tokens():
    codes, factors = op.hash_encode(*inputs(0, N=0))
    assert codes.shape == (2, 3, 0, 4) and factors.shape == (2, 3, 0)


def test_factor_makes_the_estimate_of_a_product_with_itself_exact():
    x, weights, mean = inputs(1, R=256)
    codes, factors = op.hash_encode(x, weights, mean)
    centred = np.asarray(x) - np.asarray(mean)[:, :, None]
    p = np.einsum("bknd,kdr->bknr", centred, np.asarray(weights))
    estimate = np.asarray(factors, np.float32) * np.where(unpack(codes), p, -p).sum(-1)
    np.testing.assert_allclose(estimate, (centred**2).sum(-1), rtol=2e-3)


def test_factor_edges():
    _, weights, _ = inputs(2, B=1, K=1)
    # At the mean; not numbers; a quotient that no half holds; one that only a subnormal half holds.
    values = jnp.asarray([0.0, jnp.nan, jnp.inf, 1e15, 3e-6], jnp.float32)
    x, mean = jnp.tile(values[None, None, :, None], (1, 1, 1, 64)), jnp.zeros((1, 1, 64), jnp.float32)
    for got in (op.hash_encode(x, weights, mean), on_cpu(op.reference)(x, weights, mean)):
        codes, factors = (np.asarray(a)[0, 0] for a in got)
        assert not codes[0].any()
        np.testing.assert_array_equal(factors[:4], [0, 0, 0, 65504])
        assert 0 < factors[4] < 6e-5


@pytest.mark.parametrize(
    "position, bad, message",
    [
        (0, lambda x: x[0], r"x: got shape \(3, 70, 64\), wanted \[B, K, N, D\]"),
        (0, lambda x: x.astype(jnp.int32), "x: got dtype int32, wanted float32 or bfloat16 or float16"),
        (1, lambda x: x[:2], r"weights: got shape \(2, 64, 128\), wanted \[K, D, R\]"),
        (1, lambda x: x[:, :, :33], "weights' hash bits: got 33, wanted a positive multiple of word size = 32"),
        (1, lambda x: x.astype(jnp.bfloat16), "weights: got dtype bfloat16, wanted float32"),
        (2, lambda x: x[:1], r"mean: got shape \(1, 3, 64\)"),
    ],
)
def test_bad_arguments_are_named(position, bad, message):
    args = list(inputs(0))
    args[position] = bad(args[position])
    with pytest.raises(ValueError, match=message):
        op.hash_encode(*args)
