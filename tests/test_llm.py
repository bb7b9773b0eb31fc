"""What a user holds: answers, streams, refusals, and recovery after everything that can go wrong."""

import dataclasses
import gc
import os
import shutil
import signal
import threading

import numpy as np
import psutil
import pytest

from clo_jax import memory
from clo_jax.cache import calibration
from clo_jax.cache.calibration_parts import Choice, HashWeights, Importance
from clo_jax.checkpoints import read_info
from clo_jax.config import CloConfig
from clo_jax.errors import CheckpointError, CloError, MemoryPlanError, TransferError
from clo_jax.llm import LLM
from tests import tiny, tiny_checkpoint

CLO = CloConfig(sparsity=0.2, hash_bits=64, recent_tokens=16, flush_tokens=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM.load(checkpoint, clo=CLO, max_context=256, chunk_tokens=4) as loaded:
        yield loaded


def ids(llm, prompt, n=12, **options):
    return llm.generate(prompt, max_new_tokens=n, ignore_eos=True, **options)[0].token_ids


def test_answers_are_whole(llm):
    answer = llm.generate("the cat sat on a mat", max_new_tokens=10, ignore_eos=True)[0]
    assert answer.prompt_tokens == 20 and answer.completion_tokens == 10 and answer.finish_reason == "length"
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    m = answer.metrics
    assert (
        m.attention == "clo"
        and m.retriever == "sign"
        and m.backend == ("pull" if tiny.ON_GPU else "host")
        and m.head_scores == "neutral"
    )
    assert m.ttft_s > 0 and m.tpot_s > 0 and m.device_kv_bytes == sum(m.device_kv_parts.values())
    assert m.device_kv_bytes > 0 and m.host_kv_bytes > 0


def test_prompt_forms(llm):
    text = "the cat"
    tokens = llm.tokenizer.encode(text)
    one = ids(llm, text)
    assert ids(llm, tokens) == one and ids(llm, [text]) == one and ids(llm, [tokens]) == one
    pair = llm.generate([text, "a mat and rain"], max_new_tokens=12, ignore_eos=True)
    assert [a.token_ids for a in pair] == [one, ids(llm, "a mat and rain")]


def test_more_prompts_than_fit_are_answered_in_groups(checkpoint, llm):
    prompts = [tiny.prompt(n, seed=n) for n in (5, 70, 9, 33, 1)]
    with LLM.load(checkpoint, clo=CLO, max_context=256, max_batch=2) as small:
        grouped = [a.token_ids for a in small.generate(prompts, max_new_tokens=8, ignore_eos=True)]
    assert grouped == [ids(llm, p, 8) for p in prompts]


def test_chat_wraps_the_template(llm):
    wrapped = [0, *llm.tokenizer.encode("rain"), 2, 1]
    assert ids(llm, "rain", chat=True) == ids(llm, wrapped)
    with pytest.raises(ValueError, match="chat: got True with token ids"):
        llm.generate([1, 2], chat=True)


def test_stop_tokens(llm):
    free = ids(llm, "seven slept", 20)
    stop = free[4]
    first = free.index(stop) + 1
    for form in (stop, [stop], [stop, 250]):
        answer = llm.generate("seven slept", max_new_tokens=20, ignore_eos=True, stop_token_ids=form)[0]
        assert answer.token_ids == free[:first] and answer.finish_reason == "stop"
        assert answer.text == llm.tokenizer.decode(free[: first - 1])
    assert llm.describe()["stop_token_ids"] == [2, 255]


def test_streams_add_up(llm):
    whole = llm.generate("old lamp posts", max_new_tokens=23, ignore_eos=True)[0]
    deltas = list(llm.stream("old lamp posts", max_new_tokens=23, ignore_eos=True))
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas][-1] == "length" and deltas[-1].metrics is not None
    assert all(d.finish_reason is None for d in deltas[:-1]) and len(deltas) > 3


