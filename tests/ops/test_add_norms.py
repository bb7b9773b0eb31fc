"""add_norms: the model's own norms of the sum, wherever JAX runs; what a program for each platform contains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.models.layers import RMSNorm
from clo_jax.ops import add_norms as op
from tests.cases import DTYPES
from tests.compare import assert_close, on_cpu

EPS = 1e-5


def inputs(hidden, shape=(3,), norms=2, dtype=jnp.bfloat16, scale_dtype=None):
    r = np.random.default_rng(hidden)
    x, y = (jnp.asarray(r.normal(size=(*shape, hidden)), dtype) for _ in range(2))
    scales = [jnp.asarray(1 + 0.3 * r.normal(size=hidden), scale_dtype or dtype) for _ in range(norms)]
    return x, y, scales


def by_the_model(x, y, scales):
    total = x + y
    norms = [RMSNorm(x.shape[-1], EPS, scale.dtype) for scale in scales]
    for norm, scale in zip(norms, scales, strict=True):
        norm.scale[...] = scale
    return total, *(norm(total) for norm in norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [1, 2])
@pytest.mark.parametrize("hidden", [1, 7, 64, 96, 127, 576, 1000, 4096, 4097, 8200, 16384])
def test_is_the_sum_and_the_models_norm_of_it(hidden, norms, dtype):
    args = inputs(hidden, norms=norms, dtype=dtype)
    want, got = on_cpu(by_the_model)(*args), op.add_norms(*args, EPS)
    assert len(got) == 1 + norms
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want[0], np.float32))
    for w, g in zip(want, got, strict=True):
        assert_close(g, w)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (4, 1), (0,)])
def test_any_rows(shape):
    args = inputs(256, shape)
    for w, g in zip(on_cpu(by_the_model)(*args), jax.jit(op.add_norms, static_argnums=3)(*args, EPS), strict=True):
        assert_close(g, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_scales_of_float32(dtype):
    args = inputs(520, dtype=dtype, scale_dtype=jnp.float32)
    for w, g in zip(on_cpu(by_the_model)(*args), op.add_norms(*args, EPS), strict=True):
        assert_close(g, w)


def test_the_norm_is_of_the_rounded_sum():
    x, y = jnp.full((1, 8), 256, jnp.bfloat16), jnp.full((1, 8), 1, jnp.bfloat16)
    total, normed = op.add_norms(x, y, [jnp.full((8,), 256, jnp.float32)], 0.0)
    assert total.tolist() == [[256.0] * 8] and normed.tolist() == [[256.0] * 8]  # 257 is no bfloat16
    x = x.at[0, 0].set(0)
    _, normed = op.add_norms(x, y, [jnp.ones((8,), jnp.float32)], 0.0)
    exact = np.array([1.0] + [256.0] * 7)
    assert_close(normed, jnp.asarray([exact / np.sqrt(np.mean(exact**2))], jnp.bfloat16))


@pytest.mark.gpu  # XLA's own sum depends on how many rows there are
def test_rows_do_not_depend_on_each_other():
    x, y, scales = inputs(1000, (5,), dtype=jnp.float32)
    together = op.add_norms(x, y, scales, EPS)
    for row in range(5):
        for part, alone in zip(together, op.add_norms(x[row : row + 1], y[row : row + 1], scales, EPS), strict=True):
            np.testing.assert_array_equal(part[row], alone[0])


def test_the_sum_takes_the_place_of_a_donated_stream():
    x, y, scales = inputs(512)
    step = jax.jit(lambda x, y, scales: op.add_norms(x, y, scales, EPS), donate_argnums=0)
    total, *_ = step(x, y, scales)
    assert x.is_deleted() and not total.is_deleted()


def lowered(platform):
    args = inputs(4096, (1, 1))
    step = jax.jit(lambda x, y, scales: op.add_norms(x, y, scales, EPS))
    return step.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_a_program_for_the_cpu_calls_nothing_and_one_for_cuda_one_kernel():
    assert "clo_add_norms" not in lowered("cpu") and "clo_add_norms" not in lowered("rocm")
    text = lowered("cuda")
    assert text.count("@clo_add_norms") == 1 and "rsqrt" not in text
    call = next(line for line in text.splitlines() if "@clo_add_norms" in line)
    assert "output_operand_alias" in call and "operand_index = 0" in call


def test_the_compiler_sees_no_choice_of_platforms(fresh_programs):
    text = jax.jit(lambda *args: op.add_norms(*args, EPS)).lower(*inputs(4096, (1, 1))).compile().as_text()
    assert "conditional" not in text
    assert text.count('custom_call_target="clo_add_norms"') == int(jax.default_backend() == "gpu")


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda x, y, s: (x.astype(jnp.int32), y, s), "x: got dtype int32, wanted float32 or bfloat16 or float16"),
        (lambda x, y, s: (x[0, 0], y, s), r"x: got shape \(\), wanted \[..., hidden\], hidden from 1 to 16384"),
        (lambda x, y, s: (jnp.zeros((1, 16385), x.dtype), y, s), r"x: got shape \(1, 16385\), wanted"),
        (lambda x, y, s: (x, y[:2], s), r"y: got shape \(2, 64\), wanted \[..., hidden\] = \[3, 64\]"),
        (lambda x, y, s: (x, y.astype(jnp.float16), s), "y: got dtype float16, wanted bfloat16"),
        (lambda x, y, s: (x, y, []), "scales: got 0 arrays, wanted from 1 to 2"),
        (lambda x, y, s: (x, y, [*s, s[0]]), "scales: got 3 arrays, wanted from 1 to 2"),
        (lambda x, y, s: (x, y, [s[0], s[1][:8]]), r"scales\[1\]: got shape \(8,\), wanted \[hidden\] = \[64\]"),
        (lambda x, y, s: (x, y, [s[0].astype(jnp.float16)]), r"scales\[0\]: got dtype float16, wanted bfloat16 or"),
        (lambda x, y, s: (x, y, [s[0], s[1].astype(jnp.float32)]), r"scales\[1\]: got dtype float32, wanted bfloat16"),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        op.add_norms(*bad(*inputs(64)), EPS)
