"""Where queries are guessed from: the residual stream before or after the attention of the layer before."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import generate as gen
from clo_jax import models
from clo_jax.ops import causal_attention
from clo_jax.policies.base import LATER, Position
from clo_jax.policies.full import FullPolicy
from tests import tiny


@dataclasses.dataclass(frozen=True)
class GuessedFromInput(FullPolicy):
    """Full attention that keeps the query that each layer's prefetch got."""

    guess_from: ClassVar = "input"

    def absorb(self, kind, tables, prompt, layer, shared):
        state, shared = super().absorb(kind, tables, prompt, layer, shared)
        return state | {"guess": prompt.query}, shared

    def prefetch(self, layer, tables, query, at, state, shared):
        return state | {"guess": query}, shared

    def attend(self, layer, tables, q, k, v, at, state, shared):
        guess = state["guess"]
        out, state, shared = super().attend(layer, tables, q, k, v, at, state, shared)
        return out, state | {"guess": guess}, shared


class GuessedFromAttention(GuessedFromInput):
    guess_from: ClassVar = "attention"


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen2"])
@pytest.mark.parametrize("kind", [GuessedFromInput, GuessedFromAttention])
def test_the_guess_is_of_the_stream_that_it_names(config, kind):
    params, prompt = tiny.params(config), tiny.prompt(30)
    policy = kind(tiny.full_policy(config, 1, 64).layout)
    N = len(prompt) - 1
    lengths, tables = jnp.array([N], jnp.int32), policy.tables()
    layers, shared, _ = gen.prefill(config, policy, params, tables, jnp.asarray([prompt[:N]], jnp.int32), lengths)
    last = jnp.array([prompt[N]], jnp.int32)
    state = gen.DecodeState(layers, shared, lengths, last, jnp.zeros_like(lengths), jnp.zeros((1,), bool))
    _, state = jax.jit(gen.decode_step, static_argnums=(0, 1))(config, policy, params, tables, state)

    model, length = models.merge(config, params), jnp.array([N + 1], jnp.int32)
    rope = models.rotation(config, jnp.arange(N + 1, dtype=jnp.int32)[None], length)
    x = stream = model.embed(jnp.asarray([prompt], jnp.int32))
    for layer, found in zip(model.layers, state.layers, strict=True):
        assert np.allclose(found["guess"][0], layer.query(stream, rope)[0, N], atol=1e-4)
        q, k, v = layer.qkv(x, rope)
        middle = layer.add_attention(x, causal_attention.reference(q, k, v, length))
        stream = x if kind is GuessedFromInput else middle
        x = layer.add_mlp(middle)


@pytest.mark.parametrize("kind", [GuessedFromInput, GuessedFromAttention])
def test_what_comes_after_a_prefetch_is_computed_from_what_it_hands_through(kind):
    class Marking(kind):
        def prefetch(self, layer, tables, query, at, state, shared):
            state, shared = super().prefetch(layer, tables, query, at, state, shared)
            return state, shared | {LATER: shared[LATER] + 1}

    config, params = tiny.LLAMA, tiny.params(tiny.LLAMA)
    policy = Marking(tiny.full_policy(config, 1, 64).layout)
    prompt, lengths, tables = jnp.asarray([[5]], jnp.int32), jnp.array([1], jnp.int32), policy.tables()
    layers, shared, _ = gen.prefill(config, policy, params, tables, prompt, lengths)
    state = gen.DecodeState(layers, shared, lengths, prompt[:, 0], lengths, jnp.zeros((1,), bool))
    logits, state = gen.decode_step(config, policy, params, tables, state)
    assert set(state.shared) == set(shared)

    at, rows = Position(jnp.array([1], jnp.int32), jnp.ones((1,), bool)), list(layers)
    model, rope = models.merge(config, params), models.rotation(config, jnp.array([[1]], jnp.int32), lengths + 1)
    x = model.embed(prompt)
    for index, layer in enumerate(model.layers):
        first, last = index == 0, index == config.num_layers - 1
        # What attention is computed from has been through the first layer's own prefetch, and what is computed from the
        # stream that names the guess through the next layer's, the last layer's excepted.
        normed = layer.input_norm(x) + int(first) + int(not last and kind is GuessedFromInput)
        q, k, v = (part[:, 0] for part in layer.qkv_of(normed, rope))
        attended, *_ = policy.attend(index, tables[index], q, k, v, at, rows[index], shared)
        x = layer.add_attention(x, attended[:, None])
        x = x + layer.mlp(layer.post_norm(x) + int(not last and kind is GuessedFromAttention))
    assert np.allclose(logits, model.logits(x)[:, 0], atol=1e-4)
