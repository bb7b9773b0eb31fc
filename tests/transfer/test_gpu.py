"""The backends of a GPU through Python and whole programs; what they do alone is ffi/tests/cuda/test_transfer.cu."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.config import CloConfig
from clo_jax.errors import TransferError
from clo_jax.ops.offload import offload
from clo_jax.transfer import backends
from clo_jax.transfer import engine as engine_module
from clo_jax.transfer.engine import Engine
from tests import tiny

pytestmark = pytest.mark.gpu
by_backend = pytest.mark.parametrize("backend", tiny.BACKENDS)
by_threads = pytest.mark.parametrize("backend", [name for name in tiny.BACKENDS if name != "pull"])
SMALL = CloConfig(sparsity=0.1, hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8)
SHAPE = dict(kv_heads=[2, 0, 1], batch=2, max_tokens=64, num_slots=16, head_dim=16, dtype=np.float32)


@pytest.fixture(scope="module")
def llama():
    return tiny.params(tiny.LLAMA)


def generate(llama, policy, engine, tokens=64):
    return tiny.run(tiny.LLAMA, llama, policy, engine, [tiny.prompt(300), tiny.prompt(150, seed=5)], tokens)


def test_auto_is_pull():
    with Engine(**SHAPE) as engine:
        assert engine.backend == "pull" and engine.skipped == () and engine.threads == 0
        assert engine.host_bytes == 2 * 3 * 64 * 2 * 16 * 4


@by_backend
def test_the_probe_measures(backend):
    measured = backends.probe(backend)
    assert measured.row_bytes == 512 and measured.gb_per_s > 0.1


def test_auto_falls_through_and_keeps_the_reasons(monkeypatch):
    real = engine_module._host.find_backend
    monkeypatch.setattr(
        engine_module._host,
        "find_backend",
        lambda name: (False, "no libgdrapi; no libvulkan") if name in ("pull", "bar") else real(name),
    )
    with Engine(**SHAPE) as engine:
        assert engine.backend == "staged"
        assert engine.skipped == (("pull", "no libgdrapi; no libvulkan"), ("bar", "no libgdrapi; no libvulkan"))


def test_bar_says_what_maps_the_memory():
    if "bar" in tiny.BACKENDS:
        with Engine(**SHAPE, backend="bar") as engine:
            assert engine.link in ("libgdrapi", "Vulkan")
    else:
        with pytest.raises(
            ValueError, match='backend: got "bar", .*(libgdrapi|Vulkan|libvulkan).*available here: auto'
        ):
            Engine(**SHAPE, backend="bar")


def test_progress_reaches_the_whole():
    seen = []
    with Engine(**SHAPE, progress=lambda done, total: seen.append((done, total))) as engine:
        assert seen == [(0, engine.host_bytes), (engine.host_bytes, engine.host_bytes)]


@by_backend
def test_chunks_after_the_first_are_served_beside_the_program(llama, monkeypatch, backend):
    begun = []
    begin = Engine.begin
    monkeypatch.setattr(Engine, "begin", lambda self, n: (begun.append(n), begin(self, n))[1])
    with tiny.clo_policy(tiny.LLAMA, SMALL, 2, 512, backend=backend) as (policy, engine):
        beside = [generate(llama, policy, engine).tokens for _ in range(2)]
        counters = engine.counters()
    assert begun == [32] * (3 + 4)  # 16 tokens, two layers; only the very first chunk compiles
    assert counters.rows_moved == counters.rows_posted > 0
    assert counters.bytes_moved == counters.rows_moved * 2 * tiny.HEAD_DIM * 4 and counters.requests > 0
    monkeypatch.setattr(Engine, "begin", lambda self, n: None)
    with tiny.clo_policy(tiny.LLAMA, SMALL, 2, 512, backend=backend) as (policy, engine):
        in_line = generate(llama, policy, engine).tokens
    assert beside == [in_line, in_line]


@by_backend
def test_bfloat16_offload_changes_no_token(backend):
    weights = tiny.params(tiny.LLAMA, dtype=jnp.bfloat16)
    tokens = []
    for kv_offload in (True, False):
        with tiny.clo_policy(tiny.LLAMA, SMALL, 2, 512, dtype="bfloat16", kv_offload=kv_offload, backend=backend) as (
            policy,
            engine,
        ):
            tokens.append(generate(weights, policy, engine).tokens)
    assert tokens[0] == tokens[1]


REFRESH_ALWAYS = dataclasses.replace(SMALL, sim_threshold=1.0)


@by_backend
def test_an_abort_ends_the_program_and_the_next_one_works(llama, monkeypatch, backend):
    with tiny.clo_policy(tiny.LLAMA, REFRESH_ALWAYS, 2, 512, backend=backend) as (policy, engine):
        want = generate(llama, policy, engine).tokens
        begin = Engine.begin

        def begin_and_abort(self, requests):
            begin(self, requests)
            self.abort("enough")

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "begin", begin_and_abort)
            start = time.perf_counter()
            with pytest.raises(TransferError, match=rf"layer \d, backend {backend}, request \d+: aborted: enough"):
                generate(llama, policy, engine)
            assert time.perf_counter() - start < 10
        assert generate(llama, policy, engine).tokens == want


@by_threads
def test_a_dead_thread_ends_the_program_and_the_next_one_works(llama, backend):
    with tiny.clo_policy(tiny.LLAMA, REFRESH_ALWAYS, 2, 512, backend=backend, threads=2) as (policy, engine):
        want = generate(llama, policy, engine).tokens
        engine.inject_thread_death(20)
        start = time.perf_counter()
        name = rf"layer \d, backend {backend}, request \d+"
        with pytest.raises(TransferError, match=f"{name}: transfer thread . died while it served {name}: injected"):
            generate(llama, policy, engine)
        assert time.perf_counter() - start < 10
        assert generate(llama, policy, engine).tokens == want


@by_threads
def test_a_flag_that_never_comes_ends_the_program_and_the_next_one_works(llama, backend):
    with tiny.clo_policy(tiny.LLAMA, REFRESH_ALWAYS, 2, 512, backend=backend, timeout_s=0.5) as (policy, engine):
        want = generate(llama, policy, engine).tokens
        engine.inject_delay(10**9, seed=1)
        start = time.perf_counter()
        with pytest.raises(TransferError, match=rf"layer \d, backend {backend}, request \d+: not delivered in time"):
            generate(llama, policy, engine)
        assert time.perf_counter() - start < 10
        engine.inject_delay(0, seed=0)
        assert generate(llama, policy, engine).tokens == want


def test_a_request_that_never_comes():
    with Engine(**SHAPE, timeout_s=0.2) as engine:
        engine.begin(4)
        with pytest.raises(TransferError, match="begin: the last program has not ended"):
            engine.begin(4)
        time.sleep(0.5)
        with pytest.raises(
            TransferError, match=r"layer 0, backend pull, request 1: not posted in time \(limit 0.200 s"
        ):
            engine.end()
        with pytest.raises(TransferError, match="not posted in time"):
            engine.wait(2)
        engine.reset()
        engine.begin(4)
        engine.end()


def test_handles_are_not_given_out_twice_and_hosts_are_refused():
    with Engine(**SHAPE) as engine:
        first = engine.handle
    with Engine(**SHAPE) as engine:
        assert engine.handle != first
    rows, ints = jnp.zeros((2, 2, 8, 2, 16)), jnp.zeros((2,), jnp.int32)
    with Engine(**SHAPE, backend="host") as engine, pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        args = (rows, ints, ints, jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.uint32))
        jax.block_until_ready(offload(*args, engine=engine.handle, sink=0))
    assert "a program on the GPU needs backend pull, bar or staged, the engine's is host" in str(error.value)
