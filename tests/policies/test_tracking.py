"""Statistics of heads: cosines, hits, sequences that have ended; and what a plan makes of them."""

import jax.numpy as jnp
import numpy as np

from clo_jax.adaptation import Revision, Seen, revised
from clo_jax.cache.planner import Heads
from clo_jax.policies import tracking


def test_cosines_are_weighted_and_ended_sequences_left_out():
    rng = np.random.default_rng(0)
    before, now = rng.standard_normal((2, 2, 4, 8)).astype(np.float32)  # B = 2, H = 4, K = 2
    importance = jnp.asarray([1.0, 0.5, 0.0, 0.0])
    state = tracking.begin(jnp.asarray(before), 2)
    state = tracking.observe_guess(state, jnp.asarray(now), importance, jnp.array([True, False]))
    cosine = (before * now).sum(-1) / np.linalg.norm(before, axis=-1) / np.linalg.norm(now, axis=-1)
    first = [(cosine[0, 0] + 0.5 * cosine[0, 1]) / 1.5, cosine[0, 2:].mean()]
    np.testing.assert_allclose(state["cosines"], [first, [0, 0]], rtol=1e-5)
    state = tracking.observe_guess(state, jnp.asarray(now), importance, jnp.array([True, True]))
    found = tracking.collect((state, {}), 2)
    np.testing.assert_array_equal(found.steps, [3, 0])
    # Both repeat their guess in the second step.
    np.testing.assert_allclose(found.similarity[0], (np.array(first) + 1 + 1) / 3, rtol=1e-5)


def test_hits_of_offloaded_heads():
    state = tracking.begin(jnp.ones((2, 3, 8)), 3)
    hit = jnp.array([[True, False], [True, True]])
    state = tracking.observe_hits(state, np.array([0, 2]), hit, jnp.array([True, False]))
    state = tracking.observe_hits(state, np.array([0, 2]), hit, jnp.array([True, True]))
    found = tracking.collect((state,), 3)
    np.testing.assert_array_equal(found.hits, [[3, 0, 1]])
    np.testing.assert_array_equal(found.lookups, [[3, 0, 3]])


def statistics(similarity, steps, hits, lookups):
    return tracking.HeadStatistics(
        np.array([similarity]), np.array([steps]), np.array([hits]), np.array([lookups])
    )  # fmt: skip


def test_what_is_believed_moves_with_the_number_of_steps():
    seen = Seen(Heads(np.ones((1, 2)), np.array([[0.9, 0.9]]), hit_rate=np.array([[0.5, 0.5]])))
    seen.add(statistics([0.5, 0.9], 256, [128, 0], [256, 0]))
    np.testing.assert_allclose(seen.similarity, [[0.7, 0.9]])
    np.testing.assert_allclose(seen.hit_rate, [[0.5, 0.5]])  # half of them hit; the other head was resident
    seen.add(statistics([0.0, 0.0], 0, [0, 0], [0, 0]))
    np.testing.assert_allclose(seen.similarity, [[0.7, 0.9]])


class FakePlan:
    def __init__(self, resident):
        self._resident = np.array(resident, bool)

    def is_resident(self):
        return self._resident


def test_a_plan_is_revised_when_enough_heads_move():
    plan, near, far = FakePlan([[1, 0, 0]]), FakePlan([[1, 1, 0]]), FakePlan([[0, 1, 0]])
    before, now = np.zeros((1, 3)), np.array([[0.3, 0, 0]])
    assert revised(plan, plan, Revision(), before, now) is None
    assert revised(plan, near, Revision(), before, now) is None  # one head is not worth compiling for
    other, revision = revised(plan, far, Revision(2), before, now)
    assert other is far
    assert revision == Revision(3, ((0, 1),), ((0, 0),), revision.similarity_change)
    np.testing.assert_allclose(revision.similarity_change, 0.1)
