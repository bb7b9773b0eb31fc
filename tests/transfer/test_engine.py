"""The engine through its Python wrapper: arrays, counters, failures, threads and memory."""

import gc
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest

from clo_jax.errors import MemoryPlanError, TransferError
from clo_jax.ops.offload import offload
from clo_jax.transfer.choice import default_threads
from clo_jax.transfer.engine import Engine, transfer_errors

SHAPE = dict(kv_heads=[2, 0, 3], batch=2, max_tokens=64, num_slots=8, head_dim=16, dtype=np.float32)
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # JAX raises one or the other, by the path of the call
FOREVER_US = 10**9  # of injected delay; every test that uses it must end long before


def engine(**changes):
    return Engine(**{**SHAPE, **changes})


def full_request(e, layer, seed=0):
    """Stages a move into every slot of every head, and returns the tokens."""
    B, Ko, S = e.host_rows(layer).shape[:3]
    C = e.slot_tokens(layer).shape[2]
    tokens = np.random.default_rng(seed).integers(0, S, size=(B, Ko, C))
    slots = np.broadcast_to(np.arange(C), tokens.shape)
    e.stage(layer, np.full((B, Ko), C), tokens, slots)
    return tokens


def fill(e, layer, seed=0):
    rows = e.host_rows(layer)
    rows[...] = np.random.default_rng(seed).normal(size=rows.shape)
    return rows


