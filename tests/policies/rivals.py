"""What the tests of all rival policies share: logits step by step, tokens, and one attention with a planted key."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import generate as gen
from clo_jax.config import ModelConfig
from clo_jax.policies import dense
from clo_jax.policies.base import Position, Prefilled
from clo_jax.policies.registry import rival_layout, rival_policy
from clo_jax.sampling import Sampling
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
    return run(model, tiny.full_policy(model, 1, max_tokens), None, [tiny.prompt(prompt)], new).tokens[0]


def run(model, policy, rows, prompts, new):
    """A session that draws its tokens, for a random model's likeliest ones are ever the same."""
    n = len(prompts)
    sampling = Sampling(
        jnp.ones((n,), jnp.float32), jnp.full((n,), 50, jnp.int32), jnp.ones((n,), jnp.float32),
        jnp.ones((n,), jnp.uint32),
    )  # fmt: skip
    return tiny.run(model, params(model), policy, rows, prompts, new, sampling=sampling)


@contextlib.contextmanager
def rival(model: ModelConfig, config, batch: int, max_tokens: int, dtype: str = "float32"):
    """A rival policy and who keeps its rows (None when they are on the device)."""
    layout = rival_layout(model, config, batch, max_tokens, dtype)
    policy, rows = rival_policy(layout, config)
    yield policy, rows
    if rows is not None:
        rows.close()


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode(model, policy, weights, tables, state, tokens):
    """Logits [n, B, V] of decode steps over given tokens [n, B]."""

    def step(state, token):
        logits, state = gen.decode_step(model, policy, weights, tables, state._replace(token=token))
        return state, logits

    return jax.lax.scan(step, state, tokens)[1]


def answers(model, policy, prompts, steps: int) -> np.ndarray:
    """Logits [1 + steps, B, V] of prompts that go on with random tokens: its own are ever the same."""
    weights, tables = params(model), policy.tables()
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    tokens = np.zeros((len(prompts), gen.bucket_length(int(lengths.max()), policy.layout.max_tokens)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    layers, shared, first = gen.prefill(model, policy, weights, tables, jnp.asarray(tokens), lengths, gen.JITTED)
    zero = jnp.zeros_like(lengths)
    state = gen.DecodeState(layers, shared, lengths, zero, zero, jnp.zeros(lengths.shape, bool))
    more = jnp.asarray([tiny.prompt(steps, seed=100 + b) for b in range(len(prompts))], jnp.int32).T
    return np.concatenate([first[None], decode(model, policy, weights, tables, state, more)])


@functools.cache
def full_answers(model):
    """What full attention answers to the prompts of `check_full_budget`."""
    return answers(model, tiny.full_policy(model, 2, 128), PROMPTS, 24)


def check_full_budget(model, config) -> None:
    """A budget of 100 % is full attention: logits within 1e-4, the same tokens, over 24 steps."""
    with rival(model, config, 2, 128) as (policy, _):
        logits = answers(model, policy, PROMPTS, 24)
    np.testing.assert_allclose(logits, full_answers(model), rtol=1e-4, atol=1e-4)
    assert (logits.argmax(axis=2) == full_answers(model).argmax(axis=2)).all()


def check_batch(config) -> None:
    """A row of a batch gets what it gets alone, and one that has ended does not disturb the others."""
    prompts = [tiny.prompt(n, seed=n) for n in (1, 40, 64)]
    with rival(ONE, config, 3, 96) as (policy, rows):
        together = run(ONE, policy, rows, prompts, [24, 24, 5]).tokens
    with rival(ONE, config, 1, 96) as (policy, rows):
        for row in range(2):
            assert run(ONE, policy, rows, [prompts[row]], 24).tokens[0] == together[row]


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


def noise(policy, length: int, bucket: int, seed: int = 0):
    """One layer of noise for a policy that keeps no layer in full: its state, and the shared one, after prompts of
    `length` tokens; a decode step's query [B, H, D], key and value [B, K, D]; the prompts' keys [B, K, bucket, D]."""
    lay = policy.layout
    B, K, D, H = lay.batch, lay.num_kv_heads, lay.head_dim, lay.num_kv_heads * lay.full.group
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rows, query = draw(B, K, bucket, 2, D), draw(B, H, D)
    queries = draw(B, policy.sampled_queries, H, D) if policy.sampled_queries else None
    prompt = Prefilled(rows, query, jnp.full((B,), length, jnp.int32), queries)
    state, shared = gen.JITTED.absorb(
        policy, policy.layer_kind(0), policy.tables()[0], prompt, jnp.zeros((1,), jnp.int32), policy.allocate()
    )
    return state, shared, query, draw(B, K, D), draw(B, K, D), rows[:, :, :, 0]


def heaviest(query, keys, begin: int, end: int, number: int) -> list[list[list[int]]]:
    """The `number` tokens of [begin, end) with the largest exact masses, ascending, by [B][K]."""
    scores = dense.scores(dense.grouped(query, keys.shape[1]), keys[:, :, begin:end], keys.shape[3] ** -0.5)
    best = jax.lax.top_k(dense.group_mass(scores), number)[1] + begin
    return np.sort(np.asarray(best), axis=2).tolist()


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(policy, layer, tables, query, k, v, at, state, shared):
    state, shared = policy.prefetch(layer, tables, query, at, state, shared)
    return policy.attend(layer, tables, query, k, v, at, state, shared)
