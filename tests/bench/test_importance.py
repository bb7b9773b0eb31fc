"""Which heads are windowed, and that windowing the planted head is what loses the answer."""

import numpy as np
import pytest

from clo_jax.bench.importance import survives, windowed
from clo_jax.calibrate import gated
from tests.calibrate import planted_head as planted

WINDOW = gated.Window(4, 16)


def test_which_heads_are_windowed():
    scores = np.array([[0.1, 0.9], [0.5, 0.3]])
    np.testing.assert_array_equal(windowed(scores, 0.5, False), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(windowed(scores, 0.5, True), [[1, 0], [0, 1]])
    assert windowed(scores, 0.25, False, seed=1).sum() == 3


@pytest.mark.parametrize("seed", range(3))
def test_only_the_planted_head_is_needed(seed):
    prompt = planted.example(seed).tokens.tolist()
    (needle,) = set(prompt) & set(planted.NEEDLES)
    case = (prompt, [planted.ANSWERS[planted.NEEDLES.index(needle)]])
    scores = np.zeros((2, 2))
    scores[planted.LAYER, planted.KV_HEAD] = 1

    def answered(gates):
        return survives(planted.CONFIG, planted.params(), case, gates, WINDOW).all()

    assert answered(np.ones((2, 2), np.float32))
    assert answered(windowed(scores, 0.75, highest=False))
    assert not answered(windowed(scores, 0.25, highest=True))
