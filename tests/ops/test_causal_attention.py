"""causal_attention: the chunked form against the dense reference, and what its trip counts promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.ops import causal_attention as op
from tests.cases import DTYPES, GROUPS, HEAD_DIMS
from tests.compare import on_cpu

attend = jax.jit(op.prefill_attention, static_argnames="scale")
reference = on_cpu(jax.jit(op.reference, static_argnames="scale"))


def inputs(seed, B=1, N=64, G=3, K=2, D=64, dtype=jnp.float32):
    r = np.random.default_rng(seed)
    return [jnp.asarray(r.normal(size=(B, N, heads, D)), dtype) for heads in (G * K, K, K)]


def close(got, want, dtype, tolerance=None):
    tolerance = tolerance or (2e-6 if dtype == jnp.float32 else 2e-2)
    assert got.dtype == want.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_head_dims(D, dtype):
    q, k, v = inputs(D, B=2, N=70, D=D, dtype=dtype)
    lengths = jnp.full((2,), 70, jnp.int32)
    close(attend(q, k, v, lengths), reference(q, k, v, lengths), dtype)


@pytest.mark.parametrize("G", GROUPS)
def test_groups(G):
    q, k, v = inputs(G, N=300, G=G, K=3, D=16)
    lengths = jnp.full((1,), 300, jnp.int32)
    close(attend(q, k, v, lengths), reference(q, k, v, lengths), jnp.float32)


@pytest.mark.parametrize("N", (1, 2, 65, 255, 256, 257, 511, 513))
def test_lengths_around_every_boundary(N):
    q, k, v = inputs(N, N=N, G=2, K=1, D=16)
    lengths = jnp.full((1,), N, jnp.int32)
    close(attend(q, k, v, lengths), reference(q, k, v, lengths), jnp.float32)


def test_mixed_lengths_and_padding():
    q, k, v = inputs(5, B=3, N=600, G=2, K=2, D=16)
    lengths = jnp.asarray([1, 300, 257], jnp.int32)
    q, k, v = (x.at[:, 300:].set(1e4) for x in (q, k, v))  # whatever lies in the padding
    got, want = attend(q, k, v, lengths), reference(q, k, v, lengths)
    assert bool(jnp.isfinite(got).all())
    for row, length in enumerate((1, 300, 257)):
        close(got[row, :length], want[row, :length], jnp.float32)


def test_no_work_past_the_longest_prompt():
    q, k, v = inputs(6, N=1024, G=1, K=1, D=16)
    out = attend(q, k, v, jnp.asarray([200], jnp.int32))
    assert not bool(out[:, op.QUERIES :].any()) and bool(out[:, :200].any(axis=(2, 3)).all())


def test_one_program_serves_all_lengths():
    q, k, v = inputs(7, N=600, G=1, K=1, D=16)
    traced = []

    @jax.jit
    def counted(lengths):
        traced.append(1)
        return op.prefill_attention(q, k, v, lengths)

    for length in (1, 256, 600):
        got = counted(jnp.asarray([length], jnp.int32))[:, :length]
        close(got, reference(q, k, v, jnp.asarray([length], jnp.int32))[:, :length], jnp.float32)
    assert len(traced) == 1


def test_scale():
    q, k, v = inputs(8, N=50)  # D = 64: the default is 1/8
    lengths = jnp.full((1,), 50, jnp.int32)
    smaller = q / 4  # exactly, so that four times the default gives the scores of q
    got = attend(smaller, k, v, lengths, scale=0.5)
    close(got, reference(smaller, k, v, lengths, scale=0.5), jnp.float32)
    close(got, reference(q, k, v, lengths), jnp.float32)
    assert float(jnp.abs(got - reference(smaller, k, v, lengths)).max()) > 0.01


def test_large_scores_stay_finite():
    q, k, v = inputs(9, N=300, G=1, K=1, D=16)
    lengths = jnp.full((1,), 300, jnp.int32)
    got = attend(q * 1e4, k, v, lengths)  # rounding of scores around 1e5 is what separates the two
    close(got, reference(q * 1e4, k, v, lengths), jnp.float32, tolerance=1e-3)


def test_memory_is_bounded_by_the_chunk(fresh_programs):
    def bytes_of(N):
        shapes = [jax.ShapeDtypeStruct((1, N, heads, 64), jnp.float32) for heads in (8, 2, 2)]
        compiled = jax.jit(op.prefill_attention).lower(*shapes, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # What grows is the operands' own transposes, N x (2 H + 2 K) x D; the scores alone would be N x N x H.
    assert bytes_of(8192) - bytes_of(4096) <= 4096 * (3 * 8 + 2 * 2) * 64 * 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU has cuDNN")
def test_implementation_on_a_cpu():
    assert op.implementation(jnp.bfloat16, 128) == "chunked"


@pytest.mark.gpu
@pytest.mark.parametrize("D", (64, 96, 128))
def test_cudnn_on_a_gpu(D):
    q, k, v = inputs(D, B=2, N=1000, G=3, K=2, D=D, dtype=jnp.bfloat16)
    lengths = jnp.asarray([1000, 333], jnp.int32)
    assert op.implementation(q.dtype, D) == "cudnn"
    got, want = attend(q, k, v, lengths), reference(q, k, v, lengths)
    close(got[0], want[0], jnp.bfloat16)
    close(got[1, :333], want[1, :333], jnp.bfloat16)


@pytest.mark.parametrize(
    "position, bad, message",
    [
        (0, lambda x: x[0], r"query: got shape \(64, 6, 64\), wanted \[B, N, H, D\]"),
        (0, lambda x: x.astype(jnp.int32), "query: got dtype int32, wanted float32 or bfloat16 or float16"),
        (0, lambda x: x[:, :, :5], "query heads: got 5, wanted a positive multiple of KV heads = 2"),
        (0, lambda x: x[:, :32], r"key: got shape \(1, 64, 2, 64\), wanted \[B, N, K, D\] = \[1, 32, any, 64\]"),
        (0, lambda x: x[:, :0], r"key: got shape"),
        (1, lambda x: x[:, :32], r"key: got shape \(1, 32, 2, 64\), wanted \[B, N, K, D\] = \[1, 64, any, 64\]"),
        (2, lambda x: x[:, :32], r"value: got shape \(1, 32, 2, 64\), wanted \[B, N, K, D\] = \[1, 64, 2, 64\]"),
        (1, lambda x: x.astype(jnp.bfloat16), "key: got dtype bfloat16, wanted float32"),
        (2, lambda x: x.astype(jnp.bfloat16), "value: got dtype bfloat16, wanted float32"),
        (3, lambda x: x[0], r"lengths: got shape \(\), wanted \[B\] = \[1\]"),
        (3, lambda x: x.astype(jnp.float32), "lengths: got dtype float32, wanted int32"),
    ],
)
def test_bad_arguments_are_named(position, bad, message):
    args = [*inputs(0), jnp.full((1,), 64, jnp.int32)]
    args[position] = bad(args[position])
    with pytest.raises(ValueError, match=message):
        op.prefill_attention(*args)
