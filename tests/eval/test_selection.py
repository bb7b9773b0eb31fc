"""Selection recall: by hand on planted sets, and of every policy on a tiny model."""

import copy
import dataclasses
import functools
import types

import numpy as np
import pytest

from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from clo_jax.eval import selection
from clo_jax.eval.selection import Kept, References, heaviest, shares
from clo_jax.policies.attended import Attended
from clo_jax.rivals import ExactConfig, InfiniGenConfig, PQCacheConfig, RetroInferConfig
from tests import tiny
from tests.policies import rivals, watched
from tests.policies.watched import CLO, RETRO

PROMPT, STEPS = 160, 8
TEXT = tiny.prompt(PROMPT + STEPS + 1)


def chosen(n, *tokens):
    row = np.zeros(n, bool)
    row[list(tokens)] = True
    return row


def test_shares_by_hand():
    # k = ceil(0.3 * 10) = 3, in float32 too. Heaviest of the heads: 0, 1, 2; 9, 8, 7 (of equal ones the first).
    mass = np.array(
        [[0.4, 0.2, 0.1, 0.1, 0.1, 0.1, 0, 0, 0, 0], [0.1, 0.1, 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.4]], np.float32
    )
    assert [np.flatnonzero(row).tolist() for row in heaviest(mass, 3)] == [[0, 1, 2], [0, 8, 9]]
    own = Attended(np.array([0, 1]), np.stack([chosen(10, 0, 2, 5, 9), chosen(10, 8)]))
    recall, kept = shares(mass, own, 0.3)
    np.testing.assert_allclose(recall, [2 / 3, 1 / 3])
    np.testing.assert_allclose(kept, [0.6, 0.2], rtol=1e-6)
    recall, kept = shares(mass, Attended(np.array([1]), np.ones((1, 10), bool)), 0.3)  # the other head is resident
    assert recall.tolist() == [1] and kept.tolist() == [1]
    assert shares(mass, own, 1.0)[0].tolist() == [0.4, 0.1]


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_heaviest_takes_k_and_the_first_of_equal_ones(k):
    mass = np.random.default_rng(k).integers(0, 3, (50, 6)).astype(np.float32)
    found = heaviest(mass, k)
    for row, tokens in zip(mass, found, strict=True):
        assert np.flatnonzero(tokens).tolist() == sorted(np.argsort(-row, kind="stable")[:k])


def planted(*steps):
    return types.SimpleNamespace(forced_attention=lambda tokens, prefix: iter(steps))


def test_means_over_heads_layers_and_steps():
    none, other = (Attended(np.zeros(0, np.int32), np.zeros((0, n), bool)) for n in (2, 3))
    mass = [
        np.array([[0.75, 0.25], [0.25, 0.75]], np.float32),
        np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], np.float32),
    ]
    full = planted(*([none._replace(mass=m), none._replace(mass=m)] for m in mass))
    first = [none, Attended(np.array([0, 1]), np.array([[1, 0], [1, 0]], bool))]
    second = [other, Attended(np.array([0, 1]), np.array([[1, 1, 0], [1, 0, 1]], bool))]
    seen = []
    with References(rivals.LLAMA, 5, "--recall") as references:
        references.take("text", full, [1, 2, 3, 4], 1, seen.append)
        found = references.compare("text", planted(first, second), [1, 2, 3, 4], 1, 0.5, seen.append)
        # k is 1, then 2: one of two, nothing; two, and of tokens 1 and 2 the last.
        assert found == Kept((1 + 0 + 1 + 0.5) / 4, pytest.approx((0.75 + 0.25 + 0.8 + 0.7) / 4), 2)
        assert references.compare("text", planted([none] * 2, [other] * 2), [1, 2, 3, 4], 1, 0.5) == Kept(1, 1, 2)
        assert "text" in references and "other" not in references
    assert seen == [1] * 4


def test_no_room_is_named(monkeypatch):
    monkeypatch.setattr(selection.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(CloError, match="100 bytes free, wanted 16000 for what full attention .* a smaller --recall"):
        References(rivals.LLAMA, 1000, "--recall")


@functools.cache
def weights(model):
    """Random ones whose layers hardly move the hidden states: what a policy leaves out changes its own later queries
    little, and guesses are good. Without it that would be most of what is lost, exact scores or not."""
    made = copy.deepcopy(rivals.params(model))
    for layer in made["layers"].values():
        layer["attn"]["o"]["kernel"] *= np.float32(0.003)
        layer["mlp"]["down"]["kernel"] *= np.float32(0.003)
    return made


def measure(config, model=rivals.LLAMA):
    """What a policy keeps at its sparsity, along one text."""
    llm, full = (
        types.SimpleNamespace(forced_attention=lambda t, n, c=c: watched.steps(c, t, n, model, weights(model)))
        for c in (config, None)
    )
    with References(model, len(TEXT) * STEPS, "") as references:
        references.take("text", full, TEXT, PROMPT)
        return references.compare("text", llm, TEXT, PROMPT, config.sparsity)


@pytest.mark.parametrize(
    "config, model",
    [
        (CloConfig(sparsity=1.0, **CLO), rivals.LLAMA),
        (ExactConfig(sparsity=1.0), rivals.ONE),
        (InfiniGenConfig(sparsity=1.0, full_layers=0), rivals.ONE),
        (PQCacheConfig(sparsity=1.0, sink_tokens=4, code_bits=4), rivals.ONE),
        (RetroInferConfig(sparsity=1.0, **RETRO), rivals.ONE),
    ],
    ids=lambda x: getattr(x, "attention", ""),
)
def test_the_whole_budget_keeps_everything(config, model):
    assert measure(config, model) == Kept(1, pytest.approx(1), STEPS)


def test_exact_keeps_what_full_attention_looks_at():
    found = measure(ExactConfig(sparsity=0.1))
    assert 0.99 <= found.recall <= 1 and 0.1 < found.mass < 0.9


def test_clo_keeps_more_with_exact_scores_and_fresh_sets():
    clo = CloConfig(sparsity=0.1, **CLO | {"hash_bits": 32, "recent_tokens": 8})
    best = measure(dataclasses.replace(clo, retriever="exact", retain=1.0, sim_threshold=1.0))
    few = measure(dataclasses.replace(clo, retriever="hata", retain=1.0, sim_threshold=1.0))
    assert best.recall > few.recall + 0.05 and best.mass > few.mass
