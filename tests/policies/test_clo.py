"""The CLO policy on tiny models: equals full attention at full sparsity, offload changes no token, counts add up."""

import dataclasses
import os
import re
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import generate as gen
from clo_jax.config import CloConfig
from clo_jax.forced import ForcedSession
from clo_jax.policies.clo import HeadScores, take_tail
from clo_jax.prompts import Request
from clo_jax.session import Session
from tests import tiny

SMALL = CloConfig(sparsity=0.1, hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8)
RETRIEVERS = ("sign", "hata", "exact")


@pytest.fixture(scope="module")
def llama():
    return tiny.params(tiny.LLAMA)


def full_tokens(config, weights, prompts, new, max_tokens=512):
    return tiny.run(config, weights, tiny.full_policy(config, len(prompts), max_tokens), None, prompts, new).tokens


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen2"])
@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_full_sparsity_equals_full_attention(config, retriever):
    weights, prompts = tiny.params(config), [tiny.prompt(200), tiny.prompt(33, seed=1)]
    clo = dataclasses.replace(SMALL, sparsity=1.0, retriever=retriever)
    with tiny.clo_policy(config, clo, 2, 512) as (policy, engine):
        session = tiny.run(config, weights, policy, engine, prompts, 128)
    assert session.tokens == full_tokens(config, weights, prompts, 128)


def logits(config, weights, policy, engine, steps=40):
    """[1 + steps, V] along random tokens after a prompt of 200."""
    session = ForcedSession(config, weights, policy, policy.tables(), engine, tiny.prompt(201 + steps), 200, 8)
    return np.concatenate(list(session))


@pytest.mark.parametrize(
    "config, retriever", [(tiny.LLAMA, name) for name in RETRIEVERS] + [(tiny.QWEN, "sign")],
    ids=[*RETRIEVERS, "qwen2-sign"],
)  # fmt: skip
def test_full_sparsity_gives_the_logits_of_full_attention(config, retriever):
    weights, clo = tiny.params(config), dataclasses.replace(SMALL, sparsity=1.0, retriever=retriever)
    want = logits(config, weights, tiny.full_policy(config, 1, 512), None)
    with tiny.clo_policy(config, clo, 1, 512) as (policy, engine):
        np.testing.assert_allclose(logits(config, weights, policy, engine), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype, most", [("int8", 0.02), ("fp8", 0.08)])
@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen2"])
def test_quantized_rows_at_full_sparsity_are_near_full_attention(config, kv_dtype, most):
    """Relative error of the logits; int8 has a quarter of the error of fp8."""
    weights, clo = tiny.params(config), dataclasses.replace(SMALL, sparsity=1.0, kv_dtype=kv_dtype)
    want = logits(config, weights, tiny.full_policy(config, 1, 512), None)
    with tiny.clo_policy(config, clo, 1, 512) as (policy, engine):
        got = logits(config, weights, policy, engine)
        assert engine.counters().bytes_moved == engine.counters().rows_moved * (2 * tiny.HEAD_DIM + 16) > 0
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)  # of prefill, which reads no stored row
    error = np.linalg.norm(got[1:] - want[1:], axis=-1) / np.linalg.norm(want[1:], axis=-1)
    assert 0 < error.min() and error.max() < most


