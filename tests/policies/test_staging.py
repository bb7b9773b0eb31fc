"""Rows that cross in pieces: how large pieces are, and that how many there are changes nothing."""

import dataclasses

import numpy as np
import pytest

from clo_jax.policies import staging
from clo_jax.rivals import PQCacheConfig, RetroInferConfig
from tests import tiny
from tests.policies import rivals

RETROINFER = RetroInferConfig(
    sparsity=0.2, recent_tokens=8, cluster_tokens=4, segment_tokens=32, iterations=4, page_tokens=2, buffer_clusters=4,
    update_tokens=16,
)  # fmt: skip
PQCACHE = PQCacheConfig(sparsity=0.2, sink_tokens=4, code_bits=4, iterations=5, cache_tokens=32, block_tokens=8)
ROW = 2 * rivals.LLAMA.head_dim * 4


def test_a_piece_is_no_larger_than_what_can_be_asked_for():
    assert staging.piece_rows(512, 10**9) == (4096, 16384)
    assert staging.piece_rows(512, 5000) == (4096, 5000)
    assert staging.piece_rows(512, 7) == (7, 7)
    assert staging.piece_rows(512, 0) == (1, 1) == staging.piece_rows(1 << 30, 9)


@pytest.mark.parametrize(
    "config", [RETROINFER, PQCACHE, dataclasses.replace(PQCACHE, cache_tokens=0)], ids=["retroinfer", "pqcache", "none"]
)
def test_results_do_not_depend_on_the_size_of_pieces(config, monkeypatch):
    prompts = [tiny.prompt(90), tiny.prompt(70, seed=1)]

    def found():
        with rivals.rival(rivals.LLAMA, config, 2, 128) as (policy, rows):
            logits = rivals.answers(rivals.LLAMA, policy, prompts, 24)
            counts = rows.counters()
        return logits, dataclasses.replace(counts, wait_ns=0)

    whole, counts = found()
    monkeypatch.setattr(staging, "FIRST_BYTES", 2 * ROW)
    monkeypatch.setattr(staging, "MORE_BYTES", 3 * ROW)
    asked = []
    sent = staging.CachedRows.on_more
    monkeypatch.setattr(staging.CachedRows, "on_more", lambda self, layer: asked.append(layer) or sent(self, layer))
    pieces, same = found()
    np.testing.assert_array_equal(pieces, whole)
    assert same == counts and counts.rows_moved > 5 * 2 * 24
    # At least as many as the rows need: two come with each of the 2 · 24 answers.
    assert 3 * len(asked) >= counts.rows_moved - 2 * 2 * 24
