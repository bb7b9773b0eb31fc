"""Prefill, chunks of decode steps, whole generations: pure functions that jit, over a model, a policy and its state.

`LLM` drives `prefill` and `decode_chunk`; JAX users may call `generate` under `jax.jit` with params as a pytree.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clo_jax import models
from clo_jax.config import ModelConfig
from clo_jax.decode_step import DecodeState, decode_step
from clo_jax.ops.causal_attention import prefill_attention
from clo_jax.policies.base import LayerState, Policy, Prefilled, Shared, Tables
from clo_jax.sampling import Sampling, greedy, sample

PREFILL_CHUNK = 512  # tokens of the projections and the MLP at a time: bounds their temporaries, fills two CPU cores
SMALLEST_BUCKET = 64


class Limits(NamedTuple):
    """When a row ends."""

    max_tokens: jax.Array  # [B] int32: generated tokens
    stop: jax.Array  # [n] int32 token ids, padded with -1


def bucket_length(length: int, max_tokens: int) -> int:
    """The padded prompt length: a power of two of at least `SMALLEST_BUCKET`, or `max_tokens` itself."""
    bucket = SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    return min(bucket, max_tokens)


# --- prefill ----------------------------------------


def prefill_layer(
    config: ModelConfig, params, x: jax.Array, lengths: jax.Array, samples: int = 0
) -> tuple[jax.Array, Prefilled, jax.Array]:
    """One layer over whole prompts. The same program serves every layer and every length of a bucket.

    Args:
      config: the architecture (static).
      params: this layer's parameters.
      x: [B, N, hidden]; N is the bucket, rows beyond `lengths` are padding.
      lengths: [B] int32.
      samples: how many evenly spaced queries of each prompt to return (static).

    Returns:
      x after the layer; the layer's K, V and last queries; x of each prompt's last token [B, hidden].
    """
    layer = models.merge_layer(config, params)
    B, N, _ = x.shape
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    chunk = min(PREFILL_CHUNK, N)
    num_chunks = -(-jnp.max(lengths) // chunk)
    rope = models.rotation(config, jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N)), lengths)

    def cut(array, start):
        return jax.lax.dynamic_slice_in_dim(array, start, chunk, axis=1)

    def project(i, carry):
        # The last chunk of a bucket that is no multiple of the chunk overlaps the one before: same values, twice.
        start = jnp.minimum(i * chunk, N - chunk)
        parts = layer.qkv(cut(x, start), jax.tree.map(lambda t: cut(t, start), rope))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)
            for whole, part in zip(carry, parts, strict=True)
        )

    empty = tuple(jnp.zeros((B, N, heads, D), x.dtype) for heads in (H, K, K))
    q, k, v = jax.lax.fori_loop(0, num_chunks, project, empty)
    attended = prefill_attention(q, k, v, lengths)

    def finish(i, out):
        start = jnp.minimum(i * chunk, N - chunk)
        part = layer.finish(cut(x, start), cut(attended, start))
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    out = jax.lax.fori_loop(0, num_chunks, finish, jnp.zeros_like(x))
    rows = jnp.stack([k, v], axis=3).transpose(0, 2, 1, 3, 4)
    prompt = Prefilled(rows, take_last(q, lengths), lengths)
    if samples:
        token = jnp.arange(samples, dtype=jnp.int32)[None] * lengths[:, None] // samples
        prompt = prompt._replace(queries=jnp.take_along_axis(q, token[:, :, None, None], axis=1))
    return out, prompt, take_last(out, lengths)


def take_last(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """x[b, lengths[b] - 1] for x [B, N, ...]."""
    index = (lengths - 1).reshape(-1, *([1] * (x.ndim - 1)))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def embed(config: ModelConfig, params, tokens: jax.Array) -> jax.Array:
    """Token embeddings: [B, N] int32 -> [B, N, hidden]."""
    return models.merge(config, params).embed(tokens)


def next_logits(config: ModelConfig, params, x: jax.Array) -> jax.Array:
    """Logits after the last layer: x [B, hidden] -> float32 [B, V]."""
    return models.merge(config, params).logits(x[:, None])[:, 0]


def absorb(
    policy: Policy, kind, tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
) -> tuple[LayerState, Shared]:
    """The policy's `absorb` as a function of its own, so that it compiles once per bucket and kind of layer."""
    return policy.absorb(kind, tables, prompt, layer, shared)


class Steps(NamedTuple):
    """The programs of prefill: jitted ones for `LLM`, plain ones inside somebody's own jit."""

    embed: object
    prefill_layer: object
    absorb: object
    next_logits: object


PLAIN = Steps(embed, prefill_layer, absorb, next_logits)
JITTED = Steps(
    jax.jit(embed, static_argnums=0),
    jax.jit(prefill_layer, static_argnums=(0, 4), donate_argnums=2),
    jax.jit(absorb, static_argnums=(0, 1), donate_argnums=5),
    jax.jit(next_logits, static_argnums=0),
)