@pytest.mark.parametrize("retriever", RETRIEVERS)
def test_delta_without_retained_rows_gives_the_logits_of_whole_refresh(llama, retriever):
    found = []
    for refresh in ("delta", "whole"):
        clo = dataclasses.replace(SMALL, retain=1.0, refresh=refresh, retriever=retriever)
        with tiny.clo_policy(tiny.LLAMA, clo, 1, 512) as (policy, engine):
            found.append(logits(tiny.LLAMA, llama, policy, engine))
            assert 0 < engine.counters().rows_moved
    # The same rows in another order of slots, so sums of other order: not bit by bit.
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 19, 20, 21, 27, 28, 29, 36])
def test_contexts_within_the_tail_equal_full_attention(llama, length):
    with tiny.clo_policy(tiny.LLAMA, SMALL, 1, 512) as (policy, engine):
        session = tiny.run(tiny.LLAMA, llama, policy, engine, [tiny.prompt(length)], 4)
    tail = SMALL.sink_tokens + SMALL.recent_tokens
    if length + 4 <= tail:
        assert session.tokens == full_tokens(tiny.LLAMA, llama, [tiny.prompt(length)], 4)
    assert len(session.tokens[0]) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"refresh": "whole", "retain": 1.0},
        {"retain": 1.0},
        {"retain": 3.0, "sim_threshold": 1.0},
        {"retriever": "hata"},
        {"retriever": "exact"},
        {"resident_heads": ((1, (0,)), (2, (1,)))},
        {"refresh_on_flush": False},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "default",
)
@pytest.mark.parametrize("backend", tiny.BACKENDS)
def test_offload_changes_no_token(llama, backend, changes):
    clo = dataclasses.replace(SMALL, **changes)
    prompts = [tiny.prompt(300), tiny.prompt(150, seed=5)]
    with tiny.clo_policy(tiny.LLAMA, clo, 2, 512, threads=2, backend=backend) as (policy, engine):
        engine.inject_delay(300, seed=1)
        moved = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 64)
        assert engine.counters().rows_moved > 0
    with tiny.clo_policy(tiny.LLAMA, clo, 2, 512, kv_offload=False) as (policy, engine):
        stayed = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 64)
        assert engine.counters().rows_moved == 0
    assert moved.tokens == stayed.tokens


@pytest.mark.parametrize("sparsity", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("backend", tiny.BACKENDS)
def test_offload_changes_no_token_over_two_thousand_steps(llama, backend, sparsity):
    prompts, clo = [tiny.prompt(300)], dataclasses.replace(SMALL, sparsity=sparsity)
    with tiny.clo_policy(tiny.LLAMA, clo, 1, 2304, threads=3, backend=backend) as (policy, engine):
        engine.inject_delay(500, seed=2)
        moved = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 2000)
        assert engine.counters().rows_moved == engine.counters().rows_posted > 0
    with tiny.clo_policy(tiny.LLAMA, clo, 1, 2304, kv_offload=False) as (policy, engine):
        stayed = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 2000)
    assert len(moved.tokens[0]) == 2000 and moved.tokens == stayed.tokens


def test_rows_of_a_batch_equal_their_own_runs(llama):
    prompts = [tiny.prompt(n, seed=n) for n in (1, 7, 63, 64, 65, 200)]
    with tiny.clo_policy(tiny.LLAMA, SMALL, 6, 512) as (policy, engine):
        together = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 40)
    for row, prompt in enumerate(prompts):
        with tiny.clo_policy(tiny.LLAMA, SMALL, 1, 512) as (policy, engine):
            alone = tiny.run(tiny.LLAMA, llama, policy, engine, [prompt], 40)
        assert together.tokens[row] == alone.tokens[0]


def test_counts_by_refresh(llama):
    prompts = [tiny.prompt(400)]
    metrics = {}
    for name, changes in {
        "whole": {"refresh": "whole", "retain": 1.0}, "delta": {"retain": 1.0}, "retained": {"retain": 2.0},
    }.items():  # fmt: skip
        with tiny.clo_policy(tiny.LLAMA, dataclasses.replace(SMALL, **changes), 1, 512) as (policy, engine):
            metrics[name] = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 64).metrics()
            assert engine.counters().rows_posted == engine.counters().rows_moved
    for m in metrics.values():
        assert m.bytes_moved == m.rows_moved * 2 * tiny.HEAD_DIM * 4
        assert 0 <= m.hit_rate < 1
    assert metrics["whole"].rows_moved == metrics["whole"].rows_selected
    assert 0 < metrics["delta"].rows_moved < metrics["delta"].rows_selected
    assert 0 < metrics["retained"].rows_moved < metrics["retained"].rows_selected


