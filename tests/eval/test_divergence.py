"""Perplexity and divergence: hand-computed values, and a tiny model along a text."""

import dataclasses
import types

import numpy as np
import pytest

from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from clo_jax.eval import divergence
from clo_jax.eval.divergence import Plan
from clo_jax.eval.variants import variants
from tests.eval.planted import plant


def test_log_softmax_and_divergence_by_hand():
    logits = np.array([[0.0, np.log(3.0)], [1000.0, 1000.0], [0.0, -np.inf]], np.float32)
    probabilities = np.exp(divergence.log_softmax(logits))
    np.testing.assert_allclose(probabilities, [[0.25, 0.75], [0.5, 0.5], [1, 0]], atol=1e-7)
    full, other = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    want = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    np.testing.assert_allclose(divergence.divergence(full, other), [want, 0], atol=1e-12)
    ruled_out = divergence.log_softmax(logits[2:])
    assert divergence.divergence(ruled_out, np.log([[0.5, 0.5]])) == pytest.approx(np.log(2))


@pytest.fixture
def plan(checkpoint, monkeypatch):
    plant(monkeypatch, checkpoint)
    chosen = tuple(variants(["clo"], [0.1], CloConfig(), {}))
    return Plan(str(checkpoint), chosen, (1500, 2000), 41, None, 0, "auto")


def test_planted_predictions(plan, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a" * 2500)
    outcome = divergence.run(dataclasses.replace(plan, text=text))
    assert [(r.variant, r.length) for r in outcome.results] == [
        ("full", 1500), ("full", 2000), ("clo 10 %", 1500), ("clo 10 %", 2000),
    ]  # fmt: skip
    full, clo = outcome.results[0], outcome.results[3]
    # The next token has 1/2 by full attention and 1/4 by clo; the others share the rest equally.
    assert full.perplexity == pytest.approx(2) and clo.perplexity == pytest.approx(4)
    want = 0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(clo.kl, [want] * 40, rtol=1e-6)
    assert full.kl.shape == (40,) and not full.kl.any() and full.agreement == 1
    # 1/4 for the right one and 3/4 shared by 255: it is the likeliest still.
    assert clo.agreement == 1 and clo.hit_rate == 0.5
    assert full.rows_moved is None and clo.rows_moved == pytest.approx(3 * 42 / 40)
    assert full.attended == 1 and clo.selected == pytest.approx(0.1, abs=0.001) and clo.attended < 0.6
    assert clo.percentiles == pytest.approx({"p50": want, "p90": want, "p99": want, "p100": want})
    assert len(outcome.text) == 64
    # Of the heaviest tenth the last one, which has three quarters of the mass.
    assert full.recall == full.mass_kept == 1
    assert clo.recall == pytest.approx(1 / 198, rel=0.01) and clo.mass_kept == pytest.approx(0.75)


def test_selection_is_measured_along_the_first_decoded_tokens(plan, monkeypatch, checkpoint):
    planted = plant(monkeypatch, checkpoint)
    divergence.run(plan)
    assert planted.watched == [("full", 33)] * 2 + [("clo", 33)] * 2
    planted.watched.clear()
    divergence.run(dataclasses.replace(plan, recall_tokens=100, lengths=(1500,)))
    assert planted.watched == [("full", 41), ("clo", 41)]
    planted.watched.clear()
    outcome = divergence.run(dataclasses.replace(plan, recall_tokens=0))
    assert planted.watched == [] and {r.recall for r in outcome.results} == {None}
    alone = divergence.run(dataclasses.replace(plan, variants=plan.variants[:1]))
    assert planted.watched == [] and len(alone.results) == 2


def test_generated_prose_is_long_enough(plan):
    assert divergence.run(plan).text == "generated"


def test_wrong_calls_are_named(plan, tmp_path, monkeypatch):
    text = tmp_path / "short.txt"
    text.write_text("too short")
    for change, message in (
        ({"text": text}, "short.txt: got 9 tokens, wanted at least 2000"),
        ({"tokens": 1}, "tokens: got 1, wanted at least 2"),
        ({"recall_tokens": -1}, "recall_tokens: got -1, wanted at least 0"),
        ({"lengths": (200, 40)}, "lengths: got 40, wanted 42 to 4096"),
        ({"lengths": (5000,)}, "lengths: got 5000, wanted 42 to 4096"),
        ({"lengths": ()}, "lengths: got none"),
    ):
        with pytest.raises(ValueError, match=message):
            divergence.run(dataclasses.replace(plan, **change))
    monkeypatch.setattr(divergence.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(CloError, match="100 bytes free, wanted 81920 for logits"):
        divergence.run(plan)
