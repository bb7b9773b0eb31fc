"""offload: native copy into the engine's host rows against the plain JAX reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.errors import TransferError
from clo_jax.ops import offload as op
from clo_jax.transfer.engine import Engine
from tests.cases import DTYPES, HEAD_DIMS
from tests.compare import on_cpu

B, KO, S = 3, 2, 96
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # JAX raises one or the other, by the path of the call


def engine(D=16, dtype=jnp.float32, kv_heads=(KO,), **changes):
    return Engine(kv_heads, B, S, 8, D, dtype, **changes)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def token():
    return jnp.zeros((1,), jnp.uint32)


def rows(seed, N, D=16, dtype=jnp.float32, heads=KO):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, heads, N, 2, D)), dtype)


CASES = {  # rows in the buffer, sink, begin, end
    "prefill padded to a bucket": (64, 4, (0, 0, 0), (64, 17, 3)),
    "prefill without sink": (64, 0, (0, 0, 0), (64, 1, 63)),
    "chunk": (32, 0, (32, 64, 0), (64, 96, 32)),
    "tail before the ring turns": (20, 4, (4, 8, 5), (12, 20, 5)),
    "tail across the turn": (20, 4, (15, 31, 47), (31, 40, 63)),
    "whole tail with sinks": (20, 4, (0, 0, 2), (20, 20, 20)),
    "fewer rows than sinks": (3, 4, (0, 1, 3), (3, 3, 3)),
    "nothing": (20, 4, (0, 50, 96), (0, 50, 96)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype):
    N, sink, begin, end = CASES[case]
    with engine(dtype=dtype) as e:
        before = np.random.default_rng(1).normal(size=e.host_rows(0).shape).astype(e.host_rows(0).dtype)
        e.host_rows(0)[...] = before
        new = rows(2, N, dtype=dtype)
        out = op.offload(new, ints(*begin), ints(*end), ints(0), token() + jnp.uint32(9), engine=e.handle, sink=sink)
        assert out.dtype == jnp.uint32 and int(out[0]) == 9
        want = on_cpu(op.reference)(jnp.asarray(before), new, ints(*begin), ints(*end), sink=sink)
        np.testing.assert_array_equal(e.host_rows(0), np.asarray(want))
        count = KO * sum(n - m for m, n in zip(begin, end, strict=True))
        assert e.counters().rows_offloaded == count
        assert e.counters().bytes_offloaded == count * 2 * 16 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_every_head_dim(D, dtype):
    with engine(D=D, dtype=dtype, threads=1) as e:
        new = rows(D, 40, D=D, dtype=dtype)
        op.offload(new, ints(0, 3, 40), ints(40, 40, 40), ints(0), token(), engine=e.handle, sink=0)
        want = on_cpu(op.reference)(jnp.zeros((B, KO, S, 2, D), dtype), new, ints(0, 3, 40), ints(40, 40, 40), sink=0)
        np.testing.assert_array_equal(e.host_rows(0), np.asarray(want))


def test_one_program_serves_every_layer():
    traces = []

    def step(new, layer, token, *, handle):
        traces.append(layer)
        return op.offload(new, ints(0, 0, 0), ints(8, 8, 8), layer, token, engine=handle, sink=0)

    jitted = jax.jit(step, static_argnames="handle", donate_argnums=2)
    with engine(kv_heads=(KO, KO, KO)) as e:
        at = token()
        for layer in range(3):
            at = jitted(rows(layer, 8), ints(layer), at, handle=e.handle)
        jax.block_until_ready(at)
        assert len(traces) == 1
        for layer in range(3):
            np.testing.assert_array_equal(e.host_rows(layer)[:, :, :8], np.asarray(rows(layer, 8)))


@pytest.mark.parametrize(
    "begin, end, message",
    [
        ((0, 0, -1), (8, 8, 8), r"sequence 2: tokens \[-1, 8\) are not a range within the context capacity of 96"),
        ((0, 9, 0), (8, 8, 8), r"sequence 1: tokens \[9, 8\) are not a range"),
        ((90, 0, 0), (97, 0, 0), r"sequence 0: tokens \[90, 97\) are not a range"),
        ((0, 0, 0), (21, 0, 0), r"sequence 0: tokens \[0, 21\) do not fit in a buffer of 20 rows"),
        ((0, 0, 30), (0, 0, 47), r"sequence 2: tokens \[30, 47\) do not fit"),
    ],
)
def test_ranges_that_do_not_fit_write_nothing(begin, end, message):
    with engine() as e:
        if e.backend == "pull":  # the GPU finds out while it runs, and the sequences beside are written
            jax.block_until_ready(
                op.offload(rows(0, 20), ints(*begin), ints(*end), ints(0), token(), engine=e.handle, sink=4)
            )
            with pytest.raises(TransferError, match="layer 0, backend pull: an operand is out of range"):
                e.end()
            return
        with pytest.raises(RUNTIME_ERRORS, match=message):
            args = (ints(*begin), ints(*end), ints(0), token())
            jax.block_until_ready(op.offload(rows(0, 20), *args, engine=e.handle, sink=4))
        assert not e.host_rows(0).any() and e.counters().rows_offloaded == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rows=rows(0, 8)[0]), r"rows: got shape \(2, 8, 2, 16\), wanted \[B, Ko, N, 2, D\]"),
        (dict(rows=rows(0, 8, dtype=jnp.int32)), "rows: got dtype int32, wanted float32 or bfloat16 or float16"),
        (dict(begin=ints(0)), r"begin: got shape \(1,\), wanted \[B\] = \[3\]"),
        (dict(end=jnp.zeros((3,))), "end: got dtype float32, wanted int32"),
        (dict(layer=ints(0, 1)), r"layer: got shape \(2,\)"),
        (dict(token=ints(0)), "token: got dtype int32, wanted uint32"),
        (dict(engine=0), "engine: got 0, wanted the handle of an engine"),
        (dict(sink=-1), "sink: got -1, wanted an integer >= 0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    args = dict(rows=rows(0, 8), begin=ints(0, 0, 0), end=ints(8, 8, 8), layer=ints(0), token=token(), engine=1, sink=4)
    with pytest.raises(ValueError, match=message):
        op.offload(**{**args, **change})


def test_an_engine_of_another_shape_is_refused():
    with engine(dtype=jnp.bfloat16) as e:
        with pytest.raises(RUNTIME_ERRORS, match="head dim 16, float32.*head dim 16, bfloat16"):
            args = (rows(0, 8), ints(0, 0, 0), ints(8, 8, 8), ints(0), token())
            jax.block_until_ready(op.offload(*args, engine=e.handle, sink=0))