def test_callback_sees_what_is_returned(llm):
    seen = {0: [], 1: []}
    answers = llm.generate(
        ["a mat", "rain while"], max_new_tokens=9, ignore_eos=True, callback=lambda d: seen[d.row].extend(d.token_ids)
    )
    assert [seen[0], seen[1]] == [a.token_ids for a in answers]


def test_sampling_is_seeded_per_row(llm):
    def draw(**kw):
        return ids(llm, "number", 16, do_sample=True, temperature=2.0, **kw)

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    pair = llm.generate(
        ["number", "number"], max_new_tokens=16, ignore_eos=True, do_sample=True, temperature=2.0, seed=[2, 1]
    )
    assert [a.token_ids for a in pair] == [draw(seed=2), draw(seed=1)]
    assert draw(seed=1, top_k=1) == ids(llm, "number", 16)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ("", {}, r"prompts\[0\]: got an empty prompt"),
        ([], {}, "prompts: got none"),
        ([[]], {}, r"prompts\[0\]: got an empty prompt"),
        (["fine", ""], {}, r"prompts\[1\]: got an empty prompt"),
        ([1, 256], {}, "got token 256, wanted 0 to 255"),
        ([1, -1], {}, "got token -1"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ([7] * 250, {"max_new_tokens": 7}, r"got 250 tokens and max_new_tokens 7, .* max_context = 256"),
        ([7] * 256, {}, r"got 256 tokens and max_new_tokens 1"),
        ([7] * 300, {}, r"got 300 tokens"),
        ("x", {"temperature": 0.5}, "temperature: got 0.5 with do_sample False"),
        ("x", {"do_sample": True, "temperature": 0.0}, "temperature: got 0.0"),
        ("x", {"do_sample": True, "top_p": 0.0}, "top_p: got 0.0"),
        ("x", {"do_sample": True, "top_k": -1}, "top_k: got -1"),
        ("x", {"seed": [1, 2]}, "seed: got 2 seeds"),
    ],
)
def test_wrong_calls_are_named_and_the_next_call_works(llm, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, **options)
    assert len(ids(llm, "x", 2)) == 2


@pytest.mark.parametrize("length, new", [(254, 1), (254, 2), (255, 1)])
def test_prompts_up_to_the_limit_work(llm, length, new):
    answer = llm.generate([7] * length, max_new_tokens=new, ignore_eos=True)[0]
    assert answer.finish_reason == "length" and answer.completion_tokens == new


def test_without_a_limit_the_answer_fills_the_context(llm):
    assert llm.generate([7] * 250, ignore_eos=True)[0].completion_tokens == 6


def test_recovery_from_a_callback_that_raises(llm):
    want = ids(llm, "the cat", 30)

    def explode(delta):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate("the cat", max_new_tokens=30, ignore_eos=True, callback=explode)
    assert ids(llm, "the cat", 30) == want


def test_recovery_from_ctrl_c(llm):
    want, seen = ids(llm, "the cat", 60), []

    def interrupt(delta):
        seen.append(delta)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate("the cat", max_new_tokens=60, ignore_eos=True, callback=interrupt)
    assert len(seen) < 8
    assert ids(llm, "the cat", 60) == want


def test_recovery_from_a_closed_stream(llm):
    want = ids(llm, "the cat", 30)
    stream = llm.stream("the cat", max_new_tokens=30, ignore_eos=True)
    next(stream)
    with pytest.raises(CloError, match="open stream in this thread"):
        llm.generate("x")
    stream.close()
    assert ids(llm, "the cat", 30) == want
    abandoned = llm.stream("the cat", max_new_tokens=30, ignore_eos=True)
    next(abandoned)
    del abandoned
    gc.collect()
    assert ids(llm, "the cat", 30) == want


def test_recovery_from_a_dead_transfer_thread(checkpoint):
    threads = {"backend": tiny.BACKENDS[-1], "transfer_threads": 1, "timeout_s": 5}
    with LLM.load(checkpoint, clo=CLO, max_context=256, **threads) as llm:
        want = ids(llm, tiny.prompt(150), 30)
        llm._preparation.engine.inject_thread_death(2)
        with pytest.raises(TransferError, match="layer"):
            ids(llm, tiny.prompt(150), 30)
        assert ids(llm, tiny.prompt(150), 30) == want