def take(rows, tokens):
    return np.take_along_axis(rows, tokens[..., None, None], axis=2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, ml_dtypes.bfloat16, "float32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_arrive_bit_for_bit(dtype, threads):
    with engine(dtype=dtype, threads=threads) as e:
        for layer in (0, 2):
            rows = fill(e, layer, seed=layer)
            assert rows.dtype == np.dtype(dtype) and rows.shape == (2, SHAPE["kv_heads"][layer], 64, 2, 16)
            tokens = full_request(e, layer)
            assert e.post(layer) == 1
            e.wait(layer)
            np.testing.assert_array_equal(e.selected_rows(layer), take(rows, tokens))


def test_empty_tables_and_sizes():
    with engine() as e:
        assert (e.slot_tokens(2) == -1).all() and not e.slot_counts(2).any() and not e.refreshes(2).any()
        assert e.slot_last(2).dtype == np.uint16 and e.slot_last(2).shape == (2, 3, 8)
        row, heads = 2 * 16 * 4, 2 * 5
        assert heads * 64 * row <= e.host_bytes < heads * 64 * row + heads * 8 * 8 + 1024
        assert heads * 8 * row <= e.device_bytes < heads * 8 * row + heads * 8 * 6 + 1024
        assert e.backend == "host" and e.threads == default_threads() >= 1
    with engine(kv_offload=False) as e:
        assert e.host_bytes == 0 and e.device_bytes > heads * 64 * row and e.threads == 0


def test_counters_count_and_clear():
    with engine() as e:
        full_request(e, 0)
        e.post(0)
        e.wait(0)
        c = e.counters()
        rows = 2 * 2 * 8
        assert (c.requests, c.rows_posted, c.rows_moved, c.bytes_moved) == (1, rows, rows, rows * 2 * 16 * 4)
        e.stage(0, np.zeros((2, 2)), np.zeros((2, 2, 8)), np.zeros((2, 2, 8)))
        assert e.post(0) == 1 and e.counters().requests == 1  # nothing to move: the layer stays ready
        e.wait(0)
        e.clear_counters()
        assert set(vars(e.counters()).values()) == {0}


def test_a_drained_engine_has_moved_all_that_was_posted():
    with engine(threads=1) as e:
        e.inject_delay(20000, seed=4)
        for layer in (0, 2):
            full_request(e, layer)
            e.post(layer)
        e.drain()
        assert e.counters().rows_moved == e.counters().rows_posted == 2 * 5 * 8


def test_without_offload_posts_are_ready_and_nothing_moves():
    with engine(kv_offload=False) as e:
        full_request(e, 0)
        e.post(0)
        e.wait(0)
        assert e.counters().rows_posted == 32 and e.counters().rows_moved == 0
        with pytest.raises(ValueError, match="selected_rows: there are none without kv_offload"):
            e.selected_rows(0)


def test_handles_are_reused_and_a_dead_one_is_named():
    first, second = engine(), engine()
    handle = first.handle
    assert second.handle == handle + 1
    call = jax.jit(offload, static_argnames=("engine", "sink"))
    zeros = jnp.zeros((2,), jnp.int32)

    def run(layer=0, heads=2):
        rows = jnp.ones((2, heads, 8, 2, 16), jnp.float32)
        args = (rows, zeros, zeros + 8, jnp.full((1,), layer, jnp.int32), jnp.zeros((1,), jnp.uint32))
        return jax.block_until_ready(call(*args, engine=handle, sink=0))

    run()
    first.close()
    with pytest.raises(RUNTIME_ERRORS, match=f"engine {handle} is closed"):
        run()
    with pytest.raises(TransferError, match=f"^engine {handle} is closed; a program compiled for"), transfer_errors():
        run()
    third = engine()
    assert third.handle == handle
    run()
    assert (third.host_rows(0)[:, :, :8] == 1).all()
    with pytest.raises(RUNTIME_ERRORS, match="layer is 3, the engine has 3"), transfer_errors():
        run(layer=3)  # a wrong call, which stays what it is
    with pytest.raises(RUNTIME_ERRORS, match="KV heads 2.*layer 2 of the engine.*KV heads 3"):
        run(layer=2)
    second.close()
    third.close()


def test_arrays_can_be_overwritten_and_a_program_bracketed():
    with engine() as e:
        shape = e.host_rows(0).shape
        e.write(0, host_rows=np.arange(np.prod(shape)).reshape(shape), slot_counts=[[1, 2], [3, 4]])
        np.testing.assert_array_equal(e.host_rows(0).reshape(-1), np.arange(np.prod(shape)))
        np.testing.assert_array_equal(e.slot_counts(0), [[1, 2], [3, 4]])
        with pytest.raises(ValueError, match=r"slot_counts: got shape \(2,\), wanted shape \(2, 2\)"):
            e.write(0, slot_counts=[1, 2])
        with pytest.raises(ValueError, match=r"labels: got shape \(1,\), wanted an array of the layer"):
            e.write(0, labels=[1])
        begun = []
        e.begin = lambda requests: begun.append(requests)
        for _ in range(3):
            with e.serving(7, "program"):
                pass
        with pytest.raises(KeyError), e.serving(9, "one that fails"):
            raise KeyError
        with e.serving(9, "one that fails"):
            pass
        assert begun == [7, 7]  # not the first run of a program, nor the first after one that failed
    with engine() as e:
        e.begin(3)  # nothing to launch beside a program on the CPU
        e.end()
        with pytest.raises(ValueError, match="requests: got 0, wanted a positive integer"):
            e.begin(0)


def test_use_after_close_and_arrays_that_outlive_it():
    e = engine()
    rows = fill(e, 0)
    want = rows.copy()
    e.close()
    e.close()
    for use in (lambda: e.handle, e.counters, e.reset, lambda: e.wait(0), lambda: e.host_rows(0), lambda: e.abort("x")):
        with pytest.raises(TransferError, match="the engine is closed"):
            use()
    gc.collect()
    np.testing.assert_array_equal(rows, want)


def test_a_wait_ends_at_its_limit():
    with engine(timeout_s=0.05) as e:
        e.inject_delay(FOREVER_US, seed=1)
        full_request(e, 2)
        e.post(2)
        start = time.monotonic()
        with pytest.raises(TransferError, match=r"layer 2, backend host, request 1: not delivered after 0\.\d+ s \(li"):
            e.wait(2)
        assert 0.05 <= time.monotonic() - start < 5
        with pytest.raises(TransferError, match="layer 2, backend host, request 1: not ready yet"):
            e.post(2)
        assert e.counters().wait_ns >= 50_000_000


def test_an_abort_wakes_a_wait_and_the_gil_is_free_meanwhile():
    with engine() as e:
        e.inject_delay(FOREVER_US, seed=2)
        full_request(e, 0)
        e.post(0)
        caught = []

        def wait():
            with pytest.raises(TransferError) as error:
                e.wait(0)
            caught.append(str(error.value))

        waiter = threading.Thread(target=wait)
        start = time.monotonic()
        waiter.start()
        while e.counters().wait_ns == 0 and not caught and time.monotonic() - start < 0.2:
            time.sleep(0.001)  # this thread runs while the other one waits in native code
        assert not caught and waiter.is_alive()
        e.abort("enough")
        waiter.join(5)
        assert not waiter.is_alive() and time.monotonic() - start < 5
        assert caught == ["layer 0, backend host, request 1: aborted: enough"]
        with pytest.raises(TransferError, match="layer 2.*aborted: enough"):
            e.wait(2)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_dead_thread_is_an_error_and_reset_recovers(threads):
    with engine(threads=threads, timeout_s=20) as e:
        rows = fill(e, 2)
        e.inject_thread_death(0)
        full_request(e, 2)
        e.post(2)
        start = time.monotonic()
        with pytest.raises(TransferError, match="layer 2, backend host, request 1: transfer thread . died.*injected"):
            e.wait(2)
        assert time.monotonic() - start < 5
        e.slot_tokens(2)[...] = 7
        e.reset()
        assert (e.slot_tokens(2) == -1).all()
        tokens = full_request(e, 2, seed=5)
        e.post(2)
        e.wait(2)
        np.testing.assert_array_equal(e.selected_rows(2), take(rows, tokens))


def test_four_python_threads_share_one_engine():
    layers = range(4)
    with engine(kv_heads=[2] * 4, threads=2) as e:
        e.inject_delay(100, seed=3)
        rows = [fill(e, layer, seed=layer) for layer in layers]
        wrong = []

        def work(layer):
            for step in range(50):
                tokens = full_request(e, layer, seed=step)
                e.post(layer)
                e.wait(layer)
                if not np.array_equal(e.selected_rows(layer), take(rows[layer], tokens)):
                    wrong.append((layer, step))

        workers = [threading.Thread(target=work, args=(layer,)) for layer in layers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not wrong and e.counters().requests == 200
        assert e.counters().rows_moved == e.counters().rows_posted == 200 * 2 * 2 * 8


def test_threads_and_memory_are_given_back():
    process = psutil.Process()

    def rounds(n):
        for i in range(n):
            e = engine(max_tokens=4096, threads=3)  # 5 MB of rows
            e.host_rows(0)[...] = i
            full_request(e, 0)
            e.post(0)
            if i % 2:
                e.close()
            else:
                del e  # __del__ closes, with the request under way
        gc.collect()

    rounds(20)
    threads, rss = process.num_threads(), process.memory_info().rss
    rounds(200)
    assert process.num_threads() == threads
    assert process.memory_info().rss - rss < 2 * 2**20


def test_an_engine_that_cannot_be_made_leaves_nothing_behind():
    process = psutil.Process()
    threads = process.num_threads()
    with pytest.raises(MemoryPlanError, match=r"host rows: \d{15} bytes needed"):
        engine(max_tokens=2**31 - 1, head_dim=4096)
    with pytest.raises(MemoryPlanError, match="larger than any memory"):
        engine(max_tokens=2**31 - 1, batch=2**31, head_dim=2**20)
    assert process.num_threads() == threads
    with engine() as e:
        full_request(e, 0)
        e.post(0)
        e.wait(0)


SCARCE = """
import collections, resource
import numpy as np, psutil
from clo_jax.errors import CloError
from clo_jax.transfer.engine import Engine

process = psutil.Process()
threads, seen = process.num_threads(), collections.Counter()
for megabytes in range(0, 160, 4):
    limit = process.memory_info().vms + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        Engine([4, 4], 2, 4096, 2048, 64, np.float32, threads=4).close()
        seen["made"] += 1
    except CloError as error:
        seen[f"{type(error).__name__}: {str(error).split(':')[0]}"] += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert process.num_threads() == threads
print(sorted(seen))
"""


def test_scarce_memory_is_refused_at_every_step_and_the_next_engine_works():
    out = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, check=True).stdout
    for want in (
        "MemoryPlanError: host rows",
        "MemoryPlanError: selected rows",
        "TransferError: the transfer engine could",
        "made",
    ):
        assert want in out


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(kv_heads=[]), "kv_heads: got 0, wanted at least one layer"),
        (dict(kv_heads=[-1]), "kv_heads: got -1, wanted an integer >= 0"),
        (dict(kv_heads=[1.5]), "kv_heads: got 1.5, wanted an integer"),
        (dict(batch=0), "batch: got 0, wanted a positive integer"),
        (dict(max_tokens=2**31), "max_tokens: got 2147483648, wanted a positive 32-bit integer"),
        (dict(num_slots=0), "num_slots: got 0"),
        (dict(head_dim="64"), "head_dim: got '64', wanted an integer"),
        (dict(dtype=np.int8), "dtype: got int8, wanted float32, bfloat16 or float16"),
        (dict(threads=0), r"threads: got 0, wanted an integer in \[1, 1024\]"),
        (dict(timeout_s=0), "timeout_s: wanted a number in"),
        (dict(timeout_s=float("nan")), "timeout_s: wanted a number in"),
        (dict(backend="pull"), 'backend: got "pull", not in this build .*available here: auto, host'),
        (dict(backend="magic"), 'backend: got "magic", unknown; available here: auto, host'),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        engine(**bad)


