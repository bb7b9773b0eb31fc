"""Gate optimisation: attention against its dense form, gradients against finite differences, a planted retrieval head,
and a run that is interrupted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.calibrate import gated
from clo_jax.calibrate.importance import GateSettings, distance_gradient, optimise_gates, own_states, stretched
from clo_jax.calibrate.passkeys import Example
from clo_jax.calibrate.quick import distant_mass, quick_estimate
from clo_jax.errors import CheckpointError
from clo_jax.ops import causal_attention
from tests import tiny
from tests.calibrate import planted_head as planted

SETTINGS = GateSettings(sink=4, recent=16, steps=40, rate=0.1, lengths=(96,))


def random_example(length, answers=5, seed=0):
    answer = np.zeros(length, bool)
    answer[-answers - 1 : -1] = True
    return Example(np.asarray(tiny.prompt(length, seed), np.int32), answer)


def dense(q, k, v, sink, recent):
    """Attention over a window by its definition, in NumPy."""
    _, N, H, D = q.shape
    group = H // k.shape[2]
    token, position = np.arange(N)[None, :], np.arange(N)[:, None]
    seen = (token <= position) & ((token < sink) | (token > position - recent))
    out = np.empty(q.shape)
    for h in range(H):
        scores = np.where(seen, q[0, :, h] @ k[0, :, h // group].T / np.sqrt(D), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[0, :, h] = weights / weights.sum(axis=1, keepdims=True) @ v[0, :, h // group]
    return out


@pytest.mark.parametrize(
    "tokens, sink, recent",
    [(1, 0, 1), (1, 4, 16), (30, 0, 1), (30, 4, 16), (300, 4, 16), (600, 16, 300), (600, 400, 50), (300, 0, 1000)],
)
def test_attention_over_a_window(tokens, sink, recent):
    rng = np.random.default_rng(tokens)
    q, k, v = (rng.standard_normal((1, tokens, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    found = gated.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), gated.Window(sink, recent))
    np.testing.assert_allclose(found, dense(q, k, v, sink, recent), atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 300])
def test_attention_without_a_window_is_that_of_prefill(tokens):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, tokens, heads, 16)) for key, heads in zip(keys, (6, 2, 2), strict=True))
    wanted = causal_attention.reference(q, k, v, jnp.array([tokens], jnp.int32))
    np.testing.assert_allclose(gated.attention(q, k, v), wanted, atol=1e-5)


@pytest.mark.parametrize("per", ["kv", "query"])
def test_gradient_against_finite_differences(per):
    config, weights = tiny.LLAMA, tiny.params(tiny.LLAMA)
    width = config.num_kv_heads if per == "kv" else config.num_heads
    window, example = gated.Window(2, 8), random_example(50)
    rng = np.random.default_rng(1)
    gates = rng.uniform(0.2, 0.8, (config.num_layers, width)).astype(np.float32)
    wanted = own_states(config, weights, example, window)

    def distance(gates):
        return distance_gradient(config, weights, jnp.asarray(gates, jnp.float32), example, wanted, window)

    _, grads = distance(gates)
    assert np.all(np.abs(grads) > 1e-7)
    for layer, head in [(0, 0), (1, width - 1), (config.num_layers - 1, 0)]:
        step = np.zeros_like(gates)
        step[layer, head] = 0.05
        slope = (float(distance(gates + step)[0]) - float(distance(gates - step)[0])) / 0.1
        np.testing.assert_allclose(grads[layer, head], slope, rtol=0.02, atol=1e-6)
    direction = rng.standard_normal(gates.shape).astype(np.float32)
    slope = (float(distance(gates + 0.02 * direction)[0]) - float(distance(gates - 0.02 * direction)[0])) / 0.04
    np.testing.assert_allclose(np.sum(np.asarray(grads) * direction), slope, rtol=0.02)


def test_open_gates_change_nothing():
    config, weights, example = tiny.LLAMA, tiny.params(tiny.LLAMA), random_example(50)
    window = gated.Window(2, 8)
    wanted = own_states(config, weights, example, window)
    distance, _ = distance_gradient(config, weights, jnp.ones((3, 2)), example, wanted, window)
    assert float(distance) < 1e-12
    closed, _ = distance_gradient(config, weights, jnp.zeros((3, 2)), example, wanted, window)
    assert float(closed) > 1e-4


@pytest.mark.parametrize("per", ["kv", "query"])
def test_a_planted_retrieval_head_is_found(per):
    examples, seen = [planted.example(seed) for seed in range(8)], []
    settings = dataclasses.replace(SETTINGS, per=per)
    found = optimise_gates(planted.CONFIG, planted.params(), examples, settings, progress=seen.append)
    where = (planted.LAYER, planted.KV_HEAD if per == "kv" else planted.HEAD)
    others = np.delete(found.scores.reshape(-1), np.ravel_multi_index(where, found.scores.shape))
    assert found.scores[where] > 0.9
    assert others.max() < 0.1
    assert [done.step for done in seen] == list(range(1, 41))
    assert found.distances.shape == found.mean_gates.shape == (40,)


def test_the_quick_estimate_finds_it_too():
    examples, done = [planted.example(seed) for seed in range(4)], []
    window = gated.Window(4, 16)
    mass = distant_mass(planted.CONFIG, planted.params(), examples, window, lambda *figures: done.append(figures))
    assert mass.shape == (2, 4)
    assert mass[planted.LAYER, planted.HEAD] > 0.9
    part = quick_estimate(planted.CONFIG, planted.params(), examples, window)
    assert part.source == "quick estimate"
    assert part.scores[planted.LAYER, planted.HEAD] == 1
    assert np.sort(part.scores.reshape(-1))[-2] < 0.1
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [7, 10])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, stop_at):
    examples = [planted.example(seed) for seed in range(3)]
    settings = dataclasses.replace(SETTINGS, steps=16)
    weights, state = planted.params(), tmp_path / "gates.npz"
    whole = optimise_gates(planted.CONFIG, weights, examples, settings)

    def stop(done):
        if done.step == stop_at:
            raise Stop

    with pytest.raises(Stop):
        optimise_gates(planted.CONFIG, weights, examples, settings, state_file=state, save_every=5, progress=stop)
    steps = []
    continued = optimise_gates(
        planted.CONFIG, weights, examples, settings, state_file=state, progress=lambda done: steps.append(done.step)
    )
    assert steps == list(range(stop_at + 1, 17))
    np.testing.assert_array_equal(continued.scores, whole.scores)
    np.testing.assert_array_equal(continued.distances, whole.distances)
    np.testing.assert_array_equal(continued.mean_gates, whole.mean_gates)


def test_a_state_of_other_settings_is_refused_by_name(tmp_path):
    examples, state = [planted.example(0)], tmp_path / "gates.npz"
    settings = dataclasses.replace(SETTINGS, steps=1)
    optimise_gates(planted.CONFIG, planted.params(), examples, settings, state_file=state)
    for changed, given in (
        (dataclasses.replace(settings, rate=0.2), examples),
        (settings, [planted.example(1)]),
    ):
        with pytest.raises(CheckpointError, match="gates.npz: of another model, other prompts or other settings"):
            optimise_gates(planted.CONFIG, planted.params(), given, changed, state_file=state)
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="gates.npz: no readable state"):
        optimise_gates(planted.CONFIG, planted.params(), examples, settings, state_file=state)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"per": "layer"}, "per: got 'layer'"),
        ({"steps": 0}, "steps: got 0"),
        ({"sink": -1}, "sink: got -1"),
        ({"rate": 0.0}, "rate, sparsity_weight: got 0.0"),
        ({"lengths": (80,)}, r"lengths: got \(80,\), wanted prompts longer than sink \+ recent = 80"),
    ],
)
def test_settings_are_checked(changes, named):
    with pytest.raises(ValueError, match=named):
        GateSettings(**changes)


def test_no_examples():
    with pytest.raises(ValueError, match="examples: got none"):
        optimise_gates(planted.CONFIG, planted.params(), [], SETTINGS)


def test_stretched_gates_have_an_upper_half_of_mean_one():
    gates = np.array([[0.0, 0.2], [0.4, 0.8]], np.float32)
    scores, factor = stretched(gates)
    assert factor == pytest.approx(1 / 0.6)
    np.testing.assert_allclose(scores, [[0.0, 1 / 3], [2 / 3, 1.0]], rtol=1e-6)
    assert scores.dtype == np.float32
    already = np.array([[0.1, 0.3], [1.0, 1.0]], np.float32)
    np.testing.assert_array_equal(stretched(already)[0], already)


def test_gates_that_are_all_shut_stay_so():
    scores, factor = stretched(np.zeros((2, 2), np.float32))
    assert factor == 1.0 and not scores.any()
