"""Generation with full attention: decode equals recomputation, batches equal single runs, compile counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import generate as gen
from clo_jax.policies.full import FullPolicy
from clo_jax.sampling import Sampling
from tests import tiny


def recompute(config, weights, prompt, steps):
    """Greedy tokens by running the whole sequence again for each: no cache to be wrong."""
    ids = list(prompt)
    policy = tiny.full_policy(config, 1, 512)
    for _ in range(steps):
        tokens = np.zeros((1, gen.bucket_length(len(ids), 512)), np.int32)
        tokens[0, : len(ids)] = ids
        _, _, logits = gen.prefill(
            config, policy, weights, policy.tables(), jnp.asarray(tokens), jnp.array([len(ids)], jnp.int32), gen.JITTED
        )
        ids.append(int(jnp.argmax(logits[0])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen2"])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200])
def test_decode_equals_recomputation(config, length):
    weights, prompt = tiny.params(config), tiny.prompt(length)
    session = tiny.run(config, weights, tiny.full_policy(config, 1, 512), None, [prompt], 12)
    assert session.tokens[0] == recompute(config, weights, prompt, 12)


def test_rows_of_a_batch_equal_their_own_runs():
    weights = tiny.params(tiny.LLAMA)
    prompts = [tiny.prompt(n, seed=n) for n in (1, 7, 63, 64, 65, 200)]
    limits = [20, 3, 20, 1, 20, 11]
    together = tiny.run(tiny.LLAMA, weights, tiny.full_policy(tiny.LLAMA, 6, 256), None, prompts, limits)
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = tiny.run(tiny.LLAMA, weights, tiny.full_policy(tiny.LLAMA, 1, 256), None, [prompt], limit)
        assert together.tokens[row] == alone.tokens[0]
        assert together.finish_reason(row) == "length" and len(together.tokens[row]) == limit


def test_stop_tokens_end_their_row_only():
    weights = tiny.params(tiny.LLAMA)
    prompts = [tiny.prompt(20, seed=s) for s in range(3)]
    free = tiny.run(tiny.LLAMA, weights, tiny.full_policy(tiny.LLAMA, 3, 256), None, prompts, 24)
    stop = free.tokens[1][5]
    ended = tiny.run(tiny.LLAMA, weights, tiny.full_policy(tiny.LLAMA, 3, 256), None, prompts, 24, stop=[stop, 999])
    for row in range(3):
        first = free.tokens[row].index(stop) + 1 if stop in free.tokens[row] else 24
        assert ended.tokens[row] == free.tokens[row][:first]
        assert ended.finish_reason(row) == ("stop" if stop in free.tokens[row] else "length")


def test_pure_generate_equals_chunks_under_jit():
    config, weights, prompt = tiny.QWEN, tiny.params(tiny.QWEN), tiny.prompt(40)
    policy = tiny.full_policy(config, 1, 128)
    tokens = jnp.asarray([prompt], jnp.int32)
    call = jax.jit(functools.partial(gen.generate, config, policy, 20))
    none = jnp.zeros((0,), jnp.int32)
    out, count = call(weights, policy.tables(), tokens, jnp.array([40], jnp.int32), none)
    session = tiny.run(config, weights, policy, None, [prompt], 20, chunk=7)
    assert out[0].tolist() == session.tokens[0] and int(count[0]) == 20
    out, count = call(weights, policy.tables(), tokens, jnp.array([40], jnp.int32), out[0, 3:4])
    n = session.tokens[0].index(session.tokens[0][3]) + 1
    assert int(count[0]) == n and out[0].tolist() == session.tokens[0][:n] + [-1] * (20 - n)


def test_steps_after_the_end_change_nothing():
    config, weights, prompts = tiny.QWEN, tiny.params(tiny.QWEN), [tiny.prompt(40), tiny.prompt(30, seed=1)]
    policy = tiny.full_policy(config, 2, 64)
    tokens = np.zeros((2, 64), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths, limits = jnp.array([40, 30], jnp.int32), gen.Limits(jnp.array([3, 6], jnp.int32), jnp.array([-1]))
    ended = []
    for stops_early in (True, False):
        start = gen.prefill(config, policy, weights, policy.tables(), jnp.asarray(tokens), lengths)
        state = gen.begin(*start, lengths, None, limits)
        ended.append(gen.decode_chunk(config, policy, 9, stops_early, weights, policy.tables(), state, None, limits))
    early, late = ended
    assert (early[0] == late[0]).all() and (early[0] >= 0).sum(axis=1).tolist() == [2, 5]
    assert early[1].position.tolist() == late[1].position.tolist() == [42, 35]
    for name in ("token", "count", "done"):
        assert (getattr(early[1], name) == getattr(late[1], name)).all()


@pytest.mark.parametrize("guess_from", [None, "input", "attention"])
def test_a_step_for_cuda_norms_the_stream_in_two_calls_a_layer(guess_from):
    class Policy(FullPolicy):
        pass

    Policy.guess_from = guess_from
    config, weights, lengths = tiny.LLAMA, tiny.params(tiny.LLAMA), jnp.array([3], jnp.int32)
    policy = Policy(tiny.full_policy(config, 1, 64).layout)
    start = gen.prefill(config, policy, weights, policy.tables(), jnp.zeros((1, 64), jnp.int32), lengths)
    state = gen.begin(*start, lengths, None, gen.Limits(jnp.array([9], jnp.int32), jnp.array([-1])))
    step = jax.jit(gen.decode_step, static_argnums=(0, 1)).trace(config, policy, weights, policy.tables(), state)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@clo_add_norms") == 2 * config.num_layers
    assert text.count("stablehlo.rsqrt") == 1  # of the first layer's input, which nothing is added to
    calls = [line for line in text.splitlines() if "@clo_add_norms" in line]
    norms = sum(line.split("->")[1].count("tensor<") - 1 for line in calls)
    guesses = 0 if guess_from is None else config.num_layers - 1
    assert norms == 2 * config.num_layers + guesses - (guess_from == "input")  # the first layer's input: as above


def test_pure_generate_refuses_what_does_not_fit():
    policy = tiny.full_policy(tiny.QWEN, 1, 64)
    args = (tiny.params(tiny.QWEN), policy.tables(), jnp.zeros((1, 60), jnp.int32), jnp.array([60], jnp.int32))
    with pytest.raises(ValueError, match="got 5 after prompts of 60 tokens, wanted at most 64"):
        gen.generate(tiny.QWEN, policy, 5, *args, jnp.zeros((0,), jnp.int32))
    with pytest.raises(ValueError, match="max_new_tokens: got 0"):
        gen.generate(tiny.QWEN, policy, 0, *args, jnp.zeros((0,), jnp.int32))


def test_sampled_rows_do_not_depend_on_their_batch():
    weights = tiny.params(tiny.LLAMA)
    prompts = [tiny.prompt(n, seed=n) for n in (9, 30, 64)]

    def sampling(seeds):
        n = len(seeds)
        return Sampling(
            jnp.full((n,), 1.0, jnp.float32), jnp.full((n,), 50, jnp.int32), jnp.full((n,), 0.9, jnp.float32),
            jnp.asarray(seeds, jnp.uint32),
        )  # fmt: skip

    together = tiny.run(
        tiny.LLAMA, weights, tiny.full_policy(tiny.LLAMA, 3, 128), None, prompts, 16, sampling=sampling([3, 3, 4])
    )
    for row, seed in enumerate([3, 3, 4]):
        alone = tiny.run(
            tiny.LLAMA,
            weights,
            tiny.full_policy(tiny.LLAMA, 1, 128),
            None,
            [prompts[row]],
            16,
            sampling=sampling([seed]),
        )
        assert alone.tokens[0] == together.tokens[row]


def test_buckets_end_exactly_at_the_maximum():
    assert [gen.bucket_length(n, 1000) for n in (1, 64, 65, 512, 513, 1000)] == [64, 64, 128, 512, 1000, 1000]


def test_fifty_lengths_compile_one_prefill_per_bucket_and_one_decode():
    config = tiny.QWEN
    weights, policy = tiny.params(config), tiny.full_policy(config, 1, 640)
    jax.clear_caches()
    lengths = np.random.default_rng(0).integers(1, 636, 50)
    for length in lengths:
        tiny.run(config, weights, policy, None, [tiny.prompt(int(length))], 4)
    buckets = {gen.bucket_length(int(n), 640) for n in lengths}
    assert gen.JITTED.prefill_layer._cache_size() == len(buckets) <= 5
    assert gen.JITTED.absorb._cache_size() == len(buckets)
    assert gen.decode_chunk_jitted._cache_size() == 1
