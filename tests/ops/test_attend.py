"""attend: native kernel against the plain JAX reference, and the promises about order, place and threads."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.config import KV_DTYPES
from clo_jax.ops import attend as op
from clo_jax.ops import hash_encode, prefetch
from tests.cases import DTYPES, GROUPS, HEAD_DIMS, LENGTHS, QUANTIZED
from tests.compare import assert_close
from tests.ops.attend_cases import engine_for, make

ON_CPU = jax.default_backend() == "cpu"
NAMES = ("out", "lse", "resident", "tail", "codes", "factors")


def check(case, got, want=None):
    """Attention within tolerance, appended state exactly."""
    want = case.reference() if want is None else want
    assert_close(got[0], want[0], name="out")
    assert_close(got[1], want[1], dtype=jnp.float32, name="lse")
    for name, g, w in zip(NAMES[2:], got[2:], want[2:], strict=True):
        assert g.dtype == w.dtype
        # A factor is a ratio of sums: its last bit may differ.
        rtol = 2**-10 if name == "factors" else 0
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=rtol, err_msg=name)


def run(case, kv_offload=True, delay_us=0):
    with engine_for(case, kv_offload, delay_us) as engine:
        return jax.block_until_ready(case.attend(engine))


def assert_same_bits(got, want):
    for name, g, w in zip(NAMES, got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32), err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_groups_and_head_dims(D, dtype):
    for G in GROUPS:
        case = make(G * 1000 + D, G=G, D=D, dtype=dtype, position=(60, 33), flushed=(48, 30), counts=[[20, 32], [1, 0]])
        out, lse, *_ = run(case)
        want_out, want_lse = case.definition()
        assert_close(out, want_out, name=f"out, G = {G}")
        assert_close(lse, want_lse, dtype=jnp.float32, name=f"lse, G = {G}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_quantized_rows(kv_dtype, D, dtype):
    for G in (1, 3, 4, 8):
        case = make(
            G * 1000 + D, G=G, D=D, dtype=dtype, position=(60, 33), flushed=(48, 30), counts=[[20, 32], [1, 0]],
            kv_dtype=kv_dtype,
        )  # fmt: skip
        out, lse, *_ = run(case)
        want_out, want_lse = case.definition()
        assert_close(out, want_out, name=f"out, G = {G}")
        # A GPU multiplies with elements that are rounded to the activations' dtype.
        assert_close(lse, want_lse, dtype=jnp.float32 if ON_CPU else dtype, name=f"lse, G = {G}")


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("kv_offload", (True, False))
def test_quantized_lengths_around_every_border(kv_offload, kv_dtype):
    counts = (0, *LENGTHS, 31, 32, 33, 1023, 1024, 1025)
    case = make(
        1, B=1, Ko=len(counts), Kr=0, G=2, D=64, S=1200, C=1100, position=1190, flushed=1180, counts=[counts],
        kv_dtype=kv_dtype,
    )  # fmt: skip
    check(case, run(case, kv_offload))


def test_reference_returns_the_dtypes_of_the_op():
    case = make(7, dtype=jnp.bfloat16)
    want = jax.eval_shape(
        lambda *args: op.reference(*args, sink=case.sink, scale=case.scale), *case.args.values(), *case.selected_rows
    )
    assert [x.dtype for x in want] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.uint32, jnp.float16]


def test_reference_attends_to_the_tokens_of_the_definition():
    position, flushed = (0, 3, 4, 5, 19, 20, 60, 79), (0, 0, 4, 4, 4, 5, 48, 64)
    case = make(3, B=8, G=2, position=position, flushed=flushed, counts=10)
    for got, want in zip(case.reference(), case.definition(), strict=False):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", (64, 96, 256))
def test_resident_lengths_around_every_border(D, dtype):
    lengths = (*LENGTHS, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049)
    position = np.asarray(lengths) - 1
    case = make(D, B=len(lengths), Ko=0, Kr=1, G=3, D=D, S=2050, dtype=dtype, position=position, flushed=0)
    check(case, run(case))


@pytest.mark.parametrize("kv_offload", (True, False))
def test_selected_lengths_around_every_border(kv_offload):
    counts = (0, *LENGTHS, 31, 32, 33, 1023, 1024, 1025, 1500)
    case = make(1, B=1, Ko=len(counts), Kr=0, G=2, D=64, S=1600, C=1500, position=1590, flushed=1580, counts=[counts])
    check(case, run(case, kv_offload))


@pytest.mark.parametrize("sink", (0, 1, 4, 7))
def test_tail_before_at_and_after_sink_and_wraps(sink):
    """Every position from the first token over several turns of the ring, with every legal number of flushed tokens
    at some of them."""
    T, S, r = sink + 9, 50, np.random.default_rng(sink)
    position = np.arange(S)
    oldest = np.maximum(0, position + 1 - 9)  # the ring keeps nine tokens
    flushed = r.integers(oldest, position + 1, endpoint=True)
    flushed[::3] = oldest[::3]
    flushed = np.where(position < sink, 0, flushed)
    case = make(sink, B=S, Ko=1, Kr=1, G=1, S=S, T=T, sink=sink, position=position, flushed=flushed, counts=8)
    check(case, run(case))


@pytest.mark.parametrize("Ko, Kr", [(3, 0), (0, 3), (1, 2), (2, 1)])
@pytest.mark.parametrize("R", (0, 64))
def test_head_mixes_and_codes(Ko, Kr, R):
    case = make(Ko, Ko=Ko, Kr=Kr, R=R, position=(60, 41), flushed=(48, 40))
    got = run(case)
    check(case, got)
    if R and Ko:
        changed = np.asarray(got[5]) != 0
        assert changed.sum() == 2 * Ko and changed[0, :, 60].all() and changed[1, :, 41].all()


def test_no_factors_without_codes():
    case = make(2)
    case.args["factors"] = jnp.zeros((2, 2, 0), jnp.float16)
    got = run(case)
    assert got[5].shape == (2, 2, 0)
    check(case, got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_offloaded_and_gathered_are_equal_bit_for_bit(kv_dtype, dtype):
    case = make(
        3, Ko=3, Kr=1, S=2100, C=1300, dtype=dtype, position=(2090, 700), flushed=(2080, 690), counts=1300,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    gathered = run(case, kv_offload=False)
    assert_same_bits(run(case), gathered)
    assert_same_bits(run(case, delay_us=3000), gathered)


@pytest.mark.parametrize("kv_offload", (True, False))
def test_attends_to_what_a_prefetch_has_selected(kv_offload):
    """Both ops in one program, ordered by the token alone; then the slot table says what must have been attended."""
    case = make(14, Ko=2, Kr=1, G=3, R=64, S=300, T=30, C=40, position=(290, 250), flushed=(280, 240), counts=0)
    a, B, Ko, heads, k = case.args, 2, 2, 6, 25
    codes, factors = hash_encode.hash_encode(jnp.asarray(case.history[:, :Ko, :, 0]), a["weights"], a["mean"])
    case.args.update(codes=codes, factors=factors)
    ints = {n: jnp.full((B,), n, jnp.int32) for n in (case.sink, k, case.num_slots)}

    def step(engine, query, token):
        layer = jnp.zeros((1,), jnp.int32)
        *_, token, _ = prefetch.prefetch(
            query[:, :heads], jnp.zeros_like(query[:, :heads]), jnp.full((B, Ko), -1, jnp.int32),
            jnp.ones((heads,), jnp.float32), jnp.full((Ko,), 2.0, jnp.float32), ints[k], a["weights"], a["mean"],
            jnp.zeros((B, heads), jnp.float32), codes, factors, ints[case.sink], a["flushed"], ints[k],
            ints[case.num_slots], layer, token, engine=engine.handle, retriever="sign", refresh="delta", k_max=k,
            scale=case.scale,
        )  # fmt: skip
        return case.attend(engine, query=query, token=token)

    with engine_for(case, kv_offload, delay_us=2000) as engine:
        for turn in range(3):
            query = jnp.roll(a["query"], turn, axis=1)
            got = jax.jit(step, static_argnums=0)(engine, query, jnp.zeros((1,), jnp.uint32))
            jax.block_until_ready(got)
            counts = engine.slot_counts(0)
            assert counts.min() >= k and counts.max() <= case.num_slots
            case.slots = [[engine.slot_tokens(0)[b, h, : counts[b, h]] for h in range(Ko)] for b in range(B)]
            case.args["query"] = query
            check(case, got)
        moved = engine.counters().rows_moved
        assert moved == (engine.counters().rows_posted if kv_offload else 0)


def test_a_batch_equals_its_sequences():
    position, flushed = (1500, 3, 700), (1490, 0, 695)
    case = make(5, B=3, R=32, S=1600, C=1200, position=position, flushed=flushed, counts=1200)
    together = run(case)
    for b in range(3):
        alone = make(5, B=3, R=32, S=1600, C=1200, position=position, flushed=flushed, counts=1200)
        alone.args = {k: v if k == "weights" else v[b : b + 1] for k, v in alone.args.items()}
        alone.history, alone.slots = alone.history[b : b + 1], alone.slots[b : b + 1]
        got, want = run(alone), [x[b : b + 1] for x in together]
        if jax.default_backend() == "cpu":
            assert_same_bits(got, want)
        else:  # the blocks of a GPU share out the rows of all sequences: the cuts move, and with them the rounding
            check(alone, got, want)


@pytest.mark.parametrize("sharpness", (0.0, 30.0, 3000.0))
def test_flat_and_sharp_scores(sharpness):
    case = make(9, S=1300, position=1290, flushed=1280, sharpness=sharpness)
    got, want = run(case), case.reference()
    assert bool(jnp.isfinite(got[0]).all())
    # A weight's relative error is the score's absolute one, which grows with the score.
    np.testing.assert_allclose(got[0], want[0], atol=1e-5 * max(1.0, sharpness))
    np.testing.assert_allclose(got[1], want[1], rtol=2e-6, atol=1e-5)


def test_not_a_number_stays_in_its_head():
    case = make(4, B=1, Ko=1, Kr=1, G=2)
    case.args["query"] = case.args["query"].at[0, 0, 0].set(jnp.nan)
    out, lse, *_ = run(case)
    assert bool(jnp.isnan(out[0, 0]).all()) and bool(jnp.isnan(lse[0, 0]))
    assert bool(jnp.isfinite(out[0, 1:]).all()) and bool(jnp.isfinite(lse[0, 1:]).all())


SCRIPT = """
import json, sys
import jax.numpy as jnp, numpy as np
from tests.ops.attend_cases import engine_for, make
digest = {}
for dtype in ("float32", "bfloat16", "float16"):
    case = make(6, Ko=2, Kr=2, G=3, R=32, S=5000, C=1500, dtype=jnp.dtype(dtype), position=(4990, 2500),
                flushed=(4980, 2490), counts=1500)
    with engine_for(case) as engine:
        out, lse, *_ = case.attend(engine)
    digest[dtype] = [np.asarray(out, np.float32).tobytes().hex(), np.asarray(lse).tobytes().hex()]
