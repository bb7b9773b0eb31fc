"""Similarity and traces: cosines by hand, the policy's own counts, and what the extremes must give."""

import dataclasses

import numpy as np
import pytest

from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import HashWeights, Importance
from clo_jax.cache.layout import CacheLayout
from clo_jax.calibrate import similarity
from clo_jax.config import CloConfig
from tests import tiny

L, H, K, D = tiny.LLAMA.num_layers, tiny.LLAMA.num_heads, tiny.LLAMA.num_kv_heads, tiny.LLAMA.head_dim
SMALL = CloConfig(sparsity=0.2, hash_bits=64, recent_tokens=16, flush_tokens=8)
STEPS = 20
PROMPTS = [tiny.prompt(100), tiny.prompt(61, seed=1)]


@pytest.fixture(scope="module")
def params():
    return tiny.params(tiny.LLAMA)


def measure(params, clo, **options):
    return similarity.measure(tiny.LLAMA, params, PROMPTS, steps=STEPS, clo=clo, **options)


def test_cosine_by_hand():
    a = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    b = np.array([[[1.0, 1.0], [0.0, 1.0]]])
    assert similarity.cosine(a, b, np.array([1.0, 1.0])) == pytest.approx((np.sqrt(0.5) + 1) / 2)
    assert similarity.cosine(a, b, np.array([1.0, 0.0])) == pytest.approx(np.sqrt(0.5))
    assert similarity.cosine(a, b, np.zeros(2)) == pytest.approx((np.sqrt(0.5) + 1) / 2)
    assert similarity.cosine(a, 0 * b, np.ones(2)) == 0


def test_the_schedule_is_the_policys():
    layout = CacheLayout.clo(tiny.LLAMA, SMALL, 1, 200, "float32")
    plan = similarity.schedule(layout, SMALL, 100, STEPS)
    assert len(plan) == STEPS + 1
    assert plan[0] == (4, 80, 20, 30, True) and plan[1] == (4, 80, 20, 30, False)
    # Position 104 is the first with 88 tokens flushed.
    assert [m for m, step in enumerate(plan) if step.forced] == [0, 5, 13]
    assert plan[5].end == 88 and plan[13].end == 96
    calm = similarity.schedule(layout, dataclasses.replace(SMALL, refresh_on_flush=False), 100, STEPS)
    assert [m for m, step in enumerate(calm) if step.forced] == [0]


@pytest.mark.parametrize("changes", [{}, {"retain": 1.0, "sim_threshold": 0.5}, {"refresh": "whole", "retain": 1.0}])
def test_counts_are_those_of_the_engine(params, changes):
    """With everything selected CLO decodes what full attention does, so that the same queries meet the same rules."""
    every = tuple((layer, ()) for layer in range(L))
    clo = dataclasses.replace(SMALL, sparsity=1.0, resident_heads=every, **changes)
    _, trace = measure(params, clo)
    for number, prompt in enumerate(PROMPTS):
        with tiny.clo_policy(tiny.LLAMA, clo, 1, 160) as (policy, engine):
            session = tiny.run(tiny.LLAMA, params, policy, engine, [prompt], STEPS + 1)
            counted = session.metrics()
        assert counted.hit_rate == pytest.approx(trace.hits[number].mean())
        assert counted.rows_moved == trace.new_rows[number].sum() > 0


def test_extremes(params):
    always, trace = measure(params, dataclasses.replace(SMALL, sim_threshold=1.0))
    assert not trace.hits.any() and np.all(always.hit_rate == 0)
    assert np.allclose(always.reused_mass, always.reused_mass.clip(0.5)) and np.all(always.guess[0] > 0.9999)
    assert np.all(always.reused_mass >= always.guessed_mass - 1e-6), "the buffer holds the guessed set and more"
    unimportant = Calibration(importance=Importance(np.zeros((L, H), np.float32), "gates"))
    never, trace = measure(params, dataclasses.replace(SMALL, refresh_on_flush=False), calibration=unimportant)
    assert trace.hits.all() and trace.new_rows.sum() == 0 and np.all(never.new_rows == 0)
    assert never.settings["head_scores"] == "measured (gates)"


def test_statistics_fit_the_model_and_say_what_they_were_measured_with(params):
    weights = HashWeights("sign", np.random.default_rng(0).standard_normal((L, K, D, 64)).astype(np.float32), True)
    told = []
    found, trace = measure(
        params, SMALL, calibration=Calibration(hash_weights=(weights,)), progress=lambda *args: told.append(args)
    )
    assert found.misfit(tiny.LLAMA) is None and trace.misfit(tiny.LLAMA) is None
    assert trace.hits.shape == (2, STEPS, L, K) and trace.lengths.tolist() == [100, 61]
    assert np.all(trace.new_rows[trace.hits] == 0) and np.all(trace.new_rows <= trace.selected[:, :, None, None])
    assert found.settings["trained_hash"] and found.settings["head_scores"] == "neutral"
    assert found.hit_rate == pytest.approx(trace.hits.mean(axis=(0, 1)))
    for name in ("overlap", "guessed_mass", "reused_mass"):
        assert np.all((getattr(found, name) > 0) & (getattr(found, name) <= 1.5))
    assert told[-1] == (L, L, "layer 2 followed")
    exact, _ = measure(params, dataclasses.replace(SMALL, retriever="exact"))
    assert np.all(exact.guessed_mass >= found.guessed_mass - 0.02)
    # Layer 0's guess is exact; the group's heads are weighed by the last step's normalisers, so a little is lost.
    assert exact.guessed_mass[0] == pytest.approx(1, abs=0.02)


def test_steps_beyond_the_context_are_refused(params):
    with pytest.raises(ValueError, match="^steps: got 5000"):
        similarity.measure(tiny.LLAMA, params, PROMPTS, steps=5000)
