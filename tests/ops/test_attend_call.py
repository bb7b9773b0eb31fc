"""attend as an XLA call: state in place, errors at run time, and checks of the arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import _host
from clo_jax.errors import TransferError
from clo_jax.ops import attend as op
from tests.compare import assert_close
from tests.ops.attend_cases import engine_for, make

# JAX turns INVALID_ARGUMENT from a custom call into ValueError, anything else into JaxRuntimeError.
RUNTIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)
ON_CPU = jax.default_backend() == "cpu"
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
    for got_part, want in zip(got[:2], case.reference()[:2], strict=True):
        assert_close(got_part, want)


def test_a_loop_holds_no_copy_of_the_state(fresh_programs):
    case = make(12, B=1, Ko=2, Kr=2, G=3, D=64, R=64, S=4096, T=80, C=64, position=100, flushed=90)
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
        workspace = _host.attend_workspace(batch=1, offloaded=2, resident=2, group=3, head_dim=64, bits=64)
        assert memory.temp_size_in_bytes < workspace + min(a["codes"].nbytes, a["tail"].nbytes) // 2
        assert memory.alias_size_in_bytes >= sum(a[name].nbytes for name in STATE)
        position, _, resident, *_ = compiled(*state)
    assert int(position[0]) == 105
    np.testing.assert_array_equal(resident[:, :, 104, 0], a["key"][:, 2:])


def test_a_failed_transfer_is_an_error_with_its_text():
    case = make(8)
    with engine_for(case) as engine:
        engine.abort("the link is gone")
        if ON_CPU:
            with pytest.raises(RUNTIME_ERRORS, match="the link is gone"):
                jax.block_until_ready(case.attend(engine))
        else:  # a running program of the GPU cannot raise: the engine does, once it has ended
            jax.block_until_ready(case.attend(engine))
            with pytest.raises(TransferError, match="aborted: the link is gone"):
                engine.end()
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
    with engine_for(case) as engine:
        if ON_CPU:
            with pytest.raises(RUNTIME_ERRORS, match=message):
                jax.block_until_ready(case.attend(engine, **changes))
            return
        out, lse, *_ = jax.block_until_ready(case.attend(engine, **changes))
        with pytest.raises(TransferError, match="layer 0, backend .*: an operand is out of range"):
            engine.end()
    wrong = 0 if message.split(" of sequence ")[1].startswith("0") else 1
    for x in (out, lse):
        assert np.isnan(np.asarray(x[wrong])).all() and np.isfinite(np.asarray(x[1 - wrong])).all()


def test_a_missing_or_different_engine_is_named_at_run_time():
    case, other = make(8), make(8, D=32)
    with engine_for(other) as engine:
        with pytest.raises(RUNTIME_ERRORS, match="head dim 64, float32.*, .*engine.* head dim 32"):
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
        ("query", lambda x: x.astype(jnp.int32), "query: got dtype int32, wanted float32 or bfloat16 or float16"),
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