def prefill(
    config: ModelConfig, policy: Policy, params, tables: tuple[Tables, ...], tokens: jax.Array, lengths: jax.Array,
    steps: Steps = PLAIN, on_layer=lambda layer, arrays: None,
) -> tuple[tuple[LayerState, ...], Shared, jax.Array]:  # fmt: skip
    """Layer by layer over the prompts, so that only one or two layers' K and V exist at a time.

    Args:
      config, policy: static.
      params: see `clo_jax.models`.
      tables: `policy.tables()`.
      tokens: [B, N] int32, right-padded with any valid id.
      lengths: [B] int32, 1 to N.
      steps: PLAIN inside jit, JITTED outside.
      on_layer: called after each layer with its index and what it made (to show progress, to wait, to stop).

    Returns:
      per-layer states, shared state, logits of the next token [B, V] float32.
    """
    x = steps.embed(config, params, tokens)
    shared = policy.allocate()
    layers: list[LayerState] = []
    last = None
    for index in range(config.num_layers):
        x, prompt, last = steps.prefill_layer(config, params["layers"][index], x, lengths, policy.sampled_queries)
        kind = policy.layer_kind(index)
        state, shared = steps.absorb(policy, kind, tables[index], prompt, jnp.full((1,), index, jnp.int32), shared)
        layers.append(state)
        on_layer(index, (x, shared))
    return tuple(layers), shared, steps.next_logits(config, params, last)


# --- decode ----------------------------------------


def choose(logits: jax.Array, sampling: Sampling | None, count: jax.Array) -> jax.Array:
    """The next token of each row: greedy without `sampling`."""
    return greedy(logits) if sampling is None else sample(logits, sampling, count)


def accept(state: DecodeState, token: jax.Array, limits: Limits) -> DecodeState:
    """Takes `token` [B] as generated and ends the rows that reach a stop token or their limit."""
    count = jnp.where(state.done, state.count, state.count + 1)
    stopped = jnp.any(token[:, None] == limits.stop[None, :], axis=1)
    done = state.done | stopped | (count >= limits.max_tokens)
    return state._replace(token=jnp.where(state.done, state.token, token), count=count, done=done)


def begin(
    layers: tuple[LayerState, ...], shared: Shared, logits: jax.Array, lengths: jax.Array, sampling: Sampling | None,
    limits: Limits,
) -> DecodeState:  # fmt: skip
    """The state after prefill, with the first token chosen."""
    zero = jnp.zeros_like(lengths)
    state = DecodeState(layers, shared, lengths, zero, zero, limits.max_tokens <= 0)
    return accept(state, choose(logits, sampling, zero), limits)


def decode_chunk(
    config: ModelConfig, policy: Policy, chunk: int, stops_early: bool, params, tables: tuple[Tables, ...],
    state: DecodeState, sampling: Sampling | None, limits: Limits,
) -> tuple[jax.Array, DecodeState]:  # fmt: skip
    """`chunk` decode steps in one program.

    Args:
      stops_early: end when every row has ended. On a GPU the host then waits for each step to learn whether there is
        another one. Without it the host launches all steps at once, and those after the end change nothing.

    Returns:
      tokens [B, chunk] int32, -1 where a row had ended; the state.
    """

    def step(i, carry):
        out, state = carry
        was_done = state.done
        logits, state = decode_step(config, policy, params, tables, state)
        state = accept(state, choose(logits, sampling, state.count), limits)
        column = jnp.where(was_done, jnp.int32(-1), state.token)
        return jax.lax.dynamic_update_slice_in_dim(out, column[:, None], i, axis=1), state

    carry = (jnp.full((state.token.shape[0], chunk), -1, jnp.int32), state)
    if not stops_early:
        return jax.lax.fori_loop(0, chunk, step, carry)

    def unfinished(counted):
        i, (_, state) = counted
        return (i < chunk) & ~jnp.all(state.done)

    return jax.lax.while_loop(unfinished, lambda counted: (counted[0] + 1, step(*counted)), (jnp.int32(0), carry))[1]


begin_jitted = jax.jit(begin, donate_argnums=(0, 1))
decode_chunk_jitted = jax.jit(decode_chunk, static_argnums=(0, 1, 2, 3), donate_argnums=6)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    config: ModelConfig, policy: Policy, max_new_tokens: int, params, tables: tuple[Tables, ...], tokens: jax.Array,
    lengths: jax.Array, stop: jax.Array, sampling: Sampling | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """A whole generation as one pure function: prefill, then a `lax.while_loop` over decode steps.

    Args:
      config, policy, max_new_tokens: static.
      params: parameters, plain or packed (`clo_jax.models.pack`); packed are decoded faster on a GPU.
      tables: `policy.tables()`.
      tokens: [B, N] int32, right-padded; lengths: [B] int32, 1 to N. N + max_new_tokens <= policy.layout.max_tokens.
      stop: [n] int32 stop tokens (may be empty).
      sampling: None for greedy.

    Returns:
      tokens [B, max_new_tokens] int32, -1 after the end; counts [B] int32 (the stop token included).

    Raises:
      ValueError: max_new_tokens < 1, or prompt and answer do not fit the policy's layout.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1")
    if tokens.shape[1] + max_new_tokens > policy.layout.max_tokens:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} after prompts of {tokens.shape[1]} tokens, wanted at most "
            f"{policy.layout.max_tokens} tokens together"
        )
    layers, shared, logits = prefill(config, policy, params, tables, tokens, lengths)
    limits = Limits(jnp.full(lengths.shape, max_new_tokens, jnp.int32), stop)
    state = begin(layers, shared, logits, lengths, sampling, limits)
    first = state.token[:, None]
    if max_new_tokens == 1:
        return first, state.count
    rest, state = decode_chunk(config, policy, max_new_tokens - 1, True, params, tables, state, sampling, limits)
    return jnp.concatenate([first, rest], axis=1), state.count
