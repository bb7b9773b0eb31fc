"""Quantized rows: what the reference promises, and that the engine's rows are its bytes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from clo_jax.ops import offload as offload_op
from clo_jax.ops import quantized_rows as op
from clo_jax.transfer.engine import Engine
from tests.cases import DTYPES, HEAD_DIMS, QUANTIZED
from tests.compare import on_cpu

quantize = on_cpu(jax.jit(op.quantize, static_argnames="kv_dtype"))
dequantize = on_cpu(jax.jit(op.dequantize, static_argnames="kv_dtype"))


def rows(*shape, seed=0, dtype=jnp.float32):
    """Magnitudes of every size: each row has its own, and each of its channels."""
    r = np.random.default_rng(seed)
    sizes = np.exp(3 * r.normal(size=(*shape[:-2], 1, 1)) + r.normal(size=shape[-1]))
    return jnp.asarray(np.clip(r.normal(size=shape) * sizes, -60000, 60000), dtype)


def scales(stored):
    """float32 [..., 2, 4]: of the groups of key and value."""
    return np.asarray(stored[..., -16:]).view(ml_dtypes.bfloat16).astype(np.float32).reshape(*stored.shape[:-1], 2, 4)


@pytest.mark.parametrize("D", [8, 64, 80])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_an_element_is_off_by_half_a_step_at_most(kv_dtype, D):
    x = rows(50, 2, D)
    stored = quantize(x, kv_dtype=kv_dtype)
    assert stored.shape == (50, 2 * D + 16) and stored.dtype == jnp.uint8
    error = np.abs(np.asarray(dequantize(stored, kv_dtype=kv_dtype)) - np.asarray(x))
    step = np.repeat(scales(stored), D // 4, axis=-1)
    if kv_dtype == "fp8":  # three bits of mantissa; below 2^-6 the spacing is 2^-9
        exponent = np.floor(np.log2(np.maximum(np.abs(np.asarray(x)) / step, 2.0**-6)))
        step = step * 2.0 ** (exponent - 3)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("kv_dtype, largest", [("int8", 127), ("fp8", 448)])
def test_scales_are_of_the_largest_magnitude_and_rounded_up(kv_dtype, largest):
    x = rows(200, 2, 64)
    amax = np.abs(np.asarray(x, np.float64)).reshape(200, 2, 4, 16).max(axis=-1)
    ratio = scales(quantize(x, kv_dtype=kv_dtype)) / (amax / largest)
    assert (ratio >= 1 - 1e-6).all() and (ratio < 1 + 2.0**-7 + 1e-6).all()


def test_fp8_bytes_are_those_of_ml_dtypes():
    """A largest magnitude of 448 makes the scale 1: then the bytes are the elements', rounded to nearest even."""
    x = np.random.default_rng(0).normal(size=(500, 2, 16)).astype(np.float32) * 20
    x[..., ::4] = 448
    stored = np.asarray(quantize(jnp.asarray(x), kv_dtype="fp8"))
    assert (scales(stored) == 1).all()
    np.testing.assert_array_equal(stored[:, :32], x.reshape(500, 32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_not_a_number_shows_in_its_group_alone(kv_dtype):
    x = np.array(rows(2, 2, 16))
    x[0, 0, 5], x[1, 1, 0], x[1, 1, 15] = np.nan, np.inf, -np.inf
    back = np.asarray(dequantize(quantize(jnp.asarray(x), kv_dtype=kv_dtype), kv_dtype=kv_dtype))
    wanted = np.zeros((2, 2, 4, 4), bool)
    wanted[0, 0, 1] = wanted[1, 1, 0] = wanted[1, 1, 3] = True
    np.testing.assert_array_equal(np.isnan(back), wanted.reshape(2, 2, 16))


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_zeros_and_what_is_smaller_than_any_scale(kv_dtype):
    x = np.zeros((3, 2, 8), np.float32)
    x[1], x[2] = 1e-31, -1e-38
    assert not np.asarray(quantize(jnp.asarray(x), kv_dtype=kv_dtype)).any()
    x[1] = 1e-29
    back = dequantize(quantize(jnp.asarray(x), kv_dtype=kv_dtype), kv_dtype=kv_dtype)
    np.testing.assert_allclose(np.asarray(back)[1], 1e-29, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [D for D in HEAD_DIMS if D % 8 == 0])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_the_engine_has_the_bytes_of_the_reference(kv_dtype, D, dtype):
    """A tail whose ring has turned, sinks in front; NaN and zeros among the rows."""
    B, Ko, N, S, sink = 2, 3, 20, 96, 4
    x = np.array(rows(B, Ko, N, 2, D, dtype=dtype))
    x[0, 0, 5, 0, 1], x[0, 1, 7, 1, 2], x[1, 2, 9] = np.nan, np.inf, 0
    x = jnp.asarray(x)
    begin, end = jnp.asarray([2, 47], jnp.int32), jnp.asarray([20, 63], jnp.int32)
    with Engine([Ko], B, S, 8, D, dtype, kv_dtype=kv_dtype, threads=1) as engine:
        before = engine.host_rows(0).copy()
        assert before.shape == (B, Ko, S, 2 * D + 16) and before.dtype == np.uint8
        layer, token = jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.uint32)
        jax.block_until_ready(
            offload_op.offload(x, begin, end, layer, token, engine=engine.handle, sink=sink)
        )  # fmt: skip
        assert engine.counters().bytes_offloaded == Ko * (18 + 16) * (2 * D + 16)
        at = np.array([p if p < sink else sink + (p - sink) % (N - sink) for p in range(S)])
        wanted = np.asarray(quantize(x, kv_dtype=kv_dtype))[:, :, at]
        for b, (first, last) in enumerate(((2, 20), (47, 63))):
            before[b, :, first:last] = wanted[b, :, first:last]
        np.testing.assert_array_equal(engine.host_rows(0), before)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: op.quantize(rows(1, 2, 8), "auto"), "kv_dtype: got 'auto', wanted int8 or fp8"),
        (lambda: op.dequantize(jnp.zeros((1, 32), jnp.uint8), "bf16"), "kv_dtype: got 'bf16', wanted int8 or fp8"),
        (lambda: op.quantize(jnp.zeros((1, 2, 8), jnp.int8), "int8"), "rows: got dtype int8, wanted float32"),
        (lambda: op.quantize(rows(1, 2, 6), "int8"), r"rows: got shape \(1, 2, 6\), wanted \[..., 2, D\] with D a mul"),
        (lambda: op.quantize(rows(2, 3, 8), "fp8"), r"rows: got shape \(2, 3, 8\)"),
        (lambda: op.dequantize(jnp.zeros((1, 32)), "fp8"), "stored: got dtype float32, wanted uint8"),
        (lambda: op.dequantize(jnp.zeros((1, 16), jnp.uint8), "fp8"), r"stored: got shape \(1, 16\), wanted"),
        (lambda: Engine([1], 1, 8, 8, 16, np.float32, kv_dtype="int4"), "kv_dtype: got 'int4', wanted auto, int8"),
        (lambda: Engine([1], 1, 8, 8, 20, np.float32, kv_dtype="int8"), "head_dim: got 20, wanted a multiple of 8"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