def test_bad_requests_are_named():
    with engine() as e:
        counts, tokens, slots = np.ones((2, 2), int), np.zeros((2, 2, 8), int), np.zeros((2, 2, 8), int)
        for args, message in (
            ((counts[:1], tokens, slots), r"counts: got shape \(1, 2\), wanted \(2, 2\)"),
            ((counts * 9, tokens, slots), r"counts: got values 9 to 9, wanted \[0, 9\)"),
            ((counts, tokens + 64, slots), r"tokens: got values 64 to 64, wanted \[0, 64\)"),
            ((counts, tokens, slots - 1), r"slots: got values -1 to -1, wanted \[0, 8\)"),
        ):
            with pytest.raises(ValueError, match=message):
                e.stage(0, *args)
        with pytest.raises(ValueError, match="layer: got 1, which has no offloaded KV heads"):
            e.stage(1, counts, tokens, slots)
        with pytest.raises(IndexError, match="layer: got 3, wanted one of 3 layers"):
            e.wait(3)


def test_only_the_arrays_that_are_asked_for_are_given():
    with engine() as e:
        assert set(e._arrays(0, "slot_counts", "refreshes")) == {"slot_counts", "refreshes"}
        assert {"host_rows", "selected_rows", "slot_tokens"} < set(e._arrays(0))
