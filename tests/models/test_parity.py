"""Tiny Llama and Qwen2 against transformers, rung by rung: rotary embedding, projections, attention, layers, logits,
tokens. Recorded results by default; the same comparison with transformers itself under the marker `live`."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import models
from clo_jax.models import rope
from tests.models import forward, tiny

RECORDED = pathlib.Path(__file__).parent / "recorded"
TOLERANCE = 1e-4


def recorded(name):
    with np.load(RECORDED / f"{name}.npz") as stored:
        return dict(stored)


def compare_model(name, want):
    config = models.config_from_hf(tiny.MODELS[name])
    params = tiny.params(tiny.MODELS[name])
    if config.rope.rope_type == "dynamic":
        got_inv = rope.dynamic_inverse_frequencies(config, jnp.full((1,), tiny.PROMPT, jnp.int32))[0]
    else:
        got_inv = rope.inverse_frequencies(config)[0]
    np.testing.assert_allclose(got_inv, want["inv_freq"], rtol=1e-6, atol=0)
    got = forward.run(config, params, tiny.prompt(), tiny.NEW)
    np.testing.assert_array_equal(got["query"], got["q"])  # the guess of a layer's query is its query
    for rung in ("q", "k", "v", "attended", *(f"layer{i}" for i in range(config.num_layers)), "logits"):
        assert np.abs(want[rung]).max() > 0.1 and got[rung].dtype == np.float32
        np.testing.assert_allclose(got[rung], want[rung], rtol=0, atol=TOLERANCE, err_msg=f"{name}: {rung}")
    np.testing.assert_array_equal(got["tokens"], want["tokens"])


def compare_rope(name, want):
    config = models.config_from_hf(tiny.rope_model(*tiny.ROPES[name]))
    for index, length in enumerate(tiny.ROPE_LENGTHS):
        if config.rope.rope_type == "dynamic":
            got = rope.dynamic_inverse_frequencies(config, jnp.full((1,), length, jnp.int32))[0]
        else:
            got = rope.inverse_frequencies(config)[0]
        np.testing.assert_allclose(got, want["inv_freq"][index], rtol=1e-6, atol=0, err_msg=f"{name}: length {length}")
    if config.rope.rope_type != "dynamic":
        assert rope.inverse_frequencies(config)[1] == pytest.approx(float(want["factor"]), rel=1e-9)
        positions = jnp.asarray([tiny.ROPE_POSITIONS], jnp.int32)
        cos, sin = jax.jit(rope.rotation, static_argnums=0)(config, positions, jnp.ones((1,), jnp.int32))
        # At the last position one unit in the last place of a frequency turns the angle by 0.006.
        for got, key in ((cos, "cos"), (sin, "sin")):
            np.testing.assert_allclose(got[0, :-1], want[key][:-1], rtol=0, atol=1e-3, err_msg=f"{name}: {key}")
            np.testing.assert_allclose(got[0, -1], want[key][-1], rtol=0, atol=2e-2, err_msg=f"{name}: {key}")


@pytest.mark.parametrize("name", tiny.MODELS)
def test_model_equals_recorded(name):
    compare_model(name, recorded(name))


@pytest.mark.parametrize("name", tiny.ROPES)
def test_rope_equals_recorded(name):
    stored = recorded("ropes")
    compare_rope(name, {key.split("/")[1]: value for key, value in stored.items() if key.startswith(f"{name}/")})


@pytest.mark.live
@pytest.mark.parametrize("name", tiny.MODELS)
def test_model_equals_transformers(name):
    from tests.models import record

    compare_model(name, record.model_results(name))


@pytest.mark.live
@pytest.mark.parametrize("name", tiny.ROPES)
def test_rope_equals_transformers(name):
    from tests.models import record

    compare_rope(name, record.rope_results(name))
