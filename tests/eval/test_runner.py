"""Running a suite with a planted model: what is asked, kept, continued, refused."""

import dataclasses
import re

import pytest

from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from clo_jax.eval import runner
from clo_jax.eval.ruler import TASKS
from clo_jax.eval.runner import Plan
from clo_jax.eval.samples import Draft, GeneratedTask
from clo_jax.eval.sources import Sources
from clo_jax.eval.summary import summarize
from clo_jax.eval.variants import variants
from clo_jax.text import Tokenizer
from tests.eval.planted import plant


@pytest.fixture
def planted(monkeypatch, checkpoint):
    return plant(monkeypatch, checkpoint)


@pytest.fixture
def plan(checkpoint, tmp_path):
    chosen = tuple(variants(["clo"], [0.1], CloConfig(), {"backend": "host"}))
    tasks = (TASKS["niah_single_1"], TASKS["niah_multikey_1"], TASKS["qa_1"])
    return Plan("ruler", str(checkpoint), tasks, chosen, (900, 1024), 3, 0, None, "auto", 2, Sources(), tmp_path)


def test_everything_is_asked_once(plan, planted):
    outcome = runner.run(plan)
    assert outcome.skipped == {"qa_1": "--squad FILE"} and outcome.chat is True
    assert len(planted.asked) == 2 * 2 * 2 * 3 == len(outcome.answers)
    assert {limit for _, limit in planted.asked} == {128}
    assert all("<|user|>" in text and "is<|" not in text for text, _ in planted.asked)
    assert all(re.search(r"<\|assistant\|>The secret number for \S+ .* is$", text) for text, _ in planted.asked)
    sizes = {"dtype": "auto", "max_context": 1024, "max_batch": 2}
    assert planted.loads == [sizes | dict(v.load) for v in plan.variants]
    for sample in outcome.samples[900, "niah_multikey_1"]:
        assert sample.prompt_tokens + 128 <= 900
    summaries = summarize(outcome)
    assert [(s.variant, s.length, s.mean.value) for s in summaries] == [
        ("full", 900, 100), ("full", 1024, 100), ("clo 10 %", 900, 100), ("clo 10 %", 1024, 100),
    ]  # fmt: skip
    # Batches of two and of one, each of 60 rows and four steps.
    assert summaries[2].rows_moved == pytest.approx((30 + 30 + 60) / 3 / 4)
    assert summaries[2].selected == pytest.approx(0.1, rel=0.05) and summaries[0].attended == 1


def test_an_interrupted_run_goes_on_where_it_was(plan, planted):
    planted.fail_after = 9
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan)
    planted.fail_after = None
    assert len(planted.asked) == 9
    outcome = runner.run(plan)
    assert len(planted.asked) == 24 and len(set(planted.asked)) == 12  # both variants the same prompts
    planted.loads.clear()
    assert runner.run(plan).answers == outcome.answers and planted.loads == []
    more = runner.run(dataclasses.replace(plan, samples=4, lengths=(900,)))
    assert len(planted.asked) == 24 + 2 * 2 and len(planted.loads) == 2
    assert {key: more.answers[key] for key in outcome.answers if key.length == 900}.items() <= outcome.answers.items()


def test_selection_is_measured_along_answers_of_full_attention_once(plan, planted):
    three = tuple(variants(["clo", "exact"], [0.1], CloConfig(), {"backend": "host"}))
    outcome = runner.run(plan)
    # One sample of each of two tasks at two lengths: the seven digits of the answer and one token that is not decoded.
    assert planted.watched == [("full", 8)] * 4 + [("clo", 8)] * 4
    assert len(outcome.kept) == 4 and {kept.steps for kept in outcome.kept.values()} == {7}
    full, _, clo, _ = summarize(outcome)
    assert (full.recall, full.mass_kept) == (1, 1)
    # The last one of the heaviest tenth, which has three quarters of the mass.
    (kept,) = {kept for key, kept in outcome.kept.items() if key.length == 900 and key.task == "niah_single_1"}
    assert 1 / 91 < kept.recall < 1 / 70 and kept.mass == pytest.approx(0.75)
    assert clo.recall == pytest.approx(1 / 90, rel=0.3) and clo.mass_kept == pytest.approx(0.75)
    planted.watched.clear()
    assert runner.run(plan).kept == outcome.kept and planted.watched == []
    more = runner.run(dataclasses.replace(plan, variants=three, recall=2, lengths=(900,)))
    # A second sample by both, the first one by the new policy.
    assert planted.watched == [("full", 8)] * 4 + [("clo", 8)] * 2 + [("exact", 8)] * 4
    assert len(more.kept) == 8
    planted.watched.clear()
    fewer = runner.run(dataclasses.replace(plan, lengths=(900,)))
    assert fewer.kept == {key: kept for key, kept in outcome.kept.items() if key.length == 900}
    none = summarize(runner.run(dataclasses.replace(plan, recall=0, seed=5)))
    assert planted.watched == [] and {s.recall for s in none} == {s.mass_kept for s in none} == {None}


