"""Training on planted data finds what matters, is the same every time, and goes on after an interruption."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.calibrate.hash_training import HashSettings, bytes_of_a_layer, train_layers, untrained
from clo_jax.calibrate.hashing import TrainedHash, better_of, choose, train
from clo_jax.calibrate.mass import selection_mass
from clo_jax.calibrate.text import Prompts
from tests import tiny
from tests.calibrate import planted

QUICK = HashSettings("sign", 32, steps=75, queries=24, keys=128)
HELD_OUT = (77, 78)


def mass(weights, retriever):
    each = [selection_mass(planted.samples(seed), jnp.asarray(weights), retriever, (0.1,)) for seed in HELD_OUT]
    return np.mean(each)


@pytest.mark.parametrize(("retriever", "gain"), [("sign", 0.015), ("hata", 0.05)])
def test_noise_is_left_out_of_the_codes(retriever, gain):
    settings = dataclasses.replace(QUICK, retriever=retriever)
    (weights,), (losses,) = train_layers([[planted.samples(seed) for seed in range(1, 5)]], [3], settings)
    assert weights.shape == (2, 16, 32) and weights.dtype == np.float32 and losses.shape == (75,)
    before, after = mass(untrained(settings, 2, 16), retriever), mass(weights, retriever)
    assert after > before + gain, f"{before:.3f} -> {after:.3f}"


def test_the_objective_of_the_paper_goes_down():
    settings = dataclasses.replace(QUICK, retriever="hata", objective="hata")
    (weights,), (losses,) = train_layers([[planted.samples(seed) for seed in range(1, 5)]], [3], settings)
    assert np.isfinite(weights).all() and losses[-5:].mean() < 0.8 * losses[:5].mean()


def test_training_is_a_function_of_its_arguments():
    data = [planted.samples(1), planted.samples(2, length=200)]
    quick = dataclasses.replace(QUICK, steps=25)
    told = []
    first, _ = train_layers([data], [3], quick, told.append)
    assert told == [25] and np.array_equal(first, train_layers([data], [3], quick)[0])
    assert not np.array_equal(first, train_layers([data], [4], quick)[0])
    assert not np.array_equal(first, train_layers([data], [3], dataclasses.replace(quick, seed=1))[0])


@pytest.mark.parametrize("retriever", ["sign", "hata"])
def test_layers_side_by_side_are_trained_as_each_alone(retriever):
    quick = dataclasses.replace(QUICK, retriever=retriever, steps=25)
    data = [[planted.samples(seed), planted.samples(seed + 1, length=200)] for seed in (1, 3)]
    together, losses = train_layers(data, [3, 5], quick)
    assert together.shape == (2, 2, 16, 32) and losses.shape == (2, 25)
    for layer, samples, weights in zip([3, 5], data, together, strict=True):
        (alone,), _ = train_layers([samples], [layer], quick)
        np.testing.assert_allclose(weights, alone, atol=2e-3)


def test_groups_of_layers_give_what_single_layers_give(tmp_path):
    config, params = tiny.LLAMA, tiny.params(tiny.LLAMA)
    prompts = Prompts([tiny.prompt(150), tiny.prompt(160, seed=1)], [tiny.prompt(155, seed=2)])
    quick, said = dataclasses.replace(QUICK, steps=25), []
    single = train(config, params, prompts, [quick], queries_per_prompt=16)[0]
    grouped = train(
        config, params, prompts, [quick], queries_per_prompt=16, layers_at_once=2, work=tmp_path,
        progress=lambda *args: said.append(args),
    )[0]  # fmt: skip
    assert said == [(0, 3, "layers 0 to 1, sign-32, step 25"), (2, 3, "layer 2, sign-32, step 25")]
    assert len(list(tmp_path.iterdir())) == 3
    np.testing.assert_allclose(grouped.mass, single.mass, atol=0.02)
    again = train(config, params, prompts, [quick], queries_per_prompt=16, layers_at_once=3, work=tmp_path)[0]
    np.testing.assert_array_equal(again.weights, grouped.weights)


def test_bytes_of_a_layer_count_its_keys():
    few, many = (bytes_of_a_layer(tiny.LLAMA, [1000] * number, [QUICK]) for number in (2, 4))
    assert many - few == 2 * 2 * (4 * tiny.LLAMA.num_kv_heads * tiny.LLAMA.head_dim * 1000) * 2


def test_an_interrupted_run_goes_on_to_the_same_result(tmp_path):
    config = tiny.LLAMA
    params = tiny.params(config)
    prompts = Prompts([tiny.prompt(150), tiny.prompt(160, seed=1)], [tiny.prompt(155, seed=2)])
    settings = [dataclasses.replace(QUICK, steps=25), dataclasses.replace(QUICK, retriever="hata", steps=25)]
    options = dict(queries_per_prompt=16)
    whole = train(config, params, prompts, settings, **options)

    def stop(done, total, what):
        if (done, total) == (1, 3) and "hata" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, params, prompts, settings, work=tmp_path, progress=stop, **options)
    assert len(list(tmp_path.iterdir())) == 3, "layer 0 of both kinds and layer 1 of the first"
    said = []
    resumed = train(
        config, params, prompts, settings, work=tmp_path, progress=lambda *args: said.append(args), **options
    )
    assert {what.partition(", step")[0] for *_, what in said} == {
        "layer 1, hata-32", "layer 2, sign-32", "layer 2, hata-32",
    }  # fmt: skip
    for one, other in zip(whole, resumed, strict=True):
        for name in ("weights", "mass", "untrained_mass", "losses"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    sign, hata = (one.part(config) for one in whole)
    assert sign.misfit(config) is None and sign.part_name == "hash-sign-32"
    assert set(sign.held_out_mass) == {"0.1", "0.05", "0.02"}
    # Keys of random weights leave few steps of `sign` nothing to gain: it says that it is not trained. `hata` gains.
    assert hata.trained and not sign.trained and not whole[0].gained.any()
    assert np.array_equal(sign.weights[0], untrained(settings[0], config.num_kv_heads, config.head_dim))
    again = train(config, params, prompts, settings[:1], layers=[1], **options)[0]
    assert np.array_equal(again.weights[0], whole[0].weights[1])
    with pytest.raises(ValueError, match="^layers: got"):
        again.part(config)


def test_each_head_keeps_the_better_weights():
    trained, plain = np.ones((2, 3, 32), np.float32), np.zeros((2, 3, 32), np.float32)
    masses = np.array([[0.9, 0.8], [0.5, 0.9]]), np.array([[0.8, 0.9], [0.6, 0.2]])
    weights, mass, untrained_mass = better_of((trained, masses[0]), (plain, masses[1]))
    assert weights[0].all() and not weights[1].any()
    np.testing.assert_array_equal(mass, [[0.9, 0.9], [0.5, 0.2]])
    np.testing.assert_array_equal(untrained_mass, masses[1])


def result(retriever, bits, mass):
    masses = np.full((2, 3, 2), mass)
    settings = HashSettings(retriever, bits)
    return TrainedHash(settings, (0, 1), np.zeros((2, 2, 16, bits), np.float32), masses, masses - 0.1, masses)


def test_the_better_retriever_at_equal_bytes_is_chosen_and_the_reason_given():
    sign, hata = result("sign", 128, 0.98), result("hata", 128, 0.97)
    choice = choose([hata, sign, result("sign", 64, 0.99)])
    assert (choice.retriever, choice.hash_bits) == ("sign", 128)
    assert choice.why == "held-out attention mass at 128 bits and 10% of the tokens: hata 0.9700, sign 0.9800"
    assert choose([sign, result("hata", 128, 0.99)]).retriever == "hata"
    assert choose([sign, result("sign", 256, 0.99)]).hash_bits == 256
    assert sign.figures()["untrained_mass"]["0.1"] == pytest.approx(0.88)
    with pytest.raises(ValueError, match="^trained: got nothing"):
        choose([])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hash_bits": 48}, "hash_bits"),
        ({"retriever": "exact"}, "retriever"),
        ({"objective": "hata"}, "objective"),
        ({"steps": 30}, "steps"),
        ({"keys": 0}, "keys"),
    ],
)
def test_settings_that_make_no_sense(changes, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        HashSettings(**{"retriever": "sign", "hash_bits": 64, **changes})


def test_more_queries_than_a_prompt_has_are_refused():
    prompts = Prompts([tiny.prompt(150)], [tiny.prompt(20)])
    with pytest.raises(ValueError, match="^queries_per_prompt: got 64"):
        train(tiny.LLAMA, tiny.params(tiny.LLAMA), prompts, [QUICK], queries_per_prompt=64)