def test_threads_take_turns(llm):
    want = [ids(llm, tiny.prompt(20, seed=s), 12) for s in range(4)]
    got = [None] * 4

    def work(s):
        got[s] = ids(llm, tiny.prompt(20, seed=s), 12)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


@pytest.mark.skipif(tiny.ON_GPU, reason="where everything is in the host's memory; tests/test_llm_gpu.py has the GPU's")
def test_no_room_is_refused_before_anything_is_allocated(checkpoint, monkeypatch):
    with LLM.load(checkpoint, clo=CLO, max_context=256) as llm:
        monkeypatch.setattr("clo_jax.memory.available_host_bytes", lambda: 512 << 20)
        with pytest.raises(MemoryPlanError, match=r"need .* reserve of 0.50 GiB, together .* available 0.50 GiB"):
            llm.generate("x")
        monkeypatch.undo()
        assert len(ids(llm, "x", 2)) == 2
        monkeypatch.setattr("clo_jax.memory.available_host_bytes", lambda: memory.RESERVE_BYTES + 500_000)
        with pytest.raises(MemoryPlanError, match="prefill"):  # room for a short prompt, not for a long one
            llm.generate(tiny.prompt(250), max_new_tokens=1)
        assert len(ids(llm, "x", 2)) == 2


def test_a_device_without_room_is_refused_and_named(checkpoint, monkeypatch):
    gib = 1 << 30
    with LLM.load(checkpoint, clo=CLO, max_context=256) as llm:
        want = ids(llm, "x", 4)
        llm.generate(["x", "y"], max_new_tokens=1)  # other arenas, so that the next call needs its own again
        for device, place in (
            (memory.Device(gib, 10 * gib, 10 * gib, 10 * gib), "XLA's pool on the device"),
            (memory.Device(1 << 20, 10 * gib, 10 * gib, gib), "device memory outside of XLA's pool"),
            (memory.Device(1 << 20, None, None, None), "device memory"),
        ):
            monkeypatch.setattr("clo_jax.memory.device", lambda device=device: device)
            with pytest.raises(MemoryPlanError, match=f"In {place}: need .* reserve of 0.50 GiB, together .*; avail"):
                llm.generate("x")
        monkeypatch.undo()
        assert ids(llm, "x", 4) == want


