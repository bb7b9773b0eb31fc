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
