"""What steps attended to: what scores and ranges say."""

import numpy as np
import pytest

from clo_jax.config import CloConfig
from clo_jax.forced import ForcedSession, forced_attention
from clo_jax.policies.attended import observed
from clo_jax.rivals import ExactConfig, InfiniGenConfig, PQCacheConfig, RetroInferConfig
from tests import tiny
from tests.policies import rivals, watched
from tests.policies.watched import CLO, RETRO, policy_of

PROMPT, STEPS = 90, 12
TEXT = tiny.prompt(PROMPT + STEPS + 1)


def steps(config, model=rivals.LLAMA):
    return watched.steps(config, TEXT, PROMPT, model)


def test_full_attention_tells_its_mass():
    found = steps(None)
    for i, layers in enumerate(found):
        for one in layers:
            assert one.heads.size == 0 and one.mass.shape == (2, PROMPT + i + 1)
            np.testing.assert_allclose(one.mass.sum(axis=1), 1, rtol=1e-5)
            assert one.mass.min() > 0


def test_exact_attends_to_the_heaviest_tokens_of_full_attention_in_the_first_layer():
    # There the query depends on the token alone.
    found, full = steps(ExactConfig(sparsity=0.2)), steps(None)
    for i, (layers, reference) in enumerate(zip(found, full, strict=True)):
        k = int(np.ceil(np.float32(0.2) * np.float32(PROMPT + i + 1)))
        for tokens, mass in zip(layers[0].tokens, reference[0].mass, strict=True):
            assert sorted(np.argsort(-mass, kind="stable")[:k]) == np.flatnonzero(tokens).tolist()


@pytest.mark.parametrize("refresh, retain", [("whole", 1.0), ("delta", 2.0)])
def test_clo_attends_to_sink_tail_and_filled_slots(refresh, retain):
    config = CloConfig(sparsity=0.1, refresh=refresh, retain=retain, **CLO)
    weights = rivals.params(rivals.LLAMA)
    with policy_of(config) as (policy, engine):
        run = forced_attention(rivals.LLAMA, weights, policy, policy.tables(), engine, TEXT, PROMPT)
        for i, (_, one) in enumerate(run):
            n = PROMPT + i + 1
            flushed = (n - 1 - 16) // 8 * 8
            for head, tokens in enumerate(one.tokens):
                filled = engine.slot_counts(1)[0, head]
                selected = engine.slot_tokens(1)[0, head, :filled]
                want = {*range(4), *selected.tolist(), *range(flushed, n)}
                assert np.flatnonzero(tokens).tolist() == sorted(want)
                assert 9 <= filled <= 10 * retain + 2 and (engine.slot_tokens(1)[0, head, filled:] == -1).all()


def test_delta_without_retained_rows_attends_to_what_whole_refresh_does():
    found = [steps(CloConfig(sparsity=0.1, refresh=refresh, retain=1.0, **CLO)) for refresh in ("delta", "whole")]
    for delta, whole in zip(*found, strict=True):
        for one, other in zip(delta, whole, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)


def test_pqcache_attends_to_as_many_tokens_as_it_says():
    config = PQCacheConfig(sparsity=0.3, sink_tokens=4, code_bits=4)
    with policy_of(config, rivals.ONE) as (policy, _):
        for i, layers in enumerate(steps(config, rivals.ONE)):
            attended = policy.reads(PROMPT, np.array([PROMPT + i], np.int32)).attended
            for one in layers:
                assert one.tokens.sum(axis=1).tolist() == [attended[0]] * 2
                assert one.tokens[:, :4].all() and one.tokens[:, -1].all()


def test_retroinfer_attends_to_whole_clusters_of_tokens_also_new_ones():
    found = steps(RetroInferConfig(sparsity=0.3, **RETRO), rivals.ONE)
    first = PROMPT - 8  # how far the prompt is indexed; eight new tokens more when sixteen are not
    for i, layers in enumerate(found):
        for one in layers:
            indexed = first + 8 * max(0, (PROMPT + i - first - 8) // 8)
            assert one.tokens[:, :4].all() and one.tokens[:, indexed:].all()
            assert 0.1 < one.tokens[:, 4:indexed].mean() < 0.6


def test_retroinfer_tells_tokens_by_hand():
    with rivals.rival(rivals.ONE, RetroInferConfig(sparsity=0.5, **RETRO), 1, 64) as (_, keeper):
        rows = np.zeros((1, 2, 8, 2, rivals.ONE.head_dim), np.float32)
        with pytest.raises(ValueError, match="layer: got 0, which has asked for no rows yet"):
            keeper.selected(0)
        labels = np.array([[[-1] * 4 + [1, 0, 1, -1], [-1] * 4 + [0, 0, 1, -1]]])
        keeper.on_build(0, rows, labels)  # tokens 4 to 6
        keeper.on_extend(0, rows[:, :, :4], np.array([[[0, 0, 1, 1], [1, 0, 1, 0]]]), np.array([2]))  # 7 to 10
        keeper.on_access(0, np.array([[[1, 2, 0], [3, 0, 0]]]), np.array([[2, 1]]))
        assert [tokens.tolist() for tokens in keeper.selected(0)[0]] == [[4, 6, 7, 8], [7, 9]]
        keeper.on_access(0, np.array([[[1, 2, 0], [3, 0, 0]]]), np.array([[0, 0]]))
        assert [tokens.tolist() for tokens in keeper.selected(0)[0]] == [[], []]


def test_a_pool_is_refused():
    config = InfiniGenConfig(pool_tokens=40)
    with policy_of(config) as (policy, _), pytest.raises(ValueError, match="pool_tokens: got 40, wanted None or the"):
        observed(policy)


def test_watching_changes_no_logits():
    text, weights, full = TEXT[: PROMPT + 5], rivals.params(rivals.ONE), tiny.full_policy(rivals.ONE, 1, 128)
    found = [
        np.concatenate(list(ForcedSession(rivals.ONE, weights, policy, policy.tables(), None, text, PROMPT, 1)))
        for policy in (full, observed(full))
    ]
    np.testing.assert_array_equal(*found)