def test_an_interrupted_measurement_goes_on_where_it_was(plan, planted, monkeypatch):
    whole, taken = planted.forced_attention, []

    def interrupted(self, tokens, prefix):
        if self.options["attention"] == "clo":
            taken.append(prefix)
            if len(taken) == 3:
                raise KeyboardInterrupt
        return whole(self, tokens, prefix)

    monkeypatch.setattr(planted, "forced_attention", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan)
    assert planted.watched == [("full", 8)] * 4 + [("clo", 8)] * 2
    planted.watched.clear()
    assert len(runner.run(plan).kept) == 4
    assert planted.watched == [("full", 8)] * 2 + [("clo", 8)] * 2  # full attention along what is left alone


def test_samples_without_an_answer_are_not_measured(plan, planted):
    whole = planted.generate

    def generate(self, prompts, **options):
        planted.answer = "7" if planted.asked else ""
        return whole(self, prompts, **options)

    planted.generate = generate
    outcome = runner.run(dataclasses.replace(plan, lengths=(900,), max_batch=1, recall=2))
    assert len(outcome.kept) == 3 and {kept.steps for kept in outcome.kept.values()} == {1}
    assert planted.watched == [("full", 2)] * 3 + [("clo", 2)] * 3
    planted.loads.clear()
    assert len(runner.run(dataclasses.replace(plan, lengths=(900,), max_batch=1, recall=2)).kept) == 3
    assert planted.loads == []


def test_other_settings_are_asked_anew(plan, planted):
    runner.run(plan)
    planted.asked.clear()
    for change in ({"seed": 1}, {"dtype": "float32"}, {"chat": False}):
        runner.run(dataclasses.replace(plan, samples=1, lengths=(900,), **change))
        assert len(planted.asked) == 4
        planted.asked.clear()
    changed = tuple(variants(["clo"], [0.1], CloConfig(retain=2.0), {"backend": "host"}))
    runner.run(dataclasses.replace(plan, samples=1, lengths=(900,), variants=changed))
    assert len(planted.asked) == 2  # full attention is as it was


def test_mostly_empty_answers_stop_the_run(plan, planted):
    planted.answer = "\x00 "
    with pytest.raises(CloError, match=r"8 of 8 answers of full at 900 tokens are empty: chat template"):
        runner.run(dataclasses.replace(plan, samples=8))
    assert len(planted.asked) == 8  # after the first task already
    with pytest.raises(CloError, match="2 of 2 answers of full at 900 tokens are empty"):
        runner.run(dataclasses.replace(plan, samples=1, seed=2))


def long(share):
    """A task whose prompts do not fit in that share of the cases."""

    def draft(rng, size, length, sources, index):
        words = "x" * (2000 if rng.random() < share else 10 * size)
        return Draft(f"What is the secret number for k of {words}? The number for k is 7", "It is", ("7",))

    return GeneratedTask("long", 16, TASKS["vt"].metric, draft)


def test_too_many_prompts_that_do_not_fit_stop_the_run(plan, planted):
    tight = dataclasses.replace(plan, tasks=(TASKS["niah_single_1"], long(0.5)), samples=10, lengths=(900,))
    with pytest.raises(CloError, match=r"\d of 20 prompts are longer than asked .* more than 5%: long at 900 \(\d\)"):
        runner.run(tight)
    assert planted.loads == []


def test_a_few_that_do_not_fit_are_counted(plan, planted):
    outcome = runner.run(dataclasses.replace(plan, tasks=(long(0.04),), samples=40, lengths=(900,)))
    left_out = outcome.left_out[900, "long"]
    assert 1 <= left_out <= 2 and len(outcome.samples[900, "long"]) == 40 - left_out
    assert summarize(outcome)[0].tasks["long"].samples == 40 - left_out


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": (900, 5000)}, "lengths: got 5000, wanted 1 to 4096, the model's limit: every prompt would be cut"),
        ({"lengths": ()}, "lengths: got none"),
        ({"samples": 0}, "samples: got 0, wanted at least 1"),
        ({"max_batch": 0}, "batch: got 0, wanted at least 1"),
        ({"recall": -1}, "recall: got -1, wanted at least 0"),
        ({"tasks": (TASKS["qa_1"],)}, r"tasks: got only what is left out, .* qa_1 \(--squad FILE\)"),
    ],
)
def test_wrong_calls_are_named(plan, planted, change, message):
    with pytest.raises(ValueError, match=message):
        runner.run(dataclasses.replace(plan, **change))
    assert planted.loads == []


def test_chat_without_a_template_is_refused(plan, planted, monkeypatch):
    monkeypatch.setattr(Tokenizer, "has_chat_template", property(lambda self: False))
    with pytest.raises(ValueError, match="chat: got .* without a chat template"):
        runner.run(dataclasses.replace(plan, chat=True))
