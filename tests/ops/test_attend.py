"""attend: native kernel against the plain JAX reference, and the promises about order, place and threads."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.ops import attend as op
from clo_jax.ops import hash_encode, prefetch
from tests.cases import DTYPES, GROUPS, HEAD_DIMS, LENGTHS
from tests.compare import assert_close
from tests.ops.attend_cases import engine_for, make

# JAX turns INVALID_ARGUMENT from a custom call into ValueError, anything else into JaxRuntimeError.
RUNTIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)
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
def test_offloaded_and_gathered_are_equal_bit_for_bit(dtype):
    case = make(3, Ko=3, Kr=1, S=2100, C=1300, dtype=dtype, position=(2090, 700), flushed=(2080, 690), counts=1300)
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
        *_, token = prefetch.prefetch(
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
        assert_same_bits(run(alone), [x[b : b + 1] for x in together])


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


STATE = ("resident", "tail", "codes", "factors")


def test_donated_state_is_updated_in_place():
    case = make(11, R=32)
    state = {name: jnp.array(case.args[name]) for name in STATE}
    where = {name: x.unsafe_buffer_pointer() for name, x in state.items()}
    with engine_for(case) as engine:
        step = jax.jit(
            lambda *donated: case.attend(engine, **dict(zip(STATE, donated, strict=True))), donate_argnums=(0, 1, 2, 3)
        )
        got = step(*state.values())
        for name, x in zip(STATE, got[2:], strict=True):
            assert state[name].is_deleted() and x.unsafe_buffer_pointer() == where[name], name
    check(case, got)


def test_a_loop_holds_no_copy_of_the_state():
    case = make(12, B=1, Ko=2, Kr=2, R=64, S=4096, T=80, C=64, position=100, flushed=90)
    a = case.args
    with engine_for(case) as engine:

        def step(carry):
            position, out, *state = carry
            changes = dict(zip(STATE, state, strict=True), position=position, query=out)
            out, _, *state = case.attend(engine, **changes)
            return position + 1, out, *state

        def loop(*state):
            start = (a["position"], a["query"], *state)
            return jax.lax.while_loop(lambda carry: (carry[0] < 105).all(), step, start)

        state = [jnp.array(a[name]) for name in STATE]
        compiled = jax.jit(loop, donate_argnums=(0, 1, 2, 3)).lower(*state).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < min(a["codes"].nbytes, a["tail"].nbytes) // 2
        assert memory.alias_size_in_bytes >= sum(a[name].nbytes for name in STATE)
        position, _, resident, *_ = compiled(*state)
    assert int(position[0]) == 105
    np.testing.assert_array_equal(resident[:, :, 104, 0], a["key"][:, 2:])


SCRIPT = """
import json, sys
import jax.numpy as jnp, numpy as np
from tests.ops.attend_cases import engine_for, make
digest = {}
for dtype in ("float32", "bfloat16"):
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
    for name in ("float32", "bfloat16"):
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


def test_a_failed_transfer_is_an_error_with_its_text():
    case = make(8)
    with engine_for(case) as engine:
        engine.abort("the link is gone")
        with pytest.raises(RUNTIME_ERRORS, match="the link is gone"):
            jax.block_until_ready(case.attend(engine))
        engine.reset()
        jax.block_until_ready(case.attend(engine))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(position=jnp.asarray([60, 80], jnp.int32)), "position: got 80 of sequence 1, wanted 0 to 79"),
        (dict(position=jnp.asarray([-1, 60], jnp.int32)), "position: got -1 of sequence 0"),
        (
            dict(flushed=jnp.asarray([62, 48], jnp.int32)),
            r"flushed: got 62 of sequence 0, wanted 0 to position \+ 1 = 61",
        ),
        (dict(flushed=jnp.asarray([48, 44], jnp.int32)), "flushed: got 44 of sequence 1 at position 60"),
    ],
)
def test_positions_out_of_range_are_named_at_run_time(changes, message):
    case = make(8)
    with engine_for(case) as engine, pytest.raises(RUNTIME_ERRORS, match=message):
        jax.block_until_ready(case.attend(engine, **changes))


def test_a_missing_or_different_engine_is_named_at_run_time():
    case, other = make(8), make(8, D=32)
    with engine_for(other) as engine:
        with pytest.raises(RUNTIME_ERRORS, match="layer 0 of the engine .* head dim 32"):
            jax.block_until_ready(case.attend(engine))
        gone = engine
        handle = engine.handle
    del gone
    call = dict(engine=handle, sink=4, scale=0.1)
    with pytest.raises(RUNTIME_ERRORS, match=f"engine {handle} is closed"):
        jax.block_until_ready(
            op.attend(*case.args.values(), jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.uint32), **call)
        )


@pytest.mark.parametrize(
    "name, bad, message",
    [
        ("query", lambda x: x[0], r"query: got shape \(9, 64\), wanted \[B, H, D\]"),
        ("query", lambda x: x.astype(jnp.float16), "query: got dtype float16, wanted float32 or bfloat16"),
        ("query", lambda x: x[:, :8], "query heads: got 8, wanted a positive multiple of KV heads = 3"),
        ("key", lambda x: x[:, :2], r"key: got shape \(2, 2, 64\), wanted \[B, K, D\] = \[2, 3, 64\]"),
        ("value", lambda x: x.astype(jnp.bfloat16), "value: got dtype bfloat16, wanted float32"),
        ("weights", lambda x: x[:1], r"weights: got shape \(1, 64, 32\)"),
        ("mean", lambda x: x[:, :1], r"mean: got shape \(2, 1, 64\)"),
        ("position", lambda x: x.astype(jnp.uint32), "position: got dtype uint32, wanted int32"),
        ("flushed", lambda x: x[:1], r"flushed: got shape \(1,\), wanted \[B\] = \[2\]"),
        ("resident", lambda x: x[:, :, :79], r"resident: got shape \(2, 1, 79, 2, 64\)"),
        ("tail", lambda x: x[..., 0, :], r"tail: got shape \(2, 2, 20, 64\), wanted \[B, Ko, T, 2, D\]"),
        ("codes", lambda x: x[:, :1], r"codes: got shape \(2, 1, 80, 1\)"),
        ("codes", lambda x: x.astype(jnp.int32), "codes: got dtype int32, wanted uint32"),
        ("factors", lambda x: x[:, :, :0], r"factors: got shape \(2, 2, 0\), wanted \[B, Ko, S\] = \[2, 2, 80\]"),
        ("factors", lambda x: x.astype(jnp.float32), "factors: got dtype float32, wanted float16"),
        ("layer", lambda x: x[0], r"layer: got shape \(\), wanted \[1\]"),
        ("token", lambda x: x.astype(jnp.int32), "token: got dtype int32, wanted uint32"),
        ("engine", lambda x: 0, "engine: got handle 0 with Ko = 2, wanted a positive handle"),
        ("sink", lambda x: 20, "sink: got 20, wanted 0 to T - 1 = 19"),
        ("scale", lambda x: 0.0, "scale: got 0.0, wanted a positive number"),
    ],
)
def test_bad_arguments_are_named(name, bad, message):
    args = dict(make(0, R=32).args, layer=jnp.zeros((1,), jnp.int32), token=jnp.zeros((1,), jnp.uint32))
    args.update(engine=1, sink=4, scale=0.125)
    args[name] = bad(args[name])
    with pytest.raises(ValueError, match=message):
        op.attend(**args)