def test_thresholds_decide(llama):
    prompts = [tiny.prompt(400)]
    layers, H, K = 3, 6, 2
    zero = HeadScores(np.zeros((layers, H), np.float32), np.zeros((layers, K), np.float32), "given")
    with tiny.clo_policy(tiny.LLAMA, dataclasses.replace(SMALL, refresh_on_flush=False), 1, 512, scores=zero) as (
        policy,
        engine,
    ):
        always = tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 32).metrics()
    assert always.hit_rate == 1.0 and always.rows_moved == 0 and always.head_scores == "given"
    assert always.first_fill_rows == 2 * 2 * 40  # once per offloaded head, at prefill
    with tiny.clo_policy(tiny.LLAMA, dataclasses.replace(SMALL, sim_threshold=1.0), 1, 512) as (policy, engine):
        assert tiny.run(tiny.LLAMA, llama, policy, engine, prompts, 32).metrics().hit_rate == 0.0


def test_decode_keeps_every_call_and_holds_no_cache_sized_temporary(llama, fresh_programs):
    config, clo = tiny.LLAMA, dataclasses.replace(SMALL, resident_heads=((0, (0, 1)), (1, (0,))))
    with tiny.clo_policy(config, clo, 1, 4096) as (policy, engine):
        tables = policy.tables()
        layers, shared, logits = gen.prefill(
            config, policy, llama, tables, jnp.zeros((1, 64), jnp.int32), jnp.array([64], jnp.int32), gen.JITTED
        )
        limits = gen.Limits(jnp.array([10], jnp.int32), jnp.full((8,), -1, jnp.int32))
        state = gen.begin_jitted(layers, shared, logits, jnp.array([64], jnp.int32), None, limits)
        compiled = gen.decode_chunk_jitted.lower(config, policy, 4, True, llama, tables, state, None, limits).compile()
        engine.reset()
    text = compiled.as_text()  # nothing was dropped: one call each per layer, or per layer with offloaded heads
    calls = {name: text.count(f'custom_call_target="clo_{name}"') for name in ("attend", "prefetch", "offload")}
    assert calls == {"attend": 3, "prefetch": 2, "offload": 2}
    analysis = compiled.memory_analysis()
    smallest_cache = min(state.layers[2]["codes"].nbytes, state.layers[0]["resident"].nbytes)
    # On a GPU each call has scratch of its own beside its results.
    scratch = sum(int(n) for n in re.findall(r"u8\[(\d+)\]", " ".join(re.findall(r"= \(.*custom-call\(", text))))
    assert analysis.temp_size_in_bytes - scratch < smallest_cache
    cache = sum(x.nbytes for layer in state.layers for x in layer.values() if x.size)
    assert analysis.alias_size_in_bytes >= cache


def test_ctrl_c_during_prefill_stops_after_the_layer(llama):
    seen = []

    def press(layer):
        seen.append(layer)
        if layer == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with tiny.clo_policy(tiny.LLAMA, SMALL, 1, 512) as (policy, engine):
        request = Request([tiny.prompt(100)], [8], [], None)
        args = (tiny.LLAMA, llama, policy, policy.tables(), engine, request, 4)
        with pytest.raises(KeyboardInterrupt):
            next(iter(Session(*args, on_layer=press)))
        assert seen == [0, 1]
        assert [len(new[0]) for new in Session(*args)] == [1, 4, 3]


def test_take_tail_places_every_token_that_attention_reads():
    B, N, sink, ring = 2, 100, 4, 24
    rows = jnp.broadcast_to(jnp.arange(N, dtype=jnp.float32)[None, None, :, None, None], (B, 1, N, 2, 8))
    for length in (1, 3, 4, 5, 23, 24, 27, 28, 29, 60, 100):
        lengths = jnp.array([length, max(length - 1, 1)], jnp.int32)
        tail = np.asarray(take_tail(rows, lengths, sink, sink + ring))[:, 0, :, 0, 0]
        for b, n in enumerate(lengths.tolist()):
            for token in [*range(min(sink, n)), *range(max(sink, n - ring), n)]:
                index = token if token < sink else sink + (token - sink) % ring
                assert tail[b, index] == token
