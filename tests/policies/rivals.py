"""What the tests of all rival policies share: logits step by step, tokens, and one attention with a planted key."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import generate as gen
from clo_jax.config import ModelConfig
from clo_jax.policies.base import Position, Prefilled
from clo_jax.policies.registry import rival_layout, rival_policy
from tests import tiny

LLAMA = dataclasses.replace(tiny.LLAMA, num_layers=2)
QWEN = dataclasses.replace(tiny.QWEN, num_layers=1)
ONE = dataclasses.replace(tiny.LLAMA, num_layers=1)
PROMPTS = (tiny.prompt(90), tiny.prompt(33, seed=1))


@functools.cache
def params(model):
    """Random parameters."""
    return tiny.params(model)


@functools.cache
def full_tokens(model, prompt: int, new: int, max_tokens: int) -> list[int]:
    """What full attention answers to `tiny.prompt(prompt)`."""
    full = tiny.full_policy(model, 1, max_tokens)
    return tiny.run(model, params(model), full, None, [tiny.prompt(prompt)], new).tokens[0]


@contextlib.contextmanager
def rival(model: ModelConfig, config, batch: int, max_tokens: int, dtype: str = "float32"):
    """A rival policy and who keeps its rows (None when they are on the device)."""
    layout = rival_layout(model, config, batch, max_tokens, dtype)
    policy, rows = rival_policy(layout, config)
    yield policy, rows
    if rows is not None:
        rows.close()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def decode(model, policy, steps, weights, tables, state):
    """Logits [steps, B, V] and the tokens that follow from them [steps, B]."""

    def step(state, _):
        logits, state = gen.decode_step(model, policy, weights, tables, state)
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return state._replace(token=token), (logits, token)

    return jax.lax.scan(step, state, None, length=steps)[1]


def answers(model, policy, prompts, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [1 + steps, B, V] of prompts and their greedy continuation, and its tokens [steps, B]."""
    weights, tables = params(model), policy.tables()
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    tokens = np.zeros((len(prompts), gen.bucket_length(int(lengths.max()), policy.layout.max_tokens)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    layers, shared, first = gen.prefill(model, policy, weights, tables, jnp.asarray(tokens), lengths, gen.JITTED)
    zero, token = jnp.zeros_like(lengths), jnp.argmax(first, axis=1).astype(jnp.int32)
    state = gen.DecodeState(layers, shared, lengths, token, zero, jnp.zeros(lengths.shape, bool))
    logits, new = decode(model, policy, steps, weights, tables, state)
    return np.concatenate([first[None], logits]), np.asarray(new)


@functools.cache
def full_answers(model):
    """What full attention answers to the prompts of `check_full_budget`."""
    return answers(model, tiny.full_policy(model, 2, 128), PROMPTS, 24)


def check_full_budget(model, config) -> None:
    """A budget of 100 % is full attention: logits within 1e-4, the same 24 tokens."""
    with rival(model, config, 2, 128) as (policy, _):
        logits, tokens = answers(model, policy, PROMPTS, 24)
    want, same = full_answers(model)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)
    assert tokens.tolist() == same.tolist()


def check_batch(config) -> None:
    """A row of a batch gets what it gets alone, and one that has ended does not disturb the others."""
    weights, prompts = params(ONE), [tiny.prompt(n, seed=n) for n in (1, 40, 64)]
    with rival(ONE, config, 3, 96) as (policy, rows):
        together = tiny.run(ONE, weights, policy, rows, prompts, [24, 24, 5]).tokens
    with rival(ONE, config, 1, 96) as (policy, rows):
        for row in range(2):
            assert tiny.run(ONE, weights, policy, rows, [prompts[row]], 24).tokens[0] == together[row]


def planted(policy, needle: int, length: int, bucket: int, steps: int = 1, seed: int = 0) -> np.ndarray:
    """What the heads attend to, [steps, B, H, D], when one key among noise answers the query and its value is all ones:
    prefill, then `steps` decode steps with noise for new keys. A needle from `length` on comes with a decode step.
    Sequence b > 0 has b tokens less. Values of noise are around 0, so that an output near 1 has found the needle."""
    lay = policy.layout
    B, K, D = lay.batch, lay.num_kv_heads, lay.head_dim
    G = lay.full.group
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(B, K, bucket, 2, D)).astype(np.float32) * np.array([1, 0.1], np.float32)[:, None]
    query = rng.normal(size=(B, K, 1, D)).astype(np.float32)
    query *= np.sqrt(D) / np.linalg.norm(query, axis=-1, keepdims=True)
    answer = np.stack([4 * query[:, :, 0], np.ones((B, K, D), np.float32)])
    if needle < length:
        rows[:, :, needle, 0], rows[:, :, needle, 1] = answer
    query = np.broadcast_to(query, (B, K, G, D)).reshape(B, K * G, D)
    lengths = jnp.array([length - b for b in range(B)], jnp.int32)
    layer = lay.full_layers
    tables, shared = policy.tables()[layer], policy.allocate()
    queries = query[:, None] + rng.normal(size=(B, policy.sampled_queries, K * G, D)).astype(np.float32)
    prompt = Prefilled(jnp.asarray(rows), jnp.asarray(query), lengths, jnp.asarray(queries))
    state, shared = gen.JITTED.absorb(
        policy, policy.layer_kind(layer), tables, prompt, jnp.full((1,), layer, jnp.int32), shared
    )
    outs = []
    for i in range(steps):
        noise = rng.normal(size=(2, B, K, D)).astype(np.float32) * np.array([1, 0.1], np.float32)[:, None, None, None]
        new = jnp.asarray(answer if i == needle - length else noise)
        at = Position(lengths + i, jnp.ones((B,), bool))
        out, state, shared = step(policy, layer, tables, jnp.asarray(query), new[0], new[1], at, state, shared)
        outs.append(np.asarray(out))
    return np.stack(outs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(policy, layer, tables, query, k, v, at, state, shared):
    state, shared = policy.prefetch(layer, tables, query, at, state, shared)
    return policy.attend(layer, tables, query, k, v, at, state, shared)
