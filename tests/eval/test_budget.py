"""What is read of the context, against the formulas of the README."""

import pytest

from clo_jax.config import CloConfig
from clo_jax.eval.budget import clo_shares
from tests import tiny


def shares(prompt_tokens, new_tokens, resident=(), **clo):
    described = {"max_context": 4096, "dtype": "float32", "resident_heads": resident}
    return clo_shares(tiny.LLAMA, CloConfig(**clo), described, prompt_tokens, new_tokens)


def test_one_step():
    # n = 3000: flushed (3000 - 64) // 64 * 64 = 2880, tail 3001 - 2880 = 121 with the new token, sink 4, k = 300.
    found = shares(3000, 2)
    assert found.selected == pytest.approx(0.1)
    assert found.attended == pytest.approx((4 + 121 + 450) / 3001)


def test_resident_heads_read_everything():
    assert shares(3000, 2, [[0, [0, 1]]]).attended == pytest.approx(1 / 3 + 2 / 3 * 575 / 3001)


def test_means_over_the_steps_of_an_answer():
    every = [shares(1000 + i, 2) for i in range(99)]
    found = shares(1000, 100)
    assert found.selected == pytest.approx(sum(s.selected for s in every) / 99, rel=0.01)
    assert found.attended == pytest.approx(sum(s.attended for s in every) / 99, rel=0.02)
    assert shares(1000, 1) == shares(1000, 2)


def test_the_whole_budget_is_everything():
    assert shares(2000, 30, sparsity=1.0).attended == 1
