"""Logits along given tokens: what a model said itself, said again; chunks; wrong calls."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from clo_jax.llm import LLM
from clo_jax.transfer.engine import Engine
from tests import tiny, tiny_checkpoint

CLO = CloConfig(sparsity=0.1, recent_tokens=8, flush_tokens=8, hash_bits=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    small = dataclasses.replace(tiny.LLAMA, num_layers=2)  # the first layer is resident, the second one is not
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"), small)


@pytest.fixture(scope="module")
def full(checkpoint):
    with LLM.load(checkpoint, attention="full", max_context=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def clo(checkpoint):
    with LLM.load(checkpoint, clo=CLO, max_context=256, chunk_tokens=7) as llm:
        yield llm


@pytest.mark.parametrize("name, chunks", [("full", [1, 16, 16, 7]), ("clo", [1] + [7] * 5 + [4])])
def test_an_answer_forced_is_the_answer(request, name, chunks):
    llm, prompt = request.getfixturevalue(name), tiny.prompt(150, 4)
    answer = llm.generate(prompt, max_new_tokens=40, ignore_eos=True)[0]
    found = list(llm.forced_logits([*prompt, *answer.token_ids], len(prompt)))
    logits = np.concatenate([rows for rows, _ in found])
    assert logits.shape == (40, 256) and logits.dtype == np.float32
    assert [len(rows) for rows, _ in found] == chunks
    assert logits.argmax(axis=1).tolist() == answer.token_ids
    metrics = found[-1][1]
    assert metrics.attention == answer.metrics.attention == name
    assert metrics.rows_moved == answer.metrics.rows_moved and metrics.hit_rate == answer.metrics.hit_rate
    assert (metrics.rows_moved > 0) == (name == "clo")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_nothing_is_copied_to_the_device_beside_a_transfer_kernel(clo, monkeypatch, options):
    """On a GPU a copy may stand in a queue behind the kernel that waits for the program that waits for the copy."""
    serving, served = Engine.serving, []

    @contextlib.contextmanager
    def guarded(self, requests, program):
        beside = program in self._programs  # what runs for the first time has no transfer kernel beside it
        with serving(self, requests, program), jax.transfer_guard_host_to_device("disallow" if beside else "allow"):
            yield
        served.append(beside)

    monkeypatch.setattr(Engine, "serving", guarded)
    clo.generate(tiny.prompt(150, 4), max_new_tokens=20, ignore_eos=True, **options)
    assert any(served)


def test_no_transfer_kernel_runs_beside_a_given_text(clo, monkeypatch):
    ids = tiny.prompt(150, 4)
    monkeypatch.setattr(Engine, "begin", lambda *_: pytest.fail("began"))
    assert len(list(clo.forced_logits(ids, 120))) > 2 and len(list(clo.forced_attention(ids, 145))) > 2


def test_attention_along_a_text(full, clo):
    ids = tiny.prompt(156, 4)
    for reference, found in zip(full.forced_attention(ids, 150), clo.forced_attention(ids, 150), strict=True):
        n = reference[0].mass.shape[1]
        assert [layer.mass.shape for layer in reference] == [(2, n)] * 2
        assert [layer.heads.tolist() for layer in found] == [[], [0, 1]]  # the first layer is resident
        # k = 15 or 16, half as many retained, sink 4, tail 8 to 15 and the token itself.
        assert found[1].tokens.shape == (2, n) and found[1].tokens[:, -8:].all()
        assert set(found[1].tokens.sum(axis=1)) <= set(range(4 + 9 + 15, 4 + 16 + 24 + 1))
    assert n == 155
    with pytest.raises(ValueError, match="prefix: got 156, wanted 1 to 155"):
        full.forced_attention(ids, 156)


def test_wrong_calls_are_named_and_the_model_stays_usable(full):
    ids = tiny.prompt(40, 6)
    for given, prefix, message in (
        (ids, 0, "prefix: got 0, wanted 1 to 39"),
        (ids, 40, "prefix: got 40, wanted 1 to 39"),
        (tiny.prompt(257), 10, "tokens: got 257, wanted at most max_context = 256"),
        ([*ids, 999], 10, "got token 999, wanted 0 to 255"),
    ):
        with pytest.raises(ValueError, match=message):
            full.forced_logits(given, prefix)
    open_run = full.forced_logits(ids, 10)
    next(open_run)
    with pytest.raises(CloError, match="open stream"):
        full.generate(ids, max_new_tokens=1)
    open_run.close()
    assert [len(rows) for rows, _ in full.forced_logits(ids, 30)] == [1, 9]
    assert [len(rows) for rows, _ in full.forced_logits(ids, 39)] == [1]