print(json.dumps(digest))
"""


def in_subprocess(**variables):
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_results_do_not_depend_on_the_number_of_threads():
    assert in_subprocess(CLO_JAX_THREADS="1") == in_subprocess(CLO_JAX_THREADS="3")


@pytest.mark.parametrize("isa", ("generic", "avx2", "avx512"))
def test_every_instruction_set(isa):
    if isa not in supported_isas():
        pytest.skip(f"this machine has no {isa}")
    digest = in_subprocess(CLO_JAX_ISA=isa)
    for name in ("float32", "bfloat16", "float16"):
        dtype = jnp.dtype(name)
        case = make(
            6,
            Ko=2,
            Kr=2,
            G=3,
            R=32,
            S=5000,
            C=1500,
            dtype=dtype,
            position=(4990, 2500),
            flushed=(4980, 2490),
            counts=1500,
        )
        want = case.reference()
        for text, w in zip(digest[name], want[:2], strict=True):
            got = np.frombuffer(bytes.fromhex(text), np.float32).reshape(w.shape)
            assert_close(jnp.asarray(got).astype(w.dtype), w, name=isa)


def supported_isas():
    with open("/proc/cpuinfo") as f:
        flags = next((line.split() for line in f if line.startswith("flags")), [])
    has = {"generic"}
    if {"avx2", "fma", "bmi2"} <= set(flags):
        has.add("avx2")
    if {"avx512f", "avx512_vpopcntdq", "avx512_vnni", "avx512vbmi"} <= set(flags):
        has.add("avx512")
    return has