def test_closed_is_closed(checkpoint):
    llm = LLM.load(checkpoint, clo=CLO, max_context=256)
    llm.close()
    llm.close()
    with pytest.raises(CloError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": "half"}, "attention: got 'half'"),
        ({"max_context": 1}, "max_context: got 1"),
        ({"max_context": 5000}, "max_context: got 5000, wanted 2 to 4096"),
        ({"max_batch": 0}, "max_batch: got 0"),
        ({"clo": CloConfig(resident_heads=((9, (0,)),))}, "resident_heads: got layer 9"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_wrong_settings_are_named_at_load(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        LLM.load(checkpoint, **options)


def test_head_scores(checkpoint):
    unimportant = np.zeros((3, 2))
    with LLM.load(checkpoint, clo=CLO, max_context=256, head_scores=unimportant) as llm:
        m = llm.generate(tiny.prompt(100), max_new_tokens=6, ignore_eos=True)[0].metrics
    assert m.head_scores == "given" and m.hit_rate > 0.5  # nothing but a flush refreshes such a head
    for bad, message in (
        (np.zeros((2, 2)), r"got shape \(2, 2\), wanted \(3, 2\)"),
        (np.full((3, 6), 1.5), r"\[1.5, 1.5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM.load(checkpoint, clo=CLO, max_context=256, head_scores=bad)


def test_calibration_is_picked_up_and_named(checkpoint, tmp_path):
    L, H, K, D = tiny.LLAMA.num_layers, tiny.LLAMA.num_heads, tiny.LLAMA.num_kv_heads, tiny.LLAMA.head_dim
    _, info = read_info(checkpoint)
    made_with = {"checkpoint_sha256": calibration.digest(dict(info.manifest.source_files))}
    scores = np.linspace(0, 1, L * H, dtype=np.float32).reshape(L, H)
    weights = np.random.default_rng(1).standard_normal((L, K, D, 64)).astype(np.float32)
    beside = checkpoint / calibration.FOLDER
    calibration.update(
        beside, Importance(scores, "gates"), HashWeights("hata", weights, True), Choice("hata", 64, "measured"),
        provenance=made_with, model=tiny.LLAMA,
    )  # fmt: skip
    try:
        with LLM.load(checkpoint, max_context=256) as llm:  # nothing given: the calibration decides
            policy, tables = llm._preparation.prepare(1, 10)
            assert np.array_equal(policy.scores.query_heads, scores)
            assert np.array_equal(tables[1]["weights"], weights[1])
            m, about = metrics_of(llm), llm.describe()
        assert (m.retriever, m.head_scores) == ("hata (trained)", "measured (gates)")
        assert (about["retriever"], about["hash_bits"], about["head_scores"]) == (m.retriever, 64, m.head_scores)
        assert about["calibration"] == str(beside)
        with LLM.load(checkpoint, clo=CLO, max_context=256, head_scores=np.ones((L, K))) as llm:  # what is given wins
            m = metrics_of(llm)
        assert (m.retriever, m.head_scores) == ("sign", "given")
        other_bits = dataclasses.replace(CLO, retriever="hata", hash_bits=32)
        with LLM.load(checkpoint, clo=other_bits, max_context=256) as llm:
            assert metrics_of(llm).retriever == "hata (untrained)"
        with LLM.load(checkpoint, max_context=256, calibration=None) as llm:
            assert llm.describe()["calibration"] is None and llm.describe()["head_scores"] == "neutral"
        calibration.update(beside, Choice("sign", 64, "x"), provenance={"checkpoint_sha256": "another"})
        with pytest.raises(CheckpointError, match="calibration.json: made with other weights"):
            LLM.load(checkpoint, max_context=256)
        with LLM.load(checkpoint, max_context=256, calibration=beside) as llm:
            assert llm.describe()["retriever"] == "sign"
    finally:
        shutil.rmtree(beside)
    with pytest.raises(CheckpointError, match="cannot be read"):
        LLM.load(checkpoint, max_context=256, calibration=tmp_path)


def metrics_of(llm):
    return llm.generate(tiny.prompt(100), max_new_tokens=6, ignore_eos=True)[0].metrics


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(checkpoint, dtype):
    with LLM.load(checkpoint, clo=CLO, max_context=256, dtype=dtype) as llm:
        half = llm.generate(tiny.prompt(100), max_new_tokens=20, ignore_eos=True)[0]
        assert llm.describe()["dtype"] == dtype
    assert half.completion_tokens == 20 and half.metrics.rows_moved > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_rows_of_a_byte(checkpoint, kv_dtype):
    with LLM.load(checkpoint, clo=dataclasses.replace(CLO, kv_dtype=kv_dtype), max_context=256) as llm:
        answer = llm.generate(tiny.prompt(100), max_new_tokens=20, ignore_eos=True)[0]
        about = llm.describe()
    assert about["kv_dtype"] == answer.metrics.kv_dtype == kv_dtype
    assert answer.metrics.rows_moved * (2 * tiny.HEAD_DIM + 16) == answer.metrics.bytes_moved > 0


@pytest.mark.slow
def test_two_hundred_rounds_leave_threads_and_memory_flat(checkpoint):
    process, sizes, threads = psutil.Process(), [], []
    for _ in range(200):
        with LLM.load(checkpoint, clo=CLO, max_context=256) as llm:
            ids(llm, tiny.prompt(40), 4)
        gc.collect()
        sizes.append(process.memory_info().rss)
        threads.append(process.num_threads())
    assert max(threads[100:]) <= max(threads[:20])
    # The compiled programs of the first rounds stay; after that nothing may grow.
    assert sizes[-1] < sizes[50] * 1.05
