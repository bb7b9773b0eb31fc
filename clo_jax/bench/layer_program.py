"""The program that `clo_jax.bench.layer` times: decode steps of a model whose hits, misses and new rows are given.

The ops, the policy and the matrix products are the product's; three things are not a model's. A table says which heads
miss at which step. The queries that select rows turn by a given angle a step, each in a plane of its own, so that a
share of each refreshed set is new. And every layer, the first one too, gets its rows one layer ahead: the last layer
prefetches for the first layer of the next step, as a layer in the middle of a deep model is served.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clo_jax import models
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import ModelConfig
from clo_jax.decode_step import norms_of_stream
from clo_jax.models.layers import add_and_norm
from clo_jax.policies.base import LATER, LayerState, Position, Prefilled, Shared, Tables
from clo_jax.policies.clo import CloPolicy

NEVER, ALWAYS = 2.0, -2.0  # thresholds of the cosine that no query and that every query reaches


class Plan(NamedTuple):
    """What a run is told; operands, so that one compiled program serves every case."""

    misses: jax.Array  # [P, L, Ko] bool: heads that miss at each step; step t takes row t mod P
    angle: jax.Array  # [] float32: radians that a query turns in one step
    planes: jax.Array  # [L, 2, H, D] float32: the plane that each query head turns in
    nothing: jax.Array  # [] bfloat16 or float32 zero: keeps values alive that would not matter otherwise


class State(NamedTuple):
    """What a step changes; donated."""

    x: jax.Array  # [1, 1, hidden] residual stream
    layers: tuple[LayerState, ...]  # by layer of the engine: see `engine_layer`
    shared: Shared
    step: jax.Array  # [] int32


def engine_layer(layer: int, num_layers: int) -> int:
    """Engine layers are numbered in the order in which a step posts their requests: the model's second layer first."""
    return (layer - 1) % num_layers


def turned(planes: jax.Array, angle: jax.Array) -> jax.Array:
    """Queries [1, H, D] after a turn by `angle` in planes [2, H, D]."""
    return (planes[0] * jnp.cos(angle) + planes[1] * jnp.sin(angle))[None]


def decode_step(
    config: ModelConfig, policy: CloPolicy | None, params, tables: tuple[Tables, ...], plan: Plan, x0: jax.Array,
    position: jax.Array, state: State,
) -> State:  # fmt: skip
    """One token at `position` [1] through all layers. Without a policy only the matrix products: those of the guessed
    queries too."""
    model, L = models.merge(config, params), config.num_layers
    layers, shared = list(state.layers), state.shared
    rope = models.rotation(config, position[:, None], position + 1)
    followers = [*model.layers[1:], model.layers[0]]
    inputs, middles = norms_of_stream(model, "input" if policy is None else policy.guess_from, followers)

    def prefetch(index: int, normed: jax.Array, guessed_from: jax.Array | None = None) -> jax.Array:
        """For the layer after `index`, as `clo_jax.decode_step` does for a layer."""
        nonlocal shared
        if guessed_from is None:
            return normed
        ahead, late = (index + 1) % L, (index + 1) // L
        guess = followers[index].query_of(guessed_from, rope)[:, 0]
        target = engine_layer(ahead, L)
        row = (state.step + late) % plan.misses.shape[0]
        table = tables[target] | {"thresholds": jnp.where(plan.misses[row, target], NEVER, ALWAYS)}
        angle = plan.angle * (state.step + late).astype(jnp.float32)
        query = turned(plan.planes[target], angle).astype(normed.dtype) + plan.nothing * guess
        at = Position(position + late, jnp.ones((1,), bool))
        handed = {**shared, LATER: normed}
        layers[target], handed = policy.prefetch(target, table, query, at, layers[target], handed)
        shared = {name: array for name, array in handed.items() if name != LATER}
        return handed[LATER]

    x = x0 + plan.nothing * state.x
    normed, *ahead = (norm(x) for norm in inputs[0])
    for index, layer in enumerate(model.layers):
        if policy is None:
            q, k, v = layer.qkv_of(normed, rope)
            guess = followers[index].query_of(*ahead, rope)
            attended = q + plan.nothing * (guess + jnp.sum(k) + jnp.sum(v))
        else:
            normed = prefetch(index, normed, *ahead)
            q, k, v = (part[:, 0] for part in layer.qkv_of(normed, rope))
            own = engine_layer(index, L)
            at = Position(position, jnp.ones((1,), bool))
            out, layers[own], shared = policy.attend(own, tables[own], q, k, v, at, layers[own], shared)
            attended = out[:, None]
        x, normed, *ahead = add_and_norm(x, layer.project(attended), middles[index])
        normed = prefetch(index, normed, *ahead)
        x, normed, *ahead = add_and_norm(x, layer.mlp(normed), inputs[index + 1])
    return State(x, tuple(layers), shared, state.step + 1)


def decode_steps(config, policy, first: int, steps: int, params, tables, plan: Plan, x0, state: State) -> State:
    """`steps` decode steps in one program, at the positions from `first` on, however often it runs."""

    def body(i, state):
        position = jnp.full((1,), first, jnp.int32) + i
        return decode_step(config, policy, params, tables, plan, x0, position, state)

    return jax.lax.fori_loop(0, steps, body, state)


jitted_steps = jax.jit(decode_steps, static_argnums=(0, 1, 2, 3), donate_argnums=8)


def fill(
    policy: CloPolicy, tables: tuple[Tables, ...], key: jax.Array, planes: jax.Array, length: int
) -> tuple[tuple[LayerState, ...], Shared]:
    """A context of `length` random tokens in every layer, absorbed as a prefill would."""
    layout: CacheLayout = policy.layout
    shape = (1, layout.num_kv_heads, length, 2, layout.head_dim)
    rows_of = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(layout.dtype)))
    absorb = jax.jit(policy.absorb, static_argnums=0, donate_argnums=4)
    layers, shared = [], policy.allocate()
    lengths = jnp.full((1,), length, jnp.int32)
    for layer in range(layout.num_layers):
        query = turned(planes[layer], jnp.float32(0)).astype(layout.dtype)
        prompt = Prefilled(rows_of(jax.random.fold_in(key, layer)), query, lengths)
        which = jnp.full((1,), layer, jnp.int32)
        state, shared = absorb(policy.layer_kind(layer), tables[layer], prompt, which, shared)
        layers.append(state)
        jax.block_until_ready(shared)  # so that only one layer's rows exist at a time
    return tuple(layers), shared
