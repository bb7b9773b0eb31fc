"""Collected queries and keys are those of a plain dense forward pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import models
from clo_jax.calibrate import collect
from clo_jax.ops import causal_attention
from tests import tiny


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen2"])
@pytest.mark.parametrize("guess_from", ["input", "attention"])
def test_equals_a_dense_pass(config, guess_from):
    params, prompts = tiny.params(config), [tiny.prompt(70), tiny.prompt(41, seed=1)]
    positions = [[3, 40, 69], [0, 20, 40]]
    model = models.merge(config, params)
    found = list(collect.layers(config, params, prompts, positions, guess_from))
    assert len(found) == config.num_layers
    for number, (prompt, at) in enumerate(zip(prompts, positions, strict=True)):
        N = len(prompt)
        length = jnp.array([N], jnp.int32)
        x = before = model.embed(jnp.asarray([prompt], jnp.int32))
        rope = model.rope(jnp.arange(N, dtype=jnp.int32)[None], length)
        for layer, samples in zip(model.layers, found, strict=True):
            one = samples[number]
            q, k, v = layer.qkv(x, rope)
            assert one.length == N and one.positions.tolist() == at
            assert np.allclose(one.queries, q[0, np.array(at)], atol=1e-4)
            assert np.allclose(one.guesses, layer.query(before, rope)[0, np.array(at)], atol=1e-4)
            assert np.allclose(one.keys[:, :N], k[0].transpose(1, 0, 2), atol=1e-4)
            middle = layer.add_attention(x, causal_attention.reference(q, k, v, length))
            before = middle if guess_from == "attention" else x
            x = layer.add_mlp(middle)


@pytest.mark.parametrize("positions", [[[5]], [[-1]], [[]]])
def test_positions_outside_are_refused(positions):
    with pytest.raises(ValueError, match="^positions: got"):
        list(collect.layers(tiny.LLAMA, tiny.params(tiny.LLAMA), [[1, 2, 3, 4, 5]], positions))
